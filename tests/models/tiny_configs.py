"""Tiny configurations of any model_type, made from transformers' config class, and those that differ in one key."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import configuration_utils
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

NUM_LAYERS = 4
_KINDS = sorted(
    {
        name
        for constant, names in vars(configuration_utils).items()
        if constant.startswith("ALLOWED_") and constant.endswith("LAYER_TYPES")
        for name in names
    }
)
"""The kinds of layers of the installed transformers, whose constants have other names in other versions."""
_SIZES = (
    # A window and the original positions are shorter than the documents of the tests.
    ("vocab_size", 97),
    ("original_max_position", 24),
    ("position|max_.*len|context_len|n_ctx", 128),
    ("window|chunk", 7),
    ("topk_group", 1),
    ("n_group|num_groups", 2),
    ("per_tok|top_?k", 2),
    ("experts$", 6),
    ("layers?$", NUM_LAYERS),
    ("(kv|key_value|key|group).*heads$|heads_kv$", 2),
    ("heads?$|num_.*heads", 4),
    ("_dim$|dim_head|kv_channels", 8),
    ("rank$", 10),
    ("intermediate|ffn|inner|mlp_", 48),
    ("d_model|n_embd|embed|_size$|width", 32),
)
"""The tiny value of each size, by the first pattern that its name has."""
_SMALL = 5
"""Numbers up to this one are no sizes of a large model: they stay."""
_OF_NO_EFFECT = frozenset(
    {
        *("model_type", "architectures", "transformers_version", "_name_or_path", "dtype", "id2label", "label2id"),
        *("problem_type", "output_hidden_states", "output_attentions", "return_dict", "use_cache"),
        "initializer_range",
    }
)
"""Keys of every class that say nothing about its architecture."""
_KEPT = {"model_type", "initializer_range"}
_BOUND: dict[str, dict[str, Any]] = {
    # transformers divides by head_dim, whose default is null in these classes.
    **{name: {"head_dim": 8} for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral", "nemotron")},
    # The first releases of transformers 5 compute with it, not with the sum of its two parts.
    **{name: {"qk_head_dim": 16} for name in ("deepseek_v3", "glm4_moe_lite")},
    # The heads of a state-space layer times their size are expand times hidden_size.
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 16},
    # By default it has no attention at all.
    # The first releases of transformers 5 have only this name, which later ones take as "full_attention".
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": 16, "layer_types": ["attention"] * NUM_LAYERS},
    # By default it has no convolution at all.
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 10},
    "falcon_h1": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64},
    "mamba2": {"num_heads": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "attention_layers": ["global", "local"] * 2},
    "modernbert-decoder": {"pad_token_id": 0},
    "xlnet": {"d_head": 8},
    # The default of their number is null. The wrapper `gemma4` remains without.
    "gemma4_text": {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 48},
    "dots1": {"n_routed_experts": 6, "n_shared_experts": 2, "num_experts_per_tok": 2},
}
"""What some classes need besides: sizes that are bound to others, and sizes whose default cannot be built."""

ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2", "sigmoid", "mish")
_ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default", "rope_theta": 300.0},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24},
    {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 24},
    {"rope_type": "longrope", "short_factor": [1.2] * 4, "long_factor": [3.0] * 4, "factor": 4.0}
    | {"original_max_position_embeddings": 24},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5},
)


def tiny_config(model_type: str) -> dict[str, Any]:
    """Returns a whole config.json of a tiny model: every key of the class, with tiny sizes.

    Raises:
        Exception: Of any type; transformers' class cannot be made with its defaults, or with these sizes.
    """
    config = _tiny(CONFIG_MAPPING[model_type]().to_dict()) | _BOUND.get(model_type, {})
    # With what the class derives from the sizes.
    return _plain(CONFIG_MAPPING[model_type](**config).to_dict())


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    plain = {key: _plain(value) if key.endswith("_config") and value else value for key, value in config.items()}
    return {key: value for key, value in plain.items() if key not in _OF_NO_EFFECT - _KEPT}


def _tiny(config: Mapping[str, Any]) -> dict[str, Any]:
    layers = _layers_of_each_kind(config)
    tiny = {}
    for key, value in config.items():
        if key in _OF_NO_EFFECT - _KEPT or key.endswith("token_id"):
            continue
        if key == "per_layer_config":
            # Sizes other than the rest of the layers have.
            sizes = {int(layer): _tiny(stated) for layer, stated in (value or {}).items()}
            tiny[key] = {
                new: {k: 2 * v for k, v in sizes[old].items()} for new, old in enumerate(layers) if old in sizes
            }
        elif isinstance(value, Mapping):
            tiny[key] = _tiny(value) | ({"pad_token_id": 0} if "pad_token_id" in value else {})
        elif type(value) is float and "logit" in key and "scal" in key:
            tiny[key] = 0.7  # some defaults make logits so small that no difference would show
        elif type(value) is int and (value > _SMALL or key == "topk_group"):
            tiny[key] = next((size for pattern, size in _SIZES if re.search(pattern, key)), value)
        elif isinstance(value, list) and len(value) == config.get("num_hidden_layers"):
            tiny[key] = [value[layer] for layer in layers]
        else:
            tiny[key] = value
    if "kv_lora_rank" in tiny and "num_key_value_heads" in tiny:
        tiny["num_key_value_heads"] = tiny["num_attention_heads"]
    if "initializer_range" in tiny:
        tiny["initializer_range"] = 0.3
    # In transformers the embedding of padding has no gradient.
    return tiny | ({"pad_token_id": None} if "vocab_size" in tiny else {})


def _layers_of_each_kind(config: Mapping[str, Any]) -> list[int]:
    """Returns the numbers of NUM_LAYERS layers: the first of each kind, as far as lists state kinds, and others."""
    count = config.get("num_hidden_layers")
    lists = [value for value in config.values() if isinstance(value, list) and len(value) == count]
    if not lists:
        return [*range(NUM_LAYERS)]
    kinds = [*zip(*(map(str, each) for each in lists), strict=True)]
    firsts = sorted({kind: number for number, kind in reversed([*enumerate(kinds)])}.values())
    rest = [number for number in range(len(kinds)) if number not in firsts]
    return sorted((firsts + rest)[:NUM_LAYERS])


def without_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of a `tiny_config` that the class does not have by default, given the others."""
    config_class = CONFIG_MAPPING[config["model_type"]]
    defaults = config_class().to_dict()
    stated = {key: value for key, value in config.items() if key == "model_type" or value != defaults.get(key)}
    derived = config_class(**stated).to_dict()
    return stated | {key: value for key, value in config.items() if value != derived.get(key)}


def changed_keys(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields one key of a `tiny_config` with another value, for every key that the class declares and several values.

    The keys of a part of the model (text_config) are those of a class of its own, so they are left as they are.
    """
    # The classes of the first releases of transformers 5 are no dataclasses; there, values alone tell the types.
    fields: Mapping[str, Any] = getattr(CONFIG_MAPPING[config["model_type"]], "__dataclass_fields__", {})
    kinds = {name: str(each.type) for name, each in fields.items()}
    for key in [*config, *(kinds.keys() - config.keys())]:
        if key in _OF_NO_EFFECT or key.endswith("_config") or (key.endswith("token_id") and key != "pad_token_id"):
            continue
        value, kind = config.get(key), kinds.get(key, "")
        for other in (None, *_other_values(key, value, kind)):
            if (other, type(other)) != (value, type(value)):
                yield {key: other}


def _other_values(key: str, value: Any, kind: str) -> list[Any]:
    if key.endswith("layer_types"):
        stated = value or ["full_attention"] * NUM_LAYERS
        return [[name, *stated[1:]] for name in _KINDS] + [[name] * NUM_LAYERS for name in set(stated)]
    if key == "rope_parameters":
        types = [each for each in value or {} if isinstance(value[each], Mapping)]
        ropes = [{"rope_theta": 1e4} | rope for rope in _ROPES]
        return [value | {name: value[name] | rope} for name in types for rope in _ROPES] if types else ropes
    if key == "num_hidden_layers":
        return []  # every list states as many
    if type(value) is bool or "bool" in kind:
        return [True, False]
    if isinstance(value, str):
        return [*ACTIVATIONS] if "act" in key else ["unheard_of"]
    if isinstance(value, list):
        return [[], [0], [1], [0, 1] * (NUM_LAYERS // 2), [1, 0] * (NUM_LAYERS // 2)]
    if "float" in kind or type(value) is float:
        return [0.0, 1.7] if value is None else [0.0, 3.0 * value]
    if isinstance(value, int) or "int" in kind.replace("list[int]", ""):
        return [2, 7] if value is None else [0, value + 1, 2 * value]
    if "list[int]" in kind:
        return [[], [0], [1], [0, 1] * (NUM_LAYERS // 2), [1, 0] * (NUM_LAYERS // 2)]
    return [1, 0.5, True, {}]
