"""Child processes that die with their parent, and the signals that end a run after it has saved."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
"""The signals on which a run saves and ends. A terminal or ssh connection that closes sends SIGHUP."""


def heard_signals() -> list[signal.Signals]:
    """Returns the STOP_SIGNALS that this process handles: all, except a SIGHUP that `nohup` ignores."""
    ignores_hangup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in STOP_SIGNALS if number != signal.SIGHUP or not ignores_hangup]


def die_with_parent(parent: int | None = None) -> None:
    """Makes the kernel kill this process as soon as its parent ends, for whatever reason; on Linux only.

    Args:
        parent: The parent's process id; this process exits at once if that parent has already ended.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if parent is not None and os.getppid() != parent:
            os._exit(1)


def start_worker(_worker_id: int, *, parent: int) -> None:
    """Initializes a loader worker (`worker_init_fn`)."""
    # A stop signal goes to the whole process group. Without this, the workers would die before the trainer has saved.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(parent)
