"""What the arguments of all commands have in common."""

from __future__ import annotations

import argparse


def make_parser(command: str, description: str | None, epilog: str | None = None) -> argparse.ArgumentParser:
    """Returns a parser that accepts no abbreviated options, and prints the description as it is written."""
    return argparse.ArgumentParser(
        prog=f"sftron {command}",
        allow_abbrev=False,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def positive(text: str) -> int:
    """Parses an integer of 1 or more; argparse reports a ValueError with the name of the argument."""
    if (number := int(text)) < 1:
        raise ValueError
    return number
