"""What run_train.py and the tools print: without secrets or escape sequences; and how they refuse."""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn, TextIO

from sftron.config.secrets import redacted
from sftron.visible_text import visible_text

REFUSED = 2
"""The exit status where what was given cannot be used."""


def printable(text: str) -> str:
    """The text as it is shown to people: names of files, data sets and models, and what libraries raise, may hold a
    secret, or an escape sequence that a terminal would obey."""
    return visible_text(redacted(text))


def show(text: str = "", *, to: TextIO | None = None, end: str = "\n", is_visible: bool = False) -> None:
    """Prints the text, by default on standard output; all that is printed passes here or through `console.say`.

    is_visible: the escape sequences in the text are colors of ours, as all else has been through `visible_text`.
    """
    print(redacted(text) if is_visible else printable(text), file=to, end=end, flush=True)


def refuse(error: Exception, tool: str | None = None) -> int:
    """Says what is wrong with what the user gave. Returns the exit status."""
    show(f"{tool}: {error}" if tool else str(error), to=sys.stderr)
    return REFUSED


def show_traceback(error: Exception) -> None:
    """As Python does."""
    show("".join(traceback.format_exception(error)), to=sys.stderr, end="")


def print_any_text() -> None:
    """Data holds all of Unicode, and a terminal or a log in latin-1 takes little of it: the rest is escaped."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def exit_with(main: Callable[[], int]) -> NoReturn:
    """End the process with what a tool's `main` returns, or with 1 and the traceback of what it raises."""
    print_any_text()
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read has seen enough (`| head`). Python would flush once more at its end, and fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    except Exception as error:
        show_traceback(error)
        status = 1
    sys.exit(status)
