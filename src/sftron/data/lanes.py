"""Lanes: which conversation goes to which pack, for any number of ranks and workers (laws 5 and 6).

The shuffled epochs, one after another, are one stream of positions. Position g belongs to lane g mod V, and pack n
comes from lane n mod V. A lane packs what it is dealt and knows nothing of the others, so that whoever owns it gets the
same packs out of it.

    V = 3    positions   0 1 2 3 4 5 6 7 8 ...       packs   0 1 2 3 4 5 ...
             lane        0 1 2 0 1 2 0 1 2           lane    0 1 2 0 1 2

A lane's state is what has left it: all its positions below a low-water mark, and a bitmap above it. What is pending is
the rest, and is read and tokenized again on resume; so the state is some dozens of bytes after any number of steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from sftron.data.packing import Packing
from sftron.data.types import DataError, Dropped, LabeledConversation

AUTO_NUM_LANES = 48
_MIN_ROWS_PER_LANE = 32


def auto_num_lanes(num_rows: int) -> int:
    """48, or for small sets its largest divisor that leaves every lane 32 rows an epoch to choose from."""
    divisors = [lanes for lanes in range(AUTO_NUM_LANES, 0, -1) if AUTO_NUM_LANES % lanes == 0]
    return next((lanes for lanes in divisors if num_rows >= lanes * _MIN_ROWS_PER_LANE), 1)


@dataclass(frozen=True, slots=True)
class LaneDeal:
    """What a lane gives for one pack. conversations: none once the lane has drained. dropped: counts by reason."""

    conversations: tuple[LabeledConversation, ...]
    num_rows: int
    dropped: dict[str, int]


class Lane:
    """One lane: its pending conversations and what has left it.

    read: the conversation at a stream position, or why it is dropped; a pure function.
    num_rows: rows an epoch. num_epochs: None for an endless stream.
    """

    def __init__(
        self,
        lane: int,
        num_lanes: int,
        *,
        read: Callable[[int], LabeledConversation | Dropped],
        packing: Packing,
        token_budget: int,
        num_rows: int,
        num_epochs: int | None,
    ) -> None:
        self._lane, self._num_lanes = lane, num_lanes
        self._read, self._packing, self._token_budget = read, packing, token_budget
        self._num_rows = num_rows
        self._end = None if num_epochs is None else num_epochs * num_rows
        # Positions are counted within the lane: the k-th is stream position lane + k * num_lanes.
        self._low = 0
        self._gone = 0  # bit k: position _low + k has left
        self._next = 0
        self._pool: list[tuple[int, LabeledConversation]] = []
        self._dropped: Counter[str] = Counter()

    def deal(self) -> LaneDeal:
        """The next pack of this lane. Raises DataError when a whole epoch of the lane holds nothing to train on."""
        self._fill_pool()
        chosen = (
            self._packing.choose([len(conversation) for _, conversation in self._pool], self._token_budget)
            if self._pool
            else []
        )
        for index in chosen:
            self._mark_gone(self._pool[index][0])
        deal = LaneDeal(
            tuple(self._pool[index][1] for index in chosen),
            len(chosen) + self._dropped.total(),
            dict(self._dropped),
        )
        leaving = set(chosen)
        self._pool = [pending for index, pending in enumerate(self._pool) if index not in leaving]
        self._dropped.clear()
        return deal

    def state(self) -> str:
        """What has left the lane, as "low-water mark:bitmap above it" in hexadecimal."""
        return f"{self._low:x}:{self._gone:x}"

    def load_state(self, state: str) -> None:
        """Go on after `state`; pending conversations are read again when the lane is next asked."""
        low, gone = state.split(":")
        self._low, self._gone = int(low, 16), int(gone, 16)
        self._next, self._pool = self._low, []
        self._dropped.clear()

    def _fill_pool(self) -> None:
        num_dropped_in_a_row = 0
        while len(self._pool) < self._packing.pool_size:
            position = self._lane + self._next * self._num_lanes
            epoch = position // self._num_rows
            # A pool that reached further would deal small sets out of order, many epochs at once.
            too_far = self._pool and epoch > self._epoch_of(self._pool[0][0]) + 1
            if too_far or (self._end is not None and position >= self._end):
                return
            if not self._has_left(self._next):
                item = self._read(position)
                if isinstance(item, Dropped):
                    self._mark_gone(self._next)
                    self._dropped[item.reason] += 1
                    num_dropped_in_a_row += 1
                    if not self._pool and num_dropped_in_a_row * self._num_lanes > 2 * self._num_rows:
                        raise DataError(
                            f"not one of the last {num_dropped_in_a_row} rows can be trained on: "
                            f"{dict(self._dropped)}; the last: {item.detail}"
                        )
                else:
                    self._pool.append((self._next, item))
            self._next += 1

    def _epoch_of(self, position_in_lane: int) -> int:
        return (self._lane + position_in_lane * self._num_lanes) // self._num_rows

    def _has_left(self, position_in_lane: int) -> bool:
        offset = position_in_lane - self._low
        return offset < 0 or bool(self._gone >> offset & 1)

    def _mark_gone(self, position_in_lane: int) -> None:
        self._gone |= 1 << (position_in_lane - self._low)
        num_trailing_ones = (~self._gone & (self._gone + 1)).bit_length() - 1
        self._low += num_trailing_ones
        self._gone >>= num_trailing_ones
