"""The rotary embeddings that a config.json describes, in the spellings of transformers 4 and 5."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sftron.kernels.table import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    QueryScaling,
    RopeScaling,
    RopeSpec,
    YarnScaling,
)

FULL, SLIDING = "full_attention", "sliding_attention"
"""The values of `layer_types`, which are also the keys of `rope_parameters` in families with a rope for each type."""
PROPORTIONAL = "proportional"
"""The value of `rope_type` of families whose `partial_rotary_factor` is that of such a rope (Gemma 4)."""
_ORIGINAL, _BETA, _ALPHA = "original_max_position_embeddings", "llama_4_scaling_beta", "alpha"
_NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": ("factor", _ORIGINAL),
    "longrope": ("short_factor", "long_factor", _ORIGINAL),
    PROPORTIONAL: (),
}
"""The keys that each rope_type needs."""


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
    original: int | None = None
    """The default of the key `original_max_position_embeddings`, in families that read it (Phi 3)."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """The value of `rope_parameters` if a config.json has no such key."""
    scales_queries: bool = False
    """Whether queries are multiplied by a factor that depends on `llama_4_scaling_beta`."""
    reads_alpha: bool = False
    """Whether `alpha` in rope_type 'dynamic' makes theta a larger constant, whatever the length (Hunyuan)."""
    types: tuple[str, ...] = tuple(each for each in _NEEDED if each != PROPORTIONAL)
    """The implemented values of `rope_type`."""
    only_parameters: bool = False
    """Whether `rope_parameters` is the only key, as in families that transformers 4 does not have."""
    size: str = "head_dim"
    """The key of the number of dimensions of a head that a rope is for."""
    ignored: tuple[str, ...] = ()
    """Keys of `rope_parameters` that have no effect on text."""

    @property
    def read(self) -> set[str]:
        """The keys of config.json that `read_ropes` reads."""
        if self.only_parameters:
            return {"rope_parameters"}
        keys = {"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"}
        keys |= {self.sliding_key} if self.sliding_key else set()
        return keys | ({_ORIGINAL} if self.original else set())


_OPTIONAL: dict[str, tuple[str, ...]] = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("attention_factor", "factor"),
    PROPORTIONAL: ("factor",),
}
_ELSEWHERE = ("rope_theta", "partial_rotary_factor")
"""The entries of `rope_parameters` that are keys of config.json itself in transformers 4."""


def read_ropes(
    given: Mapping[str, Any],
    keys: RopeKeys,
    *,
    head_dims: Mapping[str, Any],
    max_positions: Any,
    layer_types: Sequence[str],
) -> tuple[tuple[RopeSpec, ...], tuple[int, ...], list[str]]:
    """Returns the distinct ropes of a model, the index of each layer's rope, and the problems of the keys.

    Args:
        given: The keys of config.json that are not null.
        head_dims: The size of a head for each type of layers. It and max_positions may be of a wrong type, which
            another function reports.
        layer_types: FULL or SLIDING for each layer.
    """
    name = "rope_parameters" if "rope_parameters" in given else "rope_scaling"
    problems, specs = [], dict[str, RopeSpec]()
    for layer_type, entries in _entries_by_type(given, keys, max_positions).items():
        label = name if keys.sliding_theta is None else f"{name}.{layer_type}"
        head_dim = head_dims[layer_type]
        spec, wrong = _read_rope(entries, label, keys, head_dim if type(head_dim) is int else 0, max_positions)
        problems += wrong
        if layer_type == FULL:
            problems += _ignored_type(given.get("rope_scaling"), keys)
            old = _completed(given.get("rope_scaling", {}), None, given, keys, max_positions)
            problems += _contradictions(given, label, entries, old)
        elif (
            keys.sliding_key is not None and given.get(keys.sliding_key, entries["rope_theta"]) != entries["rope_theta"]
        ):
            stated = given[keys.sliding_key]
            problems.append(f"{keys.sliding_key}: {stated!r} contradicts {label}.rope_theta: {entries['rope_theta']!r}")
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
    if keys.only_parameters:
        return {"rope_parameters": entries}
    full = entries[FULL]
    scaling = {key: value for key, value in full.items() if key not in _ELSEWHERE}
    if keys.original is not None and scaling.keys() == {"rope_type", "short_factor", "long_factor", _ORIGINAL}:
        # transformers 4 requires exactly these three entries.
        scaling = {"type": "longrope"} | {key: scaling[key] for key in ("short_factor", "long_factor")}
    return {
        # transformers 5 takes rope_scaling in place of rope_parameters, so it has to find these here as well.
        **{key: full[key] for key in _ELSEWHERE if key in full},
        # Without it, a family has its own default of rope_parameters.
        "rope_scaling": scaling if keys.parameters or scaling != {"rope_type": "default"} else None,
        "rope_parameters": full if keys.sliding_theta is None else entries,
        **({keys.sliding_key: entries[SLIDING]["rope_theta"]} if keys.sliding_key else {}),
    }


def is_finite(value: Any) -> bool:
    """Returns whether a value is a finite number, because Python's JSON reader accepts NaN and Infinity."""
    return type(value) in (int, float) and math.isfinite(value)


def _entries_by_type(given: Mapping[str, Any], keys: RopeKeys, max_positions: Any) -> dict[str, dict[str, Any]]:
    """Returns the entries of `rope_parameters`, with their defaults, for each type of layers that has a rope."""
    stated = given.get("rope_parameters", given.get("rope_scaling", keys.parameters))
    if keys.sliding_theta is None:
        return {FULL: _completed(stated, given.get("rope_theta", keys.theta), given, keys, max_positions)}
    is_nested = isinstance(stated, Mapping) and ("rope_parameters" in given or stated is keys.parameters)
    full, sliding = (stated.get(FULL) or {}, stated.get(SLIDING) or {}) if is_nested else (stated, {})
    others = {key: stated[key] for key in stated.keys() - {FULL, SLIDING}} if is_nested else {}
    sliding_theta = given.get(keys.sliding_key or "", keys.sliding_theta)
    return {
        FULL: others | _completed(full, given.get("rope_theta", keys.theta), given, keys, max_positions),
        SLIDING: _completed(sliding, sliding_theta, given, keys, max_positions),
    }


def _completed(stated: Any, theta: Any, given: Mapping[str, Any], keys: RopeKeys, max_positions: Any) -> dict[str, Any]:
    entries = {"rope_theta": theta, **_entries(stated)}
    if keys.original is not None and entries["rope_type"] in ("su", "yarn"):
        entries["rope_type"] = "longrope"  # the names of Phi 3's first releases
    if keys.partial is not None or "partial_rotary_factor" in given:
        entries.setdefault("partial_rotary_factor", given.get("partial_rotary_factor", keys.partial))
    if _ORIGINAL in _NEEDED.get(entries["rope_type"], ()):
        if keys.original is None:
            entries.setdefault(_ORIGINAL, max_positions)
        else:
            # transformers ignores the entry of this name in these families.
            entries[_ORIGINAL] = given.get(_ORIGINAL, keys.original)
    return entries


def _entries(stated: Any) -> dict[str, Any]:
    """Returns the entries that are not null; the oldest name of rope_type is `type`."""
    stated = stated if isinstance(stated, Mapping) else {"rope_type": stated}
    entries = {key: value for key, value in stated.items() if value is not None}
    oldest = entries.pop("type", "default")
    return {"rope_type": str(entries.pop("rope_type", oldest)), **entries}


def _ignored_type(scaling: Any, keys: RopeKeys) -> list[str]:
    """Returns a problem if transformers 5 would compute a model without the scaling that transformers 4 computes."""
    if keys.sliding_theta is None or not isinstance(scaling, Mapping) or "type" not in scaling.keys() - {"rope_type"}:
        return []
    return [f"rope_scaling.type: {scaling['type']!r}, which transformers 5 ignores in this family; name it rope_type"]


def _contradictions(
    given: Mapping[str, Any], name: str, entries: Mapping[str, Any], old: Mapping[str, Any]
) -> list[str]:
    """Returns the problems of keys of transformers 4 that differ from the entries of `rope_parameters`."""
    problems = [
        f"{key}: {given[key]!r} contradicts {name}.{key}: {entries[key]!r}"
        for key in _ELSEWHERE
        if key in given and entries[key] != given[key]
    ]
    if "rope_scaling" in given and any(old.get(key) != entries.get(key) for key in {*old, *entries} - {*_ELSEWHERE}):
        problems.append(f"rope_scaling: {given['rope_scaling']!r} contradicts {name}: {dict(entries)!r}")
    return problems


def _read_rope(
    entries: Mapping[str, Any], name: str, keys: RopeKeys, head_dim: int, max_positions: Any
) -> tuple[RopeSpec | None, list[str]]:
    rope_type, partial = entries["rope_type"], entries.get("partial_rotary_factor", 1.0)
    rotary_dim = int(head_dim * partial) if is_finite(partial) and 0 < partial <= 1 else 0
    if rope_type == PROPORTIONAL and rotary_dim > 1:
        partial, rotary_dim = 1.0, head_dim
    problems = _wrong_numbers(entries, name, rotary_dim)
    # In Python, True == 1.0.
    is_whole = partial == 1.0 and type(partial) is not bool
    if keys.partial is None and not is_whole:
        problems.append(f"{name}.partial_rotary_factor: {partial!r}; sftron supports only 1.0")
    elif head_dim and (rotary_dim % 2 or not rotary_dim) and not is_whole:
        problems.append(f"{name}.partial_rotary_factor: {partial!r} of head_dim {head_dim} is not an even number")
    if rope_type not in keys.types:
        return None, [*problems, f"{name}.rope_type: {rope_type!r}; sftron supports only {', '.join(keys.types)}"]
    needed, optional = _NEEDED[rope_type], _OPTIONAL.get(rope_type, ())
    if keys.scales_queries:
        needed = tuple(dict.fromkeys((*needed, _BETA, _ORIGINAL)))
    has_alpha = keys.reads_alpha and rope_type == "dynamic" and _ALPHA in entries
    optional += (_ALPHA,) if has_alpha else ()
    unknown = entries.keys() - {"rope_type", *_ELSEWHERE, *needed, *optional, *keys.ignored}
    problems += [f"{name}.{key}: missing in rope_type {rope_type!r}" for key in needed if key not in entries]
    problems += [f"{name}.{key}: {entries[key]!r}, unknown to rope_type {rope_type!r}" for key in sorted(unknown)]
    if keys.sliding_theta is not None and entries.get("truncate") is False:
        # transformers reads the key along with the types of layers; this project does not.
        problems.append(f"{name}.truncate: False; sftron supports only True")
    if rope_type == "yarn" and is_finite(entries["rope_theta"]) and entries["rope_theta"] <= 1:
        problems.append(f"rope_theta: {entries['rope_theta']!r} is not above 1, as rope_type 'yarn' needs")
    if rope_type == "dynamic" and rotary_dim == 2:
        problems.append("head_dim: 2 rotated dimensions, but rope_type 'dynamic' needs more than 2")
    if problems:
        return None, problems
    query_scaling = None
    if keys.scales_queries:
        query_scaling = QueryScaling(beta=entries[_BETA], original_max_position_embeddings=entries[_ORIGINAL])
    theta = entries["rope_theta"]
    if has_alpha:
        theta, rope_type = theta * entries[_ALPHA] ** (rotary_dim / (rotary_dim - 2)), "default"
    spec = RopeSpec(
        theta=theta,
        rotary_dim=rotary_dim,
        interleaved=keys.interleaved,
        scaling=_scaling(rope_type, max_positions, entries, head_dim),
        query_scaling=query_scaling,
    )
    return spec, []


def _wrong_numbers(entries: Mapping[str, Any], name: str, rotary_dim: int) -> list[str]:
    """Returns the problems of entries that are not a number above 0, a list of such numbers, or a boolean."""
    problems = []
    for key, value in entries.items():
        if key in ("short_factor", "long_factor"):
            is_list = isinstance(value, list) and all(is_finite(each) and each > 0 for each in value)
            if not is_list or (rotary_dim and len(value) != rotary_dim // 2):
                problems.append(f"{name}.{key}: {value!r} is not a list of {rotary_dim // 2} finite numbers above 0")
        elif key == "truncate":
            problems += [] if type(value) is bool else [f"{name}.{key}: {value!r} is neither true nor false"]
        elif key == _ORIGINAL:
            is_number = type(value) is int and value > 1
            problems += [] if is_number else [f"{name}.{key}: {value!r} is not a whole number above 1"]
        elif any(key in (*_NEEDED[each], *_OPTIONAL.get(each, ()), "rope_theta", _BETA, _ALPHA) for each in _NEEDED):
            is_number = is_finite(value) and (value > 0 or (value == 0 and key in ("mscale", "mscale_all_dim", _BETA)))
            label = key if key in _ELSEWHERE else f"{name}.{key}"
            problems += [] if is_number else [f"{label}: {value!r} is not a finite number above 0"]
    return problems


def _scaling(rope_type: str, max_positions: int, entries: Mapping[str, Any], head_dim: int) -> RopeScaling | None:
    """Returns the scaling of valid entries, with the defaults of transformers."""
    stated = {key: entries[key] for key in (*_NEEDED[rope_type], *_OPTIONAL.get(rope_type, ())) if key in entries}
    match rope_type:
        case "linear":
            return LinearScaling(**stated)
        case "dynamic":
            return DynamicScaling(**stated, original_max_position_embeddings=max_positions)
        case "llama3":
            return Llama3Scaling(**stated)
        case "yarn":
            mscale, all_dim = stated.pop("mscale", 0.0), stated.pop("mscale_all_dim", 0.0)
            upper, lower = (mscale, all_dim) if mscale and all_dim else (1.0, 0.0)
            log = max(math.log(stated["factor"]), 0.0)
            attention_factor = (0.1 * upper * log + 1) / (0.1 * lower * log + 1)
            return YarnScaling(**{"attention_factor": attention_factor, **stated})
        case "longrope":
            original = stated[_ORIGINAL]
            stated_factor = stated.pop("factor", None)
            if stated_factor is None:
                # Positions of a wrong type are reported by another function.
                stated_factor = max_positions / original if is_finite(max_positions) else 1.0
            factor = max(stated_factor, 1.0)
            factors = {key: tuple(stated.pop(key)) for key in ("short_factor", "long_factor")}
            attention_factor = math.sqrt(1 + math.log(factor) / math.log(original))
            return LongRopeScaling(**{"attention_factor": attention_factor, **stated, **factors})
        case "proportional":
            num_rotated = int(entries.get("partial_rotary_factor", 1.0) * head_dim // 2)
            return ProportionalScaling(num_rotated=num_rotated, **stated)
    return None
