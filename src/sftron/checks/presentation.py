"""How a report is shown: as a table in the terminal, and as an HTML page."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from sftron.checks.report import Check, Report
from sftron.errors import show
from sftron.report.html import render
from sftron.report.shown import on_one_line
from sftron.report.terminal import wants_color
from sftron.visible_text import visible_text

_COLORS = {True: "32;1", False: "31;1", None: "33;1"}
_FAINT, _BOLD = "2", "1"
_NAME, _MEASURED, _ALLOWED = 18, 48, 18
"""The widths of the columns; the longest name is `packed in its type`."""


class Table:
    """Prints the table while it is measured. It flushes each line, because the next check may take a while."""

    def __init__(self) -> None:
        self._has_color = wants_color(sys.stdout)

    def start(self, title: str, facts: Mapping[str, str]) -> None:
        width = max(map(len, facts), default=0)
        self._show(self._in(_BOLD, visible_text(title)))
        for name, value in facts.items():
            self._show(f"{self._in(_FAINT, name.ljust(width))}  {on_one_line(value)}")
        columns = f"{'check':<{_NAME}}  {'measured':<{_MEASURED}}  {'allowed':<{_ALLOWED}}  seconds"
        self._show(f"\n{self._in(_FAINT, f'      {columns}')}")

    def check(self, check: Check) -> None:
        """Prints the row and, below it, the details of a failure or of an exception."""
        cells = f"{check.name:<{_NAME}}  {on_one_line(check.measured):<{_MEASURED}}"
        if check.passed is not None:
            cells += f"  {check.allowed:<{_ALLOWED}}  {check.seconds or 0:7.1f}"
        self._show(f"{self._in(_COLORS[check.passed], check.status)}  {cells.rstrip()}")
        if check.passed is False or check.raised:
            for line in check.detail:
                self._show(f"      {' ' * _NAME}  {on_one_line(line)}")

    def finish(self, report: Report) -> None:
        self._show(f"\n{self._in(_COLORS[report.passed], report.verdict)}")
        if report.not_measured:
            self._show(self._in(_COLORS[None], report.not_measured))
        for check in report.failed:
            self._show(f"\n{self._in(_BOLD, check.name)}: {check.remedy}")

    def _in(self, codes: str, text: str) -> str:
        return f"\x1b[{codes}m{text}\x1b[0m" if self._has_color else text

    def _show(self, line: str) -> None:
        show(line, is_visible=True)


def page_of(report: Report, shown: Any = None) -> str:
    """Returns a self-contained HTML page with the verdict, the table, the details of each row, and packs.

    Args:
        shown: The packs, as `shown_packs` returns them.
    """
    return render("checks.html.jinja", report=report, looks={True: "good", False: "bad", None: "open"}, shown=shown)
