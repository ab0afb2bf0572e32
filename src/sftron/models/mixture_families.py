"""The families of mixtures of experts; see families.py."""

from __future__ import annotations

from typing import Any

from sftron.models.family import BIASES, COMMON, QWEN_WINDOW, Family, Values, key, not_every, without
from sftron.models.mxfp4 import MXFP4
from sftron.models.rope_config import RopeKeys

_MIXTURE: dict[str, Any] = {
    "num_experts": None,
    "num_local_experts": None,
    "num_experts_per_tok": None,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
"""The keys of all mixtures. The number of experts has two names, of which transformers 4 and 5 write either."""
_QWEN_MIXTURE = _MIXTURE | {
    "moe_intermediate_size": None,
    "norm_topk_prob": False,
    "mlp_only_layers": None,
    "decoder_sparse_step": 1,
}
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}


def _every_other_up_to_max_window_layers(values: Values) -> list[bool]:
    last = values["max_window_layers"] if values["use_sliding_window"] else 0
    return [number < last and number % 2 == 0 for number in range(values["num_hidden_layers"])]


MIXTURE_FAMILIES: dict[str, Family] = {
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        defaults=COMMON
        | {"max_position_embeddings": 131072, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "sliding_window": None}
        | _MIXTURE
        | {"num_local_experts": 8, "num_experts_per_tok": 2},
        fixed=BIASES | {"router_jitter_noise": 0.0},
        rope=RopeKeys(theta=1000000.0),
        layer={"mlp": "experts"},
    ),
    "qwen2_moe": Family(
        architecture="Qwen2MoeForCausalLM",
        defaults=COMMON
        | {"max_position_embeddings": 32768, "num_key_value_heads": 16, "qkv_bias": True}
        | QWEN_WINDOW
        | _QWEN_MIXTURE
        | {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "intermediate_size": 5632}
        | {"shared_expert_intermediate_size": 5632},
        fixed={"mlp_bias": False},
        model={"qkv_bias": key("qkv_bias"), "o_bias": False},
        layer={"mlp": "shared_experts"},
        slides=_every_other_up_to_max_window_layers,
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        defaults=COMMON
        | {"max_position_embeddings": 32768, "num_key_value_heads": 4, "attention_bias": False}
        | {"use_sliding_window": False, "sliding_window": 4096}
        | _QWEN_MIXTURE
        | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        fixed={"mlp_bias": False},
        irrelevant=frozenset({"max_window_layers"}),
        layer={"attention": "normed_rotary", "mlp": "experts"},
        slides=lambda values: [values["use_sliding_window"]] * values["num_hidden_layers"],
    ),
    "olmoe": Family(
        architecture="OlmoeForCausalLM",
        defaults=COMMON
        | {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "attention_bias": False}
        | _MIXTURE
        | {"num_experts": 64, "num_experts_per_tok": 8, "router_aux_loss_coef": 0.01, "norm_topk_prob": False},
        fixed={"mlp_bias": False, "clip_qkv": None},
        layer={"attention": "wide_normed_rotary", "mlp": "experts"},
    ),
    "gpt_oss": Family(
        architecture="GptOssForCausalLM",
        defaults=without("hidden_act")
        | {"max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5}
        | {"attention_bias": True, "sliding_window": 128, "layer_types": None}
        | _MIXTURE
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
