"""The file adapter_config.json of an adapter in peft's format: ranks, scaling and targets."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sftron.checkpoint.model_folder import read_json
from sftron.models.adapters import SAVED_MODULES, LoraSpec
from sftron.models.architecture import LlamaConfig
from sftron.models.wrappers import TEXT_MODEL

CONFIG = "adapter_config.json"

_IMPLEMENTED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none",),
    # Every other initialization changes the base weights, or needs data.
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),
}
"""Keys with few implemented values; the first one is peft's default."""
_IRRELEVANT = frozenset(
    {
        # Which layers are adapted follows from the tensors.
        *("layers_to_transform", "layers_pattern", "exclude_modules"),
        *("inference_mode", "lora_dropout", "peft_version", "auto_mapping", "megatron_core", "qalora_group_size"),
    }
)


def _is_rank(value: Any) -> bool:
    return type(value) is int and 0 < value <= 2**16


def _is_alpha(value: Any) -> bool:
    return type(value) in (int, float) and 0 < abs(value) < 1e12  # 0 would add nothing, and train nothing


def _is_expression(value: Any) -> bool:
    try:
        return isinstance(value, str) and re.compile(value) is not None
    except re.error:
        return False


def _is_pattern(value: Any, is_value: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(map(_is_expression, value)) and all(map(is_value, value.values()))


def _is_names(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(each, str) for each in value))


_BOOL = (False, lambda value: type(value) is bool, "true or false")
_NAME = (None, lambda value: value is None or isinstance(value, str), "a name")
_FORMS: dict[str, tuple[Any, Callable[[Any], bool], str]] = {
    "r": (8, _is_rank, "a whole number from 1 to 65536"),
    "lora_alpha": (8, _is_alpha, "a finite number other than 0"),
    "rank_pattern": ({}, partial(_is_pattern, is_value=_is_rank), "whole numbers above 0 by regular expressions"),
    "alpha_pattern": (
        {},
        partial(_is_pattern, is_value=_is_alpha),
        "finite numbers but 0 by regular expressions",
    ),
    "use_rslora": _BOOL,
    "use_dora": _BOOL,
    "ensure_weight_tying": _BOOL,
    "target_modules": (None, lambda value: _is_expression(value) or _is_names(value), "names or a regular expression"),
    "modules_to_save": (None, _is_names, "names"),
    "base_model_name_or_path": _NAME,
    "revision": _NAME,
}
"""The keys that are read: peft's default, a check, and the expected form."""


def read_adapter_config(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the content of adapter_config.json, and the keys that are read, with peft's defaults.

    Raises:
        ValueError: A value is not implemented; the message lists all of them.
    """
    stated = read_json(folder / CONFIG)
    if problems := _unimplemented(stated):
        raise ValueError(f"{folder / CONFIG}: not implemented:\n  " + "\n  ".join(problems))
    given = {key: value for key, value in stated.items() if value is not None}
    return stated, {key: given.get(key, default) for key, (default, *_) in _FORMS.items()}


def _unimplemented(stated: Mapping[str, Any]) -> list[str]:
    problems = [
        f"{key}: {stated.get(key, values[0])!r}, implemented is {' or '.join(map(repr, values))}"
        for key, values in _IMPLEMENTED.items()
        if stated.get(key, values[0]) not in values
    ]
    problems += [
        f"{key}: {stated[key]!r} is not {words}"
        for key, (_, is_right, words) in _FORMS.items()
        if stated.get(key) is not None and not is_right(stated[key])
    ]
    # Every other key that peft has is off by default: null, false or empty.
    others = stated.keys() - _IMPLEMENTED.keys() - _FORMS.keys() - _IRRELEVANT
    return problems + [f"{key}: {stated[key]!r}, implemented is null or false" for key in sorted(others) if stated[key]]


def renamed(name: str, old: str, new: str) -> str:
    """Returns the name with another prefix; the head has neither of them."""
    return new + name.removeprefix(old) if name.startswith(old) else name


def spec_of(
    folder: Path, values: Mapping[str, Any], adapted: Sequence[str], config: LlamaConfig, prefix: str
) -> LoraSpec:
    saved = {name.rpartition(".")[2] for name in values["modules_to_save"] or ()}
    if unknown := sorted(saved - SAVED_MODULES.keys()):
        raise ValueError(
            f"{folder / CONFIG}: modules_to_save: {unknown[0]!r}, implemented are {', '.join(SAVED_MODULES)}"
        )
    if config.tie_word_embeddings and saved:
        if saved != SAVED_MODULES.keys() and not values["ensure_weight_tying"]:
            raise ValueError(
                f"{folder / CONFIG}: modules_to_save: {', '.join(sorted(saved))} alone, but the base ties the head to "
                "the embeddings (tie_word_embeddings: true), so peft trained two different matrices. Merge the adapter "
                "with peft into a model with tie_word_embeddings: false, and train that."
            )
        saved = {"embed_tokens"}
    named = {name: renamed(name, TEXT_MODEL, prefix) for name in adapted}
    ranks, alphas = values["rank_pattern"], values["alpha_pattern"]
    return LoraSpec(
        ranks={name: _by_pattern(ranks, there, values["r"]) for name, there in named.items()},
        alphas={name: float(_by_pattern(alphas, there, values["lora_alpha"])) for name, there in named.items()},
        rslora=values["use_rslora"],
        dora=values["use_dora"],
        modules_to_save=tuple(name for name in SAVED_MODULES if name in saved),
    )


def _by_pattern(patterns: Mapping[str, Any], name: str, default: Any) -> Any:
    """Returns the value of the first pattern that matches the end of the name, as peft's get_pattern_key."""
    matching = (value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", name))
    return next(matching, default)


def adapter_config(spec: LoraSpec, projections: Collection[str], config: LlamaConfig, prefix: str) -> dict[str, Any]:
    """Returns adapter_config.json without the names of the base. Keys that are absent have peft's defaults.

    Inside a wrapper, all names are whole, because the last parts of some are those of layers for images as well.
    """
    rank, rank_pattern = _as_pattern({renamed(name, TEXT_MODEL, prefix): each for name, each in spec.ranks.items()})
    alpha, alpha_pattern = _as_pattern({renamed(name, TEXT_MODEL, prefix): each for name, each in spec.alphas.items()})
    complete = _last_parts(projections)
    targets = {_last(name) if complete[_last(name)] <= spec.ranks.keys() else name for name in spec.ranks}
    if prefix != TEXT_MODEL:
        targets = {renamed(name, TEXT_MODEL, prefix) for name in spec.ranks}
    is_tied = config.tie_word_embeddings and bool(spec.modules_to_save)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank or 1,
        "lora_alpha": alpha or 1,
        "rank_pattern": rank_pattern,
        "alpha_pattern": alpha_pattern,
        "target_modules": sorted(targets),
        "modules_to_save": sorted(SAVED_MODULES if is_tied else spec.modules_to_save) or None,
        "ensure_weight_tying": is_tied,
        "use_rslora": spec.rslora,
        "use_dora": spec.dora,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "lora_dropout": 0.0,
        "inference_mode": True,
    }


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _last_parts(names: Collection[str]) -> dict[str, set[str]]:
    """Returns the names by their last parts."""
    found: dict[str, set[str]] = {}
    for name in names:
        found.setdefault(_last(name), set()).add(name)
    return found


def _as_pattern(values: Mapping[str, float]) -> tuple[float | None, dict[str, float]]:
    """Returns the most frequent value, and the others by the last part of a name, or by the name if layers differ."""
    exact = {name: int(value) if value == int(value) else value for name, value in values.items()}
    default = max(Counter(exact.values()).items(), key=lambda each: (each[1], each[0]), default=(None, 0))[0]
    pattern: dict[str, float] = {}
    for last, names in _last_parts(exact).items():
        found = {exact[name] for name in names}
        keys = {last: found.pop()} if len(found) == 1 else {name: exact[name] for name in sorted(names)}
        pattern |= {key: value for key, value in keys.items() if value != default}
    return default, pattern
