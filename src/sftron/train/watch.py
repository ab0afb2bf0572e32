"""What ends ranks together when one of them died, stalls or failed: each knows what all others are doing.

A thread of every rank writes twice a second what its rank is at, into the store that torchrun (or rank 0) keeps, and
reads what the others do. The first failure is written there once, by whoever sees it, and every rank ends with it, when
it has said it and shown its stacks. Without this a rank waits for a dead one in NCCL until a time-out that names no
one, and torchrun's SIGTERM does not reach a thread that waits in C++.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import Store

from sftron.config.refusal import show
from sftron.train.run_directory import machine

_BEAT_S = 0.5
_TIME_TO_END_S = 2.0
"""For a main thread to fail by itself, which tells more, and for others to say what they know."""
_LATER_THAN_TORCH_S = 5.0
"""torch's own time-outs, of a loader or of a collective, come first: they say more."""
_FIRST = "sftron/first failure"


class RankError(RuntimeError):
    """Some rank has failed; the message names it and what it was doing."""


@dataclass(slots=True)
class _Seen:
    """What another rank has written last; when, by this rank's clock, its beat and its place changed."""

    state: dict[str, Any]
    beat_at: float
    place_at: float


class Watch:
    """store: a connection of its own, as torch's blocks while it waits. timeout_s: for a rank that does not go on."""

    def __init__(self, store: Store, rank: int, world_size: int, timeout_s: float) -> None:
        self._store, self._rank, self._world_size, self._timeout_s = store, rank, world_size, timeout_s
        self._state: dict[str, Any] = {"place": 0, "phase": "starting", "process": os.getpid()}
        self._state |= {"host": socket.gethostname(), "processes": machine()}
        self._state |= {"waits": False, "gave_up": False, "ended": False}
        self._seen: dict[int, _Seen] = {}
        self._first: str | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self.on_failure: Callable[[str], None] = lambda first: None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """This rank has nothing more to do with the others, and is not missed."""
        self._over.set()
        self._thread.join(_TIME_TO_END_S)
        faulthandler.cancel_dump_traceback_later()
        with suppress(RuntimeError):
            self._write(ended=self._first is None)

    def at(self, phase: str) -> None:
        """What this rank does from now on. All ranks pass the same places in the same order."""
        self._state |= {"place": self._state["place"] + 1, "phase": phase}

    def waits(self, waits: bool) -> None:
        """Whether this rank waits for all others; before and after it, its place is another."""
        self._state |= {"place": self._state["place"] + 1, "waits": waits}

    def blame(self, error: BaseException) -> str:
        """The failure that came first; `error` of this rank, unless it only tells of another's."""
        first = self._find_first(error)
        time.sleep(2 * _BEAT_S)  # for others to read it, before the store may end with this process
        return first

    def _find_first(self, error: BaseException) -> str:
        if not _is_about_others(error):
            return self._tell_first(f"rank {self._rank}: {type(error).__name__}: {error}")
        self._state["gave_up"] = True
        deadline = time.monotonic() + _TIME_TO_END_S
        while self._first is None and time.monotonic() < deadline:
            self._over.wait(_BEAT_S / 5)
        missing = [rank for rank, seen in self._seen.items() if not seen.state["gave_up"] and rank != self._rank]
        own = f"rank {self._rank}: {error}"
        return self._first or self._tell_first("; ".join(map(self._describe, missing)) or own)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._over.wait(_BEAT_S):
            # Ends this process with its stacks where even this thread cannot: something holds Python's lock.
            faulthandler.dump_traceback_later(self._timeout_s + 5, exit=True, file=sys.__stderr__ or 2)
            try:
                self._write()
                self._read()
                first = self._read_first() or self._verdict()
            except RuntimeError:
                # Rank 0 has kept the store (where torchrun does not), and has ended. Further tries would only warn.
                if self._over.wait(_TIME_TO_END_S):
                    return
                first = self._describe(0) if 0 in self._seen else "rank 0 died"
            if first is not None:
                self._end(first)

    def _write(self, **changes: Any) -> None:
        self._state |= {"beat": time.time_ns(), **changes}
        self._store.set(f"sftron/rank {self._rank}", json.dumps(self._state))

    def _read(self) -> None:
        now = time.monotonic()
        for rank in range(self._world_size):
            key = f"sftron/rank {rank}"
            if not self._store.check([key]):
                continue
            state = json.loads(self._store.get(key))
            before = self._seen.get(rank)
            self._seen[rank] = _Seen(
                state,
                beat_at=before.beat_at if before and before.state["beat"] == state["beat"] else now,
                place_at=before.place_at if before and before.state["place"] == state["place"] else now,
            )

    def _read_first(self) -> str | None:
        return self._store.get(_FIRST).decode() if self._store.check([_FIRST]) else None

    def _verdict(self) -> str | None:
        """A rank that has died, that is not heard, or that others have been waiting for too long."""
        now, furthest = time.monotonic(), max(seen.state["place"] for seen in self._seen.values())
        for rank in [*self._seen]:
            if is_dead := self._is_dead(rank):
                self._read()  # it may have ended in order since, and has written so before
            seen = self._seen[rank]
            if seen.state["ended"] or rank == self._rank:
                continue
            is_late = seen.state["place"] < furthest and now - seen.place_at > self._timeout_s + _LATER_THAN_TORCH_S
            if is_dead or is_late or now - seen.beat_at > self._timeout_s:
                return self._tell_first(self._describe(rank))
        return None

    def _is_here(self, rank: int) -> bool:
        return self._seen[rank].state["processes"] == self._state["processes"]

    def _is_dead(self, rank: int) -> bool:
        """Known for sure of processes of this machine only; on others torchrun sees it."""
        if sys.platform != "linux" or not self._is_here(rank):
            return False
        try:
            stat = Path(f"/proc/{self._seen[rank].state['process']}/stat").read_bytes()
        except OSError:
            return True
        return stat.rpartition(b")")[2].split()[0] in (b"Z", b"X")

    def _describe(self, rank: int) -> str:
        seen, now = self._seen[rank], time.monotonic()
        who = f"rank {rank} (process {seen.state['process']} on {seen.state['host']})"
        doing = f"{'waiting for the others, ' * seen.state['waits']}{seen.state['phase']}"
        if self._is_dead(rank):
            return f"{who} died; it was last heard at: {doing}"
        heard = now - seen.beat_at
        silence = f"has not been heard for {heard:.0f} s" if heard > 2 * _BEAT_S + 1 else "did not come"
        return f"{who} {silence}; for {now - seen.place_at:.0f} s it has been at: {doing}"

    def _tell_first(self, failure: str) -> str:
        """The one that was told first stays."""
        try:
            self._first = self._store.compare_set(_FIRST, "", failure).decode()
        except RuntimeError:
            self._first = failure
        for rank, seen in self._seen.items():
            # A process that is stopped cannot end itself.
            is_stopped = time.monotonic() - seen.beat_at > self._timeout_s / 2
            if is_stopped and not seen.state["ended"] and rank != self._rank and self._is_here(rank):
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(seen.state["process"], signal.SIGKILL)
        return self._first

    def _end(self, first: str) -> None:
        self._first = first
        with suppress(OSError):  # a full disk: this thread still has to end the process
            show(f"rank {self._rank} ends: {first}. Its stacks:", to=sys.__stderr__)
        faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
        if self._over.wait(_TIME_TO_END_S):
            return
        self.on_failure(first)
        os._exit(1)


def _is_about_others(error: BaseException) -> bool:
    """What torch raises where other ranks are gone or late. gloo's are plain RuntimeErrors, known by their words."""
    text = str(error)
    return type(error).__name__.startswith("Dist") or "gloo" in text or "NCCL" in text
