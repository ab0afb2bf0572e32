"""The order of an epoch: a permutation that is computed, not stored.

A Feistel network permutes the smallest even-sized power of two that holds the rows; positions that fall outside are
sent through it again until they fall inside (cycle walking; fewer than four rounds on average). Any position of any
epoch costs the same, and nothing has to be kept for it; a shuffled list of 10 M rows takes 80 MB and half a second.
Source: Black and Rogaway, Ciphers with Arbitrary Finite Domains (2002).
"""

from __future__ import annotations

from functools import cache

_NUM_ROUNDS = 6
_MASK_64 = (1 << 64) - 1


def row_at(position: int, num_rows: int, *, seed: int, epoch: int) -> int:
    """The row dealt at `position` (0 <= position < num_rows) of an epoch; a bijection for each (seed, epoch)."""
    half_bits = max(1, ((num_rows - 1).bit_length() + 1) // 2)
    keys = _round_keys(seed, epoch)
    row = position
    while True:
        row = _permute(row, half_bits, keys)
        if row < num_rows:
            return row


def _permute(value: int, half_bits: int, keys: tuple[int, ...]) -> int:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return left << half_bits | right


@cache
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    state = _mix(seed) ^ _mix(epoch + 0x9E3779B97F4A7C15)
    return tuple(_mix(state + number * 0x9E3779B97F4A7C15) for number in range(_NUM_ROUNDS))


def _mix(value: int) -> int:
    """splitmix64's finalizer: every input bit changes half of the output bits."""
    value &= _MASK_64
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK_64
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK_64
    return value ^ value >> 31
