"""Lanes: which conversation goes to which pack, for any number of ranks and workers (laws 5 and 6).

The shuffled epochs, one after another, are one stream of positions. Position g belongs to lane g mod V, and pack n
comes from lane n mod V. A lane packs what it is dealt and knows nothing of the others, so that whoever owns it gets the
same packs out of it.

    V = 3    positions   0 1 2 3 4 5 6 7 8 ...       packs   0 1 2 3 4 5 ...
             lane        0 1 2 0 1 2 0 1 2           lane    0 1 2 0 1 2

A lane's state is what has left it: all its positions below a low-water mark, and a bitmap above it. What is pending is
the rest, and is read and tokenized again on resume; so the state is some dozens of bytes after any number of steps.

A dropped row leaves with the conversation that was dealt behind it. Counted when it is read it would run ahead: a pool
of 256 is read for the first pack of some ten conversations, and 2 % of dropped rows would look like a third.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from sftron.data.packing import Packing
from sftron.data.types import DataError, Dropped, LabeledConversation

AUTO_NUM_LANES = 48
_MIN_ROWS_PER_LANE = 32
_MOST_DROPPED_IN_A_ROW = 1000


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


@dataclass(frozen=True, slots=True)
class _Pending:
    """A conversation that waits to be packed, and the dropped rows that leave with it."""

    position: int
    conversation: LabeledConversation
    dropped_before: tuple[tuple[int, Dropped], ...]


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
        self._pool: list[_Pending] = []
        self._dropped_last: list[tuple[int, Dropped]] = []  # read since the last one of the pool

    def deal(self) -> LaneDeal:
        """The next pack of this lane.

        Raises DataError when two epochs of the lane, and a thousand rows, hold none to train on.
        """
        self._fill_pool()
        lengths = [len(pending.conversation) for pending in self._pool]
        chosen = self._packing.choose(lengths, self._token_budget) if lengths else []
        dealt = [self._pool[index] for index in chosen]
        dropped = [drop for pending in dealt for drop in pending.dropped_before]
        leaving = set(chosen)
        self._pool = [pending for index, pending in enumerate(self._pool) if index not in leaving]
        if not self._pool and self._is_at_end(self._next):
            dropped += self._dropped_last
            self._dropped_last = []
        for position in [*(pending.position for pending in dealt), *(position for position, _ in dropped)]:
            self._mark_gone(position)
        return LaneDeal(
            tuple(pending.conversation for pending in dealt),
            len(dealt) + len(dropped),
            dict(Counter(drop.reason for _, drop in dropped)),
        )

    def state(self) -> str:
        """What has left the lane, as "low-water mark:bitmap above it" in hexadecimal."""
        return f"{self._low:x}:{self._gone:x}"

    def load_state(self, state: str) -> None:
        """Go on after `state`; pending conversations are read again when the lane is next asked."""
        low, gone = state.split(":")
        self._low, self._gone = int(low, 16), int(gone, 16)
        self._next, self._pool, self._dropped_last = self._low, [], []

    def _fill_pool(self) -> None:
        while len(self._pool) < self._packing.pool_size:
            # A pool that reached further would deal small sets out of order, many epochs at once.
            too_far = self._pool and self._epoch_of(self._next) > self._epoch_of(self._pool[0].position) + 1
            if too_far or self._is_at_end(self._next):
                return
            if not self._has_left(self._next):
                item = self._read(self._lane + self._next * self._num_lanes)
                if isinstance(item, Dropped):
                    self._dropped_last.append((self._next, item))
                    self._require_some_kept()
                else:
                    self._pool.append(_Pending(self._next, item, tuple(self._dropped_last)))
                    self._dropped_last = []
            self._next += 1

    def _require_some_kept(self) -> None:
        num_dropped = len(self._dropped_last)
        if not self._pool and num_dropped > max(_MOST_DROPPED_IN_A_ROW, 2 * self._num_rows // self._num_lanes):
            reasons = dict(Counter(drop.reason for _, drop in self._dropped_last))
            raise DataError(
                f"not one of the last {num_dropped} rows can be trained on: {reasons}; "
                f"the last: {self._dropped_last[-1][1].detail}"
            )

    def _is_at_end(self, position_in_lane: int) -> bool:
        return self._end is not None and self._lane + position_in_lane * self._num_lanes >= self._end

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
