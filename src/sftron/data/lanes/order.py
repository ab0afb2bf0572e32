"""The order of an epoch: a permutation that is computed, not stored.

A Feistel network permutes the smallest even-sized power of two that holds the rows; positions that fall outside are
sent through it again until they fall inside (cycle walking; fewer than four rounds on average). Any position of any
epoch costs the same, and nothing has to be kept for it; a shuffled list of 10 M rows takes 80 MB and half a second.
Source: Black and Rogaway, Ciphers with Arbitrary Finite Domains (2002).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

_BLOCK = 512
_NUM_ROUNDS = 6
_MASK_64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


class RowOrder(Protocol):
    """Which row is dealt at which position of a stream that never ends; a pure function of the data and the seed."""

    @property
    def num_rows(self) -> int | None:
        """Rows an epoch; None where only reading to the end would tell."""
        ...

    def rows(self, positions: Sequence[int]) -> list[tuple[int, int]]:
        """(row, epoch) at each position."""
        ...


class ShuffledOrder:
    """Every epoch in an order of its own, of rows that can be had in any order.

    stride: positions are asked for in steps of it (a lane's), and are computed some hundred steps ahead; any other
    position is right as well, and slow. first_epoch: the number of the epoch that position 0 is in.
    """

    def __init__(self, num_rows: int, *, seed: int, place: int = 0, stride: int = 1, first_epoch: int = 0) -> None:
        self.num_rows = num_rows
        self._seed, self._place, self._stride, self._first_epoch = seed, place, stride, first_epoch
        # Lists of numbers, not of pairs: half a million pairs would be looked at by each garbage collection.
        self._blocks: dict[int, tuple[int, list[int], list[int]]] = {}

    def rows(self, positions: Sequence[int]) -> list[tuple[int, int]]:
        return [self._row(position) for position in positions]

    def _row(self, position: int) -> tuple[int, int]:
        step, residue = divmod(position, self._stride)
        number, offset = divmod(step, _BLOCK)
        block = self._blocks.get(residue)
        if block is None or block[0] != number:
            steps = np.arange(number * _BLOCK, (number + 1) * _BLOCK)
            rows, epochs = rows_at(
                residue + steps * self._stride,
                self.num_rows,
                seed=self._seed,
                place=self._place,
                first_epoch=self._first_epoch,
            )
            block = self._blocks[residue] = (number, rows.tolist(), epochs.tolist())
        return block[1][offset], block[2][offset]


def rows_at(
    positions: np.ndarray, num_rows: int, *, seed: int, place: int = 0, first_epoch: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Rows and epochs (both int64) dealt at `positions` of the shuffled epochs, one after another.

    Position g is in epoch first_epoch + g // num_rows; each epoch is a bijection of its own. place: number of the data
    set in a mixture, so that two of them have no order in common.

    Computed for many positions at once: alone, one takes ten times as long.
    """
    epochs, places = np.divmod(np.asarray(positions, dtype=np.int64), num_rows)
    epochs += first_epoch
    keys = _round_keys(seed, epochs, place)
    half_bits = max(1, ((num_rows - 1).bit_length() + 1) // 2)
    rows = _permute(places.astype(np.uint64), half_bits, keys)
    while (outside := np.flatnonzero(rows >= num_rows)).size:
        rows[outside] = _permute(rows[outside], half_bits, keys[outside])
    return rows.astype(np.int64), epochs


def _permute(values: np.ndarray, half_bits: int, keys: np.ndarray) -> np.ndarray:
    """values: uint64 [n], below 4**half_bits. keys: uint64 [n, rounds]."""
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for number in range(_NUM_ROUNDS):
        left, right = right, left ^ (_mix(right ^ keys[:, number]) & mask)
    return left << shift | right


def _round_keys(seed: int, epochs: np.ndarray, place: int) -> np.ndarray:
    """uint64 [n, rounds] for epochs [n]."""
    fixed = _mix(np.array([seed, place * _GOLDEN & _MASK_64], dtype=np.uint64))
    state = fixed[0] ^ fixed[1] ^ _mix(epochs.astype(np.uint64) + np.uint64(_GOLDEN))
    return _mix(state[:, None] + np.arange(_NUM_ROUNDS, dtype=np.uint64) * np.uint64(_GOLDEN))


def _mix(values: np.ndarray) -> np.ndarray:
    """splitmix64's finalizer on uint64: every input bit changes half of the output bits. 0 stays 0."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)
