"""Signals that ask a run to end."""

from __future__ import annotations

import os
import signal
from types import FrameType

from sftron.train import console


class StopRequest:
    """SIGTERM, SIGUSR1 and the first Ctrl-C end the run after its step, or before the first, with a checkpoint."""

    def __init__(self) -> None:
        self.received = False
        self._process = os.getpid()

    def listen(self) -> None:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._receive)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self.received = True
        if os.getpid() == self._process and console.speaks():
            # Not print: it may have been interrupted in the middle of one, and refuses a second.
            os.write(1, f"received {signal.Signals(number).name}: saving after this step\n".encode())
        if number == signal.SIGINT:
            # A second Ctrl-C is meant at once.
            signal.signal(signal.SIGINT, signal.default_int_handler)
