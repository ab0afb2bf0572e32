"""What run_train.py and the tools print: without secrets or escape sequences; and how they refuse bad input."""

from __future__ import annotations

import io
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TextIO

from sftron.visible_text import visible_text

REFUSED = 2
"""The exit status where what was given cannot be used."""

_IN_URL = re.compile(r"(?<=://)[^/\s@]+(?=@)")
"""user:password of https://user:password@host."""
_HUB_TOKEN = re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{20,}")
_SECRET_NAME = re.compile(r"(?:^|_)(?:TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$", re.IGNORECASE)
"""Environment variables such as HF_TOKEN, WANDB_API_KEY, AWS_SECRET_ACCESS_KEY."""
_SHORTEST_SECRET = 8


def redacted(text: str) -> str:
    """Returns the text with *** for passwords in URLs, Hub tokens, and secrets of the environment."""
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST_SECRET and _SECRET_NAME.search(name) and value in text:
            text = text.replace(value, "***")
    return _HUB_TOKEN.sub("***", _IN_URL.sub("***", text))


def without_secrets(facts: Any) -> Any:
    """Returns the same JSON with every text in it redacted."""
    if isinstance(facts, Mapping):
        return {redacted(str(name)): without_secrets(value) for name, value in facts.items()}
    if isinstance(facts, (list, tuple)):
        return [without_secrets(value) for value in facts]
    return redacted(facts) if isinstance(facts, str) else facts


def printable(text: str) -> str:
    """Returns the text as it is shown to people: names of files, data sets and models, and what libraries raise, may
    hold a secret, or an escape sequence that a terminal would obey."""
    return visible_text(redacted(text))


def show(text: str = "", *, to: TextIO | None = None, end: str = "\n", is_visible: bool = False) -> None:
    """Prints the text, by default on standard output; all that is printed passes here or through the run's console.

    is_visible: The escape sequences in the text are colors of ours, as all else has been through `visible_text`.
    """
    print(redacted(text) if is_visible else printable(text), file=to, end=end, flush=True)


def refuse(error: Exception, tool: str | None = None) -> int:
    """Prints what is wrong with the input. Returns the exit status."""
    show(f"{tool}: {error}" if tool else str(error), to=sys.stderr)
    return REFUSED


def show_traceback(error: Exception) -> None:
    show("".join(traceback.format_exception(error)), to=sys.stderr, end="")


def print_any_text() -> None:
    """Lets the standard streams escape what they cannot encode: data holds all of Unicode, and latin-1 little of it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def exit_with(main: Callable[[], int]) -> NoReturn:
    """Ends the process with what a tool's `main` returns, or with 1 and the traceback of what it raises."""
    print_any_text()
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has seen enough (`| head`). Python would flush once more at its end, and fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    except Exception as error:
        show_traceback(error)
        status = 1
    sys.exit(status)
