"""The output of `sftron verify` and `sftron verify-trainer`: the table while it is measured, and the files after it."""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from sftron.commands.arguments import writing
from sftron.errors import refuse, show, without_secrets
from sftron.report.terminal import wants_color
from sftron.verify.report import Check, Report, Table


class ShownTable:
    """Prints lines immediately, because the next check may take a while."""

    def __init__(self) -> None:
        self._table = Table(color=wants_color(sys.stdout))

    def start(self, title: str, facts: Mapping[str, str]) -> None:
        self._show(*self._table.head(title, facts))

    def check(self, check: Check) -> None:
        self._show(*self._table.row(check))

    def finish(self, report: Report, files: Mapping[Path | None, Callable[[], str]], json_file: Path | None) -> int:
        """Prints the verdict and writes the files: those of --html, --card and --json, in this order.

        A file without a path is not wanted. Returns the exit status.
        """
        self._show(*self._table.verdict(report))
        as_json = (json_file, lambda: json.dumps(without_secrets(report.as_dict()), indent=2) + "\n")
        options = ("--html", "--card")[: len(files)]
        try:
            for option, (path, text) in zip((*options, "--json"), (*files.items(), as_json), strict=True):
                if path is not None:
                    content = text()
                    with writing(path, f"choose another place with {option}"):
                        path.parent.mkdir(parents=True, exist_ok=True)
                        path.write_text(content, encoding="utf-8")
                    show(f"\nwritten: {path}")
        except OSError as error:
            return refuse(error)
        return 0 if report.passed else 1

    def _show(self, *lines: str) -> None:
        for line in lines:
            show(line, is_visible=True)
