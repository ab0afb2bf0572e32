"""What two optimizers make of their gradients: the size of the first update, in parts, and the facts that differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from sftcheck.faults import Fault
from sftron.report.token_record import ADAM, TokenRecord

_SAME = 1e-3
"""Relative, of two norms of a gradient, or of a factor from 1."""
_SAME_WEIGHTS = 1e-6
"""Relative, of two norms of the same weights."""
_LACKS, _NO_OPTION = "not recorded", "no such option"
_NO_OPTIONS = ("initial_lr", "num_weights", "names", "param_names")
_STEP_FACTS = ("gradient_norms", "optimizer", "update")
"""What the size of an update is made of; a loop has clipped, if it does, before its optimizer is given gradients."""


@dataclass(frozen=True, slots=True)
class Fact:
    """A fact of the update that differs."""

    name: str
    a: Any
    b: Any
    fault: Fault | None = None
    side: str = ""


@dataclass(frozen=True, slots=True)
class UpdateSize:
    """The logarithm of the ratio of the norms of two first updates, B's to A's, as a sum of parts.

    Attributes:
        norms: Of both updates, at the optimizer's own rate, before the schedule; None if a record lacks it.
        parts: Their values add up to log(B's norm / A's norm): one factor is exchanged at a time, in this order.
        lacks: Why there are no parts; "" if there are.
    """

    norms: tuple[float | None, float | None]
    parts: Mapping[str, float] = field(default_factory=dict)
    lacks: str = ""


def update_size(a: TokenRecord, b: TokenRecord) -> UpdateSize:
    """Returns what makes B's first update larger or smaller than A's.

    gradient      its norm; for Adam, whose first update has no size of the gradient, the weights that have one
    clipping      min(1, max_grad_norm / norm); nothing for Adam
    moments       Adam against SGD, which takes the gradient as it is
    rate          before the schedule, which the facts have
    weight decay  as a term of its own
    residual      what this leaves out: eps, decay in moments, weights too coarse for their update
    """
    facts = a.facts, b.facts
    norms = tuple((each.get("update") or {}).get("norm") for each in facts)
    missing = [
        f"{side} lacks {', '.join(names)}"
        for side, each in zip("AB", facts, strict=True)
        if (names := [name for name in _STEP_FACTS if not each.get(name)])
    ]
    if missing:
        return UpdateSize((norms[0], norms[1]), {}, f"{'; '.join(missing)}: record it again, with its optimizer")
    if not all("kind" in each["update"] for each in facts):
        return UpdateSize((norms[0], norms[1]), {}, "a record is of an earlier release: record it again, with this one")
    others = {str(each["optimizer"]["name"]): None for each in facts if not each["update"].get("kind")}
    if others:
        return UpdateSize((norms[0], norms[1]), {}, f"{' and '.join(others)}: only Adam and SGD have known parts")
    one, other = _Step(a.facts), _Step(b.facts)
    if not all(each > 0 for step in (one, other) for each in (step.norm, step.without_decay, step.gradient, step.rate)):
        return UpdateSize((one.norm, other.norm), {}, "an update, a gradient or a rate is 0, which has no logarithm")
    path = [
        one.size(), one.size(gradient=other), one.size(gradient=other, clipping=other),
        one.size(gradient=other, clipping=other, moments=other), other.size(),
    ]  # fmt: skip
    names = ("gradient", "clipping", "moments", "rate")
    parts = {name: math.log(end / begin) for name, (begin, end) in zip(names, pairwise(path), strict=True)}
    parts["weight decay"] = math.log(other.norm / other.without_decay) - math.log(one.norm / one.without_decay)
    parts["residual"] = math.log(other.norm / one.norm) - math.fsum(parts.values())
    return UpdateSize((one.norm, other.norm), parts)


class _Step:
    """The factors of a first update."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        update, optimizer = facts["update"], facts["optimizer"]
        self.norm, self.without_decay, self.num_weights = (
            float(update[name]) for name in ("norm", "without_decay", "num_weights")
        )
        self.gradient = math.hypot(*map(float, facts["gradient_norms"].values()))
        self.limit = float(facts.get("max_grad_norm") or math.inf)
        self.has_moments = update["kind"] == ADAM
        groups = optimizer["groups"]
        weights = sum(each["num_weights"] for each in groups) or 1
        self.rate = math.sqrt(sum(each["lr"] ** 2 * each["num_weights"] for each in groups) / weights)

    def size(
        self, *, gradient: _Step | None = None, clipping: _Step | None = None, moments: _Step | None = None
    ) -> float:
        """Returns the norm without decay, with factors of other steps."""
        of, limit = gradient or self, (clipping or self).limit
        one = math.sqrt(of.num_weights) if (moments or self).has_moments else min(of.gradient, limit)
        return self.rate * one


def updates(a: TokenRecord, b: TokenRecord) -> list[Fact]:
    """Returns the facts of the updates that differ, in the order in which an update is computed."""
    return [
        *_gradients(a.facts, b.facts),
        *_options(a.facts, b.facts),
        *_given(a.facts, b.facts, {"max_grad_norm": "clipping (max_grad_norm)"}),
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
    yield from _first_weights(*(each.get("weight_norms", {}) for each in (a, b)))
    only = [sorted(set(norms[n]) - set(norms[1 - n])) for n in (0, 1)]
    if any(only):
        yield Fact("tensors with a gradient in this record alone", _some(only[0]), _some(only[1]))
    trainable = a.get("trainable"), b.get("trainable")
    if trainable[0] != trainable[1]:
        yield Fact("trainable weights", trainable[0], trainable[1])


def _first_weights(a: Mapping[str, float], b: Mapping[str, float]) -> Iterator[Fact]:
    """Yields that first weights differ; those of new adapters do where the function is still the same."""
    unlike = [name for name in a if name in b and not math.isclose(a[name], b[name], rel_tol=_SAME_WEIGHTS)]
    if unlike:
        norms = [math.sqrt(math.fsum(own[name] ** 2 for name in unlike)) for own in (a, b)]
        name = f"norm of {len(unlike):,} tensors at first" if len(unlike) > 1 else f"norm of {unlike[0]} at first"
        yield Fact(name, norms[0], norms[1])


def _options(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Fact]:
    optimizers = [each.get("optimizer") or {} for each in (a, b)]
    names = [each.get("name", _LACKS) for each in optimizers]
    if names[0] != names[1]:
        yield Fact("optimizer", names[0], names[1])
    if _LACKS in names:
        return
    groups = [each.get("groups", []) for each in optimizers]
    options = sorted({name for own in groups for group in own for name in group})
    for name in options:
        if name in _NO_OPTIONS or (name == "lr" and all(each.get("rates") for each in (a, b))):
            continue
        values = [_by_weights(own, name) for own in groups]
        if values[0] != values[1]:
            yield Fact({"lr": "learning rate"}.get(name, name.replace("_", " ")), values[0], values[1])


def _by_weights(groups: list[dict[str, Any]], name: str) -> Any:
    """Returns the value of an option; with the number of weights of each, if groups have different ones."""
    values = [(str(group.get(name, _NO_OPTION)), group.get("num_weights", 0)) for group in groups]
    sizes = {value: sum(size for other, size in values if other == value) for value, _ in values}
    if len(sizes) < 2:
        return next(iter(sizes), None)
    return ", ".join(f"{value} ({size:,} weights)" for value, size in sorted(sizes.items()))


def _rates(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Fact]:
    rates = [each.get("rates") or {} for each in (a, b)]
    keys = {"highest": "highest learning rate", "num_steps": "steps of the run"}
    keys |= {"first": "learning rates of the first steps", "last": "learning rates of the last steps"}
    yield from _given(rates[0], rates[1], keys)


def _others(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Fact]:
    yield from _given(a, b, {"batching": "batches", "seeds": "seeds", "dtypes": "types of the weights"})
    yield from _given(a, b, {"callbacks": "callbacks, which no record runs"})
    versions = [each.get("versions", {}) for each in (a, b)]
    for name in sorted({*versions[0], *versions[1]}):
        yield from _given(versions[0], versions[1], {name: f"version of {name}"})


def _given(a: Mapping[str, Any], b: Mapping[str, Any], names: Mapping[str, str]) -> Iterator[Fact]:
    """Yields the facts of these keys that differ, by their names; None is a value, such as no clipping."""
    for key, name in names.items():
        values = a.get(key, _LACKS), b.get(key, _LACKS)
        if not _are_equal(*values):
            yield Fact(name, *values)


def _are_equal(a: Any, b: Any) -> bool:
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_are_equal(*each) for each in zip(a, b, strict=True))
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-9)
    return a == b


def _some(names: list[str]) -> str:
    return "none" if not names else f"{len(names):,}, {names[0]}" + (" and others" if len(names) > 1 else "")
