"""What the benchmarks share: results that are not timed, and the head, the tables and the files of a report."""

import datetime
import json
import shlex
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sftron.errors import show


class WrongResultError(Exception):
    """Something that is to be timed computes another result than its reference, by more than rounding."""


def report_head(words: Sequence[str], device: str, *packages: str) -> str:
    """Returns the date, the device, the versions of the packages that are installed, and `sftron` with the words."""
    versions = [f"{name} {version(name)}" for name in packages if find_spec(name)]
    facts = ", ".join([str(datetime.date.today()), device, *versions])
    return f"{facts}\n\n```\n{shlex.join(['sftron', *words])}\n```"


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, num_names: int = 1) -> str:
    """Returns a table whose first `num_names` columns hold names, and the others numbers."""
    rule = ["---"] * num_names + ["---:"] * (len(columns) - num_names)
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, rule, *rows))


def write_report(text: str, numbers: Any, *, out: Path | None = None, json_file: Path | None = None) -> None:
    """Prints the text, and writes it and the numbers to the files that are wanted. Raises OSError."""
    show(text)
    for path, content in ((out, text), (json_file, json.dumps(numbers, indent=1) + "\n")):
        if path:
            path.write_text(content, encoding="utf-8")
