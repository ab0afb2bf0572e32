"""The rotary embeddings that a config.json describes, in the spellings of transformers 4 and 5."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sftron.kernels.table import LinearScaling, Llama3Scaling, RopeScaling, RopeSpec

ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
"""The keys that `read_ropes` reads for every family."""

FULL, SLIDING = "full_attention", "sliding_attention"
"""The values of `layer_types`, which are also the keys of `rope_parameters` in families with a rope for each type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeKeys:
    """How a family states its rotary embeddings: the defaults of its config class in transformers."""

    theta: float = 10000.0
    """The default of `rope_theta`."""
    partial: float | None = None
    """The default of `partial_rotary_factor`; None means that the family always rotates whole heads."""
    interleaved: bool = False
    """Whether the pairs that are rotated are neighbors in a head, rather than one in each half."""
    sliding_theta: float | None = None
    """The default theta of sliding layers, in families that have another rope for them; the others have None."""
    sliding_key: str | None = None
    """The key of transformers 4 for the theta of sliding layers."""
    irrelevant: frozenset[str] = frozenset()
    """Entries of `rope_parameters` that do not affect the positions of text."""


_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_SCALINGS: dict[str, tuple[type[RopeScaling] | None, tuple[str, ...]]] = {
    "default": (None, ()),
    "linear": (LinearScaling, ("factor",)),
    "llama3": (Llama3Scaling, _NUMBERS),
}
"""For each rope_type: its scaling, and the keys that it needs."""


def read_ropes(
    given: Mapping[str, Any], keys: RopeKeys, *, head_dim: Any, max_positions: Any, layer_types: Sequence[str]
) -> tuple[tuple[RopeSpec, ...], tuple[int, ...], list[str]]:
    """Returns the distinct ropes of a model, the index of each layer's rope, and the problems of the keys.

    Args:
        given: The keys of config.json that are not null.
        head_dim, max_positions: The values of the model, which may be of a wrong type; another function reports that.
        layer_types: FULL or SLIDING for each layer.
    """
    name = "rope_parameters" if "rope_parameters" in given else "rope_scaling"
    problems, specs = [], dict[str, RopeSpec]()
    for layer_type, entries in _entries_by_type(given, keys, max_positions).items():
        label = name if keys.sliding_theta is None else f"{name}.{layer_type}"
        spec, wrong = _read_rope(entries, label, keys, head_dim if type(head_dim) is int else 0)
        problems += wrong
        if layer_type == FULL:
            old = _completed(given.get("rope_scaling", {}), None, given, keys, max_positions)
            problems += _contradictions(given, label, entries, old)
        if spec is not None:
            specs[layer_type] = spec
    if problems:
        return (), (), problems
    used = [specs.get(layer_type, specs[FULL]) for layer_type in layer_types]
    ropes = tuple(dict.fromkeys(used))
    return ropes, tuple(ropes.index(each) for each in used), []


def complete_rope_keys(config: Mapping[str, Any], keys: RopeKeys, max_positions: int) -> dict[str, Any]:
    """Returns the rope keys of a config.json that `read_ropes` accepts, in the spellings of transformers 4 and 5."""
    given = {key: value for key, value in config.items() if value is not None}
    entries = _entries_by_type(given, keys, max_positions)
    full = entries[FULL]
    scaling = {key: value for key, value in full.items() if key not in ("rope_theta", "partial_rotary_factor")}
    return {
        "rope_theta": full["rope_theta"],
        "rope_scaling": scaling if scaling["rope_type"] != "default" else None,
        "rope_parameters": full if keys.sliding_theta is None else entries,
        **({keys.sliding_key: entries[SLIDING]["rope_theta"]} if keys.sliding_key else {}),
    }


def is_finite(value: Any) -> bool:
    """Returns whether a value is a finite number, because Python's JSON reader accepts NaN and Infinity."""
    return type(value) in (int, float) and math.isfinite(value)


def _entries_by_type(given: Mapping[str, Any], keys: RopeKeys, max_positions: Any) -> dict[str, dict[str, Any]]:
    """Returns the entries of `rope_parameters`, with their defaults, for each type of layers that has a rope."""
    stated = given.get("rope_parameters", given.get("rope_scaling", {}))
    if keys.sliding_theta is None:
        return {FULL: _completed(stated, given.get("rope_theta", keys.theta), given, keys, max_positions)}
    is_nested = "rope_parameters" in given and isinstance(stated, Mapping)
    full, sliding = (stated.get(FULL) or {}, stated.get(SLIDING) or {}) if is_nested else (stated, {})
    others = {key: stated[key] for key in stated.keys() - {FULL, SLIDING}} if is_nested else {}
    sliding_theta = given.get(keys.sliding_key or "", keys.sliding_theta)
    return {
        FULL: others | _completed(full, given.get("rope_theta", keys.theta), given, keys, max_positions),
        SLIDING: _completed(sliding, sliding_theta, given, keys, max_positions),
    }


def _completed(stated: Any, theta: Any, given: Mapping[str, Any], keys: RopeKeys, max_positions: Any) -> dict[str, Any]:
    entries = {"rope_theta": theta, **_entries(stated)}
    if keys.partial is not None or "partial_rotary_factor" in given:
        entries.setdefault("partial_rotary_factor", given.get("partial_rotary_factor", keys.partial))
    if "original_max_position_embeddings" in _SCALINGS.get(entries["rope_type"], (None, ()))[1]:
        entries.setdefault("original_max_position_embeddings", max_positions)
    return entries


def _entries(stated: Any) -> dict[str, Any]:
    """Returns the entries that are not null; the oldest name of rope_type is `type`."""
    stated = stated if isinstance(stated, Mapping) else {"rope_type": stated}
    entries = {key: value for key, value in stated.items() if value is not None}
    oldest = entries.pop("type", "default")
    return {"rope_type": str(entries.pop("rope_type", oldest)), **entries}


def _contradictions(
    given: Mapping[str, Any], name: str, entries: Mapping[str, Any], old: Mapping[str, Any]
) -> list[str]:
    """Returns the problems of keys of transformers 4 that differ from the entries of `rope_parameters`."""
    elsewhere = ("rope_theta", "partial_rotary_factor")
    problems = [
        f"{key}: {given[key]!r} contradicts {name}.{key}: {entries[key]!r}"
        for key in elsewhere
        if key in given and entries[key] != given[key]
    ]
    if "rope_scaling" in given and any(old.get(key) != entries.get(key) for key in {*old, *entries} - {*elsewhere}):
        problems.append(f"rope_scaling: {given['rope_scaling']!r} contradicts {name}: {dict(entries)!r}")
    return problems


def _read_rope(
    entries: Mapping[str, Any], name: str, keys: RopeKeys, head_dim: int
) -> tuple[RopeSpec | None, list[str]]:
    partial = entries.get("partial_rotary_factor", 1.0)
    rotary_dim = int(head_dim * partial) if is_finite(partial) and 0 < partial <= 1 else 0
    numbers = {key: entries[key] for key in ("rope_theta", *_NUMBERS) if key in entries}
    problems = [
        f"{key}: {value!r} is not a finite number above 0"
        for key, value in numbers.items()
        if not is_finite(value) or value <= 0
    ]
    if keys.partial is None and partial != 1.0:
        problems.append(f"{name}.partial_rotary_factor: {partial!r}, implemented is 1.0")
    elif head_dim and (rotary_dim % 2 or not rotary_dim) and partial != 1.0:
        problems.append(
            f"{name}.partial_rotary_factor: {partial!r} does not rotate an even part of head_dim: {head_dim}"
        )
    rope_type = entries["rope_type"]
    if rope_type not in _SCALINGS:
        return None, [*problems, f"{name}.rope_type: {rope_type!r}, implemented are {', '.join(_SCALINGS)}"]
    kind, needed = _SCALINGS[rope_type]
    unknown = entries.keys() - {"rope_type", "rope_theta", "partial_rotary_factor", *needed} - keys.irrelevant
    problems += [f"{name}.{key}: missing in rope_type {rope_type!r}" for key in needed if key not in entries]
    problems += [f"{name}.{key}: {entries[key]!r}, unknown to rope_type {rope_type!r}" for key in sorted(unknown)]
    if problems:
        return None, problems
    scaling = kind(**{key: entries[key] for key in needed}) if kind else None
    theta = entries["rope_theta"]
    return RopeSpec(theta=theta, rotary_dim=rotary_dim, interleaved=keys.interleaved, scaling=scaling), []
