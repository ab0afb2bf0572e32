"""A table of the supported model families: how each differs from Llama, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sftron.models.delta import DeltaSizes
from sftron.models.mixtures import MIXTURE_KEYS, QWEN_MIXTURE_KEYS
from sftron.models.mxfp4 import MXFP4
from sftron.models.rope_config import FULL, SLIDING, RopeKeys

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
    quant_method: str | None = None
    """The quantization_config.quant_method of checkpoints whose weights can be read, besides those without one."""
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


def _every_other_up_to_max_window_layers(values: Values) -> list[bool]:
    last = values["max_window_layers"] if values["use_sliding_window"] else 0
    return [number < last and number % 2 == 0 for number in range(values["num_hidden_layers"])]


def _without(*keys: str) -> dict[str, Any]:
    return {key: value for key, value in _COMMON.items() if key not in keys}


def _rotates_what_slides(values: Values) -> list[bool]:
    if values["layer_types"] is not None:
        return [each == SLIDING for each in values["layer_types"]]
    return _not_every(values["sliding_window_pattern"])(values)


_MINISTRAL_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
_LAYER_NORM = {"norm": "layer", "norm_eps": _key("layer_norm_eps")}
_CAUSAL = {"mlp_bias": False, "use_bidirectional_attention": False}
_GEMMA: dict[str, Any] = {"norm": "rms_offset", "embedding_multiplier": lambda values: values["hidden_size"] ** 0.5}
_GEMMA_2 = _without("hidden_act") | {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
}
_GEMMA_LAYER = {"block": "norm_around", "scale": lambda values: values["query_pre_attn_scalar"] ** -0.5}
_GEMMA_IRRELEVANT = frozenset({"hidden_act", "cache_implementation", "sliding_window_size"})
_GLM = _COMMON | {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 0.00000015625,
    "attention_bias": True,
}
_COHERE = _without("rms_norm_eps", "head_dim") | {
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}
_COHERE_MODEL = _LAYER_NORM | {"norm": "layer_without_bias", "logit_scale": _key("logit_scale")}

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
    "ministral3": Family(
        architecture="Ministral3ForCausalLM",
        defaults=_COMMON
        | {"max_position_embeddings": 262144, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5}
        | {"sliding_window": None},
        fixed=_BIASES,
        rope=RopeKeys(parameters=_MINISTRAL_ROPE, scales_queries=True, ignored=("max_position_embeddings",)),
        layer={"attention": "position_scaled"},
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
        rope=RopeKeys(partial=0.25, ignored=("mrope_section", "mrope_interleaved")),
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
    "olmo3": Family(
        architecture="Olmo3ForCausalLM",
        defaults=_COMMON | {"rms_norm_eps": 1e-5, "attention_bias": False, "sliding_window": 4096, "layer_types": None},
        fixed={"mlp_bias": False},
        layer={"block": "norm_after", "attention": "wide_normed_rotary"},
        slides=_not_every(4),
        rope=RopeKeys(theta=5e5, sliding_theta=5e5),
    ),
    "granite": Family(
        architecture="GraniteForCausalLM",
        defaults=_COMMON
        | _BIASES
        | dict.fromkeys(("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"), 1.0),
        model={
            "embedding_multiplier": _key("embedding_multiplier"),
            "residual_multiplier": _key("residual_multiplier"),
            "logit_scale": lambda values: 1 / values["logits_scaling"],
        },
        layer={"scale": _key("attention_multiplier")},
    ),
    "phi": Family(
        architecture="PhiForCausalLM",
        defaults=_without("rms_norm_eps") | {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "qk_layernorm": False},
        fixed={"tie_word_embeddings": False},
        model=_LAYER_NORM | dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias", "head_bias"), True),
        layer={"block": "parallel", "mlp": "plain"}
        | {"attention": lambda values: "normed_rotary" if values["qk_layernorm"] else "rotary"},
        rope=RopeKeys(partial=0.5),
        names={
            "self_attn.o_proj": ("self_attn.dense",),
            "self_attn.q_norm": ("self_attn.q_layernorm",),
            "self_attn.k_norm": ("self_attn.k_layernorm",),
            "mlp.up_proj": ("mlp.fc1",),
            "mlp.down_proj": ("mlp.fc2",),
            "model.norm": ("model.final_layernorm",),
        },
    ),
    "phi3": Family(
        architecture="Phi3ForCausalLM",
        defaults=_COMMON | {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "sliding_window": None},
        fixed=_BIASES | {"lm_head_bias": False, "full_attn_mod": 1, "interpolate_factor": 1},
        # The code in the folders of the published models is what became transformers' class.
        irrelevant=frozenset({"auto_map"}),
        rope=RopeKeys(partial=1.0, original=4096),
        names={"self_attn.qkv_proj": ("self_attn.qkv_proj",), "mlp.gate_up_proj": ("mlp.gate_up_proj",)},
    ),
    "starcoder2": Family(
        architecture="Starcoder2ForCausalLM",
        defaults=_without("rms_norm_eps")
        | {"num_key_value_heads": 2, "max_position_embeddings": 4096, "hidden_act": "gelu_pytorch_tanh"}
        | {"norm_epsilon": 1e-5, "use_bias": True, "sliding_window": None, "tie_word_embeddings": True}
        | {"initializer_range": 0.018042},
        fixed={"mlp_type": "default", "norm_type": "layer_norm"},
        irrelevant=frozenset({"activation_function", "layer_norm_epsilon"}),
        model={"norm": "layer", "norm_eps": _key("norm_epsilon")}
        | dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), _key("use_bias")),
        layer={"mlp": "plain"},
        names={"mlp.up_proj": ("mlp.c_fc",), "mlp.down_proj": ("mlp.c_proj",)},
    ),
    "stablelm": Family(
        architecture="StableLmForCausalLM",
        defaults=_without("rms_norm_eps", "head_dim")
        | {"num_key_value_heads": 32, "max_position_embeddings": 4096, "layer_norm_eps": 1e-5}
        | {"use_qkv_bias": False, "qk_layernorm": False, "use_parallel_residual": False},
        model=_LAYER_NORM | {"qkv_bias": _key("use_qkv_bias")},
        layer={
            "block": lambda values: "parallel" if values["use_parallel_residual"] else "norm_before",
            "attention": lambda values: "each_normed_rotary_flat" if values["qk_layernorm"] else "rotary",
        },
        rope=RopeKeys(partial=0.25),
        names={
            "self_attn.q_norm": ("self_attn.q_layernorm.norms.{head}",),
            "self_attn.k_norm": ("self_attn.k_layernorm.norms.{head}",),
        },
    ),
    "gemma": Family(
        architecture="GemmaForCausalLM",
        defaults=_COMMON
        | {"max_position_embeddings": 8192, "num_key_value_heads": 16, "head_dim": 256, "attention_bias": False}
        | {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
        fixed=_CAUSAL,
        irrelevant=frozenset({"hidden_activation"}),
        # transformers, too, reads the "gelu" of the first published configurations as its approximation.
        model=_GEMMA | {"activation": lambda v: "gelu_pytorch_tanh" if v["hidden_act"] == "gelu" else v["hidden_act"]},
    ),
    "gemma2": Family(
        architecture="Gemma2ForCausalLM",
        defaults=_GEMMA_2
        | {"max_position_embeddings": 8192}
        | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
        fixed=_CAUSAL,
        irrelevant=_GEMMA_IRRELEVANT,
        model=_GEMMA | {"activation": _key("hidden_activation"), "logit_softcap": _key("final_logit_softcapping")},
        layer=_GEMMA_LAYER | {"softcap": _key("attn_logit_softcapping")},
        slides=_not_every(2),
    ),
    "gemma3_text": Family(
        architecture="Gemma3ForCausalLM",
        defaults=_GEMMA_2
        | {"max_position_embeddings": 131072}
        | {"final_logit_softcapping": None, "sliding_window_pattern": 6},
        fixed=_CAUSAL | {"attn_logit_softcapping": None},
        irrelevant=_GEMMA_IRRELEVANT | {"_sliding_window_pattern"},
        model=_GEMMA | {"activation": _key("hidden_activation"), "logit_softcap": _key("final_logit_softcapping")},
        layer=_GEMMA_LAYER | {"attention": "normed_rotary"},
        slides=lambda values: _not_every(values["sliding_window_pattern"])(values),
        rope=RopeKeys(theta=1e6, sliding_theta=1e4, sliding_key="rope_local_base_freq"),
    ),
    "glm": Family(
        architecture="GlmForCausalLM",
        defaults=_GLM,
        model={"o_bias": False},
        rope=RopeKeys(partial=0.5, interleaved=True),
        names={"mlp.gate_up_proj": ("mlp.gate_up_proj",)},
    ),
    "glm4": Family(
        architecture="Glm4ForCausalLM",
        defaults=_GLM,
        model={"o_bias": False},
        layer={"block": "norm_around"},
        rope=RopeKeys(partial=0.5, interleaved=True),
        names={
            "mlp.gate_up_proj": ("mlp.gate_up_proj",),
            "post_attention_layernorm": ("post_self_attn_layernorm",),
            "pre_feedforward_layernorm": ("post_attention_layernorm",),
            "post_feedforward_layernorm": ("post_mlp_layernorm",),
        },
    ),
    "cohere": Family(
        architecture="CohereForCausalLM",
        defaults=_COHERE | {"head_dim": None, "use_qk_norm": False},
        irrelevant=frozenset({"model_max_length"}),
        model=_COHERE_MODEL,
        layer={"block": "parallel"}
        | {"attention": lambda values: "each_normed_rotary" if values["use_qk_norm"] else "rotary"},
        rope=RopeKeys(theta=5e5, interleaved=True),
    ),
    "cohere2": Family(
        architecture="Cohere2ForCausalLM",
        defaults=_COHERE | {"sliding_window": 4096, "layer_types": None, "sliding_window_pattern": 4},
        fixed={"rotary_pct": 1.0, "use_gated_activation": True, "use_parallel_block": True, "layer_switch": 4}
        | {"position_embedding_type": "rope_gptj", "order_of_interleaved_layers": "local_attn_first"},
        irrelevant=frozenset({"cache_implementation", "use_embedding_sharing", "use_parallel_embedding"}),
        model=_COHERE_MODEL,
        layer={"block": "parallel"},
        slides=lambda values: _not_every(values["sliding_window_pattern"])(values),
        rope=RopeKeys(interleaved=True),
        rotates=_rotates_what_slides,
    ),
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        defaults=_COMMON
        | {"max_position_embeddings": 131072, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "sliding_window": None}
        | MIXTURE_KEYS
        | {"num_local_experts": 8, "num_experts_per_tok": 2},
        fixed=_BIASES | {"router_jitter_noise": 0.0},
        rope=RopeKeys(theta=1000000.0),
        layer={"mlp": "experts"},
    ),
    "qwen2_moe": Family(
        architecture="Qwen2MoeForCausalLM",
        defaults=_COMMON
        | {"max_position_embeddings": 32768, "num_key_value_heads": 16, "qkv_bias": True}
        | _QWEN_WINDOW
        | QWEN_MIXTURE_KEYS
        | {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "intermediate_size": 5632}
        | {"shared_expert_intermediate_size": 5632},
        fixed={"mlp_bias": False},
        model={"qkv_bias": _key("qkv_bias"), "o_bias": False},
        layer={"mlp": "shared_experts"},
        slides=_every_other_up_to_max_window_layers,
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        defaults=_COMMON
        | {"max_position_embeddings": 32768, "num_key_value_heads": 4, "attention_bias": False}
        | {"use_sliding_window": False, "sliding_window": 4096}
        | QWEN_MIXTURE_KEYS
        | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        fixed={"mlp_bias": False},
        irrelevant=frozenset({"max_window_layers"}),
        layer={"attention": "normed_rotary", "mlp": "experts"},
        slides=lambda values: [values["use_sliding_window"]] * values["num_hidden_layers"],
    ),
    "olmoe": Family(
        architecture="OlmoeForCausalLM",
        defaults=_COMMON
        | {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "attention_bias": False}
        | MIXTURE_KEYS
        | {"num_experts": 64, "num_experts_per_tok": 8, "router_aux_loss_coef": 0.01, "norm_topk_prob": False},
        fixed={"mlp_bias": False, "clip_qkv": None},
        layer={"attention": "wide_normed_rotary", "mlp": "experts"},
    ),
    "gpt_oss": Family(
        architecture="GptOssForCausalLM",
        defaults=_without("hidden_act")
        | {"max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5}
        | {"attention_bias": True, "sliding_window": 128, "layer_types": None}
        | MIXTURE_KEYS
        | {"num_local_experts": 128, "num_experts_per_tok": 4, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        fixed={"hidden_act": "silu"},
        # Older names of num_experts_per_tok and of an entry of rope_scaling.
        irrelevant=frozenset({"experts_per_token", "initial_context_length"}),
        model={"activation": "silu"},
        layer={"mlp": "biased_experts", "sinks": True},
        slides=_not_every(2),
        rope=RopeKeys(theta=150000.0, parameters=_GPT_OSS_ROPE),
        names={"mlp.gate": ("mlp.router",)},
        quant_method=MXFP4,
    ),
}
"""The supported values of model_type. The defaults are those of the config class in transformers."""

_OTHERS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    # First, because of granitemoe and phimoe.
    ("", "it is a mixture of experts", ("num_local_experts", "num_experts", "n_routed_experts", "num_experts_per_tok")),
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
