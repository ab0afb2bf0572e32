"""Signals that ask a run to end. Imports nothing slow: run_train.py listens before it imports anything else."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from sftron.data.child_process import STOP_SIGNALS, heard_signals


class StopRequest:
    """SIGTERM, SIGUSR1, SIGHUP and the first Ctrl-C end the run after its step, or before the first, with a checkpoint.

    speaks: whether this process says that it has received one; of several ranks, the main one does.
    """

    def __init__(self, *, speaks: bool = True) -> None:
        self.received = False
        self._speaks = speaks
        self._process = os.getpid()
        self._before: dict[signal.Signals, Any] = {}

    def listen(self) -> None:
        if not self._before:
            self._before = {number: signal.signal(number, self._receive) for number in heard_signals()}

    def give_back(self) -> None:
        """Signals mean what they meant before: a process that swallowed SIGTERM from now on would never end, nor would
        those that are forked from it, as a Pool's, which ends its own by that."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def ignore(self) -> None:
        """From now on, as nothing is left to save: Python's own end takes a while, and gives signals that are listened
        to their first meaning back, by which a run that is saved would end with another status."""
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listens within, unless it does so already."""
        is_inner = bool(self._before)
        self.listen()
        try:
            yield
        finally:
            if not is_inner:
                self.give_back()

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self.received = True
        if os.getpid() == self._process and self._speaks:
            # Not print: it may have been interrupted in the middle of one, and refuses a second.
            with suppress(OSError):  # a full disk or a closed pipe: raised here, it would end the run unsaved
                os.write(1, f"received {signal.Signals(number).name}: saving after this step\n".encode())
        if number == signal.SIGINT:
            # A second Ctrl-C is meant at once.
            signal.signal(signal.SIGINT, signal.default_int_handler)
