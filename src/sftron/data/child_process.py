"""Processes that do not outlive the one that started them, and the signals that end a run in order."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
"""Signals that make a run save and end. SIGHUP is what a closed terminal or ssh connection sends."""


def heard_signals() -> list[signal.Signals]:
    """Returns those of STOP_SIGNALS that end this process: all, but for a SIGHUP that `nohup` has it ignore."""
    ignores_hangup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in STOP_SIGNALS if number != signal.SIGHUP or not ignores_hangup]


def die_with_parent(parent: int | None = None) -> None:
    """Has this process killed as soon as its parent ends, for whatever reason.

    `parent` is the parent's process id, for one that may have ended before this call. Works on Linux; elsewhere loader
    workers check every 5 s whether their parent is alive (torch), and ranks end by their time-out.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def parent_of(process: int) -> int:
    """Returns the process id of the parent. Raises OSError where the process has ended."""
    # "pid (name) state parent ...", where a name may hold anything.
    return int(Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[1])


def children_of(process: int) -> list[int]:
    """Returns the process ids of its children; on Linux without `ps`, which small images lack."""
    if sys.platform != "linux":
        listed = subprocess.run(["ps", "-Ao", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
        pairs = [line.split() for line in listed.splitlines()]
        return [int(child) for child, parent in pairs if int(parent) == process]
    children = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            if parent_of(int(folder.name)) == process:
                children.append(int(folder.name))
    return children


def start_worker(_worker_id: int, *, parent: int) -> None:
    """Runs first in a loader worker."""
    # A signal to the process group would kill the workers before the trainer, which decides, could save.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(parent)
