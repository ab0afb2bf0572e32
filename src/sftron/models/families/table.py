"""The supported model families: how each differs from Llama, as data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sftron.models.families.family import Family
from sftron.models.families.gemma import GEMMA_FAMILIES
from sftron.models.families.glm import GLM_FAMILIES
from sftron.models.families.granite import GRANITE_FAMILIES
from sftron.models.families.llama import LLAMA_FAMILIES
from sftron.models.families.others import OTHER_FAMILIES
from sftron.models.families.qwen import QWEN_FAMILIES

FAMILIES: dict[str, Family] = {
    **LLAMA_FAMILIES,
    **QWEN_FAMILIES,
    **GEMMA_FAMILIES,
    **GLM_FAMILIES,
    **GRANITE_FAMILIES,
    **OTHER_FAMILIES,
}
"""The supported values of model_type. The defaults are those of the config class in transformers."""

_KEYS_OF_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "num_experts_per_tok")


def family_of(config: Mapping[str, Any]) -> Family:
    """Returns the family of a config.json.

    Raises:
        ValueError: The model_type is not implemented; the message states whether it is a mixture of experts.
    """
    model_type = config.get("model_type")
    if family := FAMILIES.get(str(model_type)):
        return family
    stated = ", ".join(f"{key}: {config[key]!r}" for key in _KEYS_OF_EXPERTS if config.get(key))
    reason = f" It is not supported because it is a mixture of experts ({stated})." if stated else ""
    raise ValueError(
        f"config.json: model_type is {model_type!r}, implemented are {', '.join(FAMILIES)}.{reason} "
        "Choose a checkpoint of one of these architectures."
    )
