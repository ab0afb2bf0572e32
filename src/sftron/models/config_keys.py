"""The keys of a config.json: those that every family reads, what their values may be, and what no family implements."""

from __future__ import annotations

from collections.abc import Mapping, Set
from functools import cache
from typing import Any

from sftron.kernels.activation import ACTIVATIONS
from sftron.models.families.family import LARGEST_SIZE, Family
from sftron.models.families.table import FAMILIES
from sftron.models.latent_sizes import complete_latent_sizes
from sftron.models.mxfp4 import quant_method
from sftron.models.rope_config import FULL, SLIDING, is_finite

SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_OWN_SIZES = (
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_conv_kernel_dim", "full_attention_interval", "sliding_window_pattern", "no_rope_layer_interval"),
)
"""Sizes that some families have."""
_LARGEST = {"num_hidden_layers": 2**12, "max_position_embeddings": 2**24}
"""The bounds of sizes with one lower than LARGEST_SIZE."""

DEFAULTS: dict[str, Any] = {"tie_word_embeddings": False, "initializer_range": 0.02}
"""The defaults of the keys that every family reads."""

_NULLABLE_NUMBERS = ("clip_qkv", "final_logit_softcapping", "attn_logit_softcapping", "attention_multiplier")
NULL_IS_A_VALUE = (
    *("num_key_value_heads", "head_dim", "sliding_window", "q_lora_rank", *_NULLABLE_NUMBERS),
    *("global_head_dim", "per_layer_config"),
)
"""Keys for which null is not the default: as many as query heads, hidden_size / heads, and no window, latent or bound.
In the last two it is refused."""
_ACTIVATION_KEYS = ("hidden_act", "hidden_activation")
_MAY_BE_ZERO = ("router_aux_loss_coef", "initializer_range", "rms_norm_eps", "layer_norm_eps", "norm_epsilon")

OLD_FULL = "attention"
"""The name of FULL in hybrids of transformers 4."""

_FIXED: dict[str, Any] = {
    "rope_interleaved": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "is_decoder": False,
    "chunk_size_feed_forward": 0,
    "pruned_heads": {},
}
"""Keys for which only one value is implemented."""

DROPOUTS = (
    *("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "residual_dropout", "embedding_dropout"),
    *("attention_dropout_prob", "hidden_dropout_prob"),
)
"""Keys of probabilities of dropout."""

IRRELEVANT = frozenset(
    {
        *("model_type", "architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "use_cache"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id", "problem_type"),
        *("output_attentions", "output_hidden_states", "return_dict"),
        # Splits matrix products and adds the partial results, which only changes the order of summation.
        "pretraining_tp",
        # Training options. This project trains without dropout, and the trainer reports the keys.
        *DROPOUTS,
    }
)
"""Keys that transformers' config classes declare, but that do not affect the forward pass."""


def unimplemented(given: Mapping[str, Any], read: set[str], family: Family) -> list[str]:
    fixed, found = _FIXED | dict(family.fixed), dict(given)
    if family.quant_method is not None and "quantization_config" in given:
        fixed["quantization_config.quant_method"] = family.quant_method
        found["quantization_config.quant_method"] = quant_method(given)
        del found["quantization_config"]
    known = read | {"head_dim"} | fixed.keys() | IRRELEVANT | family.irrelevant
    return unknown_keys(found, known, given.get("model_type")) + [
        f"{key}: {found[key]!r}; sftron supports only {value!r}"
        for key, value in fixed.items()
        if key in found and found[key] != value
    ]


_OF_SOME_FAMILY = {key for family in FAMILIES.values() for key in (*family.defaults, *family.fixed, *family.rope.read)}
# Only Granite 4's class asks for position_embedding_type; published configurations of other families name their rope in
# it. Some wrappers repeat sizes, which every text model states itself.
_OF_SOME_FAMILY -= {"position_embedding_type", *SIZES}


def unknown_keys(given: Mapping[str, Any], known: Set[str], model_type: Any) -> list[str]:
    """Returns a problem for each key that is not known and could change the model.

    A key that transformers' config class does not declare, or that has its default, cannot change transformers' model.
    But a few models ask for keys that only other classes declare, so no such key is ignored.
    """
    problems = []
    for key, value in given.items():
        if key in known:
            continue
        never_ignored = key in ("auto_map", "quantization_config") or key in _OF_SOME_FAMILY
        if never_ignored or getattr(_default_config(model_type), key, value) != value:
            problems.append(f"{key}: {value!r}, but sftron does not support this key")
    return problems


@cache
def _default_config(model_type: Any) -> Any:
    """Returns transformers' config with all defaults; None if the installed transformers, if any, has no such class.

    The table knows all keys that a class declared when it was added, so this finds those of later transformers.
    """
    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        return CONFIG_MAPPING[model_type]()
    except (ImportError, KeyError):
        return None


def wrong_types(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """Returns a problem for each key of another type, except for the integers, which `complete_sizes` checks."""
    problems = []
    for key, default in defaults.items():
        if type(default) is bool and type(values[key]) is not bool:
            problems.append(f"{key}: {values[key]!r} is neither true nor false")
        if key in _MAY_BE_ZERO and not (is_finite(values[key]) and values[key] >= 0):
            problems.append(f"{key}: {values[key]!r} is not a finite number of at least 0")
        is_number = type(default) is float or key in ("query_pre_attn_scalar", *_NULLABLE_NUMBERS)
        is_number = is_number and not (key in _NULLABLE_NUMBERS and values[key] is None)
        if key not in _MAY_BE_ZERO and is_number and not (is_finite(values[key]) and values[key] > 0):
            problems.append(f"{key}: {values[key]!r} is not a finite number above 0")
        if key in _ACTIVATION_KEYS and values[key] not in [*ACTIVATIONS]:
            problems.append(f"{key}: {values[key]!r}; sftron supports only {', '.join(ACTIVATIONS)}")
    return problems


def complete_sizes(values: dict[str, Any], family: Family) -> list[str]:
    """Returns the problems of the sizes. Adds sizes that follow from others to `values`, if those others are valid."""
    if values["num_key_value_heads"] is None:
        values["num_key_value_heads"] = values["num_attention_heads"]
    # Beside layer_types, a pattern has no effect; EXAONE 4 states one in letters.
    without = {"sliding_window_pattern"} if values.get("layer_types") is not None else set()
    own = [key for key in _OWN_SIZES if key in values and key not in without]
    largest = dict.fromkeys((*SIZES, *own, "num_key_value_heads", "max_position_embeddings"), LARGEST_SIZE) | _LARGEST
    problems = [
        f"{key}: {values[key]!r} is not a whole number from 1 to {bound}"
        for key, bound in largest.items()
        if type(values[key]) is not int or not 0 < values[key] <= bound
    ]
    if problems:
        return problems
    if "kv_lora_rank" in family.defaults:
        return complete_latent_sizes(values, LARGEST_SIZE)
    num_heads, num_kv_heads = values["num_attention_heads"], values["num_key_value_heads"]
    derived, head_dim = values["hidden_size"] // num_heads, values.get("head_dim")
    if head_dim is None and family.defaults.get("head_dim") is None:
        head_dim = values["head_dim"] = derived
    if "head_dim" not in family.defaults and head_dim != derived:
        problems.append(f"head_dim: {head_dim!r}; sftron supports only hidden_size / num_attention_heads: {derived}")
    if num_heads % num_kv_heads:
        problems.append(f"num_key_value_heads: {num_kv_heads} does not divide num_attention_heads: {num_heads}")
    delta_heads, delta_kv_heads = values.get("linear_num_value_heads", 1), values.get("linear_num_key_heads", 1)
    if delta_heads % delta_kv_heads:
        problems.append(f"linear_num_key_heads: {delta_kv_heads} does not divide linear_num_value_heads: {delta_heads}")
    if type(head_dim) is not int or not 0 < head_dim <= LARGEST_SIZE or head_dim % 2:
        problems.append(f"head_dim: {head_dim!r} is not a positive even number; halves of a head are rotated")
    if family.types is not None and values["layer_types"] is None:
        values["layer_types"] = family.types(values)
    return problems


def wrong_windows(values: Mapping[str, Any], family: Family) -> list[str]:
    layer_types, num_layers = values.get("layer_types"), values["num_hidden_layers"]
    window = values.get("sliding_window")
    # transformers writes 0 where Qwen 2 MoE has no window.
    window, problems = None if window == 0 and not values.get("use_sliding_window", True) else window, []
    if window is not None and (type(window) is not int or window <= 0):
        problems.append(f"sliding_window: {window!r} is not a positive whole number")
    rotated = values.get("no_rope_layers")
    if rotated is not None and (
        not isinstance(rotated, list)
        or len(rotated) != num_layers
        or any(type(each) is not int or each not in (0, 1) for each in rotated)
    ):
        return [
            *problems,
            f"no_rope_layers: {rotated!r}; it must have 0 or 1 for each of num_hidden_layers: {num_layers}",
        ]
    if type(first := values.get("max_window_layers", 0)) is not int:
        return [*problems, f"max_window_layers: {first!r} is not a whole number"]
    if layer_types is not None:
        if not isinstance(layer_types, list) or len(layer_types) != num_layers:
            number = f"a list of {len(layer_types)}" if isinstance(layer_types, list) else repr(layer_types)
            problem = f"layer_types: {number}; wanted a list of num_hidden_layers: {num_layers}"
            return [*problems, problem]
        known = (FULL, SLIDING, *family.layer_of)
        if other := [name for name in layer_types if name not in known]:
            return [*problems, f"layer_types: {other[0]!r}; sftron supports only {', '.join(known)}"]
    if any(_sliding(values, family)) and not any(windows_of_layers(values, family)):
        use = values.get("use_sliding_window", True)
        problems.append(f"layer_types: 'sliding_attention', but sliding_window: {window}, use_sliding_window: {use}")
    return problems


def _sliding(values: Mapping[str, Any], family: Family) -> list[bool]:
    """Returns whether each layer has the window."""
    if values.get("layer_types") is not None:
        return [name == SLIDING for name in values["layer_types"]]
    if family.slides is not None:
        return family.slides(values)
    return [values.get("sliding_window") is not None] * values["num_hidden_layers"]


def windows_of_layers(values: Mapping[str, Any], family: Family) -> list[int | None]:
    """Returns the window of each layer."""
    window = values.get("sliding_window") if values.get("use_sliding_window", True) else None
    return [window if slides else None for slides in _sliding(values, family)]
