"""Termination from outside: signals, and the death of the parent torchrun.

It imports nothing slow, because `sftron train` installs the signal handlers before its other imports.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from sftron.data.child_process import STOP_SIGNALS, die_with_parent, heard_signals


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
    """Ensures that this rank ends when its torchrun ends; does nothing in a process that torchrun did not start."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()
