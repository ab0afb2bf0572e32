from typing import Any

import pytest

from sftron.kernels.rope_table import LinearScaling, Llama3Scaling
from sftron.models.architecture import LlamaConfig
from tests.models.reference import LLAMA3_ROPE, TINY, make_theirs

BASE: dict[str, Any] = {"model_type": "llama", **TINY}


def test_what_transformers_writes_is_read_whole() -> None:
    config = LlamaConfig.from_hf(make_theirs(rope_parameters=LLAMA3_ROPE, mlp_bias=True).config.to_dict())
    assert {key: getattr(config, key) for key in TINY} == TINY
    assert (config.head_dim, config.mlp_bias, config.rope_theta) == (8, True, 500000.0)
    assert config.rope_scaling == Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
    )


@pytest.mark.parametrize(
    "scaling",
    [None, {"rope_type": "linear", "factor": 2.0}, {k: v for k, v in LLAMA3_ROPE.items() if k != "rope_theta"}],
)
def test_both_forms_of_rope_are_read_alike(scaling: dict[str, Any] | None) -> None:
    old = {"rope_theta": 7e4, "rope_scaling": scaling}
    new = {"rope_parameters": {"rope_type": "default", "rope_theta": 7e4, **(scaling or {})}}
    config = LlamaConfig.from_hf(BASE | old)
    assert config == LlamaConfig.from_hf(BASE | new)
    assert config.rope_theta == 7e4
    assert (config.rope_scaling is None) == (scaling is None)


def test_the_oldest_name_of_a_rope_type_is_read() -> None:
    config = LlamaConfig.from_hf(BASE | {"rope_scaling": {"type": "linear", "factor": 2.0}})
    assert config.rope_scaling == LinearScaling(factor=2.0)


def test_absent_and_null_keys_mean_what_they_mean_to_transformers() -> None:
    bare = {key: value for key, value in BASE.items() if key != "num_key_value_heads"}
    config = LlamaConfig.from_hf(bare | {"head_dim": None, "rope_scaling": None, "unheard_of": None})
    assert (config.num_key_value_heads, config.head_dim, config.rope_theta) == (4, 8, 10000.0)


def test_all_that_is_not_implemented_is_named_at_once_with_both_values() -> None:
    wrong = {
        "hidden_act": "gelu",
        "rope_interleaved": True,
        "quantization_config": {"bits": 4},
        "sliding_window": 512,
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0},
    }
    with pytest.raises(ValueError, match="not implemented") as caught:
        LlamaConfig.from_hf({key: value for key, value in BASE.items() if key != "vocab_size"} | wrong)
    lines = str(caught.value).splitlines()
    for expected in (
        "hidden_act: 'gelu', implemented is 'silu'",
        "rope_interleaved: True, implemented is False",
        "quantization_config: {'bits': 4}, but no such key is implemented",
        "sliding_window: 512, but no such key is implemented",
        "rope_scaling.rope_type: 'yarn', implemented are default, linear, llama3",
        "vocab_size: None, a positive integer is needed",
    ):
        assert f"  {expected}" in lines


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2', implemented are llama, mistral, qwen2, qwen3"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide num_attention_heads: 4"),
        ({"head_dim": 7}, "head_dim: 7, a positive even number"),
        ({"hidden_size": "32"}, "hidden_size: '32', a positive integer"),
        ({"num_attention_heads": 0}, "num_attention_heads: 0, a positive integer"),
        ({"rope_scaling": {"rope_type": "linear"}}, r"rope_scaling.factor: missing, rope_type 'linear' needs it"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta": 1}}, "rope_scaling.beta: 1, .* no such key"),
        ({"rope_theta": 1.0, "rope_parameters": {"rope_theta": 2.0}}, "rope_theta: 1.0 contradicts .* 2.0"),
        ({"rope_theta": "x"}, "rope_theta: 'x', a finite number above 0 is needed"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor: 0, a finite number above 0 is needed"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor: 0.5, implemented is 1.0"),
    ],
)
def test_a_wrong_value_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LlamaConfig.from_hf(BASE | change)
