"""A table of the supported model families: how each differs from Llama, as data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sftron.models.delta import DeltaSizes
from sftron.models.family import BIASES, COMMON, QWEN_WINDOW, Family, Values, key, not_every, without
from sftron.models.mixture_families import MIXTURE_FAMILIES
from sftron.models.rope_config import FULL, SLIDING, RopeKeys

LINEAR = "linear_attention"
"""The value of `layer_types` for layers with a state in place of attention."""


def _beyond_max_window_layers(values: Values) -> list[bool]:
    has_window = values["use_sliding_window"] and values["sliding_window"] is not None
    return [has_window and number >= values["max_window_layers"] for number in range(values["num_hidden_layers"])]


def _rotates(values: Values) -> list[bool]:
    """SmolLM 3's layers: `no_rope_layers` is 1 where heads are rotated."""
    if values["no_rope_layers"] is not None:
        return [bool(each) for each in values["no_rope_layers"]]
    return not_every(values["no_rope_layer_interval"])(values)


def _unless_rotated(values: Values) -> list[bool]:
    has_window = values["use_sliding_window"] and values["sliding_window"] is not None
    return [has_window and not rotates for rotates in _rotates(values)]


def _rotates_what_slides(values: Values) -> list[bool]:
    if values["layer_types"] is not None:
        return [each == SLIDING for each in values["layer_types"]]
    return not_every(values["sliding_window_pattern"])(values)


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
_LAYER_NORM = {"norm": "layer", "norm_eps": key("layer_norm_eps")}
_CAUSAL = {"mlp_bias": False, "use_bidirectional_attention": False}
_GEMMA: dict[str, Any] = {"norm": "rms_offset", "embedding_multiplier": lambda values: values["hidden_size"] ** 0.5}
_GEMMA_2 = without("hidden_act") | {
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
_GLM = COMMON | {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 0.00000015625,
    "attention_bias": True,
}
_COHERE = without("rms_norm_eps", "head_dim") | {
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}
_COHERE_MODEL = _LAYER_NORM | {"norm": "layer_without_bias", "logit_scale": key("logit_scale")}

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
    "llama": Family(architecture="LlamaForCausalLM", defaults=COMMON | BIASES),
    "mistral": Family(
        architecture="MistralForCausalLM",
        defaults=COMMON | {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
        fixed=BIASES,
    ),
    "ministral3": Family(
        architecture="Ministral3ForCausalLM",
        defaults=COMMON
        | {"max_position_embeddings": 262144, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5}
        | {"sliding_window": None},
        fixed=BIASES,
        rope=RopeKeys(
            parameters=_MINISTRAL_ROPE,
            scales_queries=True,
            # The factor of a query follows from its row in the table, which in other types is not its position.
            types=("default", "linear", "llama3", "yarn"),
            ignored=("max_position_embeddings",),
        ),
        layer={"attention": "position_scaled"},
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        defaults=COMMON | {"max_position_embeddings": 32768, "num_key_value_heads": 32} | QWEN_WINDOW,
        fixed={"attention_bias": True, "mlp_bias": False},
        model={"qkv_bias": True, "o_bias": False},
        slides=_beyond_max_window_layers,
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        defaults=COMMON
        | {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128, "attention_bias": False}
        | QWEN_WINDOW,
        fixed={"mlp_bias": False},
        layer={"attention": "normed_rotary"},
        slides=_beyond_max_window_layers,
    ),
    "smollm3": Family(
        architecture="SmolLM3ForCausalLM",
        defaults=COMMON
        | BIASES
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
        defaults=without("hidden_act")
        | {"max_position_embeddings": 32768, "num_key_value_heads": 4, "head_dim": 256, "attention_bias": False}
        | {"layer_types": None, "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32}
        | {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4},
        # hidden_act is the activation of delta layers, too.
        fixed={"mlp_bias": False, "mlp_only_layers": [], "hidden_act": "silu"},
        model={"norm": "rms_offset", "output_gate": True, "activation": "silu"}
        | {"delta": lambda values: DeltaSizes(**{size: values[key] for size, key in _DELTA.items()})},
        layer={"attention": "gated_rotary"},
        types=_every_fourth_is_full,
        layer_of={LINEAR: {"block": "delta", "attention": "delta"}},
        # The sections of a head are for positions in images; all of them are equal in text.
        rope=RopeKeys(partial=0.25, ignored=("mrope_section", "mrope_interleaved")),
    ),
    "olmo": Family(
        architecture="OlmoForCausalLM",
        defaults=without("rms_norm_eps") | {"attention_bias": False, "clip_qkv": None},
        fixed={"mlp_bias": False},
        model={"norm": "layer_fixed", "norm_eps": 1e-5, "clip_qkv": key("clip_qkv")},
        layer={"attention": "clipped_rotary"},
    ),
    "olmo2": Family(
        architecture="Olmo2ForCausalLM",
        defaults=COMMON | {"rms_norm_eps": 1e-5, "attention_bias": False},
        fixed={"mlp_bias": False},
        layer={"block": "norm_after", "attention": "wide_normed_rotary"},
    ),
    "olmo3": Family(
        architecture="Olmo3ForCausalLM",
        defaults=COMMON | {"rms_norm_eps": 1e-5, "attention_bias": False, "sliding_window": 4096, "layer_types": None},
        fixed={"mlp_bias": False},
        layer={"block": "norm_after", "attention": "wide_normed_rotary"},
        slides=not_every(4),
        rope=RopeKeys(theta=5e5, sliding_theta=5e5),
    ),
    "granite": Family(
        architecture="GraniteForCausalLM",
        defaults=COMMON
        | BIASES
        | dict.fromkeys(("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"), 1.0),
        model={
            "embedding_multiplier": key("embedding_multiplier"),
            "residual_multiplier": key("residual_multiplier"),
            "logit_scale": lambda values: 1 / values["logits_scaling"],
        },
        layer={"scale": key("attention_multiplier")},
    ),
    "phi": Family(
        architecture="PhiForCausalLM",
        defaults=without("rms_norm_eps") | {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "qk_layernorm": False},
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
        defaults=COMMON | {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "sliding_window": None},
        fixed=BIASES,
        # The code in the folders of the published models is what became transformers' class.
        irrelevant=frozenset({"auto_map"}),
        # As in transformers.
        rope=RopeKeys(partial=1.0, original=4096, types=("default", "longrope")),
        names={"self_attn.qkv_proj": ("self_attn.qkv_proj",), "mlp.gate_up_proj": ("mlp.gate_up_proj",)},
    ),
    "starcoder2": Family(
        architecture="Starcoder2ForCausalLM",
        defaults=without("rms_norm_eps")
        | {"num_key_value_heads": 2, "max_position_embeddings": 4096, "hidden_act": "gelu_pytorch_tanh"}
        | {"norm_epsilon": 1e-5, "use_bias": True, "sliding_window": None, "tie_word_embeddings": True}
        | {"initializer_range": 0.018042},
        model={"norm": "layer", "norm_eps": key("norm_epsilon")}
        | dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), key("use_bias")),
        layer={"mlp": "plain"},
        names={"mlp.up_proj": ("mlp.c_fc",), "mlp.down_proj": ("mlp.c_proj",)},
    ),
    "stablelm": Family(
        architecture="StableLmForCausalLM",
        defaults=without("rms_norm_eps", "head_dim")
        | {"num_key_value_heads": 32, "max_position_embeddings": 4096, "layer_norm_eps": 1e-5}
        | {"use_qkv_bias": False, "qk_layernorm": False, "use_parallel_residual": False},
        model=_LAYER_NORM | {"qkv_bias": key("use_qkv_bias")},
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
        defaults=COMMON
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
        irrelevant=frozenset({"hidden_act"}),
        model=_GEMMA | {"activation": key("hidden_activation"), "logit_softcap": key("final_logit_softcapping")},
        layer=_GEMMA_LAYER | {"softcap": key("attn_logit_softcapping")},
        slides=not_every(2),
    ),
    "gemma3_text": Family(
        architecture="Gemma3ForCausalLM",
        defaults=_GEMMA_2
        | {"max_position_embeddings": 131072}
        | {"final_logit_softcapping": None, "sliding_window_pattern": 6},
        fixed=_CAUSAL | {"attn_logit_softcapping": None},
        irrelevant=frozenset({"hidden_act", "_sliding_window_pattern"}),
        model=_GEMMA | {"activation": key("hidden_activation"), "logit_softcap": key("final_logit_softcapping")},
        layer=_GEMMA_LAYER | {"attention": "normed_rotary"},
        slides=lambda values: not_every(values["sliding_window_pattern"])(values),
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
        model=_COHERE_MODEL,
        layer={"block": "parallel"}
        | {"attention": lambda values: "each_normed_rotary" if values["use_qk_norm"] else "rotary"},
        rope=RopeKeys(theta=5e5, interleaved=True),
    ),
    "cohere2": Family(
        architecture="Cohere2ForCausalLM",
        defaults=_COHERE | {"sliding_window": 4096, "layer_types": None, "sliding_window_pattern": 4},
        model=_COHERE_MODEL,
        layer={"block": "parallel"},
        slides=lambda values: not_every(values["sliding_window_pattern"])(values),
        rope=RopeKeys(interleaved=True),
        rotates=_rotates_what_slides,
    ),
    **MIXTURE_FAMILIES,
}
"""The supported values of model_type. The defaults are those of the config class in transformers."""

_KEYS_OF_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "num_experts_per_tok")


def family_of(config: Mapping[str, Any]) -> Family:
    """Returns the family of a config.json.

    Raises:
        ValueError: The model_type is not implemented; the message states whether it is a mixture of experts.
    """
    model_type = config.get("model_type")
    if family := FAMILIES.get(str(model_type)):
        return family
    stated = ", ".join(f"{key}: {config[key]!r}" for key in _KEYS_OF_EXPERTS if config.get(key))
    reason = f" It is not supported because it is a mixture of experts ({stated})." if stated else ""
    raise ValueError(
        f"config.json: model_type is {model_type!r}, implemented are {', '.join(FAMILIES)}.{reason} "
        "Choose a checkpoint of one of these architectures."
    )
