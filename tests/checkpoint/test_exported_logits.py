"""An export is its source in transformers, to the bit of every logit, for every rope in every spelling of its keys."""

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from sftron.checkpoint.export import export_hf
from sftron.checkpoint.hf_weights import load_model
from sftron.checkpoint.model_folder import read_json
from sftron.models.families.table import FAMILIES as MODEL_TYPES
from sftron.models.rope_config import FULL, SLIDING, RopeKeys
from sftron.models.wrappers import wrapper_of
from tests.checkpoint.test_wrappers import WRAPPERS, make_wrapper
from tests.models.reference import FAMILIES, FIRST_OF_TYPE, make_reference, pack

pytestmark = pytest.mark.usefixtures("quiet")
INPUT_IDS, *REST = pack([60])
ORIGINAL = 24
"""Fewer positions than the document has, so that every scaling shows."""
BASE, OUTSIDE = {"rope_theta": 3e4}, ("rope_theta", "partial_rotary_factor")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
LLAMA_3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": ORIGINAL}
SLIDING_THETA = 5e3

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": YARN,
    "yarn with its other entries": YARN
    | {"beta_fast": 3.0, "beta_slow": 0.5, "mscale": 0.7, "mscale_all_dim": 2.0, "truncate": False},
    "yarn with a factor of attention": YARN | {"attention_factor": 1.5},
    "yarn without the original length": {"rope_type": "yarn", "factor": 4.0},
    "llama3": {"rope_type": "llama3", **LLAMA_3},
    "longrope": {"rope_type": "longrope", "original_max_position_embeddings": ORIGINAL},
    "longrope with its other entries": {"rope_type": "longrope", "original_max_position_embeddings": ORIGINAL}
    | {"factor": 4.0, "attention_factor": 1.3},
    "proportional": {"rope_type": "proportional"},
}
"""The entries of each kind; longrope has its lists of factors as well."""
SPELLINGS = ("4", "4, first", "4, all inside", "5", "5, some outside", "both")
"""The keys of transformers 4 (rope_scaling) and 5 (rope_parameters). In the first releases, rope_type was `type`."""


@pytest.fixture
def quiet() -> Iterator[None]:
    """Warnings of transformers about ropes take more time than the ropes."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


def _keys(model_type: str) -> RopeKeys:
    wrapper = wrapper_of({"model_type": model_type})
    return MODEL_TYPES[(wrapper and wrapper.text_type) or model_type].rope


def _save(model_type: str, folder: Path) -> int:
    """Saves a model of a model type, or of a wrapper, and returns its head_dim."""
    if model_type in WRAPPERS:
        reference = make_wrapper(model_type)
    else:
        # Without head_dim in its config.json, transformers 5 fails at a Mixtral with dynamic, yarn or longrope.
        options = {"head_dim": 8} if model_type == "mixtral" else {}
        reference = make_reference(**FAMILIES[FIRST_OF_TYPE[model_type]] | options)
    reference.save_pretrained(folder)
    config = reference.config.get_text_config()
    config.allow_global_per_layer_attribute_access = True
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _rope(model_type: str, kind: str, partial: float | None, head_dim: int) -> dict[str, Any]:
    rope, keys = BASE | ROPES[kind], _keys(model_type)
    rope |= {} if partial is None else {"partial_rotary_factor": partial}
    rope |= {"llama_4_scaling_beta": 0.3, "original_max_position_embeddings": ORIGINAL} if keys.scales_queries else {}
    if rope["rope_type"] == "longrope":
        half = int(head_dim * (partial or keys.partial or 1.0)) // 2
        rope |= {"short_factor": [1 + 0.3 * n for n in range(half)], "long_factor": [1 + 1.5 * n for n in range(half)]}
    return rope


def _spelled(config: dict[str, Any], keys: RopeKeys, rope: dict[str, Any], spelling: str) -> dict[str, Any]:
    """Returns a config.json whose full layers have a rope, in one of SPELLINGS."""
    names = {"rope_parameters", "rope_scaling", *OUTSIDE, keys.sliding_key}
    config = {key: value for key, value in config.items() if key not in names}
    if keys.original is not None:  # its place in all spellings
        config["original_max_position_embeddings"] = ORIGINAL
        rope = {key: value for key, value in rope.items() if key != "original_max_position_embeddings"}
    outside = {key: rope[key] for key in OUTSIDE if key in rope}
    inside = {key: value for key, value in rope.items() if key not in OUTSIDE}
    sliding = {} if keys.sliding_key is None else {keys.sliding_key: SLIDING_THETA}
    # Only rope_parameters can state another theta for the sliding layers of a family without a key for it.
    sliding_theta = SLIDING_THETA if spelling == "5" or keys.sliding_key else keys.sliding_theta

    def nested(entries: dict[str, Any]) -> dict[str, Any]:
        both = {FULL: entries, SLIDING: {"rope_type": "default", "rope_theta": sliding_theta}}
        return {"rope_parameters": entries if keys.sliding_theta is None else both}

    is_default = inside == {"rope_type": "default"}
    old = outside | sliding | {"rope_scaling": None if is_default else inside}
    match spelling:
        case "4":
            return config | old
        case "4, first":
            first = {"type" if key == "rope_type" else key: value for key, value in inside.items()}
            return config | old | {"rope_scaling": None if is_default else first}
        case "4, all inside":
            return config | sliding | {"rope_scaling": rope}
        case "5":
            return config | nested(rope)
        case "5, some outside":
            return config | outside | nested(inside)
    return config | old | nested(rope)


def _refusal(model_type: str, kind: str, spelling: str, rotary_dim: int) -> str | None:
    """Returns a part of the message for a combination that is refused, each for a reason in rope_config.py."""
    keys, rope_type = _keys(model_type), ROPES[kind]["rope_type"]
    if keys.only_parameters and spelling != "5":
        return "sftron does not support this key"
    if keys.original is not None and rope_type == "yarn":
        return "short_factor: missing in rope_type 'longrope'"  # yarn is the first name of longrope there
    if rope_type not in keys.types:
        return f"rope_type: '{rope_type}'; sftron supports only"
    # transformers 5 takes its default of rope_parameters instead; of scales_queries, rope_scaling is never null.
    is_null = kind == "default" and spelling in ("4", "4, first") and not keys.scales_queries
    if is_null and "rope_theta" in keys.parameters:
        return "rope_theta: 30000.0 contradicts rope_scaling.rope_theta"
    if rope_type == "dynamic" and rotary_dim == 2:
        return "2 rotated dimensions, but rope_type 'dynamic' needs more than 2"
    if keys.sliding_theta is not None and ROPES[kind].get("truncate") is False:
        return "truncate: False; sftron supports only True"
    if keys.sliding_theta is not None and spelling == "4, first" and kind != "default":
        return "which transformers 5 ignores in this family; name it rope_type"
    return None


def _logits(folder: Path) -> Tensor:
    """Returns the logits of transformers for a folder whose weights it reads without exception."""
    is_wrapper = read_json(folder / "config.json")["model_type"] in WRAPPERS.keys() - {"qwen3_5"}
    kind = transformers.AutoModelForImageTextToText if is_wrapper else transformers.AutoModelForCausalLM
    options: Any = {"attn_implementation": "eager", "output_loading_info": True, "dtype": torch.float32}
    model, info = kind.from_pretrained(folder, **options)
    assert is_wrapper or not (info["missing_keys"] or info["mismatched_keys"]), info
    with torch.no_grad():
        return model(INPUT_IDS[None], use_cache=False).logits[0]


def _without(folder: Path, config: dict[str, Any], keys: set[str | None]) -> Tensor:
    """Returns the logits of a folder as those see it who do not know some keys of its text model."""
    text = config.get("text_config", config)
    less = {key: value for key, value in text.items() if key not in keys}
    (folder / "config.json").write_text(json.dumps(config | {"text_config": less} if "text_config" in config else less))
    return _logits(folder)


def _require_equal_logits(source: Path, out: Path, model_type: str, rope: dict[str, Any], spelling: str) -> None:
    keys, config = _keys(model_type), read_json(source / "config.json")
    text = _spelled(config.get("text_config", config), keys, rope, spelling)
    (source / "config.json").write_text(json.dumps(config | {"text_config": text} if "text_config" in config else text))
    native = load_model(source, compute_dtype=torch.float32)
    expected = _logits(source)
    with torch.no_grad():
        logits = native.head.logits(native(INPUT_IDS, *REST))
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item() + 2e-4)
    export_hf(native.named_parameters(), out, source_folder=source, dtype=torch.float32, stop_token_ids=[3])
    assert _logits(out).equal(expected)
    # Those who know only the keys of transformers 4 or of 5 compute the same.
    exported = read_json(out / "config.json")
    assert _without(out, exported, {"rope_scaling", *OUTSIDE, keys.sliding_key}).equal(expected)
    has_other_sliding_theta = keys.sliding_theta is not None and keys.sliding_key is None and spelling == "5"
    assert _without(out, exported, {"rope_parameters"}).equal(expected) != has_other_sliding_theta


# Each kind of scaling, each spelling, and each family with keys of its own.
FAST = [("phi", "yarn", 0.25, "5"), ("phi3", "longrope", 0.5, "4, all inside"), ("glm4", "llama3", 1.0, "5")]
FAST += [("qwen3_5_text", "linear", 0.5, "both"), ("stablelm", "default", 0.5, "5, some outside")]
FAST += [("gemma3_text", "linear", None, "4"), ("olmo3", "yarn", None, "5"), ("ministral3", "yarn", None, "5")]
FAST += [("llama", "dynamic", None, "4, first")]


@pytest.mark.parametrize(("model_type", "kind", "partial", "spelling"), FAST)
def test_an_export_has_the_logits_of_its_source_in_transformers(
    model_type: str, kind: str, partial: float | None, spelling: str, tmp_path: Path
) -> None:
    head_dim = _save(model_type, tmp_path / "source")
    rope = _rope(model_type, kind, partial, head_dim)
    _require_equal_logits(tmp_path / "source", tmp_path / "out", model_type, rope, spelling)


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", [*MODEL_TYPES, *WRAPPERS])
def test_every_rope_in_every_spelling_has_equal_logits_after_an_export_or_is_refused_by_name(
    model_type: str, tmp_path: Path
) -> None:
    keys, head_dim = _keys(model_type), _save(model_type, tmp_path / "source")
    num_equal = num_refused = 0
    partials = [None] if keys.partial is None else [None, 0.25 if keys.partial == 0.5 else 0.5]
    for kind, partial, spelling in product(ROPES, partials, SPELLINGS):
        rope = _rope(model_type, kind, partial, head_dim)
        arguments: Any = (tmp_path / "source", tmp_path / "out", model_type, rope, spelling)
        if message := _refusal(model_type, kind, spelling, int(head_dim * (partial or keys.partial or 1.0))):
            with pytest.raises(ValueError, match=message):
                _require_equal_logits(*arguments)
            num_refused += 1
        else:
            try:
                _require_equal_logits(*arguments)
            except Exception as error:
                error.add_note(f"{model_type}, {kind}, partial_rotary_factor {partial}, spelling {spelling!r}")
                raise
            num_equal += 1
    print(f"{model_type}: {num_equal} equal, {num_refused} refused")
    assert num_equal > num_refused or keys.original is not None or keys.only_parameters
    assert num_equal > 1
