"""Checks a trainer of TRL, transformers or another library built on them, before it trains: one table, green or red.

    sftron verify-trainer my_script.py:make_trainer

make_trainer() returns the trainer, which is left as it was. Exit status: 0 passed, 1 a check failed or a required one
was not measured, 2 the trainer cannot be checked (a message, no traceback).
"""

import argparse
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sftron.commands.arguments import add_reports, make_parser
from sftron.errors import is_of_user, place_of, refuse


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = make_parser("verify-trainer", __doc__)
    parser.add_argument("target", metavar="SCRIPT.py:FUNCTION", help="a function without arguments; gives the trainer")
    parser.add_argument("--trained-roles", choices=("assistant", "all"), default="assistant", help="what is meant")
    parser.add_argument("--conversations", type=Path, metavar="FILE", help="the rows, if only ids are left (JSONL)")
    add_reports(parser)
    return parser.parse_args(arguments)


def load_function(target: str) -> Callable[[], Any]:
    """Returns the function that `SCRIPT.py:FUNCTION` names. Raises ValueError."""
    path, _, name = target.rpartition(":")
    if not path.endswith(".py") or not Path(path).is_file():
        raise ValueError(
            f"found {target}; wanted SCRIPT.py:FUNCTION, a Python file and its function that returns the trainer"
        )
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


def read_conversations(path: Path) -> list[Any]:
    """Returns the values of a JSONL file; lines end only at newlines. Raises OSError, or ValueError with the line."""
    from sftron.data.sources.jsonl import parse_json

    lines = enumerate(path.read_bytes().split(b"\n"), 1)
    return [parse_json(line, f"{path}:{n}", "a conversation as JSON on each line") for n, line in lines if line.strip()]


def main(arguments: list[str]) -> int:
    options = parse_arguments(arguments)
    try:
        given = None if options.conversations is None else read_conversations(options.conversations)
    except (OSError, ValueError) as error:
        return refuse(error)
    try:
        trainer = load_function(options.target)()
        # Imported here, so that --help and wrong arguments take no time.
        from sftron.commands.checked import ShownTable
        from sftron.verify.verify_trainer import page_of, verify_trainer

        shown = ShownTable()
        report = verify_trainer(trainer, given, options.trained_roles, on_start=shown.start, on_check=shown.check)
    except BrokenPipeError:
        raise
    except Exception as error:
        if not is_of_user(error):
            if isinstance(error, ValueError):
                return refuse(error)
            raise
        words = " ".join(str(error).split())
        return refuse(ValueError(f"{place_of(error)}: {type(error).__name__}{': ' * bool(words)}{words}"))
    return shown.finish(report, {options.html: lambda: page_of(report)}, options.json)
