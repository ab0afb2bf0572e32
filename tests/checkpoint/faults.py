"""System calls that fail, or at which the process dies; and ranks that are threads."""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

CALLS = ("open", "write", "fsync", "mkdir", "rename", "unlink", "rmdir")
"""All by which files and folders are changed, here and in pathlib and shutil."""


@contextmanager
def at_system_call(number: int, act: Callable[[], Any]) -> Iterator[list[str]]:
    """Call `act` instead of the system call of that number, counted from 0; the names of all calls so far."""
    made: list[str] = []

    def hook(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            made.append(name)
            if len(made) == number + 1:
                act()
            return original(*arguments, **options)

        return call

    with ExitStack() as stack:
        for name in CALLS:
            stack.enter_context(patch.object(os, name, hook(name, getattr(os, name))))
        yield made


def killed(number: int, work: Callable[[], Any]) -> bool:
    """Whether a copy of this process was killed at the system call of that number, and not done before."""
    if (process := os.fork()) == 0:
        try:
            signal.alarm(30)
            with at_system_call(number, lambda: os.kill(os.getpid(), signal.SIGKILL)):
                work()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(process, 0)
    assert status in (0, signal.SIGKILL), status
    return status != 0


class ThreadParty:
    """One of several ranks, each a thread (sftron.checkpoint.agreement.Party)."""

    def __init__(self, dp_rank: int, told: list[str], barrier: threading.Barrier) -> None:
        self.dp_rank, self.dp_world_size = dp_rank, len(told)
        self._told, self._barrier = told, barrier

    def gather(self, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
        self._told[self.dp_rank] = json.dumps(facts)
        self._barrier.wait(10)
        everyone = [json.loads(text) for text in self._told]
        self._barrier.wait(10)
        return everyone


def on_ranks(num_ranks: int, work: Callable[[ThreadParty], Any]) -> list[Any]:
    """What `work` returns, or the OSError that it raises, on each rank."""
    told, barrier = [""] * num_ranks, threading.Barrier(num_ranks)
    results: list[Any] = [None] * num_ranks

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadParty(rank, told, barrier))
        except OSError as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
