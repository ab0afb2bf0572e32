"""What the arguments of all commands have in common."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    """Writes a report, if a file is wanted. Raises OSError."""
    if path is not None:
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


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
        raise argparse.ArgumentTypeError(f"{text}: {str(error).splitlines()[0]}") from None
    return torch.device(text)


def positive(text: str) -> int:
    """Parses an integer of 1 or more; argparse reports a ValueError with the name of the argument."""
    if (number := int(text)) < 1:
        raise ValueError
    return number
