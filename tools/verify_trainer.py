"""Checks a trainer of TRL, transformers or another library built on them, before it trains: one table, green or red.

    python tools/verify_trainer.py my_script.py:make_trainer

make_trainer() returns the trainer, which is left as it was. Exit status: 0 passed, 1 a check failed or a required one
was not measured, 2 the trainer cannot be checked (a message, no traceback).
"""

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sftron.config.errors import exit_with, refuse, show
from sftron.report.terminal import wants_color


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="verify_trainer.py",
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", metavar="SCRIPT.py:FUNCTION", help="a function without arguments; gives the trainer")
    parser.add_argument("--trained-roles", choices=("assistant", "all"), default="assistant", help="what is meant")
    parser.add_argument("--conversations", type=Path, metavar="FILE", help="the rows, if only ids are left (JSONL)")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the page there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
    return parser.parse_args(arguments)


def load_function(target: str) -> Callable[[], Any]:
    """Returns the function that `SCRIPT.py:FUNCTION` names. Raises ValueError."""
    path, _, name = target.rpartition(":")
    if not path or not Path(path).is_file():
        raise ValueError(f"found {target}; wanted SCRIPT.py:FUNCTION, and {path or target} is not a file")
    specification = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[Path(path).stem] = module
    sys.path.insert(0, str(Path(path).resolve().parent))
    specification.loader.exec_module(module)
    if not callable(function := getattr(module, name, None)):
        raise ValueError(f"{path} has no function {name}; it has to return the trainer")
    return function


def main(arguments: list[str]) -> int:
    options = parse_arguments(arguments)
    try:
        function = load_function(options.target)
        given = None
        if options.conversations is not None:
            given = [
                json.loads(line) for line in options.conversations.read_text(encoding="utf-8").splitlines() if line
            ]
    except (OSError, ValueError) as error:
        return refuse(error)
    # Imported here, so that --help and wrong arguments take no time.
    from sftron.verify.table import Table
    from sftron.verify.verify_trainer import page_of, verify_trainer

    table = Table(color=wants_color(sys.stdout))

    def print_lines(*lines: str) -> None:
        for line in lines:
            show(line, is_visible=True)

    trainer = function()
    try:
        report = verify_trainer(
            trainer,
            given,
            options.trained_roles,
            on_start=lambda title, facts: print_lines(*table.head(title, facts)),
            on_check=lambda check: print_lines(*table.row(check)),
        )
    except ValueError as error:
        return refuse(error)
    print_lines(*table.verdict(report))
    try:
        for path, text in (
            (options.html, lambda: page_of(report)),
            (options.json, lambda: json.dumps(report.as_dict(), indent=2) + "\n"),
        ):
            if path is not None:
                path.write_text(text(), encoding="utf-8")
                show(f"\nwritten: {path}")
    except OSError as error:
        return refuse(error, "the report cannot be written")
    return 0 if report.passed else 1


if __name__ == "__main__":
    exit_with(lambda: main(sys.argv[1:]))
