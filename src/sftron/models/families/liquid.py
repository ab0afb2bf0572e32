"""The family of Liquid AI's LFM2; see table.py."""

from __future__ import annotations

from typing import Any

from sftron.models.causal_convolution import ConvolutionSizes
from sftron.models.families.family import LARGEST_SIZE, Family, Values, key, without
from sftron.models.rope_config import FULL, RopeKeys, is_finite

CONVOLUTION = "conv"
"""The value of `layer_types` for layers with a short convolution in place of attention."""


def _attends_by_index(values: Values) -> list[str]:
    numbers = range(values["num_hidden_layers"])
    indices = values["full_attn_idxs"]
    if not isinstance(indices, list):  # null, or what _problems refuses
        return [FULL for _ in numbers]
    return [FULL if number in indices else CONVOLUTION for number in numbers]


def _stated_size(values: Values) -> Any:
    """The first name is that of the first published configurations, and precedes the other in transformers."""
    return values["intermediate_size"] if values["block_ff_dim"] is None else values["block_ff_dim"]


def _size_of_mlp(values: Values) -> int:
    """Returns the size of the MLPs, which is not the stated one but two thirds of it, times a factor, rounded up."""
    size = _stated_size(values)
    if not values["block_auto_adjust_ff_dim"]:
        return size
    size = int(values["block_ffn_dim_multiplier"] * int(2 * size / 3))
    return -(-size // values["block_multiple_of"]) * values["block_multiple_of"]


def _ties(values: Values) -> bool:
    return values["tie_word_embeddings"] if values["tie_embedding"] is None else values["tie_embedding"]


def _problems(values: Values) -> list[str]:
    sizes = {name: values[name] for name in ("conv_L_cache", "block_multiple_of", "block_ff_dim")}
    problems = [
        f"{name}: {size!r} is not a whole number from 1 to {LARGEST_SIZE}"
        for name, size in sizes.items()
        if (type(size) is not int or not 0 < size <= LARGEST_SIZE) and not (name == "block_ff_dim" and size is None)
    ]
    indices, ties = values["full_attn_idxs"], values["tie_embedding"]
    if indices is not None and not (isinstance(indices, list) and all(type(each) is int for each in indices)):
        problems.append(f"full_attn_idxs: {indices!r} is not a list of whole numbers")
    if ties is not None and type(ties) is not bool:
        problems.append(f"tie_embedding: {ties!r} is neither true nor false")
    # That the factor is a finite number above 0 is checked as of all such keys.
    if not problems and is_finite(values["block_ffn_dim_multiplier"]):
        size = _size_of_mlp(values)
        if not 0 < size <= LARGEST_SIZE:
            stated = f"{_stated_size(values)} and block_ffn_dim_multiplier: {values['block_ffn_dim_multiplier']}"
            problems.append(f"intermediate_size: {stated} give {size}, which is not from 1 to {LARGEST_SIZE}")
    return problems


LIQUID_FAMILIES: dict[str, Family] = {
    "lfm2": Family(
        architecture="Lfm2ForCausalLM",
        defaults=without("hidden_act", "rms_norm_eps")
        | {"intermediate_size": 12288, "num_key_value_heads": 8, "max_position_embeddings": 128_000}
        | {"norm_eps": 1e-5, "tie_word_embeddings": True, "tie_embedding": None}
        | {"conv_bias": False, "conv_L_cache": 3, "layer_types": None, "full_attn_idxs": None}
        | {"block_ff_dim": None, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0}
        | {"block_auto_adjust_ff_dim": True},
        model={
            "norm_eps": key("norm_eps"),
            "activation": "silu",
            "intermediate_size": _size_of_mlp,
            "tie_word_embeddings": _ties,
            "mixing": lambda values: ConvolutionSizes(num_taps=values["conv_L_cache"], bias=values["conv_bias"]),
        },
        layer={"attention": "normed_rotary"},
        types=_attends_by_index,
        layer_of={CONVOLUTION: {"block": "short_convolution"}},
        rope=RopeKeys(theta=1e6),
        problems=_problems,
        names={
            "self_attn.o_proj": ("self_attn.out_proj",),
            "self_attn.q_norm": ("self_attn.q_layernorm",),
            "self_attn.k_norm": ("self_attn.k_layernorm",),
            "mlp.gate_up_proj": ("feed_forward.w1", "feed_forward.w3"),
            "mlp.down_proj": ("feed_forward.w2",),
            "input_layernorm": ("operator_norm",),
            "post_attention_layernorm": ("ffn_norm",),
            "model.norm": ("model.embedding_norm",),
        },
    ),
}
