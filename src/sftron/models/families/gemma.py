"""The families of Gemma; see table.py."""

from __future__ import annotations

from typing import Any

from sftron.models.families.family import COMMON, Family, key, not_every, without
from sftron.models.rope_config import RopeKeys

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

GEMMA_FAMILIES: dict[str, Family] = {
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
        # The released wrappers state only those sizes that differ from the class's defaults.
        defaults=_GEMMA_2
        | {"vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26}
        | {"num_attention_heads": 8, "max_position_embeddings": 131072}
        | {"final_logit_softcapping": None, "sliding_window_pattern": 6},
        fixed=_CAUSAL | {"attn_logit_softcapping": None},
        irrelevant=frozenset({"hidden_act", "_sliding_window_pattern"}),
        model=_GEMMA | {"activation": key("hidden_activation"), "logit_softcap": key("final_logit_softcapping")},
        layer=_GEMMA_LAYER | {"attention": "normed_rotary"},
        slides=lambda values: not_every(values["sliding_window_pattern"])(values),
        rope=RopeKeys(theta=1e6, sliding_theta=1e4, sliding_key="rope_local_base_freq"),
    ),
}
