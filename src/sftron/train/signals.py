"""What ends a run from outside: signals, and the end of its torchrun.

Imports nothing slow: run_train.py listens before it imports anything else.
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
    """SIGTERM, SIGUSR1, SIGHUP and the first Ctrl-C end the run after its step, or before the first, with a checkpoint.

    speaks: This process prints that it has received one; of several ranks, the main one does.
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
        """Restores what the signals did before: a process that swallowed SIGTERM from now on would never end, nor would
        its forks, such as the processes of a Pool, which ends them by SIGTERM."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def ignore(self) -> None:
        """Ignores the signals from now on, when nothing is left to save: Python's own end takes a while, and restores
        the default handlers, by which a run that is saved would end with another status."""
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listens within the context, unless it does so already."""
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


def die_with_torchrun() -> None:
    """Ends a rank with its torchrun: from now on, and at once where torchrun has ended already.

    Does nothing in a process that torchrun has not started.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    die_with_parent()
    if sys.platform == "linux" and not _is_torchrun_alive():
        os.write(2, b"torchrun has ended before this rank began; so the rank ends too\n")
        os._exit(1)


def _is_torchrun_alive() -> bool:
    """Returns whether the first ancestor without a rank's environment, and so the one that set it, has torch loaded.

    torchrun leaves its process id nowhere, and an orphan is given to process 1 or to another ancestor, which has not.
    """
    process = os.getppid()
    try:
        while b"TORCHELASTIC_RUN_ID=" in Path(f"/proc/{process}/environ").read_bytes():  # a script around the rank
            process = parent_of(process)
        return b"libtorch" in Path(f"/proc/{process}/maps").read_bytes()
    except OSError:  # it has ended meanwhile, or is another user's
        return False
