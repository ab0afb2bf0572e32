"""Compare any runs: `python tools/plot_runs.py runs/a runs/b --out comparison`.

Writes report.html, report.json and plots/*.png: the losses against tokens and time, speed, memory, and a table of final
figures. Runs that differ in nothing but the seed are taken together.

Exit status: 0 written, 2 a folder is no run's, or is named twice.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from sftron.config.errors import exit_with, refuse, show
from sftron.sweep.comparison import compare
from sftron.sweep.recorded_run import read_run


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="plot_runs.py",
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run directories")
    parser.add_argument("--out", type=Path, default=Path("comparison"), metavar="DIR", help="default: comparison")
    parser.add_argument("--title", default="Runs compared", help="of the page")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write report.json there")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse_arguments(arguments)
    try:
        comparison = compare(options.title, [read_run(folder) for folder in different(options.runs)])
    except ValueError as error:
        return refuse(error)
    try:
        page = comparison.write(options.out, json_copy=options.json)
    except OSError as error:
        return refuse(error, "the report cannot be written")
    show(f"{comparison.as_text()}\n\nreport     {page}")
    return 0


def different(folders: Sequence[Path]) -> Sequence[Path]:
    """Returns the folders. Raises ValueError if one is given twice, even by different paths."""
    named: dict[Path, Path] = {}
    for folder in folders:
        if (first := named.setdefault(folder.resolve(), folder)) is not folder:
            raise ValueError(f"{folder} is named twice, first as {first}: name each run once")
    return folders


if __name__ == "__main__":
    exit_with(lambda: main(sys.argv[1:]))
