"""What a check of a run is: a rule says what is asked and what a red row means, a finding what came out."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Finding:
    """passed: None where nothing was measured, and `measured` says why. detail: lines for those who ask."""

    passed: bool | None
    measured: str
    allowed: str = ""
    detail: tuple[str, ...] = ()


def skipped(reason: str) -> Finding:
    """Never a pass: a row of its own that says why nothing was measured."""
    return Finding(None, reason)


@dataclass(frozen=True, slots=True)
class Rule(Generic[T]):
    """One row of the table, before it is looked at.

    look: facts in, finding out. proves: what a pass means. if_red: what a failure means for training, and what to do.
    """

    name: str
    look: Callable[[T], Finding]
    proves: str
    if_red: str


@dataclass(frozen=True, slots=True)
class Check:
    """One row of the table. seconds: how long it took to look."""

    name: str
    passed: bool | None
    measured: str
    allowed: str
    seconds: float
    detail: tuple[str, ...]
    proves: str
    if_red: str

    @property
    def word(self) -> str:
        return {True: "PASS", False: "FAIL", None: "SKIP"}[self.passed]

    def as_dict(self) -> dict[str, Any]:
        return {"status": self.word.lower(), **asdict(self)}


def carry_out(rules: Sequence[Rule[T]], subject: T) -> Iterator[Check]:
    """The rows in order, each when it is done. A check that ends in an exception has failed: it has shown nothing."""
    for rule in rules:
        started = time.perf_counter()
        try:
            finding = rule.look(subject)
        except Exception as error:
            told = str(error).strip().splitlines() or [type(error).__name__]
            detail = (*told, *traceback.format_exc().splitlines()[-8:])
            finding = Finding(False, f"could not be carried out: {told[0]}", "to be carried out", detail)
        seconds = time.perf_counter() - started
        yield Check(
            rule.name,
            finding.passed,
            finding.measured,
            finding.allowed,
            seconds,
            tuple(line for line in finding.detail if line),
            rule.proves,
            rule.if_red,
        )
