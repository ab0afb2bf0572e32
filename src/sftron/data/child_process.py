"""Processes that do not outlive the one that started them, and that can be asked where they hang."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
TELL_STACKS = signal.SIGUSR2
"""Asks a loader's worker what it is doing; the answer goes to stderr."""


def die_with_parent(parent: int | None = None) -> None:
    """From now on this process is killed as soon as its parent has ended, however that came. On Linux; elsewhere
    loader workers look after their parent every 5 s by themselves (torch), and ranks are left to their time-out.

    parent: its process id, for a parent that ended before this call.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def children_of(process: int) -> list[int]:
    """The process ids of its children. On Linux without `ps`, which small images lack."""
    if sys.platform != "linux":
        listed = subprocess.run(["ps", "-Ao", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
        pairs = [line.split() for line in listed.splitlines()]
        return [int(child) for child, parent in pairs if int(parent) == process]
    children = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            # "pid (name) state parent ...", where a name may hold anything.
            _, parent = (folder / "stat").read_bytes().rpartition(b")")[2].split()[:2]
            if int(parent) == process:
                children.append(int(folder.name))
    return children


def start_worker(_worker_id: int, *, parent: int) -> None:
    """What a loader's worker does first."""
    # A signal to the process group would kill the workers before the trainer, which decides, could save.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(parent)
    faulthandler.register(TELL_STACKS, file=sys.__stderr__ or 2, all_threads=True)
