"""The checks of a run as lines for a terminal: each when it is done, then the verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sftron.verify.run_check import Check
from sftron.verify.verify_run import RULES, RunReport
from sftron.visible_text import visible_text

_COLORS = {True: "32;1", False: "31;1", None: "33;1"}
_FAINT, _BOLD = "2", "1"
_NAME = max(len(rule.name) for rule in RULES)
_MEASURED, _ALLOWED = 48, 18


class Table:
    """color: write escape sequences; ask `wants_color` of the stream."""

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
        """The row, and what is wrong under it."""
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
        if said := not_measured(report):
            yield self._in(_COLORS[None], said)
        for check in report.failed:
            yield f"\n{self._in(_BOLD, check.name)}: {check.if_red}"

    def _in(self, codes: str, text: str) -> str:
        return f"\x1b[{codes}m{text}\x1b[0m" if self._color else text


def verdict(report: RunReport) -> str:
    """One sentence of the whole."""
    num_passed = sum(check.passed is True for check in report.checks)
    if report.failed:
        names = ", ".join(check.name for check in report.failed)
        return f"Do not train yet: {len(report.failed)} of {len(report.checks)} checks failed: {names}."
    if not num_passed:
        return "Nothing was measured."
    of = f"All {num_passed}" if num_passed == len(report.checks) else f"{num_passed} of {len(report.checks)}"
    return f"{of} checks passed in {_minutes(report.seconds)}."


def not_measured(report: RunReport) -> str:
    """A second sentence, where something was left out."""
    skips = [check.name for check in report.checks if check.passed is None]
    return f"Not measured: {', '.join(skips)}." if skips else ""


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds // 60:.0f} min {seconds % 60:.0f} s"


def _line(text: str) -> str:
    """On one line, and safe for a terminal: details quote the data."""
    return " ".join(visible_text(text).split())
