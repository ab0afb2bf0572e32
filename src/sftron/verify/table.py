"""The checks of a run as a table: rules in, one row out as each is done, then the verdict."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

from sftron.visible_text import visible_text

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check.

    passed: None where nothing was measured; `measured` then holds the reason. detail: lines below a failed row, and on
    the page.
    """

    passed: bool | None
    measured: str
    allowed: str = ""
    detail: tuple[str, ...] = ()


def skipped(reason: str) -> Finding:
    """Returns the outcome of a check that measured nothing, for a reason that the table shows; it is never a pass."""
    return Finding(None, reason)


@dataclass(frozen=True, slots=True)
class Rule(Generic[T]):
    """One row of the table before its check is carried out.

    look: carries out the check. proves: describes what a pass means. if_red: describes what a failure means for
    training, and what to do.
    """

    name: str
    look: Callable[[T], Finding]
    proves: str
    if_red: str


@dataclass(frozen=True, slots=True)
class Check:
    """One finished row of the table. seconds: the time that the check took."""

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
    """Yields each row as soon as it is done. A check that raises has failed, since it has shown nothing."""
    for rule in rules:
        started = time.perf_counter()
        try:
            finding = rule.look(subject)
        except Exception as error:
            message = str(error).strip().splitlines() or [type(error).__name__]
            detail = (*message, *traceback.format_exc().splitlines()[-8:])
            finding = Finding(False, f"could not be carried out: {message[0]}", "to be carried out", detail)
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


@dataclass(frozen=True, slots=True)
class RunReport:
    """All rows of the table. title: names the run. facts: describe what was looked at, by name."""

    title: str
    facts: dict[str, str]
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed is not False for check in self.checks)

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if check.passed is False]

    @property
    def seconds(self) -> float:
        return sum(check.seconds for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """Returns what is written as JSON."""
        checks = [check.as_dict() for check in self.checks]
        return {"passed": self.passed, "title": self.title, "facts": self.facts, "checks": checks}


_COLORS = {True: "32;1", False: "31;1", None: "33;1"}
_FAINT, _BOLD = "2", "1"
_NAME, _MEASURED, _ALLOWED = 18, 48, 18
"""Widths of the columns; the longest name is `packed in its type`."""


class Table:
    """The table as lines of text. color: writes escape sequences; `wants_color` knows whether a stream shows them."""

    def __init__(self, *, color: bool) -> None:
        self._color = color

    def head(self, title: str, facts: Mapping[str, str]) -> Iterator[str]:
        width = max(map(len, facts), default=0)
        yield self._in(_BOLD, visible_text(title))
        for name, value in facts.items():
            yield f"{self._in(_FAINT, name.ljust(width))}  {_line(value)}"
        yield ""
        columns = f"{'check':<{_NAME}}  {'measured':<{_MEASURED}}  {'allowed':<{_ALLOWED}}  seconds"
        yield self._in(_FAINT, f"      {columns}")

    def row(self, check: Check) -> Iterator[str]:
        """Yields the row, and below it what is wrong."""
        cells = f"{check.name:<{_NAME}}  {_line(check.measured):<{_MEASURED}}"
        if check.passed is not None:
            cells += f"  {check.allowed:<{_ALLOWED}}  {check.seconds:7.1f}"
        yield f"{self._in(_COLORS[check.passed], check.word)}  {cells.rstrip()}"
        if check.passed is False:
            for line in check.detail:
                yield f"      {' ' * _NAME}  {_line(line)}"

    def verdict(self, report: RunReport) -> Iterator[str]:
        yield ""
        yield self._in(_COLORS[report.passed], verdict(report))
        if skips := not_measured(report):
            yield self._in(_COLORS[None], skips)
        for check in report.failed:
            yield f"\n{self._in(_BOLD, check.name)}: {check.if_red}"

    def _in(self, codes: str, text: str) -> str:
        return f"\x1b[{codes}m{text}\x1b[0m" if self._color else text


def verdict(report: RunReport) -> str:
    """Returns the outcome of all checks in one sentence."""
    num_passed = sum(check.passed is True for check in report.checks)
    if report.failed:
        names = ", ".join(check.name for check in report.failed)
        return f"Do not train yet: {len(report.failed)} of {len(report.checks)} checks failed: {names}."
    if not num_passed:
        return "Nothing was measured."
    of = f"All {num_passed}" if num_passed == len(report.checks) else f"{num_passed} of {len(report.checks)}"
    return f"{of} checks passed in {_minutes(report.seconds)}."


def not_measured(report: RunReport) -> str:
    """Returns a second sentence where something was left out, or nothing."""
    skips = [check.name for check in report.checks if check.passed is None]
    return f"Not measured: {', '.join(skips)}." if skips else ""


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds // 60:.0f} min {seconds % 60:.0f} s"


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Returns each line with its cells padded to the width of their columns."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]


def _line(text: str) -> str:
    """Returns text on one line that is safe for a terminal, since details quote the data."""
    return " ".join(visible_text(text).split())
