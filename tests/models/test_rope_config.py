"""Rotary embeddings of every family, from config.json to rotated heads, against transformers' own modules."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from sftron.kernels.rope import rotate_heads
from sftron.kernels.table import RopeSpec, RopeTables, document_lengths
from sftron.models.families.table import FAMILIES
from sftron.models.generation import greedy_generate
from sftron.models.rope_config import FULL, SLIDING, RopeKeys, complete_rope_keys, read_ropes
from tests.conftest import rest_nightly
from tests.models.reference import make_native, make_reference, pack, require_same_model

PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "assets" / "published_ropes.json").read_text(encoding="utf-8")
)
"""The keys of published config.json files that their ropes depend on."""
NUM_POSITIONS = 9000
LENGTHS = [4096, 1, 4097, 9, 8193]
"""Around the original lengths of Phi and others, in one pack."""
_LAYER_TYPES = [SLIDING, FULL]


KEYS = {
    "qwen3_5_text": RopeKeys(partial=0.25, ignored=("mrope_section", "mrope_interleaved")),
}
"""Of families that are not implemented."""


def _keys(config: dict[str, Any]) -> RopeKeys:
    name = config["model_type"]
    return FAMILIES[name].rope if name in FAMILIES else KEYS.get(name, RopeKeys())


def _ropes(config: dict[str, Any], reference: Any) -> dict[str, RopeSpec]:
    """The rope of each type of layers, as it is read."""
    head_dim = getattr(reference, "head_dim", None) or reference.hidden_size // reference.num_attention_heads
    given = {key: value for key, value in config.items() if value is not None}
    sizes = {"head_dims": dict.fromkeys(_LAYER_TYPES, head_dim), "max_positions": reference.max_position_embeddings}
    ropes, of_layer, problems = read_ropes(given, _keys(config), **sizes, layer_types=_LAYER_TYPES)
    assert problems == []
    return {layer_type: ropes[index] for layer_type, index in zip(_LAYER_TYPES, of_layer, strict=True)}


def _heads_of_transformers(reference: Any, layer_type: str, qk: Tensor) -> Tensor:
    """One document's heads [tokens, 2, head_dim], rotated by the modules of the model's own file."""
    name = reference.model_type.removesuffix("_text")
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    (kind,) = {each for key, each in vars(module).items() if key.endswith("RotaryEmbedding") and "Vision" not in key}
    nested = (layer_type,) if layer_type in reference.rope_parameters else ()
    position_ids = torch.arange(len(qk))[None]
    q, k = qk.transpose(0, 1)[None].split(1, dim=1)
    cos, sin = kind(reference)(q, position_ids, *nested)
    # gpt-oss has each of them once, not once for each half; some families rotate a part of their heads elsewhere.
    rotary_dim = cos.shape[-1] * (2 if name == "gpt_oss" else 1)
    rotated = module.apply_rotary_pos_emb(q[..., :rotary_dim], k[..., :rotary_dim], cos, sin)
    heads = [torch.cat([x, rest[..., rotary_dim:]], dim=-1) for x, rest in zip(rotated, (q, k), strict=True)]
    return torch.cat(heads, dim=1)[0].transpose(0, 1)


# Each type of scaling with each of its parameters, partial and interleaved rotation, and two ropes in a model.
FAST = ["meta-llama/Llama-3.1-8B", "01-ai/Yi-6B-200K with dynamic scaling", "Qwen/Qwen3-8B with YaRN"]
FAST += ["microsoft/Phi-3.5-mini-instruct", "microsoft/Phi-4-mini-instruct", "microsoft/phi-1_5", "openai/gpt-oss-20b"]
FAST += ["THUDM/GLM-4-9B-0414", "CohereLabs/c4ai-command-r-v01", "google/gemma-3-4b-it (text_config)"]
FAST += [
    "tencent/Hunyuan-7B-Instruct",
    "mistralai/Ministral-3-8B-Instruct-2512 (text_config)",
    "Qwen/Qwen3.5-4B (text_config)",
]


@pytest.mark.parametrize("name", rest_nightly(PUBLISHED, FAST))
def test_heads_in_a_pack_are_rotated_as_transformers_rotates_each_document_alone(name: str) -> None:
    config = PUBLISHED[name]
    reference = transformers.AutoConfig.for_model(**config)
    torch.manual_seed(0)
    position_ids = torch.cat([torch.arange(length) for length in LENGTHS])
    ropes = _ropes(config, reference)
    for layer_type, spec in ropes.items():
        head_dim = getattr(reference, "head_dim", None) or reference.hidden_size // reference.num_attention_heads
        qk = torch.randn(sum(LENGTHS), 2, head_dim)
        rows, table = RopeTables(NUM_POSITIONS, [spec]).at(position_ids)[0]
        q, k, _ = rotate_heads(torch.cat([qk, qk[:, :1]], dim=1).flatten(1), rows, table, 1, 1, spec.interleaved)
        expected = [_heads_of_transformers(reference, layer_type, each) for each in qk.split(LENGTHS)]
        assert torch.cat([q, k], dim=1).equal(torch.cat(expected))


@pytest.mark.parametrize("name", PUBLISHED)
def test_exported_keys_are_read_as_the_same_ropes_here_and_in_transformers(name: str) -> None:
    config, keys = PUBLISHED[name], _keys(PUBLISHED[name])
    reference = transformers.AutoConfig.for_model(**config)
    exported = config | complete_rope_keys(config, keys, reference.max_position_embeddings)
    assert _ropes(exported, reference) == _ropes(config, reference)
    theirs = transformers.AutoConfig.for_model(**exported).rope_parameters
    assert {k: v for k, v in theirs.items() if k != "type"} == {
        k: v for k, v in reference.rope_parameters.items() if k != "type"
    }


@pytest.mark.parametrize("model_type", sorted({config["model_type"] for config in PUBLISHED.values()}))
def test_absent_keys_have_the_defaults_of_transformers(model_type: str) -> None:
    sizes = {"model_type": model_type, "hidden_size": 64, "num_attention_heads": 4}
    reference = transformers.AutoConfig.for_model(**sizes)
    ours = complete_rope_keys(sizes, _keys(sizes), reference.max_position_embeddings)["rope_parameters"]
    without = ("type", *_keys(sizes).ignored)
    assert ours == {key: value for key, value in reference.rope_parameters.items() if key not in without}


ORIGINAL = 24
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.2, 1.5], "long_factor": [1.5, 3.0, 9.0]}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
MSCALE = {"beta_fast": 3.0, "beta_slow": 0.5, "mscale": 0.7, "mscale_all_dim": 2.0, "llama_4_scaling_beta": 0.8}
MODELS: dict[str, dict[str, Any]] = {
    "Phi 4 mini": {"model_type": "phi3", "partial_rotary_factor": 0.75, "rope_parameters": LONG}
    | {"original_max_position_embeddings": ORIGINAL},
    "Qwen 2.5 with YaRN": {"model_type": "qwen2", "rope_parameters": YARN | {"truncate": False, "beta_fast": 2.0}},
    "Ministral 3": {"model_type": "ministral3", "head_dim": 8, "rope_parameters": YARN | MSCALE},
    "Yi 200K": {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}},
}


@pytest.mark.parametrize("name", MODELS)
def test_short_and_long_documents_in_a_pack_are_those_of_transformers(name: str) -> None:
    reference = make_reference(**MODELS[name])
    require_same_model(make_native(reference), reference, [20, 25, 1, 24, 58])


@pytest.mark.parametrize("name", MODELS)
def test_a_generation_that_grows_beyond_the_original_length_is_that_of_transformers(name: str) -> None:
    reference = make_reference(**MODELS[name])
    inputs = pack([20])[0][None]
    options = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None}
    expected = reference.generate(inputs, attention_mask=torch.ones_like(inputs), **options)[0, 20:].tolist()
    generation = greedy_generate(make_native(reference), inputs[0].tolist(), 12, ())
    assert list(generation.token_ids) == expected
    assert len(set(expected)) > 3


def test_long_and_short_conversations_are_rotated_alike_with_and_without_attention_between_them() -> None:
    """Positions decide, not the bounds of attention, so an ablation changes only its toggle."""
    native = make_native(make_reference(**MODELS["Phi 4 mini"]))
    _, position_ids, *_ = pack([20, 30])
    rows = native.rope_tables.at(position_ids)[0][0]
    assert rows.tolist() == [*range(20), *range(128, 158)]
    # Without restarts, the pack is one document of 50 tokens.
    assert native.rope_tables.at(torch.arange(50))[0][0].tolist() == [*range(128, 178)]


def test_each_document_beyond_the_positions_of_dynamic_scaling_has_its_own_frequencies() -> None:
    reference = make_reference(**MODELS["Yi 200K"], max_position_embeddings=ORIGINAL)
    native = make_native(reference, num_positions=128)
    require_same_model(native, reference, [20, 25, 1, 24, 58])
    with pytest.raises(ValueError, match=r"25 tokens exceed the 24 positions .*'dynamic'"):
        greedy_generate(native, [1] * 20, 5, ())


def test_the_length_of_a_document_is_that_of_its_run_of_positions() -> None:
    assert document_lengths(torch.tensor([0, 1, 2, 0, 0, 1])).tolist() == [3, 3, 3, 1, 2, 2]
    assert document_lengths(torch.tensor([7])).tolist() == [8]
    assert document_lengths(torch.tensor([], dtype=torch.long)).tolist() == []
