"""The families of Gemma; see table.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sftron.models.families.family import COMMON, LARGEST_SIZE, Family, Values, key, not_every, without
from sftron.models.rope_config import FULL, PROPORTIONAL, SLIDING, RopeKeys

_NOT_STATED = ()
"""The default of per_layer_config, a value that JSON does not have."""

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

# --- Gemma 4 ---


def _every_sixth_is_full(values: Values) -> list[str]:
    """The last layer is full as well, whatever its number."""
    num_layers = values["num_hidden_layers"]
    return [FULL if number % 6 == 0 or number == num_layers else SLIDING for number in range(1, num_layers + 1)]


def _stated_sizes(values: Values) -> list[dict[str, Any]]:
    """Returns the head_dim and num_key_value_heads of each layer that are not those of the model.

    The released files have keys for all full layers, and transformers 5 writes `per_layer_config`, by the number.
    """
    stated = values["per_layer_config"]
    if stated == _NOT_STATED:
        of_full = {"head_dim": values["global_head_dim"]}
        if values["attention_k_eq_v"] and values["num_global_key_value_heads"] is not None:
            of_full["num_key_value_heads"] = values["num_global_key_value_heads"]
        return [of_full if each == FULL else {} for each in values["layer_types"]]
    return [dict(stated.get(str(number), {})) for number in range(values["num_hidden_layers"])]


def _first_that_shares(values: Values) -> int:
    return values["num_hidden_layers"] - values["num_kv_shared_layers"]


def _layers_of_gemma_4(values: Values) -> list[dict[str, Any]]:
    layers = []
    for number, (layer_type, sizes) in enumerate(zip(values["layer_types"], _stated_sizes(values), strict=True)):
        shares = number >= _first_that_shares(values)
        layer: dict[str, Any] = {**sizes, "shares_keys": shares}
        layer["values_are_keys"] = values["attention_k_eq_v"] and layer_type == FULL and not shares
        if shares and values["use_double_wide_mlp"]:
            layer["intermediate_size"] = 2 * values["intermediate_size"]
        layers.append(layer)
    return layers


def _problems_of_gemma_4(values: Values) -> list[str]:
    types, num_layers, num_shared = values["layer_types"], values["num_hidden_layers"], values["num_kv_shared_layers"]
    size, num_tokens = values["hidden_size_per_layer_input"], values["vocab_size_per_layer_input"]
    problems = []
    if values["use_bidirectional_attention"] not in (None, "vision"):
        stated = values["use_bidirectional_attention"]
        problems.append(f"use_bidirectional_attention: {stated!r}; sftron supports only null and 'vision'")
    if type(size) is not int or not 0 <= size <= LARGEST_SIZE:
        problems.append(f"hidden_size_per_layer_input: {size!r} is not a whole number from 0 to {LARGEST_SIZE}")
    elif size and num_tokens != values["vocab_size"]:
        problems.append(
            f"vocab_size_per_layer_input: {num_tokens!r}; sftron supports only vocab_size: {values['vocab_size']}"
        )
    if types[-1] != FULL:
        problems.append(f"layer_types: the last is {types[-1]!r}, which transformers replaces by {FULL!r}")
    if type(num_shared) is not int or not 0 <= num_shared < num_layers:
        return [*problems, f"num_kv_shared_layers: {num_shared!r} is not a whole number below {num_layers}"]
    if num_shared and size == 0:
        problems.append(
            f"num_kv_shared_layers: {num_shared}, which transformers cannot compute with hidden_size_per_layer_input: 0"
        )
    if num_shared and {*types} - {*types[:-num_shared]}:
        problems.append(f"num_kv_shared_layers: {num_shared}, but no layer before has keys of each of the layer_types")
    return problems + _wrong_sizes_of_gemma_4(values)


def _wrong_sizes_of_gemma_4(values: Values) -> list[str]:
    stated, num_heads = values["per_layer_config"], values["num_attention_heads"]
    name = "global_head_dim, num_global_key_value_heads" if stated == _NOT_STATED else "per_layer_config"
    if stated != _NOT_STATED:
        is_table = isinstance(stated, Mapping) and all(isinstance(sizes, Mapping) for sizes in stated.values())
        numbers = {str(number) for number in range(values["num_hidden_layers"])}
        if not is_table or not stated.keys() <= numbers:
            return [f"per_layer_config: {stated!r} is not an object with the sizes of some layers by their number"]
        if other := {key for sizes in stated.values() for key in sizes} - {"head_dim", "num_key_value_heads"}:
            named = ", ".join(sorted(other))
            return [f"per_layer_config: {named}; sftron supports only head_dim and num_key_value_heads"]
    usual = {key: values[key] for key in ("head_dim", "num_key_value_heads")}
    of_type: dict[str, dict[str, Any]] = {}
    for layer_type, sizes in zip(values["layer_types"], _stated_sizes(values), strict=True):
        whole = usual | sizes
        head_dim, num_kv_heads = whole["head_dim"], whole["num_key_value_heads"]
        if type(head_dim) is not int or not 0 < head_dim <= LARGEST_SIZE or head_dim % 2:
            return [f"{name}: a head_dim of {head_dim!r} is not a positive even number"]
        if type(num_kv_heads) is not int or num_kv_heads < 1 or num_heads % num_kv_heads:
            return [f"{name}: {num_kv_heads!r} key-value heads do not divide num_attention_heads: {num_heads}"]
        if of_type.setdefault(layer_type, whole) != whole:
            return [f"{name}: {whole} and {of_type[layer_type]} in layers of one type; sftron supports only one size"]
    return []


_GEMMA_4_ROPE = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": PROPORTIONAL, "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
_GEMMA_4_NAMES = {"mlp.gate.weight": ("router.proj.weight",), "mlp.gate": ("router",), "mlp.experts": ("experts",)}
_GEMMA_4_NAMES |= {
    f"mlp.{name}": (name,)
    for name in ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")
}
_GEMMA_4 = Family(
    architecture="Gemma4ForCausalLM",
    defaults=without("hidden_act")
    | {"vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30}
    | {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072}
    | {"attention_bias": False, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh"}
    | {"sliding_window": 512, "layer_types": None, "final_logit_softcapping": None}
    | {"global_head_dim": 512, "num_global_key_value_heads": None, "per_layer_config": _NOT_STATED}
    | {"attention_k_eq_v": False, "num_kv_shared_layers": 0, "use_double_wide_mlp": False}
    | {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144}
    | {"use_bidirectional_attention": None, "enable_moe_block": False}
    | {"num_experts": None, "top_k_experts": None, "moe_intermediate_size": None},
    fixed={"mlp_bias": False},
    irrelevant=frozenset({"hidden_act"}),
    model={
        "embedding_multiplier": lambda values: values["hidden_size"] ** 0.5,
        "activation": key("hidden_activation"),
        "logit_softcap": key("final_logit_softcapping"),
        "per_layer_input_size": key("hidden_size_per_layer_input"),
    },
    layer={
        "block": "gemma4",
        "attention": "normed_values",
        "scale": 1.0,
        "mlp": lambda values: "beside_experts" if values["enable_moe_block"] else "gated",
    },
    types=_every_sixth_is_full,
    each_layer=_layers_of_gemma_4,
    problems=_problems_of_gemma_4,
    vocab_keys=("vocab_size_per_layer_input",),
    is_whole=True,
    names=_GEMMA_4_NAMES,
    rope=RopeKeys(
        theta=1e6,
        sliding_theta=1e4,
        parameters=_GEMMA_4_ROPE,
        types=("default", PROPORTIONAL),
        only_parameters=True,
    ),
)

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
    "gemma4_text": _GEMMA_4,
    "gemma4_unified_text": replace(
        _GEMMA_4,
        architecture="Gemma4UnifiedForCausalLM",
        defaults={**_GEMMA_4.defaults, "max_position_embeddings": 262144, "sliding_window": 1024}
        | {"use_bidirectional_attention": "vision", "hidden_size_per_layer_input": 0},
        # Its class in transformers has no experts.
        fixed={"mlp_bias": False, "enable_moe_block": False},
    ),
}
