"""A table of the supported model families: how each differs from Llama, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sftron.models.delta import DeltaSizes
from sftron.models.rope_config import FULL, RopeKeys

LINEAR = "linear_attention"
"""The value of `layer_types` for layers with a state in place of attention."""

Values = Mapping[str, Any]
"""The keys of a config.json that its family reads, with the defaults of absent ones."""
Pattern = Callable[[Values], list[bool]]
"""Returns one value per layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The ways in which one model_type differs from the others: its keys of config.json, its blocks and its names.

    In `model` and `layer`, a value that is a function is called with the `Values` of the config.json.
    """

    architecture: str
    """The model's class in transformers; loaders select their own class by this name."""
    defaults: Mapping[str, Any]
    """The keys that this family reads in addition to the common ones, each with its default."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """The keys that this family does not read; if one is present, its value must be this one."""
    irrelevant: frozenset[str] = frozenset()
    """Further keys that this family does not read, and which may have any value."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """The fields of LlamaConfig that differ from `MODEL`."""
    layer: Mapping[str, Any] = field(default_factory=dict)
    """The fields of every Layer that differ from their defaults, except for its window and its rope."""
    slides: Pattern | None = None
    """Whether each layer has the window, if `layer_types` is absent; None means that all do, if there is a window."""
    rope: RopeKeys = field(default_factory=RopeKeys)
    """The keys of the rotary embeddings."""
    rotates: Pattern | None = None
    """Whether the heads of each layer are rotated; None means that all are."""
    types: Callable[[Values], list[str]] | None = None
    """Returns the `layer_types` of a config.json without them."""
    layer_of: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Further values of `layer_types`, each with the fields of its Layers that differ from `layer`."""
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """For parts of native names, the parts of Hugging Face's names that replace them; see fusion.py."""


def _key(name: str, *, or_else: Any = None) -> Callable[[Values], Any]:
    """Returns a function that returns the value of a key, or `or_else` if the family does not read the key."""
    return lambda values: values.get(name, or_else)


MODEL: dict[str, Any] = {
    "norm": "rms",
    "norm_eps": _key("rms_norm_eps"),
    "activation": _key("hidden_act"),
    "qkv_bias": _key("attention_bias", or_else=False),
    "o_bias": _key("attention_bias", or_else=False),
    "mlp_bias": _key("mlp_bias", or_else=False),
    "head_bias": False,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logit_scale": 1.0,
    "logit_softcap": None,
    "clip_qkv": None,
    "output_gate": False,
    "delta": None,
}
"""The fields of LlamaConfig that a family may change, as in Llama."""

_COMMON: dict[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
}
_BIASES = {"attention_bias": False, "mlp_bias": False}
_QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None}


def _beyond_max_window_layers(values: Values) -> list[bool]:
    has_window = values["use_sliding_window"] and values["sliding_window"] is not None
    return [has_window and number >= values["max_window_layers"] for number in range(values["num_hidden_layers"])]


def _rotates(values: Values) -> list[bool]:
    """SmolLM 3's layers: `no_rope_layers` is 1 where heads are rotated."""
    if values["no_rope_layers"] is not None:
        return [bool(each) for each in values["no_rope_layers"]]
    return _not_every(values["no_rope_layer_interval"])(values)


def _unless_rotated(values: Values) -> list[bool]:
    has_window = values["use_sliding_window"] and values["sliding_window"] is not None
    return [has_window and not rotates for rotates in _rotates(values)]


def _not_every(number: int) -> Pattern:
    """Returns the pattern that is False for every layer of that number, counted from 1."""
    return lambda values: [bool((index + 1) % number) for index in range(values["num_hidden_layers"])]


def _without(*keys: str) -> dict[str, Any]:
    return {key: value for key, value in _COMMON.items() if key not in keys}


_GEMMA: dict[str, Any] = {"norm": "rms_offset", "embedding_multiplier": lambda values: values["hidden_size"] ** 0.5}

_DELTA = {
    "num_key_heads": "linear_num_key_heads",
    "num_value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "num_taps": "linear_conv_kernel_dim",
}


def _every_fourth_is_full(values: Values) -> list[str]:
    interval = values["full_attention_interval"]
    return [LINEAR if number % interval else FULL for number in range(1, values["num_hidden_layers"] + 1)]


FAMILIES: dict[str, Family] = {
    "llama": Family(architecture="LlamaForCausalLM", defaults=_COMMON | _BIASES),
    "mistral": Family(
        architecture="MistralForCausalLM",
        defaults=_COMMON | {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
        fixed=_BIASES,
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        defaults=_COMMON | {"max_position_embeddings": 32768, "num_key_value_heads": 32} | _QWEN_WINDOW,
        fixed={"attention_bias": True, "mlp_bias": False, "use_mrope": False},
        model={"qkv_bias": True, "o_bias": False},
        slides=_beyond_max_window_layers,
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        defaults=_COMMON
        | {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128, "attention_bias": False}
        | _QWEN_WINDOW,
        fixed={"mlp_bias": False},
        layer={"attention": "normed_rotary"},
        slides=_beyond_max_window_layers,
    ),
    "smollm3": Family(
        architecture="SmolLM3ForCausalLM",
        defaults=_COMMON
        | _BIASES
        | {"max_position_embeddings": 32768, "num_key_value_heads": 4, "tie_word_embeddings": True}
        | {"use_sliding_window": False, "sliding_window": None, "layer_types": None}
        | {"no_rope_layers": None, "no_rope_layer_interval": 4},
        irrelevant=frozenset({"max_window_layers"}),
        slides=_unless_rotated,
        rope=RopeKeys(theta=2e6),
        rotates=_rotates,
    ),
    "qwen3_5_text": Family(
        architecture="Qwen3_5ForCausalLM",
        defaults=_COMMON
        | {"max_position_embeddings": 32768, "num_key_value_heads": 4, "head_dim": 256, "attention_bias": False}
        | {"layer_types": None, "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32}
        | {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4},
        # The recurrence is in fp32 whatever its key states; transformers does not compute the heads of mtp.
        irrelevant=frozenset({"mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"}),
        fixed={"mlp_bias": False, "attn_output_gate": True, "mlp_only_layers": []},
        model={"norm": "rms_offset", "output_gate": True}
        | {"delta": lambda values: DeltaSizes(**{size: values[key] for size, key in _DELTA.items()})},
        layer={"attention": "gated_rotary"},
        types=_every_fourth_is_full,
        layer_of={LINEAR: {"block": "delta", "attention": "delta"}},
        # The sections of a head are for positions in images; all of them are equal in text.
        rope=RopeKeys(partial=0.25, irrelevant=frozenset({"mrope_section", "mrope_interleaved"})),
        names={"linear_attn.in_proj": tuple(f"linear_attn.in_proj_{part}" for part in ("qkv", "z", "b", "a"))},
    ),
    "olmo": Family(
        architecture="OlmoForCausalLM",
        defaults=_without("rms_norm_eps") | {"attention_bias": False, "clip_qkv": None},
        fixed={"mlp_bias": False},
        model={"norm": "layer_fixed", "norm_eps": 1e-5, "clip_qkv": _key("clip_qkv")},
        layer={"attention": "clipped_rotary"},
    ),
    "olmo2": Family(
        architecture="Olmo2ForCausalLM",
        defaults=_COMMON | {"rms_norm_eps": 1e-5, "attention_bias": False},
        fixed={"mlp_bias": False},
        layer={"block": "norm_after", "attention": "wide_normed_rotary"},
    ),
    "phi3": Family(
        architecture="Phi3ForCausalLM",
        defaults=_COMMON | {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "sliding_window": None},
        fixed=_BIASES,
        irrelevant=frozenset({"original_max_position_embeddings"}),
        names={"self_attn.qkv_proj": ("self_attn.qkv_proj",), "mlp.gate_up_proj": ("mlp.gate_up_proj",)},
    ),
    "starcoder2": Family(
        architecture="Starcoder2ForCausalLM",
        defaults=_without("rms_norm_eps")
        | {"num_key_value_heads": 2, "max_position_embeddings": 4096, "hidden_act": "gelu_pytorch_tanh"}
        | {"norm_epsilon": 1e-5, "use_bias": True, "sliding_window": None, "tie_word_embeddings": True}
        | {"initializer_range": 0.018042},
        irrelevant=frozenset({"mlp_type", "norm_type", "layer_norm_epsilon"}),
        model={"norm": "layer", "norm_eps": _key("norm_epsilon")}
        | dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), _key("use_bias")),
        layer={"mlp": "plain"},
        names={"mlp.up_proj": ("mlp.c_fc",), "mlp.down_proj": ("mlp.c_proj",)},
    ),
    "gemma": Family(
        architecture="GemmaForCausalLM",
        defaults=_COMMON
        | {"max_position_embeddings": 8192, "num_key_value_heads": 16, "head_dim": 256, "attention_bias": False}
        | {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
        fixed={"mlp_bias": False, "use_bidirectional_attention": False},
        irrelevant=frozenset({"hidden_activation"}),
        # transformers, too, reads the "gelu" of the first published configurations as its approximation.
        model=_GEMMA | {"activation": lambda v: "gelu_pytorch_tanh" if v["hidden_act"] == "gelu" else v["hidden_act"]},
    ),
}
"""The supported values of model_type. The defaults are those of the config class in transformers."""

_OTHERS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    # First, because of granitemoe and phimoe.
    ("", "it is a mixture of experts", ("num_local_experts", "num_experts", "n_routed_experts", "num_experts_per_tok")),
    (
        "granite",
        "it multiplies embeddings, residuals, attention scores and logits",
        ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"),
    ),
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
