"""Families whose blocks are those of Llama; see table.py."""

from __future__ import annotations

from sftron.models.families.family import BIASES, COMMON, MIXTURE, Family, Values, key, not_every
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

_CWM_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
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
    "seed_oss": Family(
        architecture="SeedOssForCausalLM",
        defaults=COMMON
        | BIASES
        | {"max_position_embeddings": 524288, "num_key_value_heads": 8, "head_dim": 128}
        | {"attention_bias": True, "attention_out_bias": False},
        model={"o_bias": key("attention_out_bias")},
    ),
    "ernie4_5": Family(
        architecture="Ernie4_5ForCausalLM",
        defaults=COMMON
        | {"max_position_embeddings": 131072, "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5}
        | {"use_bias": False, "tie_word_embeddings": True},
        # The code in the folders of the first releases is what became transformers' class.
        irrelevant=frozenset({"auto_map"}),
        model=dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), key("use_bias")),
        rope=RopeKeys(theta=5e5, interleaved=True),
    ),
    "arcee": Family(
        architecture="ArceeForCausalLM",
        defaults=COMMON | BIASES | {"max_position_embeddings": 4096, "hidden_act": "relu2", "rms_norm_eps": 1e-5},
        layer={"mlp": "plain"},
    ),
    "cwm": Family(
        architecture="CwmForCausalLM",
        defaults=COMMON
        | {"max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5}
        | {"mlp_bias": False, "sliding_window": 8192, "layer_types": None},
        fixed={"attention_bias": False},
        slides=lambda values: [number % 4 != 0 for number in range(values["num_hidden_layers"])],
        rope=RopeKeys(theta=1e6, parameters=_CWM_ROPE),
    ),
    # These two are of transformers' class of Llama; only the defaults differ.
    "internlm3": Family(
        architecture="LlamaForCausalLM",
        defaults=COMMON
        | BIASES
        | {"max_position_embeddings": 32768, "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5},
        # Other names of the same biases.
        fixed={"qkv_bias": False, "bias": False},
        irrelevant=frozenset({"auto_map"}),
    ),
    "iquestcoder": Family(
        architecture="LlamaForCausalLM",
        defaults=COMMON
        | BIASES
        | {"max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
        fixed={"use_sliding_window": False},
        irrelevant=frozenset({"auto_map", "max_window_layers"}),
    ),
    "hyperclovax": Family(
        architecture="HyperCLOVAXForCausalLM",
        defaults=COMMON
        | BIASES
        | dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling"), 1.0)
        | {"attention_multiplier": None},
        fixed={"use_post_norm": True},
        irrelevant=frozenset({"auto_map"}),
        model={
            "embedding_multiplier": key("embedding_multiplier"),
            "residual_multiplier": key("residual_multiplier"),
            "logit_scale": key("logits_scaling"),
        },
        layer={"block": "norm_around", "scale": key("attention_multiplier")},
        names={
            "post_attention_layernorm": ("post_norm1",),
            "pre_feedforward_layernorm": ("post_attention_layernorm",),
            "post_feedforward_layernorm": ("post_norm2",),
        },
    ),
}
