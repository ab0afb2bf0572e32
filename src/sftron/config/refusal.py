"""How run_train.py and the tools say that something is wrong: without secrets, and with the exit status for it."""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from sftron.config.secrets import redacted

REFUSED = 2
"""The exit status where what was given cannot be used."""


def refuse(error: Exception, tool: str | None = None) -> int:
    """Say what is wrong with what the user gave, which may quote a URL with a password. Returns the exit status."""
    print(redacted(f"{tool}: {error}" if tool else str(error)), file=sys.stderr)
    return REFUSED


def show_traceback(error: Exception) -> None:
    """As Python does, without secrets: what libraries raise may quote a proxy's or a mirror's URL."""
    print(redacted("".join(traceback.format_exception(error))), end="", file=sys.stderr)


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
