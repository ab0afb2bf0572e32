"""The difference of two records: its parts with their causes, the update, and the conversation that differs most."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from textwrap import wrap
from typing import Any

import numpy as np

from sftcheck.diff.causes import Cause, causes
from sftcheck.diff.matching import Matching, Pair
from sftcheck.diff.parts import Factor, decompose
from sftcheck.diff.updates import Fact, UpdateSize, update_size, updates
from sftcheck.faults import values_of_mask
from sftron.report.token_record import TokenRecord

RESIDUAL = 1e-6
"""Relative to the larger loss, the largest residual of an explained difference."""
_SAME_SIZE = 1e-4
"""Of the logarithm of a norm; in float32, other shapes take other kernels."""
_SHOWN_TOKENS = 120
_WIDTH, _INDENT = 120, 34
_RED, _MARKED, _END = "\x1b[31m", "\x1b[1;4m", "\x1b[0m"


@dataclass(frozen=True, slots=True)
class Part:
    """One factor's part of the difference of the losses, B - A."""

    factor: Factor
    value: float
    share: float
    """Of the sum of all parts without their signs."""
    cause: Cause
    is_equal: bool
    """Whether the records are equal in this factor: nothing differs, and the value is rounding."""


@dataclass(frozen=True, slots=True, eq=False)
class Difference:
    """Why two records differ. The values of the parts add up to `loss_b - loss_a`."""

    a: TokenRecord
    b: TokenRecord
    parts: tuple[Part, ...]
    """In the order of `Factor`."""
    update: UpdateSize
    updates: tuple[Fact, ...]
    worst: Pair | None
    """The conversation whose part of the losses differs most, if tokens of it differ."""

    @property
    def named(self) -> list[Part]:
        """The parts that differ, the largest first."""
        return sorted((each for each in self.parts if not each.is_equal), key=lambda each: -abs(each.value))

    @property
    def residual(self) -> Part:
        return next(each for each in self.parts if each.factor is Factor.RESIDUAL)

    @property
    def is_explained(self) -> bool:
        return self.residual.is_equal

    def as_dict(self) -> dict[str, Any]:
        """Returns JSON values."""
        return {
            "losses": [self.a.loss, self.b.loss],
            "parts": [
                {"factor": each.factor.value, "value": each.value, "share": each.share, "equal": each.is_equal,
                 "count": each.cause.count, "sentence": each.cause.sentence, "side": each.cause.side,
                 "fault": each.cause.fault and each.cause.fault.name}
                for each in self.parts
            ],
            "update": {
                "norms": list(self.update.norms), "parts": dict(self.update.parts), "lacks": self.update.lacks,
            },
            "updates": [
                {"name": each.name, "a": each.a, "b": each.b, "fault": each.fault and each.fault.name}
                for each in self.updates
            ],
            "explained": self.is_explained,
        }  # fmt: skip


def difference(a: TokenRecord, b: TokenRecord) -> Difference:
    """Explains why B's loss and update are not A's."""
    matching = Matching(a, b)
    values, _, _ = decompose(matching)
    found, size = causes(matching), max(abs(a.loss), abs(b.loss))
    total = sum(map(abs, values.values()))
    parts = list[Part]()
    for factor, value in values.items():
        cause, is_small = found[factor], abs(value) <= RESIDUAL * size
        if factor in (Factor.CONTEXT, Factor.MODEL) and not (is_small or cause.count):
            cause = replace(cause, sentence=f"{cause.sentence}; but B weighs these tokens otherwise than A")
        is_equal = is_small and (factor is Factor.RESIDUAL or not cause.count)
        parts.append(Part(factor, value, abs(value) / total if total else 0.0, cause, is_equal))
    return Difference(a, b, tuple(parts), update_size(a, b), tuple(updates(a, b)), _worst(matching))


def _worst(matching: Matching) -> Pair | None:
    """Returns the conversation whose part of the losses differs most, of those with other ids or trained tokens."""
    a, b = matching.a, matching.b

    def is_unlike(pair: Pair) -> bool:
        trained = [record.is_trained[own.at] for record, own in ((a, pair.a), (b, pair.b))]
        return not pair.is_same or not np.array_equal(trained[0], trained[1])

    def apart(pair: Pair) -> float:
        shares = [float((record.weight * record.own)[own.at].sum()) for record, own in ((a, pair.a), (b, pair.b))]
        return abs(shares[1] - shares[0])

    return max(filter(is_unlike, matching.pairs), key=apart, default=None)


# -- as text -----------------------------------------------------------------------------------------------------------


def as_text(found: Difference, *, color: bool = False) -> str:
    """Returns the table of the parts, the update, the remedies, and the conversation that differs most."""
    a, b = found.a.loss, found.b.loss
    lines = [f"loss  A {a:.6f}   B {b:.6f}   B - A {b - a:+.6f}", ""]
    for part in found.parts:
        lines += _row(part)
    if not found.is_explained:
        lines.append(f"unexplained: {found.residual.value:+.2e}, above {RESIDUAL:.0e} of the loss")
    lines += ["", *_of_update(found.update)]
    if found.updates:
        lines += ["", f"{'facts of the update':36}{'A':>30}   B"]
        lines += [f"  {each.name:34}{_short(each.a):>30}   {_short(each.b)}" for each in found.updates]
    remedies = list(_remedies(found))
    lines += ["", *remedies] if remedies else []
    if found.worst is not None:
        lines += ["", *_side_by_side(found, found.worst, color=color)]
    return "\n".join(lines) + "\n"


def _row(part: Part) -> Iterator[str]:
    value = "=" if part.is_equal else f"{part.value:+.6f}"
    share = "" if part.is_equal else f"{part.share:.0%}"
    first, *rest = wrap(part.cause.sentence or "none", _WIDTH - _INDENT) or [""]
    yield f"{part.factor.value:16}{value:>11}{share:>5}  {first}"
    yield from (" " * _INDENT + each for each in rest)


def _of_update(update: UpdateSize) -> Iterator[str]:
    """Yields the size of the first updates; its parts, if it differs, as logarithms and as factors."""
    a, b = ("not recorded" if each is None else f"{each:.6g}" for each in update.norms)
    total = f"   log(B / A) {math.fsum(update.parts.values()):+.6f}" if update.parts else ""
    yield f"norm of the first update  A {a}   B {b}{total}"
    if update.lacks:
        yield from wrap(f"It is not decomposed: {update.lacks}.", _WIDTH)
    if any(abs(each) > _SAME_SIZE for each in update.parts.values()):
        for name, value in update.parts.items():
            shown = f"{'=':>11}" if abs(value) <= _SAME_SIZE else f"{value:+11.6f}  x {math.exp(value):.6g}"
            yield f"  {name:14}{shown}"


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (list, tuple)):
        return " ".join(_short(each) for each in value) or "none"
    if isinstance(value, dict):
        return " ".join(f"{name} {_short(each)}" for name, each in value.items())
    return "none" if value is None else str(value)


def _remedies(found: Difference) -> Iterator[str]:
    """Yields the meaning and the remedy of each known fault, of the largest part first."""
    named: list[tuple[str, Any, str, dict[str, Any]]] = [
        (each.factor.value, each.cause.fault, each.cause.side, dict(each.cause.values)) for each in found.named
    ]
    named += [(each.name, each.fault, each.side, {}) for each in found.updates]
    for name, fault, side, values in named:
        if fault is not None:
            facts = (found.b if side == "B" else found.a).facts
            own = {"pad": "the padding token", "stop": "the stop token", **_values_of_mask(facts), **values}
            yield from wrap(f"{name}, in {side}: {fault.remedy(facts.get('library', ''), own)}", _WIDTH)


def _values_of_mask(facts: Mapping[str, Any]) -> dict[str, str]:
    """Returns the values of a fault of the mask in TRL."""
    options = {name: bool(facts.get(name)) for name in ("is_assistant_only", "is_completion_only")}
    return values_of_mask([dict.fromkeys(facts.get("columns", []))], **options)


def _side_by_side(found: Difference, pair: Pair, *, color: bool) -> Iterator[str]:
    """Yields the tokens of a conversation in both records, from the first difference on; trained ones are marked."""
    sides = (("A", found.a, pair.a, pair.aligned[:, 0]), ("B", found.b, pair.b, pair.aligned[:, 1]))
    trained = [record.is_trained[document.at] for _, record, document, _ in sides]
    aligned = pair.aligned
    unlike = np.flatnonzero(trained[0][aligned[:, 0]] != trained[1][aligned[:, 1]])
    alone = [np.setdiff1d(np.arange(len(document.ids)), places) for _, _, document, places in sides]
    firsts = [min([*aligned[unlike[:1], n].tolist(), *alone[n][:1].tolist()], default=0) for n in (0, 1)]
    yield "the conversation that differs most, from a few tokens before the first difference:"
    for n, (name, record, document, _) in enumerate(sides):
        begin = max(0, firsts[n] - 12)
        part = slice(begin, begin + _SHOWN_TOKENS)
        pieces = _pieces(record, document.ids[part])
        text = _marked(pieces, trained[n][part], np.isin(np.arange(len(document.ids))[part], alone[n]), color=color)
        yield f"{name} │ {'… ' if begin else ''}{text}{' …' if begin + _SHOWN_TOKENS < len(document.ids) else ''}"


def _pieces(record: TokenRecord, ids: np.ndarray) -> list[str]:
    texts = record.facts.get("texts") or {}
    return [_visible(texts[str(n)]) if str(n) in texts else f"{n} " for n in ids.tolist()]


def _visible(text: str) -> str:
    return "".join("↵" if each == "\n" else each if each.isprintable() else "�" for each in text)


def _marked(pieces: Sequence[str], is_trained: np.ndarray, is_alone: np.ndarray, *, color: bool) -> str:
    """Returns the pieces, with ⟦ ⟧ or color around those that are trained, and red those that one record has alone."""
    text, is_open = "", False
    for piece, trained, alone in zip(pieces, is_trained.tolist(), is_alone.tolist(), strict=True):
        if color:
            codes = _MARKED * trained + _RED * alone
            text += f"{codes}{piece}{_END}" if codes else piece
            continue
        text += "⟦" if trained and not is_open else "⟧" if is_open and not trained else ""
        text, is_open = text + piece, trained
    return text + "⟧" * is_open
