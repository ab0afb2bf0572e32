"""Checkpoints of multimodal models, of which the text model is trained: its part of config.json, and of the weights.

    model_type    the text model's weights                                     carried through an export unchanged
    qwen3_5       model.language_model.*, lm_head                              model.visual.*, mtp.*
    gemma3        language_model.model.*, language_model.lm_head; newer files  vision_tower.*, multi_modal_projector.*,
    mistral3      as in qwen3_5                                                with and without model.
    qwen3_5_moe   as in qwen3_5                                                as in qwen3_5

Text alone is trained, and of text alone the wrapper's forward pass is that of its text model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A model_type whose checkpoints hold more than the text model."""

    carried: tuple[str, ...]
    """The prefixes of the names of all other tensors."""
    text_type: str | None
    """The default of text_config.model_type; None if config.json itself is that of the text model."""
    architecture: str | None = None
    """The wrapper's class in transformers; None as for text_type."""
    has_text_class: bool = False
    """Whether transformers' AutoModelForCausalLM loads the text model alone."""


_VISION = tuple(f"{prefix}{name}." for prefix in ("", "model.") for name in ("vision_tower", "multi_modal_projector"))
# Heads that predict further tokens; transformers does not load them.
_MTP = ("mtp.",)

WRAPPERS: dict[str, Wrapper] = {
    "qwen3_5": Wrapper(("model.visual.", *_MTP), "qwen3_5_text", "Qwen3_5ForConditionalGeneration", True),
    "qwen3_5_text": Wrapper(("model.visual.", *_MTP), None),
    "qwen3_5_moe": Wrapper(("model.visual.", *_MTP), "qwen3_5_moe_text", "Qwen3_5MoeForConditionalGeneration", True),
    "qwen3_5_moe_text": Wrapper(("model.visual.", *_MTP), None),
    "qwen3_next": Wrapper(_MTP, None),
    "gemma3": Wrapper(_VISION, "gemma3_text", "Gemma3ForConditionalGeneration"),
    "mistral3": Wrapper(_VISION, "mistral", "Mistral3ForConditionalGeneration"),
}

TEXT_MODEL, WRAPPED = "model.", "model.language_model."
"""The prefix of the names of all modules of a text model except the head, alone and inside a wrapper."""

_TEXT_PREFIXES = {
    WRAPPED: TEXT_MODEL,
    "language_model.model.": TEXT_MODEL,
    "language_model.lm_head.": "lm_head.",
}

_IMAGES = frozenset(
    {
        *("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
        *("image_token_index", "boi_token_index", "eoi_token_index", "mm_tokens_per_image", "spatial_merge_size"),
        *("multimodal_projector_bias", "projector_hidden_act", "vision_feature_layer", "initializer_range"),
    }
)
"""The keys of wrappers that do not affect the forward pass of text."""


def wrapper_of(config: Mapping[str, Any]) -> Wrapper | None:
    """Returns the wrapper that a config.json describes; None if it is that of a text model."""
    wrapper = WRAPPERS.get(str(config.get("model_type")))
    return None if wrapper is None or wrapper.text_type is None else wrapper


def text_config(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the config of the text model in a config.json, and the wrapper's own keys that concern it as well.

    Raises:
        ValueError: A wrapper has no text_config, or it contradicts the wrapper.
    """
    wrapper = wrapper_of(config)
    if wrapper is None:
        return dict(config), {}
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise ValueError(f"config.json: text_config is {text!r}, expected the config of the text model as an object")
    others = {key: value for key, value in config.items() if key not in _IMAGES and key != "text_config"}
    # The wrapper's own value counts for its class in transformers, and the text model's for the class of text alone.
    tied = {text["tie_word_embeddings"]} if text.get("tie_word_embeddings") is not None else set()
    tied |= {others.pop("tie_word_embeddings")} if others.get("tie_word_embeddings") is not None else set()
    others.pop("tie_word_embeddings", None)
    if len(tied) > 1:
        raise ValueError("config.json: tie_word_embeddings contradicts text_config.tie_word_embeddings; correct one")
    is_tied = {"tie_word_embeddings": tied.pop()} if tied else {}
    return {"model_type": wrapper.text_type, **text, **is_tied}, others


def in_wrapper(config: Mapping[str, Any]) -> str:
    """Returns what TEXT_MODEL is called in the class that a config.json names (architectures)."""
    return TEXT_MODEL if wrapper_of(config) is None else WRAPPED


def with_text_config(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config.json with changes to the config of its text model."""
    if wrapper_of(config) is None:
        return {**config, **changes}
    return {**config, "text_config": {**config["text_config"], **changes}}


def text_names(stored: Iterable[str], model_type: Any) -> tuple[dict[str, str], list[str]]:
    """Returns the stored name of each tensor of the text model by its usual name, and the names of carried tensors.

    Raises:
        ValueError: Two stored names have the same usual name.
    """
    wrapper = WRAPPERS.get(str(model_type))
    if wrapper is None:
        return {name: name for name in stored}, []
    names: dict[str, str] = {}
    carried: list[str] = []
    for name in stored:
        if name.startswith(wrapper.carried):
            carried.append(name)
            continue
        prefix = next((prefix for prefix in _TEXT_PREFIXES if name.startswith(prefix)), "")
        usual = _TEXT_PREFIXES.get(prefix, "") + name.removeprefix(prefix)
        if usual in names:
            raise ValueError(f"the tensors {names[usual]} and {name} are both {usual} of the text model; remove one")
        names[usual] = name
    return names, carried
