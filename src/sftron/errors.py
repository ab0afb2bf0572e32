"""Console output without secrets and escape sequences, and the handling of errors, for all commands."""

from __future__ import annotations

import io
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TextIO

from sftron.visible_text import visible_text

REFUSED = 2
"""The exit status for input that cannot be used."""

_IN_URL = re.compile(r"(?<=://)[^/\s@]+(?=@)")
"""Matches `user:password` in https://user:password@host."""
_HUB_TOKEN = re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{20,}")
_SECRET_NAME = re.compile(r"(?:^|_)(?:TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$", re.IGNORECASE)
"""Matches names of environment variables such as HF_TOKEN, WANDB_API_KEY and AWS_SECRET_ACCESS_KEY."""
_SHORTEST_SECRET = 8


def redacted(text: str) -> str:
    """Replaces passwords in URLs, Hub tokens, and secrets from environment variables by ***.

    A secret is found without the space around it, because libraries strip it, or quote the line end in another way.
    """
    for name, value in os.environ.items():
        value = value.strip()
        if len(value) >= _SHORTEST_SECRET and _SECRET_NAME.search(name) and value in text:
            text = text.replace(value, "***")
    return _HUB_TOKEN.sub("***", _IN_URL.sub("***", text))


def without_secrets(facts: Any) -> Any:
    """Returns a copy of JSON values in which every string is redacted."""
    if isinstance(facts, Mapping):
        return {redacted(str(name)): without_secrets(value) for name, value in facts.items()}
    if isinstance(facts, (list, tuple)):
        return [without_secrets(value) for value in facts]
    return redacted(facts) if isinstance(facts, str) else facts


def printable(text: str) -> str:
    """Returns the text without secrets and with visible escape sequences.

    Names of files, data sets and models, and errors of libraries, may contain secrets, or escape sequences that a
    terminal would execute.
    """
    return visible_text(redacted(text))


def show(text: str = "", *, to: TextIO | None = None, end: str = "\n", is_visible: bool = False) -> None:
    """Prints the text. All output goes through this function or the run's console.

    Args:
        text: The text.
        to: The stream; by default, standard output.
        end: The string that is printed after the text.
        is_visible: Whether the text has already been through `visible_text`, so that its only escape sequences are the
            colors of this program.
    """
    print(redacted(text) if is_visible else printable(text), file=to, end=end, flush=True)


def refuse(error: Exception, tool: str | None = None) -> int:
    """Prints the error of bad input on standard error. Returns the exit status.

    Raises a BrokenPipeError again: the reader of standard output has gone, which `exit_with` ends without a message.
    """
    if isinstance(error, BrokenPipeError):
        raise error
    show(f"{tool}: {error}" if tool else str(error), to=sys.stderr)
    return REFUSED


def show_traceback(error: Exception) -> None:
    show("".join(traceback.format_exception(error)), to=sys.stderr, end="")


def print_any_text() -> None:
    """Makes the standard streams escape characters that they cannot encode, which are common in data.

    A closed stream (`>&-`) becomes /dev/null. Otherwise the next file that is opened would get its descriptor.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def exit_with(main: Callable[[], int]) -> NoReturn:
    """Ends the process with the exit status that `main` returns, or with 1 and a traceback if `main` fails.

    An OSError, such as a full disk, is one line, because a traceback says nothing about the machine.
    """
    print_any_text()
    try:
        status = main()
    except BrokenPipeError:  # the reader has closed the pipe (`| head`)
        status = 1
    except KeyboardInterrupt:
        show("stopped", to=sys.stderr)
        status = 128 + signal.SIGINT
    except OSError as error:
        show(f"{type(error).__name__}: {error}", to=sys.stderr)
        status = 1
    except Exception as error:
        show_traceback(error)
        status = 1
    try:
        sys.stdout.flush()
    except OSError:  # a full disk or a closed pipe; Python would flush again and exit with 120
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status)
