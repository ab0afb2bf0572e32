"""A loader worker that hangs, wherever it does, or is killed ends the wait for it in time, with the remedy."""

import gc
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data._utils.signal_handling import _remove_worker_pids, _set_worker_pids

from sftron.data import loader as loader_module
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.dataset import PackedDataset
from sftron.data.loader import PackLoader, WorkerError
from tests.data.streams import make_dataset, mixed_rows

TIMEOUT_S = 3.0
TIME_TO_START_S = 60.0


def make_loader(chat_tokenizer: ChatTokenizer, num_workers: int = 1, timeout_s: float = TIME_TO_START_S) -> PackLoader:
    dataset = make_dataset(mixed_rows(40), chat_tokenizer)
    return PackLoader(dataset, num_workers=num_workers, keep_tail=False, timeout_s=timeout_s)


def start(chat_tokenizer: ChatTokenizer, num_workers: int = 1) -> Iterator[Any]:
    """Returns the batches after the first of a loader that from now on waits 3 s for each; a start may take longer."""
    loader = make_loader(chat_tokenizer, num_workers)
    batches = iter(loader)
    next(batches)
    loader._timeout_s = TIMEOUT_S
    return batches


def wait_for_failure(wait: Callable[[], object], *others: Any) -> str:
    """Returns the message of the WorkerError; of this process's children the others alone are left."""
    with warnings.catch_warnings():
        # torch opens files to count them at the moment when its handler reports that a worker has been killed.
        warnings.simplefilter("ignore", ResourceWarning)
        with pytest.raises(WorkerError) as caught:
            wait()
        message = str(caught.value)
        caught.value.__traceback__ = caught.value.__context__ = None
        del caught
        gc.collect()
    assert multiprocessing.active_children() == [*others]
    return message


def next_batches(batches: Iterator[Any]) -> Callable[[], object]:
    return lambda: list(islice(batches, 200))


def workers_of(batches: Any) -> Any:
    return batches.gi_frame.f_locals["items"]._workers


def test_a_worker_that_is_stopped_with_batches_ready_ends_the_wait_in_time(
    chat_tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The remedy is shared memory where that is full."""
    free = SimpleNamespace(free=3 * 2**20)
    monkeypatch.setattr(loader_module.shutil, "disk_usage", lambda path: {"/dev/shm": free}[path])
    batches = start(chat_tokenizer, 2)
    address = id(batches.gi_frame.f_locals["items"])  # pyright: ignore[reportAttributeAccessIssue]
    time.sleep(0.5)  # for the workers to announce what they prefetch
    os.kill(workers_of(batches)[-1].pid, signal.SIGSTOP)
    message = wait_for_failure(next_batches(batches))
    assert message.startswith("a loader worker has given nothing for 3 s (parallelism.timeout_seconds). /dev/shm, ")
    assert "has 3 MB left" in message
    assert "data.num_workers: 0" in message
    _set_worker_pids(address, ())  # refused where torch still has those of the loader that failed
    _remove_worker_pids(address)


def test_a_worker_that_is_stopped_in_the_middle_of_a_message_ends_the_wait_in_time(
    chat_tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message larger than a pipe's buffer is written in parts."""
    make_pack, main_process = PackedDataset._pack, os.getpid()

    def send_half(connection: Any, message: Any) -> None:
        os.write(connection.fileno(), bytes(message)[: len(message) // 2])
        os.kill(os.getpid(), signal.SIGSTOP)

    def large(self: PackedDataset, index: int) -> Any:
        pack = make_pack(self, index)
        if os.getpid() != main_process and index == 3:
            Connection._send = send_half  # pyright: ignore[reportAttributeAccessIssue]
            return replace(pack, lane_state="x" * 300_000)
        return pack

    monkeypatch.setattr(PackedDataset, "_pack", large)
    assert "has given nothing for 3 s" in wait_for_failure(next_batches(start(chat_tokenizer)))


def test_a_worker_that_is_stopped_before_it_has_begun_ends_the_wait_in_time(
    chat_tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_module, "start_worker", _stop)
    bystander = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True)
    bystander.start()
    loader = make_loader(chat_tokenizer, timeout_s=TIMEOUT_S)
    message = wait_for_failure(lambda: iter(loader), bystander)
    assert message.startswith("a loader worker has given nothing for 3 s")
    assert bystander.is_alive()  # a child of the program, and none of the loader's
    bystander.kill()
    bystander.join()


def _stop(_worker: int, *, parent: int) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def test_a_worker_that_is_killed_ends_the_wait_with_a_remedy(chat_tokenizer: ChatTokenizer) -> None:
    batches = start(chat_tokenizer)
    os.kill(workers_of(batches)[-1].pid, signal.SIGKILL)
    message = wait_for_failure(next_batches(batches))
    assert message.startswith("a loader worker has died: ")
    assert "lower data.num_workers" in message


def test_a_slow_worker_that_goes_on_in_time_and_a_slow_caller_are_no_failures(
    chat_tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_pack, main_process = PackedDataset._pack, os.getpid()

    def slow(self: PackedDataset, index: int) -> Any:
        if os.getpid() != main_process and index == 4:
            time.sleep(TIMEOUT_S / 4)
        return make_pack(self, index)

    monkeypatch.setattr(PackedDataset, "_pack", slow)
    batches = start(chat_tokenizer)
    time.sleep(TIMEOUT_S + 2)
    assert [next(batches).pack.index for _ in range(8)] == list(range(1, 9))


def test_workers_exist_before_the_first_batch_is_requested(chat_tokenizer: ChatTokenizer) -> None:
    """Whoever requests batches may have threads by then."""
    others = multiprocessing.active_children()
    batches = iter(make_loader(chat_tokenizer, 2))
    assert len([child for child in multiprocessing.active_children() if child not in others]) == 2
    del batches
