"""The families of DeepSeek, and what others have of theirs; see table.py."""

from __future__ import annotations

import math
from typing import Any

from sftron.models.families.family import (
    COMMON,
    CORRECTED_FIXED,
    CORRECTED_IRRELEVANT,
    CORRECTED_MIXTURE,
    Family,
    Values,
    beyond_max_window_layers,
)
from sftron.models.latent_sizes import LatentSizes
from sftron.models.rope_config import RopeKeys


def _scale(values: Values) -> float:
    """Returns 1 / sqrt(size of a query), times the square of yarn's mscale for all dimensions, if there is one."""
    entries = values.get("rope_parameters") or values.get("rope_scaling") or {}
    all_dim, factor = entries.get("mscale_all_dim") or 0.0, entries.get("factor") or 1.0
    mscale = 0.1 * all_dim * math.log(factor) + 1 if factor > 1 else 1.0
    return LatentSizes.of(values).qk_head_dim ** -0.5 * mscale**2


LATENT: dict[str, Any] = {
    "architecture": "DeepseekV3ForCausalLM",
    "defaults": COMMON
    | {"num_key_value_heads": 128, "max_position_embeddings": 4096, "attention_bias": False, "rope_interleave": True}
    | {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    | CORRECTED_MIXTURE
    | {"n_routed_experts": 256, "moe_intermediate_size": 2048, "n_group": 8, "topk_group": 4}
    | {"routed_scaling_factor": 2.5, "first_k_dense_replace": 3},
    "fixed": CORRECTED_FIXED | {"mlp_bias": False},
    "irrelevant": CORRECTED_IRRELEVANT | {"qk_head_dim"},
    "model": {"mixing": LatentSizes.of},
    "layer": {"attention": "latent", "mlp": "added_experts", "scale": _scale},
    "router": "corrected",
    "rope": RopeKeys(size="qk_rope_head_dim"),
}
"""The fields of a family with latent attention and the experts of DeepSeek V3."""

_UNREAD = CORRECTED_IRRELEVANT | {"scoring_func", "topk_method"}
"""The published folders of these families have other words for the same router."""


DEEPSEEK_FAMILIES: dict[str, Family] = {
    # The code in the folders of the published models is what became transformers' class.
    "deepseek_v3": Family(**LATENT | {"irrelevant": LATENT["irrelevant"] | {"auto_map"}}),
    "dots1": Family(
        architecture="Dots1ForCausalLM",
        defaults=COMMON
        | {"num_key_value_heads": 32, "attention_bias": False, "sliding_window": 4096, "max_window_layers": 62}
        | {"layer_types": None}
        | CORRECTED_MIXTURE
        | {"n_shared_experts": None, "num_experts_per_tok": None, "moe_intermediate_size": 1408}
        | {"norm_topk_prob": False, "first_k_dense_replace": 0},
        fixed={"mlp_bias": False, "moe_layer_freq": 1},
        irrelevant=_UNREAD,
        layer={"attention": "normed_rotary", "mlp": "added_experts"},
        slides=beyond_max_window_layers,
        router="corrected",
    ),
    "solar_open": Family(
        architecture="SolarOpenForCausalLM",
        # Each layer has experts, so that the intermediate size is not read.
        defaults=COMMON
        | {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5}
        | {"attention_bias": False, "intermediate_size": 1280}
        | CORRECTED_MIXTURE
        | {"n_routed_experts": 128, "moe_intermediate_size": 1280},
        fixed={"mlp_bias": False, "moe_layer_freq": 1, "first_k_dense_replace": 0},
        irrelevant=_UNREAD,
        model={"o_bias": False},
        layer={"mlp": "added_experts"},
        router="corrected",
        rope=RopeKeys(theta=1e6),
    ),
}
