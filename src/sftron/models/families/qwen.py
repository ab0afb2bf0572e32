"""The families of Qwen; see table.py."""

from __future__ import annotations

from sftron.models.delta import DeltaSizes
from sftron.models.families.family import (
    COMMON,
    MIXTURE,
    QWEN_WINDOW,
    Family,
    Values,
    beyond_max_window_layers,
    key,
    without,
)
from sftron.models.rope_config import FULL, RopeKeys

LINEAR = "linear_attention"
"""The value of `layer_types` for layers with a state in place of attention."""


def _every_other_up_to_max_window_layers(values: Values) -> list[bool]:
    last = values["max_window_layers"] if values["use_sliding_window"] else 0
    return [number < last and number % 2 == 0 for number in range(values["num_hidden_layers"])]


_QWEN_MIXTURE = MIXTURE | {
    "moe_intermediate_size": None,
    "norm_topk_prob": False,
    "mlp_only_layers": None,
    "decoder_sparse_step": 1,
}

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


# hidden_act is the activation of delta layers, too.
_HYBRID_FIXED = {"mlp_bias": False, "hidden_act": "silu"}
_HYBRID = without("hidden_act") | {
    "max_position_embeddings": 32768,
    "head_dim": 256,
    "attention_bias": False,
    "layer_types": None,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_HYBRID_MODEL = {
    "norm": "rms_offset",
    "output_gate": True,
    "activation": "silu",
    "delta": lambda values: DeltaSizes(**{size: values[key] for size, key in _DELTA.items()}),
}
_HYBRID_MIXTURE = MIXTURE | {
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
# The sections of a head are for positions in images; all of them are equal in text.
_SECTIONS = RopeKeys(partial=0.25, ignored=("mrope_section", "mrope_interleaved"))


QWEN_FAMILIES: dict[str, Family] = {
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        defaults=COMMON | {"max_position_embeddings": 32768, "num_key_value_heads": 32} | QWEN_WINDOW,
        fixed={"attention_bias": True, "mlp_bias": False},
        model={"qkv_bias": True, "o_bias": False},
        slides=beyond_max_window_layers,
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        defaults=COMMON
        | {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128, "attention_bias": False}
        | QWEN_WINDOW,
        fixed={"mlp_bias": False},
        layer={"attention": "normed_rotary"},
        slides=beyond_max_window_layers,
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
    "qwen3_5_text": Family(
        architecture="Qwen3_5ForCausalLM",
        defaults=_HYBRID | {"num_key_value_heads": 4},
        fixed=_HYBRID_FIXED | {"mlp_only_layers": []},
        model=_HYBRID_MODEL,
        layer={"attention": "gated_rotary"},
        types=_every_fourth_is_full,
        layer_of={LINEAR: {"block": "delta", "attention": "delta"}},
        rope=_SECTIONS,
    ),
    "qwen3_5_moe_text": Family(
        architecture="Qwen3_5MoeForCausalLM",
        # No layer has an MLP of this intermediate_size, and published configurations do not state one.
        defaults=_HYBRID | {"num_key_value_heads": 2, "intermediate_size": 512} | _HYBRID_MIXTURE,
        fixed=_HYBRID_FIXED | {"mlp_only_layers": [], "decoder_sparse_step": 1, "norm_topk_prob": True},
        model=_HYBRID_MODEL,
        layer={"attention": "gated_rotary", "mlp": "shared_experts"},
        types=_every_fourth_is_full,
        layer_of={LINEAR: {"block": "delta", "attention": "delta"}},
        rope=_SECTIONS,
    ),
    "qwen3_next": Family(
        architecture="Qwen3NextForCausalLM",
        defaults=_HYBRID
        | {"num_key_value_heads": 2, "intermediate_size": 5632}
        | _QWEN_MIXTURE
        | _HYBRID_MIXTURE
        | {"num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True},
        fixed=_HYBRID_FIXED | {"use_sliding_window": False},
        model=_HYBRID_MODEL,
        layer={"attention": "gated_rotary", "mlp": "shared_experts"},
        types=_every_fourth_is_full,
        layer_of={LINEAR: {"block": "delta", "attention": "grouped_delta"}},
        rope=RopeKeys(partial=0.25),
    ),
}
