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
SHOW_STACKS = signal.SIGUSR2
"""Makes a loader worker write the stacks of its threads to stderr."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
"""Ask a run to save and end. SIGHUP is what a closed terminal or ssh connection sends."""


def heard_signals() -> list[signal.Signals]:
    """Returns those of STOP_SIGNALS that end this process: all, but for a SIGHUP that `nohup` has it ignore."""
    return [
        number for number in STOP_SIGNALS if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    ]


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
    """Returns whether the first ancestor without a rank's environment, and so the one that gave it, has torch loaded.

    torchrun leaves its process id nowhere, and an orphan is given to process 1 or to another ancestor, which has not.
    """
    process = os.getppid()
    try:
        while b"TORCHELASTIC_RUN_ID=" in Path(f"/proc/{process}/environ").read_bytes():  # a script around the rank
            process = _parent_of(process)
        return b"libtorch" in Path(f"/proc/{process}/maps").read_bytes()
    except OSError:  # it has ended meanwhile, or is another user's
        return False


def _parent_of(process: int) -> int:
    # "pid (name) state parent ...", where a name may hold anything.
    return int(Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[1])


def children_of(process: int) -> list[int]:
    """The process ids of its children. On Linux without `ps`, which small images lack."""
    if sys.platform != "linux":
        listed = subprocess.run(["ps", "-Ao", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
        pairs = [line.split() for line in listed.splitlines()]
        return [int(child) for child, parent in pairs if int(parent) == process]
    children = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            if _parent_of(int(folder.name)) == process:
                children.append(int(folder.name))
    return children


def start_worker(_worker_id: int, *, parent: int) -> None:
    """What a loader's worker does first."""
    # A signal to the process group would kill the workers before the trainer, which decides, could save.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(parent)
    faulthandler.register(SHOW_STACKS, file=sys.__stderr__ or 2, all_threads=True)
