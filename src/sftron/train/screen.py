"""What a run says, line by line: on its standard output, above the progress bar if there is one, and in console.log."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from threading import RLock
from typing import Any, TextIO

from sftron.config.refusal import printable
from sftron.config.secrets import redacted

_ERASE_LINE = "\r\x1b[2K"
_INDENT = " " * 11

_lock = RLock()
_speaks = True
_log: Callable[[bytes], None] | None = None
_unlogged: list[str] | None = None
"""What a run says before there is a file for it."""
_bar: Callable[[int], str] | None = None
_drawn = False
_stderr: TextIO | None = None


def speak(wanted: bool) -> None:
    """A run begins. wanted: whether this process says anything: of several ranks, only the main one does."""
    global _speaks, _log, _unlogged
    _speaks, _log, _unlogged = wanted, None, []


def speaks() -> bool:
    return _speaks


def say(line: str, colored: str | None = None) -> None:
    """One line, out at once: a log file is read while the run goes on. Names and errors in it are made printable; where
    they hold a line end, the line goes on indented, so that no name passes for a line of ours.

    colored: the same for the screen, which may have several lines, and in which all but our own escape codes has been
        through `visible_text`.
    """
    if not _speaks:
        return
    line = printable(line)
    if colored is None:
        line = colored = line.replace("\n", f"\n{_INDENT}")
    with _lock:
        _erase_bar()
        _put(redacted(colored) + "\n")
        _write_down(line)
        _draw_bar()


def say_in_short(line: str, short: str) -> None:
    """On a terminal the short form, cut to its width; in console.log, and where standard output is no terminal, the
    line."""
    say(line, short[: terminal_columns() - 1] if sys.stdout.isatty() else None)


def terminal_columns() -> int:
    """Asked each time, as terminals change their size; 80 where nobody has set one."""
    with suppress(OSError):
        return os.get_terminal_size(sys.stdout.fileno()).columns or 80
    return 80


def _put(text: str) -> None:
    """On standard output. A full disk below it, a closed pipe or a terminal that is gone does not end a run: what a
    buffer still holds comes later, the rest is in console.log only."""
    with suppress(OSError):
        sys.stdout.write(text)
        sys.stdout.flush()


def _write_down(line: str) -> None:
    if _log is not None:
        _log(line.encode(errors="replace"))
    elif _unlogged is not None:
        _unlogged.append(line)


def log_to(append: Callable[[bytes], None] | None) -> None:
    """Every line from now on, and those that the run has said so far, go there too; None: nowhere any more."""
    global _log, _unlogged
    with _lock:
        _log, earlier, _unlogged = append, _unlogged or [], None
        if append is not None:
            for line in earlier:
                append(line.encode(errors="replace"))


def show_bar(bar: Callable[[int], str]) -> None:
    """Keep a line at the foot of the terminal, or nothing where standard output is none; bar: of the columns it may
    have, the text."""
    global _bar, _stderr
    if not (_speaks and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"):
        return
    with _lock:
        if _stderr is None and sys.stderr.isatty():
            _stderr, sys.stderr = sys.stderr, _AboveBar(sys.stderr)
        _bar = bar
        _erase_bar()
        _draw_bar()


def hide_bar() -> None:
    global _bar, _stderr
    with _lock:
        _erase_bar()
        _bar = None
        if _stderr is not None:
            sys.stderr, _stderr = _stderr, None


def _erase_bar() -> None:
    global _drawn
    if _drawn:
        _put(_ERASE_LINE)
        _drawn = False


def _draw_bar() -> None:
    global _drawn
    if _bar is None:
        return
    columns = terminal_columns() - 1  # in the last one some terminals wrap
    _put(_bar(columns)[:columns])
    _drawn = True


class _AboveBar:
    """Standard error while there is a bar: what Python and libraries warn of is written above it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with _lock:
            _erase_bar()
            written = self._stream.write(text)
            self._stream.flush()
            if text.endswith("\n"):
                _draw_bar()
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
