"""What was handed out, and nothing else, is in the loader's state; a worker changes neither packs nor messages."""

import errno
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import islice
from multiprocessing import synchronize
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data._utils.signal_handling import _remove_worker_pids, _set_worker_pids
from torchdata.stateful_dataloader import StatefulDataLoader

from sftron.data import loader as loader_module
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.child_process import STOP_SIGNALS
from sftron.data.dataset import PackedDataset
from sftron.data.loader import PackLoader, WorkerError, collate
from sftron.data.types import IGNORE_INDEX, Batch, DataError, Pack
from tests.conftest import ROOT
from tests.data.streams import as_json, facts, keys, make_dataset, mixed_rows, take

NUM_PACKS = 30
Make = Callable[..., PackedDataset]


@pytest.fixture
def make(chat_tokenizer: ChatTokenizer) -> Make:
    def make(**options: Any) -> PackedDataset:
        return make_dataset(mixed_rows(40), chat_tokenizer, **{"num_epochs": 2} | options)

    return make


@pytest.fixture
def expected(make: Make) -> list[dict[str, Any]]:
    """The stream's packs, as one process makes them."""
    return [facts(pack) for pack in take(make(), NUM_PACKS + 10)]


def load(dataset: PackedDataset, num_workers: int = 0, state: dict[str, Any] | None = None) -> PackLoader:
    loader = PackLoader(dataset, num_workers=num_workers, keep_tail=False, timeout_s=60)
    if state is not None:
        loader.load_state_dict(as_json(state))
    return loader


def packs_of(batches: Iterable[Batch], number: int) -> list[Pack]:
    return [batch.pack for batch in islice(batches, number)]


# --- One batch ---


@pytest.mark.parametrize("remove_cross_attention", [True, False])
@pytest.mark.parametrize("keep_tail", [True, False])
def test_a_batch_is_its_pack_with_or_without_the_padding(
    make: Make, keep_tail: bool, remove_cross_attention: bool
) -> None:
    for pack in take(make(remove_cross_attention=remove_cross_attention), NUM_PACKS):
        batch = collate(pack, keep_tail=keep_tail)
        size = 96 if keep_tail else max(1, pack.num_tokens)
        for name in ("input_ids", "position_ids", "role_ids"):
            assert getattr(batch, name).tolist() == getattr(pack, name)[:size].tolist()
        labels, weights = torch.full((size,), IGNORE_INDEX), torch.zeros(size)
        labels[batch.label_positions], weights[batch.label_positions] = batch.labels, batch.loss_weights
        assert labels.tolist() == pack.labels[:size].tolist()
        assert weights.tolist() == pack.loss_weights[:size].tolist()
        assert batch.weight_sum == pack.loss_weights.sum()
        documents = pack.conversation_bounds.tolist() if remove_cross_attention else [0, pack.num_tokens]
        assert batch.cu_seqlens.tolist() == sorted({*(documents if pack.num_tokens else [0]), size})
        assert batch.max_seqlen == int(np.diff(batch.cu_seqlens).max()) > int(batch.position_ids.max())
        types = {name: getattr(batch, name).dtype for name in ("input_ids", "position_ids", "cu_seqlens", "labels")}
        assert list(types.values()) == [torch.int64, torch.int32, torch.int32, torch.int64]


def test_a_batch_is_pinned_whole(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that is left out would make every copy to the GPU wait."""
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor.clone())
    copy = next(iter(PackLoader(make(), num_workers=0, keep_tail=True, pin_memory=True)))
    batch = collate(copy.pack, keep_tail=True)
    tensors = [name for name in Batch.__dataclass_fields__ if isinstance(getattr(batch, name), torch.Tensor)]
    assert len(pinned) == len(tensors) == 12
    assert all(torch.equal(getattr(copy, name), getattr(batch, name)) for name in tensors)


# --- The stream, its state, and layouts ---


@pytest.mark.parametrize("num_workers", [0, 2])
def test_workers_and_what_they_prefetch_change_nothing_in_the_stream_and_the_state(
    make: Make, expected: list, num_workers: int
) -> None:
    """Workers are there before the first batch is requested, as whoever requests it may have threads by then."""
    others, lanes = multiprocessing.active_children(), {}
    loader = load(make(), num_workers)
    batches = iter(loader)
    assert len([child for child in multiprocessing.active_children() if child not in others]) == num_workers
    for number in range(1, NUM_PACKS + 1):
        pack = next(batches).pack
        assert facts(pack) == expected[number - 1]
        lanes[pack.lane] = pack.lane_state
        assert loader.state_dict() == {"next_pack": number, "lanes": lanes, "first_epoch": 0}
    assert len(str(loader.state_dict())) < 6 * 30 + 40


def test_stopped_anywhere_the_stream_goes_on_in_another_layout(make: Make, expected: list) -> None:
    """2 ranks with no worker, then 1 rank with 2 workers, then 3 ranks; prefetched batches do not count as consumed."""

    def run_ranks(num_ranks: int, state: dict[str, Any] | None, number: int) -> tuple[list[Pack], dict[str, Any]]:
        loaders = [load(make(dp_rank=r, dp_world_size=num_ranks), state=state) for r in range(num_ranks)]
        packs = [pack for loader in loaders for pack in packs_of(loader, number)]
        states = [loader.state_dict() for loader in loaders]
        assert len({state["next_pack"] for state in states}) == 1
        return packs, states[0] | {"lanes": {k: v for s in states for k, v in s["lanes"].items()}}

    packs, state = run_ranks(2, None, 3)
    single = load(make(), 2, state)
    packs += packs_of(single, 3)
    packs += run_ranks(3, single.state_dict(), 2)[0]
    packs.sort(key=lambda pack: pack.index)
    assert [facts(pack) for pack in packs] == expected[: 6 + 3 + 6]


def test_iterating_again_goes_on_and_repeats_nothing(make: Make, expected: list) -> None:
    loader = load(make())
    assert [facts(pack) for pack in packs_of(loader, 4) + packs_of(loader, 4)] == expected[:8]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 on torch 2.11
@pytest.mark.parametrize(("num_workers", "cut"), [(0, 11), (2, 0), (2, 11)])
def test_torchdatas_own_loader_state_resumes_the_dataset(
    make: Make, expected: list, num_workers: int, cut: int
) -> None:
    """Twice in a row, the second time at once."""

    def loader() -> StatefulDataLoader:
        return StatefulDataLoader(make(), batch_size=None, num_workers=num_workers, collate_fn=_unchanged)

    first = loader()
    batches = iter(first)
    packs = [next(batches) for _ in range(cut)]
    state = first.state_dict()
    for _ in range(2):
        resumed = loader()
        resumed.load_state_dict(state)
        batches = iter(resumed)
        state = resumed.state_dict()
    packs += [next(batches) for _ in range(NUM_PACKS - cut)]
    assert [facts(pack) for pack in packs] == expected[:NUM_PACKS]


def _unchanged(pack: Pack) -> Pack:
    return pack


# --- What goes wrong ---


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_bad_row_reaches_the_caller_as_the_error_it_is_or_is_counted_once(
    chat_tokenizer: ChatTokenizer, num_workers: int
) -> None:
    rows = [*mixed_rows(20), "broken_json"]
    with pytest.raises(DataError) as caught:
        packs_of(load(make_dataset(rows, chat_tokenizer, num_epochs=1), num_workers), 60)
    assert type(caught.value) is DataError
    assert (str(caught.value), caught.value.reason) == ("rows.jsonl:21: broken_json", "broken_json")

    packs = packs_of(load(make_dataset(rows, chat_tokenizer, num_epochs=1, on_bad_row="skip"), num_workers), 60)
    assert sum(pack.dropped.get((0, "broken_json"), 0) for pack in packs) == 1
    assert sum(pack.num_rows for pack in packs) == 21
    assert set(Counter(keys(packs)).values()) == {1}


def test_an_exception_in_the_midst_of_loading_ends_the_process() -> None:
    """Workers ignore SIGTERM, which Python sends them at its exit: it would wait for them without end."""
    script = """
import tests.conftest
from transformers import AutoTokenizer
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.loader import PackLoader
from tests.data.streams import make_dataset, mixed_rows
tokenizer = AutoTokenizer.from_pretrained(tests.conftest.ASSETS / "tokenizer")
dataset = make_dataset(mixed_rows(40), ChatTokenizer(tokenizer))
batches = iter(PackLoader(dataset, num_workers=2, keep_tail=False))
next(batches)
raise RuntimeError("in the midst")
"""
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    ended = subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=ROOT, timeout=60, capture_output=True, text=True
    )
    assert ended.returncode == 1
    assert ended.stderr.strip().endswith("RuntimeError: in the midst")


def test_a_signal_to_the_process_group_does_not_reach_the_workers(make: Make, expected: list) -> None:
    others = multiprocessing.active_children()
    batches = iter(load(make(), 2))
    packs = packs_of(batches, 2)  # one of each worker, so both have begun
    workers = [child for child in multiprocessing.active_children() if child not in others]
    assert len(workers) == 2
    for worker in workers:
        for number in STOP_SIGNALS:
            os.kill(int(worker.pid or 0), number)
    packs += packs_of(batches, NUM_PACKS - 2)
    assert [facts(pack) for pack in packs] == expected[:NUM_PACKS]


@pytest.mark.parametrize(
    ("number", "problem"),
    [
        (signal.SIGSTOP, r"sent nothing for 3 s \(parallelism\.timeout_seconds\)"),
        (signal.SIGKILL, r"died: .*lower data\.num_workers"),
    ],
)
def test_a_worker_that_hangs_or_is_killed_ends_the_wait_in_time_with_a_remedy(
    make: Make, number: signal.Signals, problem: str
) -> None:
    batches: Any = iter(load(make(), 2))
    next(batches)
    packs = batches.gi_frame.f_locals["packs"]
    packs._timeout = batches.gi_frame.f_locals["self"]._timeout_s = 3  # for the start, there were 60 s
    address, started = id(packs), time.monotonic()
    os.kill(packs._workers[-1].pid, number)
    with warnings.catch_warnings():
        # torch opens files to count them at the moment when its handler reports that a worker has been killed.
        warnings.simplefilter("ignore", ResourceWarning)
        with pytest.raises(WorkerError, match=f"^a loader worker {problem}") as caught:
            packs_of(batches, 200)
        caught.value.__traceback__ = caught.value.__context__ = None
        gc.collect()
    assert time.monotonic() - started < 20
    assert not any(worker.is_alive() for worker in packs._workers)
    _set_worker_pids(address, ())  # refused where torch still has those of the loader that failed
    _remove_worker_pids(address)


def test_what_torch_says_of_a_dead_worker_has_the_remedy_wherever_it_is_raised() -> None:
    for text in ("DataLoader worker (pid 7) is killed by signal: Killed. ", "DataLoader worker (pid(s) 7, 8) exited"):
        error = loader_module.death_of_worker(RuntimeError(text))
        assert (
            str(error) == f"a loader worker died: {text}; if the machine ran out of memory, lower "
            "data.num_workers or data.packing.pool_size"
        )
        assert loader_module.death_of_worker(error) is None, "once"
    assert loader_module.death_of_worker(RuntimeError("shapes differ")) is None


def test_a_worker_that_hangs_before_it_has_begun_ends_the_start_in_time(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_module, "start_worker", lambda worker, parent: os.kill(os.getpid(), signal.SIGSTOP))
    others = multiprocessing.active_children()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        with pytest.raises(WorkerError, match=r"^a loader worker sent nothing for 2 s") as caught:
            iter(PackLoader(make(), num_workers=1, keep_tail=False, timeout_s=2))
        caught.value.__traceback__ = caught.value.__context__ = None
        gc.collect()
    assert multiprocessing.active_children() == others


@pytest.mark.parametrize(
    "change",
    [
        {"next_pack": "4"},
        {"next_pack": -1},
        {"first_epoch": None},
        {"lanes": {"99": "1:0"}},
        {"lanes": {"-1": "1:0"}},
        {"lanes": {"0": 1}},
    ],
)
def test_a_state_that_is_no_position_is_refused(make: Make, change: dict[str, Any]) -> None:
    loader = load(make(), 0)
    with pytest.raises(ValueError, match=r"is not a position in|has no position epoch|the lane state is"):
        loader.load_state_dict({"next_pack": 0, "lanes": {}, "first_epoch": 0} | change)
    assert loader.state_dict() == {"next_pack": 0, "lanes": {}, "first_epoch": 0}


@pytest.mark.parametrize("num_made", [0, 3, 7])
def test_without_room_for_the_queues_of_workers_the_remedy_is_named_and_no_worker_is_left(
    make: Make, monkeypatch: pytest.MonkeyPatch, num_made: int
) -> None:
    """Semaphores are files in /dev/shm. What torchdata has made by then prints no error of its own (gc.collect)."""
    left, make_semaphore = iter(range(num_made)), synchronize.SemLock.__init__

    def make_or_fail(*arguments: Any, **options: Any) -> None:
        if next(left, None) is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        make_semaphore(*arguments, **options)

    before = multiprocessing.active_children()
    monkeypatch.setattr(synchronize.SemLock, "__init__", make_or_fail)
    with pytest.raises(WorkerError, match=r"^cannot start a loader worker .* need /dev/shm: enlarge it"):
        iter(load(make(), num_workers=2))
    monkeypatch.undo()
    gc.collect()
    assert [child for child in multiprocessing.active_children() if child not in before] == []
