"""The console of a run: lines on standard output and in console.log, and a progress bar."""

from __future__ import annotations

import importlib
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from sftron.errors import printable, redacted

_INDENT = " " * 11
_CELL_BAR = 30
"""The characters of the bar in a notebook."""

_prints = True
_is_quiet = False
"""Whether only warnings and the outcome are printed; console.log has everything."""
_append: Callable[[bytes], None] | None = None
"""Appends a line to console.log."""
_early_lines: list[bytes] | None = None
"""The lines printed before the run has a console.log."""
_bar: Progress | None = None
"""The progress bar that is currently on the terminal."""
_lock = threading.RLock()
"""Held while printing a line or drawing the bar, because logger threads print too; a signal handler may reenter."""


def start(prints: bool) -> None:
    """Starts the console of a run. Only the main rank prints; `prints` is false on the others."""
    global _prints, _append, _early_lines
    _prints, _append, _early_lines = prints, None, []


def log_to(append: Callable[[bytes], None] | None) -> None:
    """Logs every line since `start`, and from now on, with `append`; None ends the logging."""
    global _append, _early_lines
    with _lock:
        early_lines, _append, _early_lines = _early_lines, append, None
        if append is not None:
            for line in early_lines or ():
                append(line)


def be_quiet(is_quiet: bool) -> None:
    """Sets whether the runs of this process print only their warnings and their outcome."""
    global _is_quiet
    _is_quiet = is_quiet


def warn(text: str) -> None:
    """Prints a warning, also in a quiet run."""
    write(f"WARNING    {text}", is_needed=True)


def write(line: str, colored: str | None = None, *, is_needed: bool = False) -> None:
    """Prints one line immediately and logs it.

    Removes secrets from it, and makes escape sequences visible. If the text contains line ends, for example in a
    file name, the following lines are indented, so that they cannot imitate a line of the run.

    Args:
        line: The text.
        colored: The same text for the screen, which may have colors and several lines. The caller has passed all
            foreign text in it through `visible_text`.
        is_needed: Whether a quiet run prints the line too.
    """
    if not _prints:
        return
    line = printable(line)
    if colored is None:
        line = colored = line.replace("\n", f"\n{_INDENT}")
    with _lock:
        if _is_quiet and not is_needed:
            pass
        elif _bar is None:
            _standard_output.write(redacted(colored) + "\n")
            _standard_output.flush()
        else:
            _bar.console.print(Text.from_ansi(redacted(colored)), soft_wrap=True)
        log = _append or (_early_lines.append if _early_lines is not None else None)
        if log is not None:
            log(line.encode(errors="replace"))


def write_short(line: str, short: str) -> None:
    """Prints the short form on a terminal, cut to its width.

    console.log receives the full line, and so does standard output if it is not a terminal.
    """
    write(line, short[: shutil.get_terminal_size().columns - 1] if sys.stdout.isatty() else None)


class RunProgress:
    """A progress bar at the bottom of the terminal, with the time left at the speed of the last 1,000 steps.

    The speed includes saves and evaluations. In a notebook, the bar is a line of the cell's output. Elsewhere, if
    standard output is not a terminal, nothing is drawn.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._progress = Progress(
            BarColumn(),
            TextColumn("{task.description}", markup=False),
            console=_Terminal(file=cast(TextIO, _standard_output), markup=False, emoji=False, highlight=False),
            auto_refresh=False,  # starts no thread, because loader workers are forked from this process
            transient=True,
            redirect_stdout=False,
            redirect_stderr=sys.stderr.isatty(),  # warnings of Python and of libraries appear above the bar
            speed_estimate_period=math.inf,
            get_time=clock,
            disable=not (_prints and not _is_quiet and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"),
        )
        self._task_id = self._progress.add_task("", total=1.0)
        self._cell = _notebook_line() if _prints and not _is_quiet else None

    def update(self, share: float, words: str) -> None:
        """Draws the bar after a step. `share` is the finished share of the run; `words` describes the step."""
        global _bar
        share = min(1.0, share)
        self._progress.update(self._task_id, completed=share)
        left = "" if self.time_left is None else f" | {self.time_left} left"
        self._progress.update(self._task_id, description=f"{share:4.0%} | {words}{left}")
        if self._cell is not None:
            filled = round(_CELL_BAR * share)
            self._cell(printable(f"{'━' * filled}{'·' * (_CELL_BAR - filled)} {share:4.0%} | {words}{left}"))
        if not self._progress.disable:
            with _lock:
                _bar = self._progress
                _bar.start()
                _bar.refresh()

    @property
    def time_left(self) -> str | None:
        """The time left, as `12:05`; None after the first step, when the speed is not known yet."""
        seconds = self._progress.tasks[0].time_remaining
        if seconds is None:
            return None
        minutes, seconds = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _notebook_line() -> Callable[[str], None] | None:
    """Returns what shows a text in a line of the notebook cell that is running; None outside of a notebook."""
    if "ipykernel" not in sys.modules:
        return None
    display: Any = importlib.import_module("IPython.display").display
    handle = display({"text/plain": ""}, raw=True, display_id=True)
    return None if handle is None else lambda text: handle.update({"text/plain": text}, raw=True)


def hide_progress() -> None:
    """Removes the progress bar from the terminal, if there is one."""
    global _bar
    with _lock:
        if _bar is not None:
            _bar.stop()
            _bar = None


class _Terminal(Console):
    """A terminal whose cursor stays visible, because a killed process could not restore it."""

    def show_cursor(self, show: bool = True) -> bool:
        return False


class _StandardOutput:
    """The current `sys.stdout`, whose write errors (a full disk, a closed pipe or terminal) are ignored."""

    def write(self, text: str) -> None:
        with suppress(OSError):
            sys.stdout.write(text)

    def flush(self) -> None:
        with suppress(OSError):
            sys.stdout.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)


_standard_output = _StandardOutput()
