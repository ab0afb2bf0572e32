"""Console output without secrets and escape sequences, and the handling of errors, for all commands."""

from __future__ import annotations

import atexit
import io
import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, TextIO
from urllib.parse import quote

from sftron.regular_file import read_regular
from sftron.user_code import place_of
from sftron.visible_text import visible_text

REFUSED = 2
"""The exit status for input that cannot be used."""

_IN_URL = re.compile(
    r"(?<=://)(?:[^/\s?#\"'<>:@]{0,100}:"
    r"(?:(?!\d{1,5}/)[^\s\"'<>]{1,300}|(?!\d{1,5}\b)[^\s\"'<>][^\n\"'<>]{0,100}?)"
    r"|[^/\s?#\"'<>]+)(?=@)"
)
"""Matches `user:password` in https://user:password@host, also of a password with `/`, `?`, `#` or spaces, and a token
before the `@`; not the `@` in the path of https://host:80/@name."""
_HUB_TOKEN = re.compile(r"(?<![A-Za-z0-9])(?:hf_(?:oauth|jwt)_[\w.-]{8,}|(?:hf|api_org)_[A-Za-z0-9]{20,})")
_SECRET_NAMES = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "APIKEY")
_SECRET_NAMES += ("_KEY", "_KEYS", "_PASS", "_PAT", "_CREDENTIAL", "_CREDENTIALS")
"""The ends of names of environment variables such as HF_TOKEN, WANDB_API_KEY and AWS_SECRET_ACCESS_KEY."""
_SHORTEST_SECRET = 8
_MAX_TOKEN_FILE_BYTES = 2**20


def redacted(text: str) -> str:
    """Replaces secrets by ***: passwords in URLs, Hub tokens, and secrets of the environment and of logins.

    It finds a secret without surrounding space (libraries strip it), line by line, and in the spellings of URLs, JSON
    and Python.
    """
    for secret in _secrets():
        for spelling in _spellings(secret):
            text = text.replace(spelling, "***")
    return _HUB_TOKEN.sub("***", _IN_URL.sub("***", text))


def _secrets() -> Iterator[str]:
    """Yields the values of environment variables with the names of secrets, and the tokens of `hf` and `wandb login`.

    The paths repeat huggingface_hub's and wandb's, because both are slow to import.
    """
    yield from (value for name, value in os.environ.items() if f"_{name.upper()}".endswith(_SECRET_NAMES))
    hub = os.environ.get("HF_HOME") or os.environ.get("XDG_CACHE_HOME", "~/.cache") + "/huggingface"
    paths = (os.environ.get("HF_TOKEN_PATH") or f"{hub}/token", os.environ.get("NETRC") or "~/.netrc")
    # Not Path.expanduser, which raises an error if there is no home.
    token, netrc = (_content(os.path.expandvars(os.path.expanduser(path))) for path in paths)  # noqa: PTH111
    yield from (token, *re.findall(r"password\s+(\S+)", netrc))


@cache
def _content(path: str) -> str:
    """Returns the content of a file that a login wrote; empty if it cannot be read."""
    try:
        return read_regular(Path(path), _MAX_TOKEN_FILE_BYTES).decode("utf-8", "replace")
    except (OSError, ValueError):
        return ""


@cache
def _spellings(secret: str) -> list[str]:
    """Returns the secret and its lines, plain and as spelled in URLs, JSON and Python literals, longest first."""
    parts = [part.strip() for part in (secret, *secret.splitlines())]
    parts = [part for part in parts if len(part) >= _SHORTEST_SECRET]
    spelled = [(part, quote(part, safe=""), quote(part), json.dumps(part)[1:-1], repr(part)[1:-1]) for part in parts]
    return sorted({each for spellings in spelled for each in spellings}, key=len, reverse=True)


def without_secrets(facts: Any) -> Any:
    """Returns a copy of JSON values in which every string is redacted."""
    return map_texts(redacted, facts)


def map_texts(change: Callable[[str], str], value: Any) -> Any:
    """Returns a copy of JSON values with `change` applied to every string, including keys."""
    if isinstance(value, Mapping):
        return {change(str(name)): map_texts(change, each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [map_texts(change, each) for each in value]
    return change(value) if isinstance(value, str) else value


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
        is_visible: Whether the text has been through `visible_text`, so that its only escape sequences are this
            program's colors.
    """
    print(redacted(text) if is_visible else printable(text), file=to, end=end, flush=True)


def refuse(error: Exception, tool: str | None = None) -> int:
    """Prints the error of bad input on standard error. Returns the exit status.

    Re-raises a BrokenPipeError (the reader of standard output is gone), for which `exit_with` prints no message.
    """
    if isinstance(error, BrokenPipeError):
        raise error
    show(f"{tool}: {error}" if tool else str(error), to=sys.stderr)
    return REFUSED


def show_traceback(error: Exception) -> None:
    show("".join(traceback.format_exception(error)), to=sys.stderr, end="")


class _WithoutSecrets(io.TextIOWrapper):
    """A stream to which libraries write their warnings and logs."""

    def write(self, text: str) -> int:
        return super().write(redacted(text))


def print_any_text() -> None:
    """Makes the standard streams escape characters that they cannot encode, which are common in data.

    A closed stream (`>&-`) becomes /dev/null. Otherwise the next file that is opened would get its descriptor.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("r" if name == "stdin" else "w"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def exit_with(main: Callable[[], int]) -> NoReturn:
    """Ends the process with the exit status that `main` returns, or with 1 and a traceback if `main` fails.

    One of several ranks ends at once, without Python's own shutdown.

    An OSError, such as a full disk, prints one line, because a traceback says nothing about the machine.
    """
    print_any_text()
    if isinstance(stream := sys.stderr, io.TextIOWrapper) and stream is sys.__stderr__:
        sys.stderr = _WithoutSecrets(stream.buffer, stream.encoding, stream.errors, line_buffering=True)
    try:
        status = main()
    except BrokenPipeError:  # the reader has closed the pipe (`| head`)
        status = 1
    except KeyboardInterrupt:
        show("stopped", to=sys.stderr)
        status = 128 + signal.SIGINT
    except OSError as error:
        place = "" if error.errno is None or error.filename else f" ({place_of(error)})"
        show(f"{type(error).__name__}: {error}{place}", to=sys.stderr)
        status = 1
    except Exception as error:
        show_traceback(error)
        status = 1
    try:
        sys.stdout.flush()
    except OSError:  # a full disk or a closed pipe; Python would flush again and exit with 120
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if os.environ.get("WORLD_SIZE", "1") != "1":
        # One of several ranks. While Python shuts down, a thread of gloo may drop the tensor of a finished collective,
        # which aborts the process. So only the handlers of the shutdown run.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
