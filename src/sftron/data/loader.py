"""Converts packs to batches, and loads them with a record of what was consumed."""

from __future__ import annotations

import atexit
import errno
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from traceback import walk_tb
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch.utils.data import IterableDataset

from sftron.data.child_process import start_worker
from sftron.data.dataset import PackedDataset
from sftron.data.labels import label_roles, untrained_rows
from sftron.data.lanes.lane import parse_state
from sftron.data.types import IGNORE_INDEX, WHOLE_ROW, Batch, ContextRank, DataError, Pack, Role


def death_of_worker(error: BaseException) -> WorkerError | None:
    """Returns the error with a remedy if torch reports a dead loader worker; None for any other error.

    torch's SIGCHLD handler raises it in the middle of whatever the main thread is doing: a step, an evaluation, a save.
    """
    if isinstance(error, WorkerError) or "DataLoader worker (pid" not in str(error):
        return None
    remedy = "if the machine ran out of memory, lower data.num_workers or data.packing.pool_size"
    return WorkerError(f"a loader worker died: {error}; {remedy}")


class WorkerError(ChildProcessError):
    """A loader worker cannot be started, has died, or has sent nothing within the time-out."""


def collate(
    pack: Pack,
    *,
    keep_tail: bool,
    measured_roles: frozenset[Role] = frozenset(),
    context: ContextRank = WHOLE_ROW,
) -> Batch:
    """Returns a pack, or a rank's part of it, as a batch of CPU tensors.

    Labels are shifted before the row is cut, so the label of a part's last token is the first token of the next part.

    Args:
        pack: The pack.
        keep_tail: Whether to keep the padding, so that all batches have one shape, as compiled models need. Without it,
            less is computed, and the results for the conversations are the same.
        measured_roles: The roles whose untrained tokens become `untrained_labels`, so that their loss can be measured.
        context: The place of this rank among those that share the pack; without the padding, each has a token.

    Raises:
        ValueError: More ranks share the pack than it has tokens.
    """
    num_tokens = len(pack.input_ids) if keep_tail else min(max(context.size, pack.num_tokens), len(pack.input_ids))
    part = context.part_of(num_tokens)
    cu_seqlens = np.unique(pack.cu_seqlens.clip(max=num_tokens))
    labeled = np.flatnonzero(pack.labels != IGNORE_INDEX)
    label_positions = part.select(labeled)
    roles, measured = label_roles(pack), part.select(untrained_rows(pack, measured_roles))
    sources = np.array([key.source for key in pack.keys], dtype=np.int32)
    return Batch(
        input_ids=torch.from_numpy(pack.input_ids[part.begin : part.end].astype(np.int64)),
        position_ids=torch.from_numpy(pack.position_ids[:num_tokens]),
        role_ids=torch.from_numpy(pack.role_ids[part.begin : part.end]),
        cu_seqlens=torch.from_numpy(cu_seqlens),
        max_seqlen=int(np.diff(cu_seqlens).max()),
        label_positions=torch.from_numpy(label_positions - part.begin),
        labels=torch.from_numpy(pack.labels[label_positions].astype(np.int64)),
        loss_weights=torch.from_numpy(pack.loss_weights[label_positions]),
        label_roles=torch.from_numpy(roles[label_positions]),
        label_sources=torch.from_numpy(np.repeat(sources, np.diff(pack.conversation_bounds))[label_positions]),
        untrained_rows=torch.from_numpy(measured - part.begin),
        untrained_labels=torch.from_numpy(pack.input_ids[measured + 1].astype(np.int64)),
        untrained_roles=torch.from_numpy(roles[measured]),
        weight_sum=float(pack.loss_weights[labeled].sum(dtype=np.float64)),
        pack=pack,
        part=part,
    )


class PackLoader:
    """Loads the batches of one rank, in order. `state_dict` covers exactly the batches that were yielded.

    Args:
        dataset: The packs.
        num_workers: The number of worker processes; 0 loads in this process.
        keep_tail: See `collate`.
        measured_roles, context: See `collate`.
        pin_memory: Whether batches are in page-locked memory.
        timeout_s: How many seconds the loader waits for a worker. If a worker sends nothing for that long, or dies, the
            iteration raises WorkerError.
    """

    def __init__(
        self,
        dataset: PackedDataset,
        *,
        num_workers: int,
        keep_tail: bool,
        measured_roles: frozenset[Role] = frozenset(),
        context: ContextRank = WHOLE_ROW,
        pin_memory: bool = False,
        timeout_s: float = 600,
    ) -> None:
        # Imported here, so that `collate` does not need torchdata: GPU benchmarks of kernels and steps run without it.
        from torchdata.stateful_dataloader import StatefulDataLoader

        self._dataset, self._pin_memory, self._timeout_s = dataset, pin_memory, timeout_s
        self._collate = partial(collate, keep_tail=keep_tail, measured_roles=measured_roles, context=context)
        self.start_epoch(0, next_pack=0)
        # Workers send packs, whose arrays travel through a pipe. A batch's tensors would need /dev/shm, of which a
        # container has 64 MB, and the worker that made them would have to be alive when they are received.
        self._make_loader = partial(
            StatefulDataLoader,
            batch_size=None,
            num_workers=num_workers,
            worker_init_fn=partial(start_worker, parent=os.getpid()),
            timeout=timeout_s if num_workers else 0,
        )

    def __iter__(self) -> Iterator[Batch]:
        """Resumes at the position of `state_dict`. Raises DataError for a bad row, with or without workers.

        The workers are forked by this call and not by the first `next`, so the caller can choose a moment at which no
        other thread holds a lock that a worker needs.
        """
        if self._dataset.is_planned:
            self._dataset.measure()  # once, so that it does not happen in every worker
        self._dataset.seek(self._next_pack, self._lanes, self._first_epoch)
        with warnings.catch_warnings():
            # torchdata 0.11 calls a function that torch 2.11 deprecates; a user can do nothing about it.
            warnings.filterwarnings("ignore", "'set_vital' is deprecated")
            loader = self._make_loader(_ErrorsAsItems(self._dataset))
            others = multiprocessing.active_children()
            try:
                packs = self._wait_for(lambda: iter(loader))
            except OSError as error:
                for worker in [child for child in multiprocessing.active_children() if child not in others] * 2:
                    with suppress(RuntimeError):  # torch's SIGCHLD handler raises it once for each
                        worker.kill()
                        worker.join(1)
                if error.errno not in (errno.ENOSPC, errno.ENOMEM) or not loader.num_workers:
                    raise
                for frame, _ in walk_tb(error.__traceback__):  # torch's half-made iterator would print another error
                    iterator: Any = frame.f_locals.get("self")
                    if type(iterator).__module__.startswith("torchdata."):
                        iterator._shutdown = True
                raise WorkerError(
                    f"cannot start a loader worker ({error}); its queues need /dev/shm: enlarge it (docker run "
                    "--shm-size=1g), or set data.num_workers: 0"
                ) from None
        _STARTED.add(packs)
        return self._batches(packs)

    def _batches(self, packs: Any) -> Iterator[Batch]:
        try:
            while (pack := self._wait_for(lambda: next(packs, None))) is not None:
                if isinstance(pack, DataError):
                    raise pack
                self._next_pack = self._dataset.round_after(pack.index)
                self._lanes[pack.lane] = pack.lane_state
                batch = self._collate(pack)
                yield batch.pin_memory() if self._pin_memory else batch
        finally:
            _end_workers(packs)

    def _wait_for(self, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except RuntimeError as error:
            if "DataLoader timed out" in str(error):
                problem = f"sent nothing for {self._timeout_s:.0f} s (parallelism.timeout_seconds)"
                remedy = "raise it if reading the rows takes that long"
                raise WorkerError(f"a loader worker {problem}; {remedy}") from None
            raise death_of_worker(error) or error from None

    def state_dict(self) -> dict[str, Any]:
        """Returns {"next_pack": n, "lanes": {lane: state}, "first_epoch": e}, with the lanes that this rank owns.

        The state does not depend on the number of workers. Ranks that have consumed equally many packs have the same
        next_pack; the state of the run is the union of their lanes.
        """
        owned = {lane: state for lane, state in self._lanes.items() if self._dataset.owns_lane(lane, self._next_pack)}
        return {"next_pack": self._next_pack, "lanes": owned, "first_epoch": self._first_epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets the position from a state with the lanes of all ranks; the next `iter` resumes there.

        Raises ValueError if `state` is not a position in this data.
        """
        weights = self._dataset.preparation.weights
        known = range(self._dataset.num_lanes)
        try:
            lanes = {known.index(int(lane)): str(text) for lane, text in state["lanes"].items()}
            next_pack, first_epoch = state["next_pack"], state["first_epoch"]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{str(state)[:60]} is not a position in {self._dataset.lanes_in_words}") from error
        for text in lanes.values():
            parse_state(text, None if weights is None else len(weights))
        self.start_epoch(first_epoch, next_pack=next_pack)
        self._lanes = lanes

    def start_epoch(self, epoch: int, *, next_pack: int) -> None:
        """Restarts the data from its beginning, as epoch number `epoch`; the next pack has the number next_pack."""
        if not all(type(number) is int and 0 <= number < 2**60 for number in (epoch, next_pack)):
            raise ValueError(f"the data has no position epoch {epoch!r:.60}, pack {next_pack!r:.60}")
        self._next_pack, self._first_epoch = next_pack, epoch
        self._lanes: dict[int, str] = {}


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


_STARTED: WeakSet[Any] = WeakSet()
"""The iterators that may still have workers."""


def _end_workers(packs: Any) -> None:
    """Kills the workers of an iterator, which have nothing to save.

    torch would end them with a signal that they ignore, and might wait for a lock that a killed worker held.
    """
    if packs not in _STARTED:
        return
    _STARTED.discard(packs)
    workers = getattr(packs, "_workers", ())
    if workers and not packs._shutdown:
        from torch.utils.data._utils.signal_handling import _remove_worker_pids

        packs._shutdown, packs._worker_pids_set = True, False
        # torch raises an error for each child that dies and is noted here, by the iterator's address, which a later
        # iterator may have too.
        _remove_worker_pids(id(packs))
        for queue in packs._index_queues:
            queue.cancel_join_thread()
            queue.close()
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.join(1)


@atexit.register
def _end_all_workers() -> None:
    """Ends the workers of all iterators when the process exits.

    After an exception, a traceback keeps the iterator alive. multiprocessing would then send the workers SIGTERM, which
    they ignore, and wait for them forever.
    """
    for packs in list(_STARTED):
        _end_workers(packs)
