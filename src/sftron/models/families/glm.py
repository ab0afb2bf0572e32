"""The families of GLM; see table.py."""

from __future__ import annotations

from sftron.models.families.deepseek import LATENT
from sftron.models.families.family import (
    COMMON,
    CORRECTED_FIXED,
    CORRECTED_IRRELEVANT,
    CORRECTED_MIXTURE,
    Family,
)
from sftron.models.rope_config import RopeKeys

_GLM = COMMON | {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 0.00000015625,
    "attention_bias": True,
}

GLM_FAMILIES: dict[str, Family] = {
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
    "glm4_moe": Family(
        architecture="Glm4MoeForCausalLM",
        defaults=COMMON
        | {"num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "attention_bias": False}
        | {"use_qk_norm": False}
        | CORRECTED_MIXTURE
        | {"n_routed_experts": 128, "moe_intermediate_size": 1408, "first_k_dense_replace": 1},
        fixed=CORRECTED_FIXED | {"mlp_bias": False},
        irrelevant=CORRECTED_IRRELEVANT,
        model={"o_bias": False},
        layer={"mlp": "added_experts"}
        | {"attention": lambda values: "normed_rotary" if values["use_qk_norm"] else "rotary"},
        router="corrected",
        rope=RopeKeys(partial=0.5),
    ),
    "glm4_moe_lite": Family(
        **LATENT
        | {
            "architecture": "Glm4MoeLiteForCausalLM",
            "defaults": {key: value for key, value in LATENT["defaults"].items() if key != "first_k_dense_replace"}
            | {"num_key_value_heads": 20, "max_position_embeddings": 202752, "rms_norm_eps": 1e-5}
            | {"q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "n_routed_experts": 64}
            | {"moe_intermediate_size": 1536, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1}
            | {"routed_scaling_factor": 1.8, "mlp_layer_types": None},
            # The published key, whose value is what mlp_layer_types are without it.
            "fixed": LATENT["fixed"] | {"first_k_dense_replace": 1},
        },
    ),
}
