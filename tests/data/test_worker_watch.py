"""A worker that hangs, wherever it does, ends the wait for it in time, and is named."""

import gc
import multiprocessing
import os
import re
import signal
import time
import warnings
from dataclasses import replace
from itertools import islice
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch.utils.data._utils.signal_handling import _remove_worker_pids, _set_worker_pids

from sftron.data import dataloader, worker_watch
from sftron.data.chat_tokenizer import ChatTokenizer
from sftron.data.dataloader import PackLoader
from sftron.data.dataset import PackedDataset
from sftron.data.worker_watch import WorkerError, WorkerWatch
from tests.data.streams import make_dataset, mixed_rows

TIMEOUT_S = 2.0
TIME_TO_START_S = 60.0


@pytest.fixture(autouse=True)
def addresses(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of torch's iterators. A busy machine may need longer for a fork than a test wants to wait for a worker that
    hangs, so the time counts from here."""
    start, seen = WorkerWatch.start, []

    def start_impatiently(self: WorkerWatch, items: Any) -> None:
        self._timeout_s = items._timeout = TIMEOUT_S
        seen.append(id(items))
        start(self, items)

    monkeypatch.setattr(WorkerWatch, "start", start_impatiently)
    return seen


def loader(chat_tokenizer: ChatTokenizer, num_workers: int = 1, time_to_start_s: float = TIME_TO_START_S) -> PackLoader:
    dataset = make_dataset(mixed_rows(40), chat_tokenizer)
    return PackLoader(dataset, num_workers=num_workers, keep_tail=False, timeout_s=time_to_start_s)


def wait_for_failure(batches: Any) -> tuple[str, float]:
    started = time.monotonic()
    with warnings.catch_warnings():
        # torch's, which counts the files that may be opened just when it is told that its worker has been killed.
        warnings.simplefilter("ignore", ResourceWarning)
        with pytest.raises(WorkerError) as caught:
            list(islice(batches, 200))
        seconds, told = time.monotonic() - started, str(caught.value)
        caught.value.__traceback__ = caught.value.__context__ = None
        del caught
        gc.collect()
    return told, seconds


def _send_half(connection: Any, message: Any) -> None:
    os.write(connection.fileno(), bytes(message)[: len(message) // 2])
    os.kill(os.getpid(), signal.SIGSTOP)


def new_children(before: list[Any]) -> list[int]:
    return [child.pid or 0 for child in multiprocessing.active_children() if child not in before]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_worker_that_is_stopped_with_batches_ready_ends_the_wait_in_time_and_is_named(
    chat_tokenizer: ChatTokenizer, num_workers: int, addresses: list[int]
) -> None:
    others = multiprocessing.active_children()
    batches = iter(loader(chat_tokenizer, num_workers))
    next(batches)
    time.sleep(0.5)  # for the workers to have announced what they prefetch
    stopped = new_children(others)[-1]
    os.kill(stopped, signal.SIGSTOP)
    told, seconds = wait_for_failure(batches)

    assert re.match(rf"loader worker \d \(process {stopped}, which is stopped\) has given nothing for 2 s", told)
    assert seconds < TIME_TO_START_S / 2
    assert not new_children(others)
    (address,) = addresses
    _set_worker_pids(address, ())  # refused where torch still has those of the loader that failed
    _remove_worker_pids(address)


def test_a_worker_that_is_stopped_in_the_midst_of_a_message_ends_the_wait_in_time(
    chat_tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message larger than a pipe's buffer is written in parts."""
    give, main_process = PackedDataset._pack, os.getpid()

    def large(self: PackedDataset, index: int) -> Any:
        pack = give(self, index)
        if os.getpid() != main_process and index == 3:
            Connection._send = _send_half  # pyright: ignore[reportAttributeAccessIssue]
            return replace(pack, lane_state="x" * 300_000)
        return pack

    monkeypatch.setattr(PackedDataset, "_pack", large)
    others = multiprocessing.active_children()
    told, seconds = wait_for_failure(iter(loader(chat_tokenizer)))

    assert "which is stopped) has given nothing for 2 s" in told
    assert seconds < TIME_TO_START_S / 2
    assert not new_children(others)


def test_where_shared_memory_is_full_that_is_the_remedy(
    chat_tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = SimpleNamespace(free=3 * 2**20)
    monkeypatch.setattr(worker_watch.shutil, "disk_usage", lambda path: {"/dev/shm": free}[path])
    batches = iter(loader(chat_tokenizer))
    next(batches)
    os.kill(new_children([])[-1], signal.SIGSTOP)
    told, _ = wait_for_failure(batches)
    assert "/dev/shm, by which they hand over batches, has 3 MB left" in told
    assert "data.num_workers: 0" in told


def test_a_slow_worker_that_goes_on_in_time_and_a_slow_caller_are_no_failures(
    chat_tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    give, main_process = PackedDataset._pack, os.getpid()

    def slow(self: PackedDataset, index: int) -> Any:
        if os.getpid() != main_process and index == 4:
            time.sleep(TIMEOUT_S / 4)
        return give(self, index)

    monkeypatch.setattr(PackedDataset, "_pack", slow)
    batches = iter(loader(chat_tokenizer))
    next(batches)
    time.sleep(TIMEOUT_S * 1.5)
    assert [next(batches).pack.index for _ in range(8)] == list(np.arange(1, 9))


def test_workers_are_there_before_the_first_batch_is_asked_for(chat_tokenizer: ChatTokenizer) -> None:
    """Who asks for batches may have threads by then."""
    others = multiprocessing.active_children()
    batches = iter(loader(chat_tokenizer, 2))
    assert len(new_children(others)) == 2
    del batches


def test_a_worker_that_is_stopped_before_it_has_begun_ends_the_wait_in_time(
    chat_tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataloader, "start_worker", _stop)
    bystander = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True)
    bystander.start()
    others = multiprocessing.active_children()
    with pytest.raises(WorkerError, match=r"^a loader worker has given nothing for 2 s") as caught:
        iter(loader(chat_tokenizer, time_to_start_s=TIMEOUT_S))
    caught.value.__traceback__ = caught.value.__context__ = None
    gc.collect()
    assert not new_children(others)
    assert bystander.is_alive()  # a child of the program, and none of the loader's
    bystander.kill()
    bystander.join()


def _stop(_worker: int, *, parent: int) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
