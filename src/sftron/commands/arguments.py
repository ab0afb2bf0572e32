"""What the arguments of all commands have in common."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sftron.errors import without_secrets

if TYPE_CHECKING:
    import torch

OVERRIDES = "--section.key=value overrides the configuration, as in `sftron train`."


def make_parser(command: str, description: str | None, epilog: str | None = None) -> argparse.ArgumentParser:
    """Returns a parser that accepts no abbreviated options, and prints the description as it is written."""
    return argparse.ArgumentParser(
        prog=f"sftron {command}",
        allow_abbrev=False,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_reports(parser: argparse.ArgumentParser, html: str | None = "write the page there") -> None:
    """Adds --html, with this help, unless it is None, and --json."""
    if html is not None:
        parser.add_argument("--html", type=Path, metavar="FILE", help=html)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there too")


def write_json(path: Path | None, content: Any) -> None:
    """Writes a report without secrets and makes its folder, if a file is wanted. Raises OSError."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(without_secrets(content), indent=2) + "\n", encoding="utf-8")


@contextlib.contextmanager
def writing(path: Path, remedy: str = "choose another place with --out") -> Iterator[None]:
    """Words an OSError of writing to `path`."""
    try:
        yield
    except OSError as error:
        at = Path(str(error.filename or path)).absolute()
        if isinstance(error, ConnectionError) or not at.is_relative_to(path.absolute().parent):
            raise  # of the reader of standard output, of the Hub, or of another file
        raise OSError(f"{path} cannot be written: {error.strerror or error}; {remedy}") from error


def integers(text: str) -> list[int]:
    """Parses whole numbers separated by commas."""
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers separated by commas") from None


def device(text: str) -> torch.device:
    """Parses a device of torch, which has to be present."""
    import torch  # argparse calls this only if a device is given, so --help takes no time

    try:
        torch.empty(0, device=text)
    except (RuntimeError, AssertionError) as error:  # torch raises either for a missing device
        problem = str(error).splitlines()[0]
        raise argparse.ArgumentTypeError(f"{text}: {problem}; give cpu, or cuda where there is a GPU") from None
    return torch.device(text)


def positive(text: str) -> int:
    """Parses an integer of 1 or more; argparse reports a ValueError with the name of the argument."""
    if (number := int(text)) < 1:
        raise ValueError
    return number
