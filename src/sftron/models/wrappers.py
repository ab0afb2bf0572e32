"""Checkpoints that hold more than the weights of a text model: other tensors, constants, and keys of config.json.

    model_type    the text model's weights                                     carried through an export unchanged
    qwen3_5, and  model.language_model.*, lm_head                              model.visual.*, mtp.*
    qwen3_5_moe
    gemma4        as in qwen3_5                                                model.{vision,audio}_tower.*, and
                                                                               model.embed_{vision,audio}.*
    deepseek_v3   model.*, lm_head                                             model.layers.N.*, where N is a layer
                                                                               beyond num_hidden_layers
    all others    language_model.model.*, language_model.lm_head; newer files  vision_tower.*, multi_modal_projector.*,
                  as in qwen3_5                                                image_newline, with and without model.

The constants of a family (`Family.constants`) are carried as well, and have to have their values.

Text alone is trained, and of text alone the wrapper's forward pass is that of its text model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sftron.models.families.table import FAMILIES


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
    ties: bool = True
    """The default of the wrapper's own tie_word_embeddings, by which its class in transformers ties the head."""
    ties_if_text_does: bool = False
    """Whether that class ties the head also if only text_config.tie_word_embeddings is true."""
    bounds_logits: bool = False
    """Whether that class applies the soft cap of the logits of text_config."""
    further_layers: bool = False
    """Whether layers beyond num_hidden_layers, as many as num_nextn_predict_layers, are carried. They predict further
    tokens, and transformers does not load them."""


_VISION = tuple(
    f"{prefix}{name}"
    for prefix in ("", "model.")
    for name in ("vision_tower.", "multi_modal_projector.", "image_newline")
)
_SOUNDS = ("model.vision_tower.", "model.audio_tower.", "model.embed_vision.", "model.embed_audio.")
# Heads that predict further tokens; transformers does not load them.
_MTP = ("mtp.",)

_FURTHER_LAYERS = Wrapper((), None, further_layers=True)

WRAPPERS: dict[str, Wrapper] = {
    "qwen3_5": Wrapper(("model.visual.", *_MTP), "qwen3_5_text", "Qwen3_5ForConditionalGeneration", True, ties=False),
    "qwen3_5_text": Wrapper(("model.visual.", *_MTP), None),
    "qwen3_5_moe": Wrapper(
        ("model.visual.", *_MTP), "qwen3_5_moe_text", "Qwen3_5MoeForConditionalGeneration", True, ties=False
    ),
    "qwen3_5_moe_text": Wrapper(("model.visual.", *_MTP), None),
    "qwen3_next": Wrapper(_MTP, None),
    "gemma3": Wrapper(_VISION, "gemma3_text", "Gemma3ForConditionalGeneration"),
    "gemma4": Wrapper(_SOUNDS, "gemma4_text", "Gemma4ForConditionalGeneration", bounds_logits=True),
    "gemma4_unified": Wrapper(
        (*_SOUNDS, "model.vision_embedder."),
        "gemma4_unified_text",
        "Gemma4UnifiedForConditionalGeneration",
        bounds_logits=True,
    ),
    "mistral3": Wrapper(_VISION, "mistral", "Mistral3ForConditionalGeneration"),
    "internvl": Wrapper(_VISION, "qwen2", "InternVLForConditionalGeneration"),
    "llava": Wrapper(_VISION, "llama", "LlavaForConditionalGeneration", ties=False, ties_if_text_does=True),
    "llava_next": Wrapper(_VISION, "llama", "LlavaNextForConditionalGeneration", ties=False),
    "llava_onevision": Wrapper(
        _VISION, "qwen2", "LlavaOnevisionForConditionalGeneration", ties=False, ties_if_text_does=True
    ),
    **dict.fromkeys(("glm4_moe", "glm4_moe_lite", "deepseek_v3"), _FURTHER_LAYERS),
}

TEXT_MODEL, WRAPPED = "model.", "model.language_model."
"""The prefix of the names of all modules of a text model except the head, alone and inside a wrapper."""

_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")

_TEXT_PREFIXES = {
    WRAPPED: TEXT_MODEL,
    "language_model.model.": TEXT_MODEL,
    "language_model.lm_head.": "lm_head.",
}

_TIED = "tie_word_embeddings"

_IMAGES = frozenset(
    {
        *("audio_config", "audio_token_id", "boi_token_id", "eoi_token_id", "boa_token_id", "eoa_token_index"),
        *("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
        *("image_token_index", "boi_token_index", "eoi_token_index", "mm_tokens_per_image", "spatial_merge_size"),
        *("multimodal_projector_bias", "projector_hidden_act", "vision_feature_layer", "initializer_range"),
        *("vision_feature_select_strategy", "image_seq_length", "image_grid_pinpoints", "vision_aspect_ratio"),
        *("video_token_index", "downsample_ratio", "ignore_index"),
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
        ValueError: A wrapper has no text_config.
    """
    wrapper = wrapper_of(config)
    if wrapper is None:
        return dict(config), {}
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise ValueError(f"config.json: text_config is {text!r}, expected the config of the text model as an object")
    others = {key: value for key, value in config.items() if key not in _IMAGES and key not in ("text_config", _TIED)}
    return {"model_type": wrapper.text_type, **text}, others


def wrapper_ties(config: Mapping[str, Any], text_ties: bool) -> bool:
    """Returns whether the class in transformers of a config.json ties the head to the embeddings.

    Args:
        text_ties: The value of the text model's config. Without a wrapper it decides, in one the wrapper's own key.

    Raises:
        ValueError: transformers has a class for the wrapper and one for its text model, of which one ties the head.
    """
    wrapper = wrapper_of(config)
    if wrapper is None:
        return text_ties
    stated = config.get(_TIED, wrapper.ties)
    if type(stated) is not bool:
        raise ValueError(f"config.json: {_TIED}: {stated!r} is neither true nor false")
    is_tied = stated or (wrapper.ties_if_text_does and text_ties)
    if wrapper.has_text_class and is_tied != text_ties:
        raise ValueError(
            f"config.json: {_TIED} is {is_tied} for {wrapper.architecture}, but {text_ties} in text_config, by which "
            "AutoModelForCausalLM loads the text model alone, and there is no head that suits both: correct one of them"
        )
    return is_tied


def wrong_head(config: Mapping[str, Any], text: Mapping[str, Any]) -> list[str]:
    """Returns a problem for each thing that the text model does to its logits and the wrapper's class leaves out.

    Args:
        text: The fields of LlamaConfig.
    """
    wrapper = wrapper_of(config)
    if wrapper is None:
        return []
    left_out = {"a factor": text["logit_scale"] != 1, "a bias": text["head_bias"]}
    left_out["a soft cap"] = text["logit_softcap"] is not None and not wrapper.bounds_logits
    return [
        f"text_config: its logits have {what}, which {wrapper.architecture} of transformers leaves out"
        for what, is_left_out in left_out.items()
        if is_left_out
    ]


def with_stored_head(config: Mapping[str, Any], is_equal: bool) -> dict[str, Any]:
    """Returns the config.json of a wrapper as transformers reads it if the folder stores a head.

    Each class takes that head, and ties it only if it `is_equal` to the embeddings.
    """
    text = text_config(config)[0]
    wrapper = wrapper_of(config)
    assert wrapper is not None
    is_tied = bool(config.get(_TIED, wrapper.ties)) or (wrapper.ties_if_text_does and bool(text.get(_TIED)))
    return {**config, _TIED: is_tied and is_equal, "text_config": {**text, _TIED: is_tied and is_equal}}


def in_wrapper(config: Mapping[str, Any]) -> str:
    """Returns what TEXT_MODEL is called in the class that a config.json names (architectures)."""
    return TEXT_MODEL if wrapper_of(config) is None else WRAPPED


def with_text_config(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config.json with changes to the config of its text model."""
    if wrapper_of(config) is None:
        return {**config, **changes}
    return {**config, "text_config": {**config["text_config"], **changes}}


_OF_KEYS = re.compile(r"model\.layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.")


def _is_unread(usual: str, text: Mapping[str, Any]) -> bool:
    """Returns whether a tensor belongs to keys or values of its own in a layer that reads those of another layer.

    Published files of Gemma 4 may hold such tensors, and transformers does not load them.
    """
    num_layers, num_shared = text.get("num_hidden_layers"), text.get("num_kv_shared_layers")
    found = _OF_KEYS.match(usual)
    return bool(num_layers and num_shared and found and int(found[1]) >= num_layers - num_shared)


def text_names(stored: Iterable[str], config: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Returns the stored name of each tensor of the text model by its usual name, and the names of carried tensors.

    Args:
        stored: The names in the files.
        config: The content of config.json; empty for other files than a model's.

    Raises:
        ValueError: Two stored names have the same usual name.
    """
    wrapper, text = WRAPPERS.get(str(config.get("model_type"))), text_config(config)[0]
    constants = tuple(_constants(text.get("model_type")))
    further = _further_layers(config) if wrapper is not None and wrapper.further_layers else range(0)
    names: dict[str, str] = {}
    carried: list[str] = []
    for name in stored:
        prefix = next((prefix for prefix in _TEXT_PREFIXES if wrapper and name.startswith(prefix)), "")
        usual = _TEXT_PREFIXES.get(prefix, "") + name.removeprefix(prefix)
        layer = _LAYER.match(usual)
        is_further = layer is not None and int(layer[1]) in further
        is_of_wrapper = wrapper is not None and name.startswith(wrapper.carried)
        if is_of_wrapper or is_further or name.endswith(constants) or _is_unread(usual, text):
            carried.append(name)
            continue
        if usual in names:
            raise ValueError(f"the tensors {names[usual]} and {name} are both {usual} of the text model; remove one")
        names[usual] = name
    return names, carried


def wrong_constants(carried: Mapping[str, Callable[[], Tensor]], model_type: Any) -> list[str]:
    """Returns a problem for each constant that is not the family's, to within the rounding of bf16.

    Args:
        carried: Functions that read the carried tensors, by their stored names.
    """
    problems = []
    for name, read in carried.items():
        for constant in (value for end, value in _constants(model_type).items() if name.endswith(end)):
            stored = read().double()
            if not torch.allclose(stored, torch.full_like(stored, constant), atol=0, rtol=2**-8):
                problems.append(f"{name}: {stored.tolist()}; sftron supports only {constant}")
    return problems


def _constants(model_type: Any) -> Mapping[str, float]:
    family = FAMILIES.get(str(model_type))
    return {} if family is None else family.constants


def _further_layers(config: Mapping[str, Any]) -> range:
    """Returns the numbers of the layers that predict further tokens; a config.json with wrong numbers has none."""
    first, stated = config.get("num_hidden_layers"), config.get("num_nextn_predict_layers")
    number = config.get("num_mtp_layers") if stated is None else stated
    return range(first, first + number) if type(first) is int and type(number) is int else range(0)
