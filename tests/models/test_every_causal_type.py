"""Every causal model type of transformers, and every key of those that are accepted: equal, or refused by name.

The configurations are made from transformers' config classes (tiny_configs.py), so a new release of transformers brings
its own types and keys.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from sftron.checkpoint.hf_weights import load_model
from sftron.models.architecture import FAMILIES, LlamaConfig
from sftron.models.llama import LlamaForSFT
from sftron.models.wrappers import WRAPPERS, wrapper_of
from tests.conftest import rest_nightly
from tests.models.reference import make_reference, pack, require_same_model
from tests.models.tiny_configs import changed_keys, tiny_config, without_defaults

LENGTHS = [3, 45]
"""Shorter than a window of 7, and longer than it and the original positions."""
EQUAL, REFUSED, NOT_BUILT = "equal", "refused by name", "not built by transformers"
ANOTHER = "another model in this release of transformers"


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """transformers warns of many of these configurations; what it computes is compared."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.enable_progress_bar()
    transformers.logging.set_verbosity(level)


def _read(config: Mapping[str, Any]) -> LlamaConfig | None:
    """Returns the architecture of a config.json; None if it is refused by the name of its type or of a key."""
    try:
        return LlamaConfig.from_hf(config)
    except ValueError as error:
        refusal = str(error)
    names = [repr(config["model_type"]), *(rf"\b{key}[.:]" for key in (*config, "head_dim")), r"\btext_config\b"]
    assert re.search("|".join(names), refusal), f"it names neither the type nor a key: {refusal}"
    return None


@torch.no_grad()
def _make_theirs(config: dict[str, Any], seed: int) -> Any:
    """Returns transformers' model, with every stored tensor away from the zeros and ones that some start as."""
    model = make_reference(seed, **config).eval()
    stored = model.state_dict()
    for name, buffer in model.named_buffers():
        if name in stored and buffer.is_floating_point() and buffer.dim():  # one number alone is a constant
            buffer += 0.3 * torch.randn_like(buffer)
    return model


def _make_ours(theirs: Any, config: Mapping[str, Any]) -> LlamaForSFT:
    """Reads the weights that transformers saves: its names in memory differ between releases."""
    with TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return load_model(folder, compute_dtype=torch.float32, num_positions=128)


@torch.no_grad()
def _expected_logits(theirs: Any) -> Tensor:
    input_ids, *_ = pack(LENGTHS)
    return torch.cat([theirs(ids[None], use_cache=False).logits[0] for ids in input_ids.split(LENGTHS)])


@torch.no_grad()
def _difference(ours: LlamaForSFT, expected: Tensor) -> float:
    """Returns the largest difference of logits as a multiple of the tolerance of require_same_model, which grows with
    the logits, as a key may multiply them."""
    input_ids, *rest = pack(LENGTHS)
    tolerance = 2e-4 * max(1.0, expected.abs().max().item() / 10)
    return (ours.head.logits(ours(input_ids, *rest)) - expected).abs().max().item() / tolerance


def _compare(model_type: str) -> str:
    """Returns how the tiny configuration of a type ends: EQUAL, REFUSED, or NOT_BUILT with the reason.

    Raises:
        AssertionError: Ours is another model, or the refusal names neither the type nor a key.
    """
    try:
        config = tiny_config(model_type)
    except Exception as error:  # of any type, from transformers alone
        assert _read({"model_type": model_type}) is None
        return f"{NOT_BUILT}: {error}"
    architecture = _read(config)
    if architecture is None:
        return REFUSED
    assert LlamaConfig.from_hf(without_defaults(config)) == architecture
    theirs = _make_theirs(config, 0)
    ours = _make_ours(theirs, config)
    if wrapper_of(config) is None:
        require_same_model(ours, theirs, LENGTHS)
    else:
        assert _difference(ours, _expected_logits(theirs)) < 1
    return EQUAL


def _compare_changed(config: Mapping[str, Any], change: Mapping[str, Any]) -> str:
    """Returns how a configuration with another value of one key ends, as `_compare` does."""
    changed = {**config, **change}
    if _read(changed) is None:
        return REFUSED
    differences = []
    for seed in range(3):
        try:
            theirs = _make_theirs(changed, seed)
            expected = _expected_logits(theirs)
        except Exception as error:  # of any type, from transformers alone
            return f"{NOT_BUILT}: {error}"
        differences.append(_difference(_make_ours(theirs, changed), expected))
        if differences[-1] < 1:
            return EQUAL
        if not differences[-1] < 20:
            break  # another model; less is rounding of some weights, and other weights show it
    raise AssertionError(f"logits differ by {differences} times the tolerance")


_TYPES = [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
# Some releases have several names of one class.
_SUPPORTED = [name for name in _TYPES if CONFIG_MAPPING[name].model_type in {*FAMILIES, *WRAPPERS}]
# Until then, all layers of OLMo 3 have the rope of its full layers.
_ANOTHER = ["olmo3"] if Version(transformers.__version__) < Version("5.13") else []


def test_every_causal_type_of_transformers_is_equal_or_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    results = {}
    for model_type in _TYPES:
        try:
            results[model_type] = _compare(model_type)
        except Exception as error:
            if model_type in _ANOTHER and isinstance(error, AssertionError):
                results[model_type] = ANOTHER
                continue
            error.add_note(f"in the tiny configuration of {model_type}")
            raise
    counts = Counter(result.partition(":")[0] for result in results.values())
    with capsys.disabled():
        print(f"\n{len(_TYPES)} causal types of transformers {transformers.__version__}: {dict(counts)}")
        print(*(f"  {name} {result}" for name, result in results.items() if result.startswith(NOT_BUILT)), sep="\n")
    assert [name for name, result in results.items() if result == ANOTHER] == _ANOTHER
    assert [name for name, result in results.items() if result in (EQUAL, ANOTHER)] == _SUPPORTED
    assert counts[EQUAL] + counts[REFUSED] > 0.9 * len(_TYPES)


@pytest.mark.parametrize("model_type", rest_nightly(_SUPPORTED, fast=["llama", "gemma3_text"]))
def test_every_value_of_every_key_of_a_supported_type_is_equal_or_refused_by_name(model_type: str) -> None:
    config, counts = tiny_config(model_type), Counter[str]()
    for change in changed_keys(config):
        try:
            counts[_compare_changed(config, change).partition(":")[0]] += 1
        except Exception as error:
            error.add_note(f"{model_type} with {change}")
            raise
    print(model_type, dict(counts))
    assert counts[REFUSED] > 0
    assert wrapper_of(config) is not None or counts[EQUAL] > counts[NOT_BUILT]
