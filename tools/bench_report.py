"""What the benchmarks share: their arguments, results that are not timed, and the parts of a report."""

import argparse
import datetime
import json
import shlex
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any


class WrongResultError(Exception):
    """Something that is to be timed computes another result than its reference, by more than rounding."""


def benchmark_parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser that accepts no abbreviated options, and prints the description as it is written."""
    return argparse.ArgumentParser(
        allow_abbrev=False, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def report_head(command: Sequence[str], device: str, *packages: str) -> str:
    """Returns the date, the device, the versions of the packages that are installed, and the command."""
    versions = [f"{name} {version(name)}" for name in packages if find_spec(name)]
    facts = ", ".join([str(datetime.date.today()), device, *versions])
    return f"{facts}\n\n```\n{shlex.join(command)}\n```"


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, num_names: int = 1) -> str:
    """Returns a table whose first `num_names` columns hold names, and the others numbers."""
    rule = ["---"] * num_names + ["---:"] * (len(columns) - num_names)
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, rule, *rows))


def write_report(text: str, numbers: Any, *, out: Path | None = None, json_file: Path | None = None) -> None:
    """Writes the text and the numbers to the files that are wanted. Raises OSError."""
    for path, content in ((out, text), (json_file, json.dumps(numbers, indent=1) + "\n")):
        if path:
            path.write_text(content, encoding="utf-8")
