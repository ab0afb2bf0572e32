"""Termination from outside: signals, and the death of the parent torchrun.

It imports nothing slow, because `sftron train` installs the signal handlers before its other imports.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from sftron.data.child_process import STOP_SIGNALS, die_with_parent, heard_signals, parent_of


class StopRequest:
    """Records SIGTERM, SIGUSR1, SIGHUP and the first Ctrl-C as a request to stop.

    The run then saves a checkpoint and ends after the current step, or before its first one.

    Args:
        prints: Whether this process prints a line when it receives a signal; only the main rank does.
    """

    def __init__(self, *, prints: bool = True) -> None:
        self.received = False
        self._prints = prints
        self._process = os.getpid()
        self._before: dict[signal.Signals, Any] = {}

    def listen(self) -> None:
        if not self._before:
            self._before = {number: signal.signal(number, self._receive) for number in heard_signals()}

    def give_back(self) -> None:
        """Restores the previous signal handlers, so that SIGTERM ends this process and its forks again."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def ignore(self) -> None:
        """Ignores the signals from now on; during Python's shutdown, one would change a saved run's exit status."""
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Installs the handlers within the context, unless they are already installed."""
        is_inner = bool(self._before)
        self.listen()
        try:
            yield
        finally:
            if not is_inner:
                self.give_back()

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self.received = True
        if os.getpid() == self._process and self._prints:
            # Not print: the signal may have interrupted a print, and print is not reentrant.
            with suppress(OSError):  # a full disk or a closed pipe; the exception would end the run unsaved
                os.write(1, f"received {signal.Signals(number).name}: saving after this step\n".encode())
        if number == signal.SIGINT:
            # A second Ctrl-C ends the run at once.
            signal.signal(signal.SIGINT, signal.default_int_handler)


def die_with_torchrun() -> None:
    """Ensures that this rank ends when its torchrun ends, and ends it now if torchrun has already ended.

    Does nothing in a process that torchrun did not start.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    die_with_parent()
    if sys.platform == "linux" and not _is_torchrun_alive():
        os.write(2, b"torchrun has ended before this rank began; so the rank ends too\n")
        os._exit(1)


def _is_torchrun_alive() -> bool:
    """Returns whether the first ancestor without a rank's environment variables has torch loaded.

    torchrun does not publish its process id, but it is that ancestor, because it set the variables for its children.
    An orphan is adopted by process 1 or by another ancestor, which does not have torch loaded.
    """
    process = os.getppid()
    try:
        while b"TORCHELASTIC_RUN_ID=" in Path(f"/proc/{process}/environ").read_bytes():  # a script around the rank
            process = parent_of(process)
        return b"libtorch" in Path(f"/proc/{process}/maps").read_bytes()
    except OSError:  # the process has ended meanwhile, or belongs to another user
        return False
