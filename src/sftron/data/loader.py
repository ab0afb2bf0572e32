"""Converts packs to batches, and loads them with a record of what was consumed. Only this module uses torchdata."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch.utils.data import IterableDataset

from sftron.data.child_process import start_worker
from sftron.data.dataset import PackedDataset
from sftron.data.labels import label_roles, untrained_rows
from sftron.data.lanes.sampler import parse_state
from sftron.data.types import IGNORE_INDEX, Batch, DataError, Pack, Role

_LATER_THAN_TORCH_S = 1.0
_TIME_TO_DIE_S = 1.0
_LITTLE_SHARED_MEMORY = 32 * 2**20


class WorkerError(RuntimeError):
    """A loader worker has died, or has sent nothing within the time-out."""


def collate(pack: Pack, *, keep_tail: bool, measured_roles: frozenset[Role] = frozenset()) -> Batch:
    """Returns a pack as a batch of CPU tensors.

    Args:
        pack: The pack.
        keep_tail: Whether to keep the padding, so that all batches have the same shape, as compiled models need.
            Without it, less is computed, and the results for the conversations are the same.
        measured_roles: The roles whose untrained tokens become `untrained_labels`, so that their loss can be measured.
    """
    num_tokens = len(pack.input_ids) if keep_tail else max(1, pack.num_tokens)
    cu_seqlens = np.unique(pack.cu_seqlens.clip(max=num_tokens))
    label_positions = np.flatnonzero(pack.labels != IGNORE_INDEX)
    loss_weights = pack.loss_weights[label_positions]
    roles, measured = label_roles(pack), untrained_rows(pack, measured_roles)
    sources = np.array([key.source for key in pack.keys], dtype=np.int32)
    return Batch(
        input_ids=torch.from_numpy(pack.input_ids[:num_tokens].astype(np.int64)),
        position_ids=torch.from_numpy(pack.position_ids[:num_tokens]),
        role_ids=torch.from_numpy(pack.role_ids[:num_tokens]),
        cu_seqlens=torch.from_numpy(cu_seqlens),
        max_seqlen=int(np.diff(cu_seqlens).max()),
        label_positions=torch.from_numpy(label_positions),
        labels=torch.from_numpy(pack.labels[label_positions].astype(np.int64)),
        loss_weights=torch.from_numpy(loss_weights),
        label_roles=torch.from_numpy(roles[label_positions]),
        label_sources=torch.from_numpy(np.repeat(sources, np.diff(pack.conversation_bounds))[label_positions]),
        untrained_rows=torch.from_numpy(measured),
        untrained_labels=torch.from_numpy(pack.input_ids[measured + 1].astype(np.int64)),
        untrained_roles=torch.from_numpy(roles[measured]),
        weight_sum=float(loss_weights.sum(dtype=np.float64)),
        pack=pack,
    )


@dataclass(frozen=True, slots=True)
class _Position:
    next_pack: int
    lanes: dict[int, str]
    first_epoch: int


class PackLoader:
    """Loads the batches of one rank, in order. `state_dict` covers exactly the batches that were yielded.

    Args:
        dataset: The packs.
        num_workers: The number of worker processes; 0 loads in this process.
        keep_tail: See `collate`.
        measured_roles: See `collate`.
        pin_memory: Whether batches are in page-locked memory.
        timeout_s: How many seconds the loader waits for a batch. If a worker sends nothing for that long, or dies, the
            iteration raises WorkerError.
    """

    def __init__(
        self,
        dataset: PackedDataset,
        *,
        num_workers: int,
        keep_tail: bool,
        measured_roles: frozenset[Role] = frozenset(),
        pin_memory: bool = False,
        timeout_s: float = 600,
    ) -> None:
        # Imported here, so that `collate` does not need torchdata: GPU benchmarks of kernels and steps run without it.
        from torchdata.stateful_dataloader import StatefulDataLoader

        self._dataset = dataset
        self._position = _Position(0, {}, 0)
        self._timeout_s = timeout_s
        collate_fn = partial(_collate_or_error, keep_tail=keep_tail, measured_roles=measured_roles)
        self._make_loader = partial(
            StatefulDataLoader,
            batch_size=None,
            num_workers=num_workers,
            collate_fn=collate_fn,  # pyright: ignore[reportArgumentType]
            worker_init_fn=partial(start_worker, parent=os.getpid()),
            pin_memory=pin_memory,
            timeout=timeout_s if num_workers else 0,
        )

    def __iter__(self) -> Iterator[Batch]:
        """Resumes at the position of `state_dict`. Raises DataError for a bad row, with or without workers.

        The workers are forked by this call and not by the first `next`, so the caller can choose a moment at which no
        other thread holds a lock that a worker needs.
        """
        position = self._position
        if self._dataset.is_planned:
            self._dataset.measure()  # once, so that it does not happen in every worker
        self._dataset.seek(position.next_pack, position.lanes, position.first_epoch)
        with warnings.catch_warnings():
            # torchdata 0.11 calls a function that torch 2.11 deprecates; a user can do nothing about it.
            warnings.filterwarnings("ignore", "'set_vital' is deprecated")
            loader = self._make_loader(_ErrorsAsItems(self._dataset))
        others = multiprocessing.active_children()
        with _worker_errors(lambda: [c for c in multiprocessing.active_children() if c not in others], self._timeout_s):
            items = iter(loader)
        _STARTED.add(items)
        return self._batches(items)

    def _batches(self, items: Any) -> Iterator[Batch]:
        try:
            while True:
                with _worker_errors(lambda: getattr(items, "_workers", ()), self._timeout_s):
                    item = next(items, None)
                if item is None:
                    return
                if isinstance(item, DataError):
                    raise item
                self._position = _Position(
                    self._dataset.round_after(item.pack.index),
                    self._position.lanes | {item.pack.lane: item.pack.lane_state},
                    self._position.first_epoch,
                )
                yield item
        finally:
            _end_workers(items)

    def state_dict(self) -> dict[str, Any]:
        """Returns {"next_pack": n, "lanes": {lane: state}, "first_epoch": e}, with the lanes that this rank owns.

        The state does not depend on the number of workers. Ranks that have consumed equally many packs have the same
        next_pack; the state of the run is the union of their lanes.
        """
        next_pack, lanes = self._position.next_pack, self._position.lanes
        owned = {lane: state for lane, state in lanes.items() if self._dataset.owns_lane(lane, next_pack)}
        return {"next_pack": next_pack, "lanes": owned, "first_epoch": self._position.first_epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets the position from a state with the lanes of all ranks; the next `iter` resumes there.

        Raises:
            ValueError: `state` is not a valid position.
        """
        lanes = state.get("lanes")
        if not isinstance(lanes, dict):
            raise ValueError(f"the data position {str(state)[:60]} is none; wanted next_pack and lanes")
        known = {str(lane): lane for lane in range(self._dataset.num_lanes)}
        if unknown := [lane for lane, text in lanes.items() if str(lane) not in known or not isinstance(text, str)]:
            raise ValueError(f"the data position has a lane {str(unknown[0])[:20]!r}; wanted those below {len(known)}")
        weights = self._dataset.preparation.weights
        for text in lanes.values():
            parse_state(text, None if weights is None else len(weights))
        self._position = _Position(
            _number(state.get("next_pack"), "next_pack"),
            {known[str(lane)]: text for lane, text in lanes.items()},
            _number(state.get("first_epoch"), "first_epoch"),
        )

    def start_epoch(self, epoch: int, *, next_pack: object) -> None:
        """Restarts the data from its beginning, as epoch number `epoch`; the next pack has the number next_pack.

        Raises:
            ValueError: `next_pack` is not a whole number.
        """
        self._position = _Position(_number(next_pack, "next_pack"), {}, epoch)


def _number(value: object, name: str) -> int:
    if type(value) is not int or not 0 <= value < 2**60:
        raise ValueError(f"the data position's {name} is {str(value)[:20]!r}; wanted a whole number")
    return value


class _ErrorsAsItems(IterableDataset[Pack | DataError]):
    """Yields a DataError as an item. An exception that a worker raises would arrive as the text of a traceback."""

    def __init__(self, dataset: PackedDataset) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[Pack | DataError]:
        try:
            yield from self._dataset
        except DataError as error:
            yield error

    def state_dict(self) -> dict[str, Any]:
        return self._dataset.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._dataset.load_state_dict(state)


def _collate_or_error(item: Pack | DataError, **options: Any) -> Batch | DataError:
    return item if isinstance(item, DataError) else collate(item, **options)


@contextmanager
def _worker_errors(workers: Callable[[], Sequence[Any]], timeout_s: float) -> Iterator[None]:
    """Raises WorkerError in place of torch's errors about loader workers, after killing all of them.

    torch's own time-out bounds the wait for a message but not the reading of one. So a timer kills the workers if one
    stops while it sends a batch, or before it hands over the batch's memory.
    """
    is_late = threading.Event()

    def kill_late() -> None:
        is_late.set()
        for worker in workers():
            worker.kill()

    timer = threading.Timer(timeout_s + _LATER_THAN_TORCH_S, kill_late)
    timer.daemon = True
    if workers():  # not before they are forked: a fork in a process with threads may deadlock
        timer.start()
    try:
        yield
    except Exception as error:
        timer.cancel()
        if is_late.is_set() or "DataLoader timed out" in str(error):
            problem = f"has given nothing for {timeout_s:.0f} s (parallelism.timeout_seconds). {_remedy()}"
        elif _is_of_a_death(error, workers()):
            remedy = "If the machine ran out of memory, lower data.num_workers or data.packing.pool_size"
            problem = f"has died: {error}. {remedy}"
        else:
            raise
        # Joined here; otherwise torch's SIGCHLD handler would raise at an arbitrary point of the main thread.
        for worker in [*workers()] * 2:
            with suppress(RuntimeError):  # the handler raises it once
                worker.kill()
                worker.join(_TIME_TO_DIE_S)
        raise WorkerError(f"a loader worker {problem}") from None
    finally:
        timer.cancel()


def _is_of_a_death(error: Exception, workers: Sequence[Any]) -> bool:
    """Returns whether the error means that a worker has died.

    It is torch's own error, or an OSError or EOFError because the worker died while it handed over a batch's memory.
    """
    if isinstance(error, (OSError, EOFError)):
        with suppress(RuntimeError):  # raised by torch's SIGCHLD handler
            wait([worker.sentinel for worker in workers], _TIME_TO_DIE_S)
        return any(worker.exitcode for worker in workers)
    return "DataLoader worker (pid" in str(error)


def _remedy() -> str:
    """Returns the remedy for a worker that sends nothing.

    Workers send batches through shared memory, which a container may limit to 64 MB. When it is full, torch prints an
    error on stderr and the batch never arrives.
    """
    with suppress(OSError):
        if (free := shutil.disk_usage("/dev/shm").free) < _LITTLE_SHARED_MEMORY:
            return (
                f"/dev/shm, through which workers hand over batches, has {free / 2**20:.0f} MB left: give the "
                "container more (docker run --shm-size=1g), or set data.num_workers: 0"
            )
    return "Raise it where reading so many rows takes that long"


_STARTED: WeakSet[Any] = WeakSet()
"""The iterators that may still have workers."""


def _end_workers(items: Any) -> None:
    """Ends the workers of an iterator.

    torch itself ends them only when the iterator is garbage-collected, and with a signal that they ignore.
    """
    if items not in _STARTED:
        return
    _STARTED.discard(items)
    workers = getattr(items, "_workers", ())
    if any(worker.exitcode for worker in workers):
        # A worker was killed, perhaps in the middle of a message; torch's own shutdown would wait for its end.
        from torch.utils.data._utils.signal_handling import _remove_worker_pids

        items._shutdown = True
        # torch stores the process ids by the iterator's address, and refuses a second iterator at the same address.
        if items._worker_pids_set:
            items._worker_pids_set = False
            _remove_worker_pids(id(items))
    elif workers:
        items._shutdown_workers()
    for worker in workers:
        worker.kill()


@atexit.register
def _end_all_workers() -> None:
    """Ends the workers of all iterators when the process exits.

    After an exception, a traceback keeps the iterator alive. multiprocessing would then send the workers SIGTERM, which
    they ignore, and wait for them forever.
    """
    for items in list(_STARTED):
        _end_workers(items)
