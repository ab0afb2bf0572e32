"""The architecture, as a Llama checkpoint's config.json states it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sftron.kernels.rope import LinearScaling, Llama3Scaling, RopeScaling

_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")

_DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
}
"""What transformers assumes when a key is absent."""

_OPTIONAL = ("num_key_value_heads", "head_dim", "rope_theta", "rope_scaling", "rope_parameters")

_FIXED: dict[str, Any] = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "pretraining_tp": 1,
    "partial_rotary_factor": 1.0,
    "rope_interleaved": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "is_decoder": False,
    "chunk_size_feed_forward": 0,
    "pruned_heads": {},
}
"""Keys with a single implemented value."""

_IRRELEVANT = frozenset(
    {
        *("architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "max_sequence_length"),
        *("_name_or_path", "_model_name_or_path", "is_llama_config", "_attn_implementation_autoset"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "decoder_start_token_id"),
        *("output_attentions", "output_hidden_states", "return_dict", "id2label", "label2id", "problem_type"),
        *("transformers.js_config",),
    }
)
"""Keys that say nothing about the computation of a forward pass."""

_ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """What the forward pass depends on, under Hugging Face's names; nothing in it is optional."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    initializer_range: float
    rope_theta: float
    rope_scaling: RopeScaling | None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> LlamaConfig:
        """Reads a config.json, of transformers 4 (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`).

        A null is an absent key, as in transformers.

        Raises: ValueError, naming every key that is missing, unknown or has a value that is not implemented, with the
            value found and the one expected.
        """
        given = {key: value for key, value in config.items() if value is not None}
        if given.get("model_type") != "llama":
            raise ValueError(
                f"config.json: model_type is {given.get('model_type')!r}, implemented is 'llama'. "
                "Choose a checkpoint of the Llama architecture."
            )
        problems = _unimplemented(given)
        rope_theta, rope_scaling = _read_rope(given, problems)
        fields: dict[str, Any] = {key: given.get(key) for key in _SIZES}
        fields |= {key: given.get(key, default) for key, default in _DEFAULTS.items()}
        fields["num_key_value_heads"] = given.get("num_key_value_heads", fields["num_attention_heads"])
        fields["head_dim"] = given.get("head_dim")
        problems += _wrong_sizes(fields)
        if problems:
            raise ValueError(
                "config.json describes a model that is not implemented:\n  "
                + "\n  ".join(problems)
                + "\nChoose another checkpoint; remove a key only if the model does not need what it says."
            )
        return cls(**fields, rope_theta=rope_theta, rope_scaling=rope_scaling)


def _unimplemented(given: Mapping[str, Any]) -> list[str]:
    known = {*_SIZES, *_DEFAULTS, *_OPTIONAL, *_FIXED} | _IRRELEVANT
    unknown = [f"{key}: {given[key]!r}, but no such key is implemented" for key in given if key not in known]
    return unknown + [
        f"{key}: {given[key]!r}, implemented is {value!r}"
        for key, value in _FIXED.items()
        if key in given and given[key] != value
    ]


def _wrong_sizes(fields: dict[str, Any]) -> list[str]:
    """Sizes that no Llama can have. Completes `head_dim`, where the sizes that it follows from are right."""
    sizes = (*_SIZES, "num_key_value_heads", "max_position_embeddings")
    problems = [
        f"{key}: {fields[key]!r}, a positive integer is needed"
        for key in sizes
        if type(fields[key]) is not int or fields[key] <= 0
    ]
    if problems:
        return problems
    num_heads, num_kv_heads = fields["num_attention_heads"], fields["num_key_value_heads"]
    if fields["head_dim"] is None:
        fields["head_dim"] = fields["hidden_size"] // num_heads
    if num_heads % num_kv_heads:
        problems.append(f"num_key_value_heads: {num_kv_heads} does not divide num_attention_heads: {num_heads}")
    head_dim = fields["head_dim"]
    if type(head_dim) is not int or head_dim <= 0 or head_dim % 2:
        problems.append(f"head_dim: {head_dim!r}, a positive even number is needed, as halves are rotated")
    return problems


_ROPE_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def _read_rope(given: Mapping[str, Any], problems: list[str]) -> tuple[float, RopeScaling | None]:
    """rope_theta and the scaling, out of either form; what is wrong is appended to `problems`."""
    name = "rope_parameters" if "rope_parameters" in given else "rope_scaling"
    rope = dict(given.get(name, {}))
    if name == "rope_parameters" and "rope_scaling" in given and given["rope_scaling"] != given[name]:
        problems.append(f"rope_scaling: {given['rope_scaling']!r} contradicts rope_parameters: {given[name]!r}")
    rope_theta = rope.pop("rope_theta", given.get("rope_theta", 10000.0))
    numbers = {"rope_theta": rope_theta, **{key: rope[key] for key in _ROPE_NUMBERS if rope.get(key) is not None}}
    problems += [
        f"{key}: {value!r}, a number above 0 is needed"
        for key, value in numbers.items()
        if type(value) not in (int, float) or not value > 0
    ]
    if given.get("rope_theta", rope_theta) != rope_theta:
        problems.append(f"rope_theta: {given['rope_theta']!r} contradicts {name}.rope_theta: {rope_theta!r}")
    if rope.pop("partial_rotary_factor", 1.0) != 1.0:
        problems.append(f"{name}.partial_rotary_factor: {given[name]['partial_rotary_factor']!r}, implemented is 1.0")
    old_name = rope.pop("type", "default")
    rope_type = rope.pop("rope_type", old_name)
    if rope_type not in _ROPE_TYPES:
        problems.append(f"{name}.rope_type: {rope_type!r}, implemented are {', '.join(_ROPE_TYPES)}")
        return rope_theta, None
    if rope_type == "llama3":
        rope.setdefault("original_max_position_embeddings", given.get("max_position_embeddings"))
    needed = _ROPE_TYPES[rope_type]
    problems += [f"{name}.{key}: missing, rope_type {rope_type!r} needs it" for key in needed if rope.get(key) is None]
    problems += [
        f"{name}.{key}: {value!r}, rope_type {rope_type!r} has no such key"
        for key, value in rope.items()
        if key not in needed and value is not None
    ]
    if rope_type == "default" or problems:
        return rope_theta, None
    return rope_theta, (LinearScaling if rope_type == "linear" else Llama3Scaling)(**{key: rope[key] for key in needed})
