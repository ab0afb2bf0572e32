"""The order in which the rows of a data set are consumed: a pure function of the seed, the epoch and the position.

An indexed data set has a permutation for each epoch, which is computed rather than stored. A Feistel network permutes
the integers below the smallest power of four that is at least the number of rows; a result outside the rows is permuted
again until it is inside (cycle walking; fewer than four passes on average). Every position of every epoch costs the
same, whereas a shuffled list of 10 M rows would take 80 MB and half a second. Source: Black and Rogaway, Ciphers with
Arbitrary Finite Domains (2002).

A streamed data set keeps its own order, except that each window of rows is shuffled. Rows can only be read forward, and
lanes fetch at different rates, since the number of rows that fill a pack depends on their lengths. So each row that was
read is queued until its lane fetches it: after R rows per lane, about sqrt(R) rows are queued for each. Rows of other
workers' lanes are skipped.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from sftron.data.sources import EndOfStream, RawRow, StreamedSource

SHUFFLE_WINDOW = 10_000
_BLOCK = 512
_NUM_ROUNDS = 6
_GOLDEN = 0x9E3779B97F4A7C15


class ShuffledOrder:
    """The order of an indexed data set: maps the positions of its endless epochs to rows.

    Position g is in epoch first_epoch + g // num_rows. Each epoch has a different permutation of the rows, and so has
    each data set of a mixture (`dataset` is its index). `stride` is the distance of positions that are requested in
    turn, as by a lane; others give the same rows, but slowly.
    """

    def __init__(self, num_rows: int, *, seed: int, dataset: int = 0, stride: int = 1, first_epoch: int = 0) -> None:
        self.num_rows = num_rows
        self._stride, self._first_epoch = stride, first_epoch
        fixed = _mix(np.array([seed, dataset * _GOLDEN % 2**64], dtype=np.uint64))
        self._key = fixed[0] ^ fixed[1]
        # Lists of ints rather than of pairs, as every garbage collection would visit half a million pairs.
        self._blocks: dict[int, tuple[int, list[int], list[int]]] = {}

    def rows(self, positions: Sequence[int]) -> list[tuple[int, int]]:
        """Returns (row, epoch) at each position."""
        return [self._row(position) for position in positions]

    def _row(self, position: int) -> tuple[int, int]:
        step, residue = divmod(position, self._stride)
        number, offset = divmod(step, _BLOCK)
        block = self._blocks.get(residue)
        if block is None or block[0] != number:
            # A call for a single position takes ten times as long as one position in a call for many.
            rows, epochs = self.compute(residue + np.arange(number * _BLOCK, (number + 1) * _BLOCK) * self._stride)
            block = self._blocks[residue] = (number, rows.tolist(), epochs.tolist())
        return block[1][offset], block[2][offset]

    def compute(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the rows and epochs (both int64 [n]) at `positions` (int64 [n])."""
        epochs, offsets = np.divmod(positions, self.num_rows)
        epochs += self._first_epoch
        state = self._key ^ _mix(epochs.astype(np.uint64) + np.uint64(_GOLDEN))
        keys = _mix(state[:, None] + np.arange(_NUM_ROUNDS, dtype=np.uint64) * np.uint64(_GOLDEN))
        half_bits = max(1, ((self.num_rows - 1).bit_length() + 1) // 2)
        rows = _permute(offsets.astype(np.uint64), half_bits, keys)
        while (outside := np.flatnonzero(rows >= self.num_rows)).size:
            rows[outside] = _permute(rows[outside], half_bits, keys[outside])
        return rows.astype(np.int64), epochs


def _permute(values: np.ndarray, half_bits: int, keys: np.ndarray) -> np.ndarray:
    """Permutes values, uint64 [n] below 4**half_bits, with keys, uint64 [n, rounds]."""
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for number in range(_NUM_ROUNDS):
        left, right = right, left ^ (_mix(right ^ keys[:, number]) & mask)
    return left << shift | right


def _mix(values: np.ndarray) -> np.ndarray:
    """Applies splitmix64's finalizer to uint64: each input bit changes about half of the output bits. 0 maps to 0."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)


class _Waiting(NamedTuple):
    position: int
    row: int
    epoch: int
    raw: RawRow


class StreamOrder:
    """The order of a streamed data set, for some lanes of one process. It reads `source` as far as necessary.

    The positions of each lane must be requested in ascending order, none below `start`. After each call of `rows`,
    `source` holds exactly the rows that it returned. Position 0 is in epoch number `first_epoch`.
    """

    num_rows = None
    """None even once it is known, as the consumed rows must not depend on how far the stream was read."""

    def __init__(
        self,
        source: StreamedSource,
        *,
        seed: int,
        dataset: int,
        num_lanes: int,
        lanes: Iterable[int],
        start: int,
        window: int = SHUFFLE_WINDOW,
        first_epoch: int = 0,
    ) -> None:
        self._source, self._seed, self._dataset, self._first_epoch = source, seed, dataset, first_epoch
        self._num_lanes, self._window = num_lanes, window
        self._waiting: dict[int, deque[_Waiting]] = {lane: deque() for lane in lanes}
        self._seek(start)

    def rows(self, positions: Sequence[int]) -> list[tuple[int, int]]:
        """Returns (row, epoch) at each position. Raises DataError if the stream cannot be read further."""
        found = [self._next(position) for position in positions]
        self._source.hold({each.row: each.raw for each in found})
        return [(each.row, each.epoch) for each in found]

    def _seek(self, position: int) -> None:
        """Moves to the beginning of the window that contains the position."""
        num_rows = self._source.num_rows
        epoch, row = (0, position) if num_rows is None else divmod(position, num_rows)
        first = row // self._window * self._window
        self._source.seek(first)
        if num_rows is None and first:
            try:
                self._source.raw(first)
            except EndOfStream:
                return self._seek(position)  # the number of rows is now known, and the position is in a later epoch
        self._epoch, self._next_row, self._next_position = self._first_epoch + epoch, first, position - row + first
        return None

    def _next(self, position: int) -> _Waiting:
        waiting = self._waiting[position % self._num_lanes]
        while True:
            while waiting:
                # Rows below the position were consumed before a resume.
                if (first := waiting.popleft()).position == position:
                    return first
                assert first.position < position
            self._read_window()

    def _read_window(self) -> None:
        raws: list[RawRow] = []
        with suppress(EndOfStream):
            raws.extend(self._source.raw(row) for row in range(self._next_row, self._next_row + self._window))
        # The window's rows are sorted by a hash.
        name = f"{self._seed} {self._dataset} {self._epoch} {self._next_row // self._window}"
        hashes = np.frombuffer(hashlib.shake_128(name.encode()).digest(8 * len(raws)), "<u8")
        order = np.argsort(hashes, kind="stable").tolist()
        for position, offset in enumerate(order, start=self._next_position):
            waiting = self._waiting.get(position % self._num_lanes)
            if waiting is not None:
                waiting.append(_Waiting(position, self._next_row + offset, self._epoch, raws[offset]))
        self._next_position += len(raws)
        self._next_row += len(raws)
        if len(raws) < self._window:
            self._epoch, self._next_row = self._epoch + 1, 0
