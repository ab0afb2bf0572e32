"""The families of GLM; see table.py."""

from __future__ import annotations

from sftron.models.families.family import COMMON, Family
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
}
