"""What the commands share: types of arguments, written files, and errors of bad input."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sftron.errors import refuse, without_secrets
from sftron.regular_file import expand_home

if TYPE_CHECKING:
    import torch

OVERRIDES = "--section.key=value overrides the configuration, as in `sftron train`."
OVERRIDES_OF_RUN = (
    "--section.key=value overrides the run's configuration, for example if the model or the data has moved."
)


def make_parser(command: str, description: str | None, epilog: str | None = None) -> argparse.ArgumentParser:
    """Returns a parser that refuses abbreviated options and prints the description unchanged."""
    return argparse.ArgumentParser(
        prog=f"sftron {command}",
        allow_abbrev=False,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


Main = Callable[[list[str]], int]


def refusing(*errors: type[Exception], tool: str | None = None) -> Callable[[Main], Main]:
    """Makes a command print these errors of bad input after the tool's name, and return exit status 2."""

    def decorate(main: Main) -> Main:
        @functools.wraps(main)
        def with_refusal(arguments: list[str]) -> int:
            try:
                return main(arguments)
            except errors as error:
                return refuse(error, tool)

        return with_refusal

    return decorate


# -- kinds of arguments ----------------------------------------------------------------------------------------------


def positive(text: str) -> int:
    """Parses an integer of 1 or more; argparse reports a ValueError with the name of the argument."""
    if (number := int(text)) < 1:
        raise ValueError
    return number


def as_path(text: str) -> Path:
    """Parses a path and expands `~`, which a shell leaves in `--out=~/x` and in quotes."""
    return Path(expand_home(text))


def count(text: str) -> int:
    """Parses an integer of 0 or more."""
    if (number := int(text)) < 0:
        raise ValueError
    return number


def integers(text: str) -> list[int]:
    """Parses whole numbers separated by commas."""
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers separated by commas") from None


def device(text: str) -> torch.device:
    """Parses the name of a torch device that is present."""
    import torch  # argparse calls this only if a device is given, so --help takes no time

    from sftron.kernels.device import GPU_TYPES, gpu_functions

    try:
        found = torch.empty(0, device=text).device
        if found.type == "meta":  # which holds no numbers
            raise RuntimeError
    except (RuntimeError, AssertionError, ImportError):  # torch raises any of these for an absent device
        kinds = ("cpu", *GPU_TYPES)
        seen = [kind for kind in kinds if kind == "cpu" or gpu_functions(torch.device(kind)).is_available()]
        problem = f"torch {torch.__version__} cannot use a device {text!r} here"
        raise argparse.ArgumentTypeError(f"{problem}; give {' or '.join(seen)}") from None
    return found


# -- files -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def writing(path: Path, remedy: str = "choose another place with --out") -> Iterator[None]:
    """Turns an OSError while writing to `path` into a ValueError with the remedy."""
    try:
        yield
    except OSError as error:
        at = Path(str(error.filename or path)).absolute()
        if isinstance(error, ConnectionError) or not at.is_relative_to(path.absolute().parent):
            raise  # it concerns standard output, the Hub or another file
        raise ValueError(f"{path} cannot be written: {error.strerror or error}; {remedy}") from error


def write_report(path: Path, content: str, option: str) -> None:
    """Writes the file that an option names, and makes its folder. Raises ValueError if it cannot."""
    with writing(path, f"choose another place with {option}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")


def write_json(path: Path | None, content: Any) -> None:
    """Writes the file of --json, if any, without secrets. Raises ValueError if it cannot."""
    if path is not None:
        write_report(path, json.dumps(without_secrets(content), indent=2) + "\n", "--json")
