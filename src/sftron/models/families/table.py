"""The supported model families: how each differs from Llama, as data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sftron.models.families.deepseek import DEEPSEEK_FAMILIES
from sftron.models.families.family import Family
from sftron.models.families.gemma import GEMMA_FAMILIES
from sftron.models.families.glm import GLM_FAMILIES
from sftron.models.families.granite import GRANITE_FAMILIES
from sftron.models.families.liquid import LIQUID_FAMILIES
from sftron.models.families.llama_like import LLAMA_FAMILIES
from sftron.models.families.others import OTHER_FAMILIES
from sftron.models.families.qwen import QWEN_FAMILIES

FAMILIES: dict[str, Family] = {
    **LLAMA_FAMILIES,
    **QWEN_FAMILIES,
    **GEMMA_FAMILIES,
    **GLM_FAMILIES,
    **DEEPSEEK_FAMILIES,
    **GRANITE_FAMILIES,
    **LIQUID_FAMILIES,
    **OTHER_FAMILIES,
}
"""The supported values of model_type. The defaults are those of the config class in transformers."""

_KEYS_OF_KINDS = {
    "a mixture of experts": ("num_local_experts", "num_experts", "n_routed_experts", "num_experts_per_tok"),
    "latent attention": ("kv_lora_rank",),
    "state-space layers": ("mamba_d_state", "ssm_state_size", "state_size"),
    "short convolutions": ("conv_L_cache",),
    "an encoder": ("is_encoder_decoder",),
    "parts for images or sound": ("vision_config", "audio_config"),
}
"""Kinds of models beyond plain decoders, each with keys that state it."""


def family_of(config: Mapping[str, Any]) -> Family:
    """Returns the family of a config.json.

    Raises:
        ValueError: The model_type is not implemented; the message states what the model has, as far as its keys tell.
    """
    model_type = config.get("model_type")
    if family := FAMILIES.get(str(model_type)):
        return family
    text = config.get("text_config")
    stated = {**(text if isinstance(text, Mapping) else {}), **config}
    kinds = []
    for kind, keys in _KEYS_OF_KINDS.items():
        if values := ", ".join(f"{key}: {stated[key]!r:.40}" for key in keys if stated.get(key)):
            kinds.append(f"{kind} ({values})")
    has = f" It has {', '.join(kinds)}." if kinds else ""
    raise ValueError(
        f"config.json: model_type is {model_type!r}; sftron supports only {', '.join(FAMILIES)}.{has} "
        "Choose a checkpoint of one of these architectures."
    )
