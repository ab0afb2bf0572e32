"""A bound on the time that a loader may wait for its workers, wherever in the wait one of them hangs.

torch's own time-out ends the wait for a message to begin, and not the reading of one: a worker that is stopped while it
sends, or before it has handed over the memory of a batch that it has announced, would be waited for without end.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sftron.data.child_process import TELL_STACKS

_LATER_THAN_TORCH_S = 1.0
"""torch's own time-out comes first where it comes at all; it is the only one while the workers start."""
_TIME_TO_TELL_S = 1.0
_LITTLE_SHARED_MEMORY = 32 * 2**20


class WorkerError(RuntimeError):
    """A loader worker has died or hangs."""


class WorkerWatch:
    """`with watch.waiting():` around each wait for a worker, which raises WorkerError where one dies, or gives nothing
    for timeout_s: then the workers tell their stacks, are killed, and torch's wait ends with some error."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.failed = False
        """Whether a wait has ended with WorkerError."""
        self._verdict: str | None = None
        self._waiting_since: float | None = None
        self._over = threading.Event()
        self._items: Any = None
        self._others = multiprocessing.active_children()
        """The program's own children, which are not ours to kill."""

    def start(self, items: Any) -> None:
        """items: torch's iterator, whose workers have been forked; they inherit nothing of this thread."""
        self._items = items
        threading.Thread(target=self._run, name="worker watch", daemon=True).start()

    def stop(self) -> None:
        self._over.set()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        self._waiting_since = time.monotonic()
        try:
            yield
        except Exception as error:
            # What torch lets be known by its words only.
            died = "DataLoader worker (pid" in str(error)
            if "DataLoader timed out" in str(error) and self._verdict is None:
                self._waiting_since = None
                with suppress(RuntimeError):  # torch's, where one of them dies of being asked
                    self._pass_verdict()
            self.failed = died or self._verdict is not None
            if not self.failed:
                raise
            self._see_all_end()
            raise WorkerError(self._verdict or f"a loader worker has died: {error}") from None
        finally:
            self._waiting_since = None

    def _see_all_end(self) -> None:
        """Here and now, or torch would tell the main thread of their deaths wherever that is by then."""
        for worker in [*self._workers()] * 2:
            with suppress(RuntimeError):  # torch's, from its handler of SIGCHLD, once
                worker.kill()
                worker.join(_TIME_TO_TELL_S)

    def _workers(self) -> list[Any]:
        if self._items is not None:
            return self._items._workers
        return [child for child in multiprocessing.active_children() if child not in self._others]

    def _run(self) -> None:
        while not self._over.wait(min(1.0, self._timeout_s / 4)):
            since = self._waiting_since
            if since is not None and time.monotonic() - since > self._timeout_s + _LATER_THAN_TORCH_S:
                self._pass_verdict()
                for worker in self._workers():
                    worker.kill()
                return

    def _pass_verdict(self) -> None:
        self._verdict = (
            f"{self._who_hangs()} has given nothing for {self._timeout_s:.0f} s (parallelism.timeout_seconds); the "
            f"stacks of the workers stand above. {_remedy()}"
        )
        for worker in self._workers():
            with suppress(ProcessLookupError):
                os.kill(worker.pid, TELL_STACKS)
        time.sleep(_TIME_TO_TELL_S)

    def _who_hangs(self) -> str:
        """Those that are stopped, or else the one whose batch is the next."""
        if self._items is None:
            return "a loader worker"
        due = self._items._task_info.get(self._items._rcvd_idx, ())[:1]
        stopped = [number for number, worker in enumerate(self._workers()) if _is_stopped(worker.pid)]
        names = [
            f"{number} (process {self._workers()[number].pid}{', which is stopped' * bool(stopped)})"
            for number in stopped or due
        ]
        return f"loader worker {', '.join(names)}"


def _remedy() -> str:
    """Workers hand over batches in shared memory, of which a container may have 64 MB. Where it is full, torch says so
    on stderr, and the batch never comes."""
    with suppress(OSError):
        if (free := shutil.disk_usage("/dev/shm").free) < _LITTLE_SHARED_MEMORY:
            return (
                f"/dev/shm, by which they hand over batches, has {free / 2**20:.0f} MB left: give the container more "
                "(docker run --shm-size=1g), or set data.num_workers: 0"
            )
    return "Raise it where reading so many rows takes that long"


def _is_stopped(process: int) -> bool:
    """By a signal or a debugger. Known on Linux only."""
    if sys.platform != "linux":
        return False
    with suppress(OSError):  # it has ended meanwhile
        return Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0] in (b"T", b"t")
    return False
