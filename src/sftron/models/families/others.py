"""Families with norms, blocks or names of their own; see table.py."""

from __future__ import annotations

from sftron.kernels.xielu import BETA, EPS
from sftron.models.families.family import BIASES, COMMON, MIXTURE, Family, Values, key, not_every, without
from sftron.models.mxfp4 import MXFP4
from sftron.models.rope_config import SLIDING, RopeKeys


def _rotates_what_slides(values: Values) -> list[bool]:
    if values["layer_types"] is not None:
        return [each == SLIDING for each in values["layer_types"]]
    return not_every(values["sliding_window_pattern"])(values)


def _slides_by_pattern(values: Values) -> list[bool]:
    pattern = not_every(values["sliding_window_pattern"])(values)
    return [values["sliding_window"] is not None and slides for slides in pattern]


def _rotates_what_slides_if_any_may(values: Values) -> list[bool]:
    """EXAONE 4's layers: in a model with a window, those without it are not rotated."""
    if values["sliding_window"] is None:
        return [True] * values["num_hidden_layers"]
    return _rotates_what_slides(values)


_LAYER_NORM = {"norm": "layer", "norm_eps": key("layer_norm_eps")}
_COHERE = without("rms_norm_eps", "head_dim") | {
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}
_COHERE_MODEL = _LAYER_NORM | {"norm": "layer_without_bias", "logit_scale": key("logit_scale")}

_APERTUS_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12000000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}

_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}


OTHER_FAMILIES: dict[str, Family] = {
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
    "olmoe": Family(
        architecture="OlmoeForCausalLM",
        defaults=COMMON
        | {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "attention_bias": False}
        | MIXTURE
        | {"num_experts": 64, "num_experts_per_tok": 8, "router_aux_loss_coef": 0.01, "norm_topk_prob": False},
        fixed={"mlp_bias": False, "clip_qkv": None},
        layer={"attention": "wide_normed_rotary", "mlp": "experts"},
    ),
    "exaone4": Family(
        architecture="Exaone4ForCausalLM",
        defaults=COMMON
        | {"num_key_value_heads": 32, "rms_norm_eps": 1e-5}
        | {"sliding_window": 4096, "sliding_window_pattern": 4, "layer_types": None},
        fixed=BIASES,
        layer={"block": "norm_after", "attention": "normed_rotary"},
        slides=_slides_by_pattern,
        rotates=_rotates_what_slides_if_any_may,
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
    "jais2": Family(
        architecture="Jais2ForCausalLM",
        defaults=without("rms_norm_eps")
        | {"max_position_embeddings": 8192, "hidden_act": "relu2", "layer_norm_eps": 1e-5}
        | {"attention_bias": True, "mlp_bias": True},
        model=_LAYER_NORM,
        layer={"mlp": "plain"},
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
    "hunyuan_v1_dense": Family(
        architecture="HunYuanDenseV1ForCausalLM",
        defaults=COMMON | {"rms_norm_eps": 1e-5, "attention_bias": False},
        fixed={"mlp_bias": False, "use_qk_norm": True},
        irrelevant=frozenset({"eod_token_id"}),
        layer={"attention": "rotary_normed"},
        # The published configurations state the entries of "yarn" in "dynamic", where they have no effect.
        rope=RopeKeys(reads_alpha=True, ignored=("beta_fast", "beta_slow", "mscale", "mscale_all_dim")),
        names={
            "self_attn.q_norm": ("self_attn.query_layernorm",),
            "self_attn.k_norm": ("self_attn.key_layernorm",),
        },
    ),
    "apertus": Family(
        architecture="ApertusForCausalLM",
        defaults=without("hidden_act")
        | {"max_position_embeddings": 65536, "rms_norm_eps": 1e-5, "attention_bias": False},
        fixed={"hidden_act": "xielu", "mlp_bias": False},
        model={"activation": "xielu"},
        layer={"attention": "normed_rotary", "mlp": "xielu"},
        rope=RopeKeys(theta=12000000.0, parameters=_APERTUS_ROPE),
        constants={".mlp.act_fn.beta": BETA, ".mlp.act_fn.eps": EPS},
        names={"input_layernorm": ("attention_layernorm",), "post_attention_layernorm": ("feedforward_layernorm",)},
    ),
    "gpt_oss": Family(
        architecture="GptOssForCausalLM",
        defaults=without("hidden_act")
        | {"max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5}
        | {"attention_bias": True, "sliding_window": 128, "layer_types": None}
        | MIXTURE
        | {"num_local_experts": 128, "num_experts_per_tok": 4, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        fixed={"hidden_act": "silu"},
        model={"activation": "silu"},
        layer={"mlp": "biased_experts", "sinks": True},
        slides=not_every(2),
        rope=RopeKeys(theta=150000.0, parameters=_GPT_OSS_ROPE),
        names={"mlp.gate": ("mlp.router",)},
        quant_method=MXFP4,
    ),
}
