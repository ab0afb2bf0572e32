"""Signals that ask a run to end."""

from __future__ import annotations

import signal
from types import FrameType

from sftron.train import console


class StopRequest:
    """SIGTERM, SIGUSR1 and the first Ctrl-C end the run after its current step, with a checkpoint."""

    def __init__(self) -> None:
        self.received = False

    def listen(self) -> None:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._receive)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self.received = True
        console.say(f"received {signal.Signals(number).name}: saving after this step")
        if number == signal.SIGINT:
            # A second Ctrl-C is meant at once.
            signal.signal(signal.SIGINT, signal.default_int_handler)
