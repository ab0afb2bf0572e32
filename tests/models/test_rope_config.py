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
from sftron.models.families import FAMILIES
from sftron.models.rope_config import FULL, SLIDING, RopeKeys, complete_rope_keys, read_ropes

PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "assets" / "published_ropes.json").read_text(encoding="utf-8")
)
"""The keys of published config.json files that their ropes depend on."""
NUM_POSITIONS = 9000
LENGTHS = [4096, 1, 4097, 9, 8193]
"""Around the original lengths of Phi and others, in one pack."""
_LAYER_TYPES = [SLIDING, FULL]


KEYS = {
    "olmo3": RopeKeys(theta=500000.0, sliding_theta=500000.0),
    "phi": RopeKeys(partial=0.5),
    "phi3": RopeKeys(partial=1.0, original=4096),
    "stablelm": RopeKeys(partial=0.25),
    "glm4": RopeKeys(partial=0.5, interleaved=True),
    "cohere": RopeKeys(theta=500000.0, interleaved=True),
    "cohere2": RopeKeys(interleaved=True),
    "gemma3_text": RopeKeys(theta=1e6, sliding_theta=1e4, sliding_key="rope_local_base_freq"),
    "gpt_oss": RopeKeys(
        theta=150000.0,
        parameters={"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
        | {"original_max_position_embeddings": 4096},
    ),
    "ministral3": RopeKeys(
        parameters={"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0}
        | {"original_max_position_embeddings": 16384, "mscale": 1.0, "mscale_all_dim": 1.0}
        | {"llama_4_scaling_beta": 0.1},
        scales_queries=True,
        ignored=("max_position_embeddings",),
    ),
    "qwen3_5_text": RopeKeys(partial=0.25, ignored=("mrope_section", "mrope_interleaved")),
    "mixtral": RopeKeys(theta=1e6),
}


def _keys(config: dict[str, Any]) -> RopeKeys:
    name = config["model_type"]
    return FAMILIES[name].rope if name in FAMILIES else KEYS.get(name, RopeKeys())


def _ropes(config: dict[str, Any], reference: Any) -> dict[str, RopeSpec]:
    """The rope of each type of layers, as it is read."""
    head_dim = getattr(reference, "head_dim", None) or reference.hidden_size // reference.num_attention_heads
    given = {key: value for key, value in config.items() if value is not None}
    sizes = {"head_dim": head_dim, "max_positions": reference.max_position_embeddings}
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


@pytest.mark.parametrize("name", PUBLISHED)
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


def test_the_length_of_a_document_is_that_of_its_run_of_positions() -> None:
    assert document_lengths(torch.tensor([0, 1, 2, 0, 0, 1])).tolist() == [3, 3, 3, 1, 2, 2]
    assert document_lengths(torch.tensor([7])).tolist() == [8]
    assert document_lengths(torch.tensor([], dtype=torch.long)).tolist() == []
