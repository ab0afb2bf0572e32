"""The model architecture described by a checkpoint's config.json, and a table of the supported model families."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import Any

from sftron.kernels.table import RopeSpec
from sftron.models.rope_config import FULL, ROPE_KEYS, SLIDING, RopeKeys, is_finite, read_ropes
from sftron.models.wrappers import text_config


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The structure of one transformer block. Three fields are keys of the class tables in llama.py."""

    block: str = "norm_before"
    """The key of BLOCKS; it determines the position of the norms."""
    attention: str = "rotary"
    """The key of ATTENTIONS; it determines whether heads are normalized before they are rotated."""
    mlp: str = "gated"
    """The key of MLPS."""
    window: int | None = None
    """The number of tokens that a token attends to, itself included; None means all tokens up to it."""
    rope: int | None = 0
    """The index in `LlamaConfig.ropes`; None means that heads are not rotated (NoPE)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The ways in which one model_type differs from the others: its keys of config.json and its blocks."""

    architecture: str
    """The model's class in transformers; loaders select their own class by this name."""
    defaults: Mapping[str, Any]
    """The keys that this family reads in addition to the common ones, each with its default."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """The keys that this family does not read; if one is present, its value must be this one."""
    biases: tuple[bool, bool] | None = None
    """Whether q, k and v have biases, and whether o has one; None means that `attention_bias` determines both."""
    layer: Layer = Layer()
    """The structure of every block, except for its window and its rope."""
    rope: RopeKeys = field(default_factory=RopeKeys)
    """The keys of the rotary embeddings."""


_QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None}

FAMILIES: dict[str, Family] = {
    "llama": Family(
        architecture="LlamaForCausalLM",
        defaults={"max_position_embeddings": 2048, "num_key_value_heads": None, "head_dim": None}
        | {"attention_bias": False, "mlp_bias": False},
    ),
    "mistral": Family(
        architecture="MistralForCausalLM",
        defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": None}
        | {"sliding_window": 4096},
        fixed={"attention_bias": False, "mlp_bias": False},
        biases=(False, False),
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        defaults={"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": None} | _QWEN_WINDOW,
        fixed={"attention_bias": True, "mlp_bias": False, "use_mrope": False},
        biases=(True, False),
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        defaults={"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128}
        | {"attention_bias": False, **_QWEN_WINDOW},
        fixed={"mlp_bias": False},
        layer=Layer(attention="normed_rotary"),
    ),
}
"""The supported values of model_type. The defaults are those of the config class in transformers."""

_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_LARGEST = {"num_hidden_layers": 2**12, "max_position_embeddings": 2**24}
_LARGEST_SIZE = 2**27
"""The bound of all other sizes: above any model's, but low enough to compute the memory before it is allocated."""

_DEFAULTS: dict[str, Any] = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "initializer_range": 0.02}
"""The defaults of the keys that every family reads."""

_NULL_IS_A_VALUE = ("num_key_value_heads", "head_dim", "sliding_window")
"""Keys for which null has a meaning of its own: as many as query heads, hidden_size / heads, and no window."""

_FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "rope_interleaved": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "is_decoder": False,
    "chunk_size_feed_forward": 0,
    "pruned_heads": {},
}
"""Keys for which only one value is implemented."""

_IRRELEVANT = frozenset(
    {
        *("model_type", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"),
        *("max_sequence_length", "_name_or_path", "_model_name_or_path", "is_llama_config", "tokenizer_class"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "decoder_start_token_id"),
        *("output_attentions", "output_hidden_states", "return_dict", "id2label", "label2id", "problem_type"),
        *("transformers.js_config", "_commit_hash", "_flash_attn_2_enabled", "_attn_implementation_autoset"),
        *("torchscript", "unsloth_fixed", "unsloth_version", "use_bfloat16"),
        # Splits matrix products and adds the partial results, which only changes the order of summation.
        "pretraining_tp",
        # A training option. This project trains without dropout, and the trainer reports the key.
        "attention_dropout",
    }
)
"""Keys that do not affect the forward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """The parameters of the forward pass, under Hugging Face's names where those exist."""

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
    """Both biases follow `attention_bias`, or are fixed by the family."""
    mlp_bias: bool
    tie_word_embeddings: bool
    initializer_range: float
    ropes: tuple[RopeSpec, ...]
    """The distinct rotary embeddings of the layers."""
    layers: tuple[Layer, ...]
    """One entry per block."""

    @property
    def sliding_window(self) -> int | None:
        """The smallest window of any layer; None if every layer attends to all previous tokens."""
        return min((layer.window for layer in self.layers if layer.window is not None), default=None)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> LlamaConfig:
        """Reads a config.json written by transformers 4 (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`).

        An absent or null key has the same default as in transformers' config class for that model_type.

        Raises:
            ValueError: At least one key is missing, unknown, or has an unsupported value. The message lists all of
                them, with the value found and the value expected.
        """
        config, others = text_config(config)
        family = family_of(config)
        given = {key: value for key, value in config.items() if value is not None}
        defaults = _DEFAULTS | dict(family.defaults)
        nulls = {key: None for key in _NULL_IS_A_VALUE if key in config}
        values: dict[str, Any] = dict.fromkeys(_SIZES) | defaults | nulls | given
        problems = _unimplemented(given, {*_SIZES, *ROPE_KEYS, *defaults}, _FIXED | dict(family.fixed))
        problems += _unimplemented(others, set(), {})
        problems += _wrong_types(values, defaults)
        wrong_sizes = _complete_sizes(values, family) or _wrong_windows(values)
        windows = [] if wrong_sizes else _windows(values)
        ropes, rope_of_layer, wrong_ropes = read_ropes(
            given,
            family.rope,
            head_dim=values["head_dim"],
            max_positions=values["max_position_embeddings"],
            layer_types=[FULL if window is None else SLIDING for window in windows],
        )
        problems += wrong_ropes + wrong_sizes
        if problems:
            raise ValueError(
                "config.json describes a model that is not implemented:\n  "
                + "\n  ".join(problems)
                + "\nChoose another checkpoint; remove a key only if the model does not need it."
            )
        attention_bias = values.get("attention_bias", False)
        qkv_bias, o_bias = family.biases or (attention_bias, attention_bias)
        return cls(
            **{key: values[key] for key in (*_SIZES, *_DEFAULTS)},
            **{key: values[key] for key in ("num_key_value_heads", "head_dim", "max_position_embeddings")},
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            mlp_bias=values.get("mlp_bias", False),
            ropes=ropes,
            layers=tuple(
                replace(family.layer, window=window, rope=rope)
                for window, rope in zip(windows, rope_of_layer, strict=True)
            ),
        )


_FACT = "the model's "


def architecture_facts(config: LlamaConfig) -> dict[str, str]:
    """Returns the entries of a checkpoint's fingerprint for the architecture, which must match to load the weights."""
    layers = ", ".join(f"{len(list(run))} x {layer}" for layer, run in groupby(config.layers))
    facts = asdict(config) | {"layers": layers, "ropes": ", ".join(str(rope) for rope in config.ropes)}
    return {f"{_FACT}{name}": str(value) for name, value in facts.items()}


def is_of_the_model(name: str) -> bool:
    """Returns whether an entry of a fingerprint comes from `architecture_facts`."""
    return name.startswith(_FACT)


_OTHERS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    # First, because of granitemoe and phimoe.
    ("", "it is a mixture of experts", ("num_local_experts", "num_experts", "n_routed_experts", "num_experts_per_tok")),
    (
        "granite",
        "it multiplies embeddings, residuals, attention scores and logits",
        ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"),
    ),
    ("smollm3", "some of its layers have no rotary embedding", ("no_rope_layers", "no_rope_layer_interval")),
    ("gemma", "its norms multiply by 1 + weight, its embeddings are scaled", ("hidden_activation", "hidden_act")),
    ("phi", "it rotates a part of each head, or scales positions by longrope", ("partial_rotary_factor",)),
)
"""For prefixes of unsupported model types: the reason, and the keys to report. Keys of experts decide for any type."""


def family_of(config: Mapping[str, Any]) -> Family:
    """Returns the family of a config.json.

    Raises:
        ValueError: The model_type is not implemented; the message has the reason for well-known ones.
    """
    model_type = config.get("model_type")
    if family := FAMILIES.get(str(model_type)):
        return family
    reason = ""
    for prefix, why, keys in _OTHERS:
        stated = ", ".join(f"{key}: {config[key]!r}" for key in keys if config.get(key))
        if str(model_type).startswith(prefix) and (prefix or stated):
            reason = f" It is not supported because {why}{f' ({stated})' if stated else ''}."
            break
    raise ValueError(
        f"config.json: model_type is {model_type!r}, implemented are {', '.join(FAMILIES)}.{reason} "
        "Choose a checkpoint of one of these architectures."
    )


def _unimplemented(given: Mapping[str, Any], read: set[str], fixed: Mapping[str, Any]) -> list[str]:
    known = read | fixed.keys() | _IRRELEVANT
    return [f"{key}: {value!r}, but no such key is implemented" for key, value in given.items() if key not in known] + [
        f"{key}: {given[key]!r}, implemented is {value!r}"
        for key, value in fixed.items()
        if key in given and given[key] != value
    ]


def _wrong_types(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """Returns a problem for each boolean or float key of another type; `_complete_sizes` checks the integers."""
    problems = []
    for key, default in defaults.items():
        if type(default) is bool and type(values[key]) is not bool:
            problems.append(f"{key}: {values[key]!r} is neither true nor false")
        if type(default) is float and not (is_finite(values[key]) and values[key] >= 0):
            problems.append(f"{key}: {values[key]!r} is not a finite number of at least 0")
    return problems


def _complete_sizes(values: dict[str, Any], family: Family) -> list[str]:
    """Returns the problems of the sizes. Adds sizes that follow from others to `values`, if those others are valid."""
    if values["num_key_value_heads"] is None:
        values["num_key_value_heads"] = values["num_attention_heads"]
    largest = dict.fromkeys((*_SIZES, "num_key_value_heads", "max_position_embeddings"), _LARGEST_SIZE) | _LARGEST
    problems = [
        f"{key}: {values[key]!r} is not a whole number from 1 to {bound}"
        for key, bound in largest.items()
        if type(values[key]) is not int or not 0 < values[key] <= bound
    ]
    if problems:
        return problems
    num_heads, num_kv_heads = values["num_attention_heads"], values["num_key_value_heads"]
    if values["head_dim"] is None and family.defaults["head_dim"] is None:
        values["head_dim"] = values["hidden_size"] // num_heads
    head_dim = values["head_dim"]
    if num_heads % num_kv_heads:
        problems.append(f"num_key_value_heads: {num_kv_heads} does not divide num_attention_heads: {num_heads}")
    if type(head_dim) is not int or not 0 < head_dim <= _LARGEST_SIZE or head_dim % 2:
        problems.append(f"head_dim: {head_dim!r} is not a positive even number; halves of a head are rotated")
    return problems


def _wrong_windows(values: Mapping[str, Any]) -> list[str]:
    layer_types, num_layers = values.get("layer_types"), values["num_hidden_layers"]
    window = values.get("sliding_window")
    problems = []
    if window is not None and (type(window) is not int or window <= 0):
        problems.append(f"sliding_window: {window!r} is not a positive whole number")
    if type(first := values.get("max_window_layers", 0)) is not int:
        return [*problems, f"max_window_layers: {first!r} is not a whole number"]
    if layer_types is None:
        return problems
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        problems.append(f"layer_types: {layer_types!r} has not one entry for each of num_hidden_layers: {num_layers}")
    elif other := [name for name in layer_types if name not in (FULL, SLIDING)]:
        problems.append(f"layer_types: {other[0]!r}, implemented are {FULL}, {SLIDING}")
    elif "sliding_attention" in layer_types and not any(_windows(values)):
        use = values["use_sliding_window"]
        problems.append(f"layer_types: 'sliding_attention', but sliding_window: {window}, use_sliding_window: {use}")
    return problems


def _windows(values: Mapping[str, Any]) -> list[int | None]:
    """Returns the window of each layer. In Mistral all layers have the same one; Qwen's config selects the layers."""
    window = values.get("sliding_window") if values.get("use_sliding_window", True) else None
    if values.get("layer_types") is not None:
        slides = [name == "sliding_attention" for name in values["layer_types"]]
    else:
        slides = [number >= values.get("max_window_layers", 0) for number in range(values["num_hidden_layers"])]
    return [window if each else None for each in slides]
