"""The architecture, as a checkpoint's config.json states it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sftron.kernels.rope_table import LinearScaling, Llama3Scaling, RopeScaling
from sftron.models.families import Family, family_of

_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")

_LARGEST = {"num_hidden_layers": 2**12, "max_position_embeddings": 2**24}
_LARGEST_SIZE = 2**27
"""Above any model's, and small enough that the memory for what config.json says can be reckoned before it is taken."""

_DEFAULTS: dict[str, Any] = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "initializer_range": 0.02}
"""What every family assumes when a key is absent; see families.py for what they assume apart."""

_ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")

_NULL_IS_A_VALUE = ("num_key_value_heads", "head_dim", "sliding_window")
"""Keys whose null is not what an absent key is: as many as heads, hidden_size / heads, no window."""

_FIXED: dict[str, Any] = {
    "hidden_act": "silu",
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
        *(
            "model_type",
            "architectures",
            "dtype",
            "torch_dtype",
            "transformers_version",
            "use_cache",
            "max_sequence_length",
        ),
        *("_name_or_path", "_model_name_or_path", "is_llama_config", "_attn_implementation_autoset"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "decoder_start_token_id"),
        *("output_attentions", "output_hidden_states", "return_dict", "id2label", "label2id", "problem_type"),
        *("transformers.js_config", "_commit_hash", "_flash_attn_2_enabled", "tokenizer_class", "torchscript"),
        *("unsloth_fixed", "unsloth_version", "use_bfloat16"),
        # Slices matrix products and adds the parts: the same sums in another order.
        "pretraining_tp",
        # A setting of training, which the fine-tuning of here does without; the trainer says so.
        "attention_dropout",
    }
)
"""Keys that say nothing about what a forward pass computes."""

_ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """What the forward pass depends on, under Hugging Face's names where it has one.

    qkv_bias, o_bias: attention_bias, or what the family has without saying so.
    qk_norm: q and k are normed, each head by itself, before they are rotated.
    sliding_window: tokens that a token attends to, itself included, in some layer at least; None: all before it.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_window: int | None
    tie_word_embeddings: bool
    initializer_range: float
    rope_theta: float
    rope_scaling: RopeScaling | None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> LlamaConfig:
        """Reads a config.json, of transformers 4 (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`).

        An absent key is what transformers' config class of that model_type takes it for, and so is a null.

        Raises: ValueError, naming every key that is missing, unknown or has a value that is not implemented, with the
            value found and the one expected.
        """
        family = family_of(config)
        given = {key: value for key, value in config.items() if value is not None}
        defaults = _DEFAULTS | dict(family.defaults)
        problems = _unimplemented(given, {*defaults}, _FIXED | dict(family.fixed))
        problems += _wrong_types(given, defaults)
        nulls = {key: None for key in _NULL_IS_A_VALUE if key in config}
        values: dict[str, Any] = dict.fromkeys(_SIZES) | defaults | nulls | given
        rope_theta, rope_scaling = _read_rope(given, problems)
        problems += _complete_sizes(values, family) or _wrong_windows(values)
        if problems:
            raise ValueError(
                "config.json describes a model that is not implemented:\n  "
                + "\n  ".join(problems)
                + "\nChoose another checkpoint; remove a key only if the model does not need what it says."
            )
        attention_bias = values.get("attention_bias", False)
        qkv_bias, o_bias = family.biases or (attention_bias, attention_bias)
        return cls(
            **{key: values[key] for key in (*_SIZES, *_DEFAULTS)},
            **{key: values[key] for key in ("num_key_value_heads", "head_dim", "max_position_embeddings")},
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            mlp_bias=values.get("mlp_bias", False),
            qk_norm=family.qk_norm,
            sliding_window=_met_window(values),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
        )


def _unimplemented(given: Mapping[str, Any], read: set[str], fixed: Mapping[str, Any]) -> list[str]:
    known = {*_SIZES, *read, *_ROPE_KEYS, *fixed} | _IRRELEVANT
    unknown = [f"{key}: {given[key]!r}, but no such key is implemented" for key in given if key not in known]
    return unknown + [
        f"{key}: {given[key]!r}, implemented is {value!r}"
        for key, value in fixed.items()
        if key in given and given[key] != value
    ]


def _wrong_types(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """Flags and fractions that are none; `_complete_sizes` looks at the integers."""
    return [
        f"{key}: {given[key]!r}, {'true or false' if type(default) is bool else 'a finite number from 0 on'} is needed"
        for key, default in defaults.items()
        if key in given
        and (
            (type(default) is bool and type(given[key]) is not bool)
            or (type(default) is float and not (_is_finite(given[key]) and given[key] >= 0))
        )
    ]


def _is_finite(value: Any) -> bool:
    """Python's JSON knows NaN and Infinity."""
    return type(value) in (int, float) and math.isfinite(value)


def _complete_sizes(values: dict[str, Any], family: Family) -> list[str]:
    """Sizes that no Llama can have. Completes those that follow from others, where the others are right."""
    if values["num_key_value_heads"] is None:
        values["num_key_value_heads"] = values["num_attention_heads"]
    problems = [
        f"{key}: {values[key]!r}, a positive integer is needed"
        for key in (*_SIZES, "num_key_value_heads", "max_position_embeddings")
        if type(values[key]) is not int or values[key] <= 0
    ]
    if problems:
        return problems
    limits = {
        key: _LARGEST.get(key, _LARGEST_SIZE) for key in (*_SIZES, "num_key_value_heads", "max_position_embeddings")
    }
    problems += [
        f"{key}: {values[key]}, at most {limit} is read" for key, limit in limits.items() if values[key] > limit
    ]
    num_heads, num_kv_heads = values["num_attention_heads"], values["num_key_value_heads"]
    if values["head_dim"] is None and family.defaults["head_dim"] is None:
        values["head_dim"] = values["hidden_size"] // num_heads
    if num_heads % num_kv_heads:
        problems.append(f"num_key_value_heads: {num_kv_heads} does not divide num_attention_heads: {num_heads}")
    head_dim = values["head_dim"]
    if type(head_dim) is not int or not 0 < head_dim <= _LARGEST_SIZE or head_dim % 2:
        problems.append(f"head_dim: {head_dim!r}, a positive even number is needed, as halves are rotated")
    return problems


_LAYER_TYPES = ("full_attention", "sliding_attention")


def _wrong_windows(values: Mapping[str, Any]) -> list[str]:
    layer_types, num_layers = values.get("layer_types"), values["num_hidden_layers"]
    window = values.get("sliding_window")
    problems = []
    if window is not None and (type(window) is not int or window <= 0):
        problems.append(f"sliding_window: {window!r}, a positive integer is needed")
    if layer_types is None:
        return problems
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        problems.append(f"layer_types: {layer_types!r}, one for each of num_hidden_layers: {num_layers} is needed")
    elif other := [name for name in layer_types if name not in _LAYER_TYPES]:
        problems.append(f"layer_types: {other[0]!r}, implemented are {', '.join(_LAYER_TYPES)}")
    elif "sliding_attention" in layer_types and _window(values) is None:
        use = values["use_sliding_window"]
        problems.append(f"layer_types: 'sliding_attention', but sliding_window: {window}, use_sliding_window: {use}")
    return problems


def _window(values: Mapping[str, Any]) -> int | None:
    return values.get("sliding_window") if values.get("use_sliding_window", True) else None


def _met_window(values: Mapping[str, Any]) -> int | None:
    """The window, if some layer attends through it. Mistral's layers all do; Qwen says which."""
    if values.get("layer_types") is not None:
        meets_it = "sliding_attention" in values["layer_types"]
    else:
        meets_it = values.get("max_window_layers", 0) < values["num_hidden_layers"]
    return _window(values) if meets_it else None


def _says_the_same(scaling: Any, parameters: Mapping[str, Any]) -> bool:
    """Whether the spelling of transformers 4, which has rope_theta apart, is that of 5."""
    if not isinstance(scaling, Mapping):
        return False
    old, new = ({"rope_type": each.get("type", "default"), **each} for each in (scaling, parameters))
    return all(old.get(key) == new.get(key) for key in ("rope_type", *_ROPE_NUMBERS))


_ROPE_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def _read_rope(given: Mapping[str, Any], problems: list[str]) -> tuple[float, RopeScaling | None]:
    """rope_theta and the scaling, out of either form; what is wrong is appended to `problems`."""
    name = "rope_parameters" if "rope_parameters" in given else "rope_scaling"
    rope = dict(given.get(name, {}))
    if name == "rope_parameters" and "rope_scaling" in given and not _says_the_same(given["rope_scaling"], rope):
        problems.append(f"rope_scaling: {given['rope_scaling']!r} contradicts rope_parameters: {given[name]!r}")
    rope_theta = rope.pop("rope_theta", given.get("rope_theta", 10000.0))
    numbers = {"rope_theta": rope_theta, **{key: rope[key] for key in _ROPE_NUMBERS if rope.get(key) is not None}}
    problems += [
        f"{key}: {value!r}, a finite number above 0 is needed"
        for key, value in numbers.items()
        if not _is_finite(value) or value <= 0
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
