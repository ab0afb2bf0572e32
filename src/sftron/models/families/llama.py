"""Families whose blocks are those of Llama; see table.py."""

from __future__ import annotations

from sftron.models.families.family import BIASES, COMMON, MIXTURE, Family, Values, not_every
from sftron.models.rope_config import RopeKeys


def _rotates(values: Values) -> list[bool]:
    """SmolLM 3's layers: `no_rope_layers` is 1 where heads are rotated."""
    if values["no_rope_layers"] is not None:
        return [bool(each) for each in values["no_rope_layers"]]
    return not_every(values["no_rope_layer_interval"])(values)


def _unless_rotated(values: Values) -> list[bool]:
    has_window = values["use_sliding_window"] and values["sliding_window"] is not None
    return [has_window and not rotates for rotates in _rotates(values)]


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


LLAMA_FAMILIES: dict[str, Family] = {
    "llama": Family(architecture="LlamaForCausalLM", defaults=COMMON | BIASES),
    "mistral": Family(
        architecture="MistralForCausalLM",
        defaults=COMMON | {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
        fixed=BIASES,
    ),
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        defaults=COMMON
        | {"max_position_embeddings": 131072, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "sliding_window": None}
        | MIXTURE
        | {"num_local_experts": 8, "num_experts_per_tok": 2},
        fixed=BIASES | {"router_jitter_noise": 0.0},
        rope=RopeKeys(theta=1000000.0),
        layer={"mlp": "experts"},
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
}
