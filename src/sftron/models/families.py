"""The model types that are the block of llama.py, each with the defaults of its config class in transformers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one model_type reads config.json, where it differs from the others.

    architecture: transformers' class, by which loaders select theirs.
    defaults: the keys that it reads beside those that all read, and what it takes an absent one for.
    fixed: keys that it does not read; one that is there nevertheless has to say what the model does.
    biases: whether q, k and v have biases, and whether o has; None where attention_bias says both.
    qk_norm: q and k are normed, each head by itself, before they are rotated.
    """

    architecture: str
    defaults: Mapping[str, Any]
    fixed: Mapping[str, Any]
    biases: tuple[bool, bool] | None = None
    qk_norm: bool = False


_QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None}

FAMILIES: dict[str, Family] = {
    "llama": Family(
        architecture="LlamaForCausalLM",
        defaults={
            "max_position_embeddings": 2048,
            "num_key_value_heads": None,
            "head_dim": None,
            "attention_bias": False,
            "mlp_bias": False,
        },
        fixed={},
    ),
    "mistral": Family(
        architecture="MistralForCausalLM",
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "head_dim": None,
            "sliding_window": 4096,
        },
        fixed={"attention_bias": False, "mlp_bias": False},
        biases=(False, False),
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 32,
            "head_dim": None,
            **_QWEN_WINDOW,
        },
        fixed={"attention_bias": True, "mlp_bias": False, "use_mrope": False},
        biases=(True, False),
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "attention_bias": False,
            **_QWEN_WINDOW,
        },
        fixed={"mlp_bias": False},
        qk_norm=True,
    ),
}

_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "num_experts_per_tok")

_OTHERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "granite": ("it multiplies embeddings, residuals, attention scores and logits", _MULTIPLIERS),
    "smollm3": ("some of its layers have no rotary embedding", ("no_rope_layers", "no_rope_layer_interval")),
    "gemma": ("its norms multiply by 1 + weight, its embeddings are scaled", ("hidden_activation", "hidden_act")),
    "phi": ("it rotates a part of each head, or scales positions by longrope", ("partial_rotary_factor",)),
}
"""By the beginning of a model_type: why it is no Llama, and the keys that say so. Experts are told by their keys."""


def family_of(config: Mapping[str, Any]) -> Family:
    """Raises: ValueError for a model_type that is not implemented, with the reason where it is a well-known one."""
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type in FAMILIES:
        return FAMILIES[model_type]
    reason = _reason_against(str(model_type), config)
    raise ValueError(
        f"config.json: model_type is {model_type!r}, implemented are {', '.join(FAMILIES)}.{reason} "
        "Choose a checkpoint of one of these architectures."
    )


def _reason_against(model_type: str, config: Mapping[str, Any]) -> str:
    experts = [key for key in _EXPERTS if config.get(key)]
    # granitemoe and phimoe are mixtures before they are anything else.
    found = [("it is a mixture of experts", _EXPERTS)] if experts else []
    found += [other for name, other in _OTHERS.items() if model_type.startswith(name)]
    if not found:
        return ""
    why, keys = found[0]
    stated = ", ".join(f"{key}: {config[key]!r}" for key in keys if config.get(key) is not None)
    return f" It is no Llama: {why}{f' ({stated})' if stated else ''}."
