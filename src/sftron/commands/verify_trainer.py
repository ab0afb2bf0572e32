"""Checks a trainer of TRL, transformers or another library built on them, before it trains: one table, green or red.

    sftron verify-trainer my_script.py:make_trainer
    torchrun --nproc_per_node 4 -m sftron verify-trainer my_script.py:make_trainer

make_trainer() returns the trainer, which is left as it was. --script FOLDER writes a program without sftron for each
failed row, which shows the fault in about thirty lines (FOLDER/trained-tokens.py); each takes about a minute. Exit
status: 0 passed, 1 a check failed or a required one was not measured, 2 the trainer cannot be checked (a message, no
traceback). Under torchrun, rank 0 prints and writes, and all ranks exit alike.
"""

import importlib.util
import os
import sys
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

from sftron.commands.arguments import as_path, make_parser, refusing, write_json, write_report
from sftron.errors import show
from sftron.regular_file import expand_home, where_missing
from sftron.user_code import naming_the_users_line


def make_trainer(target: str) -> Any:
    """Returns what the function that `SCRIPT.py:FUNCTION` names returns. Raises ValueError if it takes arguments."""
    function = load_function(target)
    try:
        signature(function).bind()
    except TypeError as error:
        raise ValueError(f"{target}: {error}; give a function without arguments, which returns the trainer") from error
    return function()


def load_function(target: str) -> Callable[[], Any]:
    """Returns the function that `SCRIPT.py:FUNCTION` names. Raises ValueError."""
    path, _, name = expand_home(target).rpartition(":")
    if not path.endswith(".py"):
        raise ValueError(
            f"found {target}; wanted SCRIPT.py:FUNCTION, a Python file and its function that returns the trainer"
        )
    if not Path(path).is_file():
        raise ValueError(f"{path}: no such file{where_missing(path)}")
    specification = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[Path(path).stem] = module
    sys.path.insert(0, str(Path(path).resolve().parent))
    specification.loader.exec_module(module)
    if not callable(function := getattr(module, name, None)):
        raise ValueError(f"{path} has no function {name}; define it to return the trainer")
    return function


def read_conversations(path: Path) -> list[Any]:
    """Returns the values of a JSONL file; lines end only at newlines. Raises ValueError with the file or the line."""
    from sftron.data.json_text import parse_json

    try:
        lines = enumerate(path.read_bytes().split(b"\n"), 1)
    except OSError as error:
        raise ValueError(str(error)) from error
    return [parse_json(line, f"{path}:{n}", "a conversation as JSON on each line") for n, line in lines if line.strip()]


@refusing(ValueError)
def main(arguments: list[str]) -> int:
    parser = make_parser("verify-trainer", __doc__)
    parser.add_argument("target", metavar="SCRIPT.py:FUNCTION", help="a function without arguments; gives the trainer")
    parser.add_argument("--trained-roles", choices=("assistant", "all"), default="assistant", help="what is meant")
    parser.add_argument("--conversations", type=as_path, metavar="FILE", help="the rows, if only ids are left (JSONL)")
    parser.add_argument("--html", type=as_path, metavar="FILE", help="write the page there")
    parser.add_argument("--json", type=as_path, metavar="FILE", help="write the report there too")
    parser.add_argument("--script", type=as_path, metavar="FOLDER", help="write a program for each failed row there")
    parser.add_argument(
        "--time-limit", type=float, default=600, metavar="SECONDS", help="how long a rank waits for another"
    )
    options = parser.parse_args(arguments)
    is_main = os.environ.get("RANK", "0") == "0"
    given = None if options.conversations is None else read_conversations(options.conversations)
    with naming_the_users_line():
        trainer = make_trainer(options.target)
        # Imported here, so that --help and wrong arguments take no time.
        from sftcheck.ranks.on_ranks import leave_together
        from sftcheck.verify_trainer import verify_trainer
        from sftron.checks.presentation import Table, page_of

        table = Table()
        report = verify_trainer(
            trainer,
            given,
            options.trained_roles,
            time_limit=options.time_limit,
            on_start=table.start,
            on_check=table.check,
        )
    if is_main:
        table.finish(report)
        if options.html is not None:
            write_report(options.html, page_of(report), "--html")
        write_json(options.json, report.as_dict())
        for path in filter(None, (options.html, options.json)):
            show(f"\nwritten: {path}")
    leave_together(options.time_limit)
    if is_main and options.script is not None:
        write_scripts(options.script, report)
    return 0 if report.passed else 1


def write_scripts(folder: Path, report: Any) -> None:
    """Writes a program for each failed row, and prints its path, or why there is none."""
    for check in report.failed:
        try:
            text = report.script(check.name)
        except ValueError as error:
            show(f"\nno program: {error}", is_visible=True)
            continue
        path = folder / f"{check.name.replace(' ', '-')}.py"
        write_report(path, text, "--script")
        show(f"\nwritten: {path}")
