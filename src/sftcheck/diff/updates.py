"""What the optimizers of two records make of their gradients, as named facts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sftcheck.faults import Fault
from sftron.report.token_record import TokenRecord

_SAME = 1e-3
"""Relative, of two norms of a gradient, or of a factor from 1."""
_RATES = ("lr", "initial_lr")


@dataclass(frozen=True, slots=True)
class Fact:
    """A fact of the update that differs."""

    name: str
    a: Any
    b: Any
    fault: Fault | None = None
    side: str = ""


def updates(a: TokenRecord, b: TokenRecord) -> list[Fact]:
    """Returns the facts of the updates that differ, in the order in which an update is computed."""
    return [
        *_gradients(a.facts, b.facts),
        *_options(a.facts, b.facts),
        *_rates(a.facts, b.facts),
        *_others(a.facts, b.facts),
    ]


def _gradients(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Fact]:
    factors = [float(each.get("gradient_of_loss", 1.0)) for each in (a, b)]
    if not math.isclose(factors[0], factors[1], rel_tol=_SAME):
        side = "B" if abs(factors[1] - 1) > abs(factors[0] - 1) else "A"
        yield Fact("gradient, in units of the loss's", factors[0], factors[1], Fault.GRADIENT_SCALED, side)
    kept = [each.get("gradient", {}) for each in (a, b)]
    apart = [float(each.get("apart", 0.0)) for each in kept]
    if max(apart) > _SAME and not math.isclose(apart[0], apart[1], rel_tol=_SAME):
        side, name = "B" if apart[1] > apart[0] else "A", "gradient kept, apart from the sum of all passes"
        yield Fact(name, apart[0], apart[1], Fault.GRADIENT_CHANGED, side)
    factors = [float(each.get("factor", 1.0)) for each in kept]
    if not math.isclose(factors[0], factors[1], rel_tol=_SAME) and max(apart) <= _SAME:
        yield Fact("gradient kept, of the sum of all passes", factors[0], factors[1])
    norms = [each.get("gradient_norms", {}) for each in (a, b)]
    totals = [math.sqrt(math.fsum(norm**2 for norm in each.values())) for each in norms]
    if not math.isclose(totals[0], totals[1], rel_tol=_SAME):
        yield Fact("gradient norm", totals[0], totals[1])
    only = [sorted(set(norms[n]) - set(norms[1 - n])) for n in (0, 1)]
    if any(only):
        yield Fact("tensors with a gradient in this record alone", _some(only[0]), _some(only[1]))
    trainable = a.get("trainable"), b.get("trainable")
    if trainable[0] != trainable[1]:
        yield Fact("trainable weights", trainable[0], trainable[1])


def _options(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Fact]:
    optimizers = [each.get("optimizer") or {} for each in (a, b)]
    names = [each.get("name") for each in optimizers]
    if names[0] != names[1]:
        yield Fact("optimizer", names[0], names[1])
    groups = [each.get("groups", []) for each in optimizers]
    options = sorted({name for own in groups for group in own for name in group})
    for name in options:
        if name in ("initial_lr", "num_weights") or (name == "lr" and all(each.get("rates") for each in (a, b))):
            continue
        values = [_by_weights(own, name) for own in groups]
        if values[0] != values[1]:
            yield Fact({"lr": "learning rate"}.get(name, name.replace("_", " ")), values[0], values[1])
    if a.get("max_grad_norm") != b.get("max_grad_norm"):
        yield Fact("clipping (max_grad_norm)", a.get("max_grad_norm"), b.get("max_grad_norm"))


def _by_weights(groups: list[dict[str, Any]], name: str) -> Any:
    """Returns the value of an option; with the number of weights of each, if groups have different ones."""
    values = [(str(group.get(name)), group.get("num_weights", 0)) for group in groups]
    sizes = {value: sum(size for other, size in values if other == value) for value, _ in values}
    if len(sizes) < 2:
        return next(iter(sizes), None)
    return ", ".join(f"{value} ({size:,} weights)" for value, size in sorted(sizes.items()))


def _rates(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Fact]:
    rates = [each.get("rates") or {} for each in (a, b)]
    keys = {"highest": "highest learning rate", "num_steps": "steps of the run"}
    keys |= {"first": "learning rates of the first steps", "last": "learning rates of the last steps"}
    for key, name in keys.items():
        values = [each.get(key) for each in rates]
        if not _are_equal(values[0], values[1]):
            yield Fact(name, values[0], values[1])


def _others(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Fact]:
    for name, key in (("batches", "batching"), ("seeds", "seeds"), ("types of the weights", "dtypes")):
        values = a.get(key), b.get(key)
        if values[0] != values[1]:
            yield Fact(name, *values)
    versions = [each.get("versions", {}) for each in (a, b)]
    for name in sorted({*versions[0], *versions[1]}):
        values = versions[0].get(name), versions[1].get(name)
        if values[0] != values[1]:
            yield Fact(f"version of {name}", *values)


def _are_equal(a: Any, b: Any) -> bool:
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_are_equal(*each) for each in zip(a, b, strict=True))
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-9)
    return a == b


def _some(names: list[str]) -> str:
    return "none" if not names else f"{len(names):,}, {names[0]}" + (" and others" if len(names) > 1 else "")
