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
"""All that change files and folders, here and in pathlib and shutil."""


@contextmanager
def at_system_call(number: int, act: Callable[[], Any]) -> Iterator[list[str]]:
    """Calls `act` instead of the system call of that number, counted from 0. Yields the names of all calls so far."""
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
    """Returns whether a copy of this process was killed at the system call of that number, and not done before."""
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


class ThreadRanks:
    """One of several ranks, each a thread (sftron.checkpoint.atomic.ProcessGroup)."""

    def __init__(self, dp_rank: int, texts: list[str], barrier: threading.Barrier) -> None:
        self.dp_rank, self.dp_world_size = dp_rank, len(texts)
        self._texts, self._barrier = texts, barrier

    def gather(self, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
        self._texts[self.dp_rank] = json.dumps(facts)
        self._barrier.wait(10)
        everyone = [json.loads(text) for text in self._texts]
        self._barrier.wait(10)
        return everyone


def on_ranks(num_ranks: int, work: Callable[[ThreadRanks], Any]) -> list[Any]:
    """Returns what `work` returns, or the OSError that it raises, on each rank."""
    texts, barrier = [""] * num_ranks, threading.Barrier(num_ranks)
    results: list[Any] = [None] * num_ranks

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadRanks(rank, texts, barrier))
        except OSError as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
