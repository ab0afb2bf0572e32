"""Samplers fetch the rows of one lane in order and record which were consumed, so that a lane can resume (law 6).

The rows are numbered as they are fetched. The consumed numbers are stored as a low-water mark, below which all are
consumed, and a bitmap above it. All other rows that were fetched are pending, and a resume reads them again.

A dropped row is consumed with the conversation that was fetched after it. If it were counted when it is read, the count
would run ahead of the packs: a pool of 256 is read for a first pack of about ten conversations, so 2 % of dropped rows
would look like a third.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from sftron.data.types import DataError, Dropped, LabeledConversation, MeasuredRow

_MOST_DROPPED_IN_A_ROW = 1000


@dataclass(frozen=True, slots=True)
class Stream:
    """The endless stream of positions of consecutive epochs of one data set, or of several numbered as one."""

    read: Callable[[Sequence[int]], Sequence[LabeledConversation | MeasuredRow | Dropped]]
    """Returns the prepared rows at these positions, in order; each result is a pure function of its position."""
    num_rows: int | None
    """The number of rows per epoch; None where it is not known."""


# A tuple, since one is made for every row; a frozen dataclass takes three times as long.
class Sample(NamedTuple):
    """A conversation with its number in the lane, and the dropped rows directly before it."""

    number: int
    conversation: LabeledConversation | MeasuredRow
    dropped: tuple[Dropped, ...]


class Sampler(Protocol):
    """Fetches conversations in the order in which a lane pools them. The order does not depend on any `limit`."""

    def fetch(self, limit: int, oldest: int | None) -> list[Sample]:
        """Returns the next conversations, at most `limit`.

        The list is empty only at the end, or where the next conversation is too far ahead of the oldest pending one.

        Args:
            limit: The largest number of conversations to return.
            oldest: The number of the oldest pending conversation, or None if there is none.

        Raises:
            DataError: Two epochs of the lane, and at least a thousand rows, hold no row to train on.
        """
        ...

    def consume(self, sample: Sample) -> None:
        """Marks the conversation and its dropped rows as consumed."""
        ...

    def consume_rest(self) -> tuple[Dropped, ...]:
        """Marks the dropped rows after the last conversation as consumed, and returns them, once the lane has ended."""
        ...

    def state(self) -> str:
        """Returns which numbers were consumed, in hexadecimal; a few dozen bytes."""
        ...

    def load_state(self, state: str) -> None:
        """Resumes after `state`; rows that were pending are fetched again."""
        ...


_NUMBER = "(?:0|[1-9a-f][0-9a-f]{0,14})"
_LANE_STATE = re.compile(rf"({_NUMBER}|{_NUMBER}\.{_NUMBER}(?:,{_NUMBER}\.{_NUMBER})*):(0|[1-9a-f][0-9a-f]*)")
_LONGEST_STATE = 2**20
"""The largest number of characters of a state, enough for four million consecutive dropped rows."""


def parse_state(state: str, num_accounts: int | None) -> tuple[list[list[int]], int]:
    """Returns the numbers before the colon and the bitmap after it.

    Args:
        state: The state of a lane.
        num_accounts: The number of data sets if they have weights, else None.

    Raises:
        ValueError: `state` is not a valid state.
    """
    match = _LANE_STATE.fullmatch(state) if len(state) <= _LONGEST_STATE else None
    numbers = [[int(number, 16) for number in low.split(".")] for low in match[1].split(",")] if match else []
    wanted = (1, 1) if num_accounts is None else (num_accounts, 2)
    if match is None or (len(numbers), len(numbers[0])) != wanted:
        form = "low:bitmap" if num_accounts is None else f"cursor.tokens of {num_accounts} data sets:bitmap"
        raise ValueError(f"the lane state {state[:60]!r} is none; wanted {form}, in hexadecimal: resume from another")
    return numbers, int(match[2], 16)


def low_cursors(state: str) -> list[int]:
    """Returns, for each stream, the index within the lane of the first row that a resume from `state` may read."""
    return [int(low.split(".")[0], 16) for low in state.split(":")[0].split(",")]


class EpochSampler:
    """Samples a single stream, each row once per epoch.

    Position g of the stream is number g // num_lanes of lane g % num_lanes. `num_epochs` is None for an endless stream.
    The state is "low-water mark:bitmap".
    """

    def __init__(self, lane: int, num_lanes: int, stream: Stream, *, num_epochs: int | None) -> None:
        self._lane, self._num_lanes = lane, num_lanes
        self._num_rows, self._num_epochs = stream.num_rows, num_epochs
        self._reader = LaneReader(lane, num_lanes, stream)
        self._consumed = ConsumedSet()
        self._next = 0

    def fetch(self, limit: int, oldest: int | None) -> list[Sample]:
        while numbers := self._numbers(limit, oldest):
            if samples := self._reader.read(numbers):
                return samples
        return []

    def consume(self, sample: Sample) -> None:
        self._consumed.add(sample.number, len(sample.dropped) + 1)

    def consume_rest(self) -> tuple[Dropped, ...]:
        rest = tuple(self._reader.dropped) if self._next >= self._stop(self._next) else ()
        if rest:
            self._consumed.add(self._next - 1, len(rest))
            self._reader.dropped.clear()
        return rest

    def state(self) -> str:
        return f"{self._consumed.low:x}:{self._consumed.above:x}"

    def load_state(self, state: str) -> None:
        ([low],), above = parse_state(state, None)
        self._consumed = ConsumedSet(low, above)
        self._next = low
        self._reader.dropped.clear()

    def _numbers(self, limit: int, oldest: int | None) -> list[int]:
        """Returns the next numbers to read, without those that are already consumed."""
        numbers, number = [], self._next
        while number in self._consumed:
            number += 1
        stop = self._stop(number if oldest is None else oldest)
        while len(numbers) < limit and number < stop:
            if number not in self._consumed:
                numbers.append(number)
            number += 1
        self._next = number
        return numbers

    def _stop(self, oldest: int) -> float:
        """Returns the first number that may not be fetched while `oldest` is pending: the end of the next epoch.

        Without this bound, the pool would hold many epochs of a small data set at once and consume them out of order.
        """
        if self._num_rows is None:
            return math.inf
        epoch = (self._lane + oldest * self._num_lanes) // self._num_rows + 2
        if self._num_epochs is not None:
            epoch = min(epoch, self._num_epochs)
        return -((self._lane - epoch * self._num_rows) // self._num_lanes)


class LaneReader:
    """Reads a lane's rows of a stream in order, and attaches dropped rows to the conversation after them."""

    def __init__(self, lane: int, num_lanes: int, stream: Stream) -> None:
        self._lane, self._num_lanes, self._stream = lane, num_lanes, stream
        self._most_dropped = max(_MOST_DROPPED_IN_A_ROW, 2 * (stream.num_rows or 0) // num_lanes)
        self.dropped: list[Dropped] = []
        """The rows that were dropped after the last conversation."""

    def read(self, numbers: Sequence[int]) -> list[Sample]:
        """Returns the conversations among the lane's rows with these numbers.

        Raises:
            DataError: Too many consecutive rows are dropped, so that there may be no row to train on.
        """
        samples = []
        items = self._stream.read([self._lane + number * self._num_lanes for number in numbers])
        for number, item in zip(numbers, items, strict=True):
            if not isinstance(item, Dropped):
                samples.append(Sample(number, item, tuple(self.dropped)))
                self.dropped.clear()
                continue
            self.dropped.append(item)
            if len(self.dropped) > self._most_dropped:
                counts = Counter(drop.reason for drop in self.dropped)
                reasons = ", ".join(f"{count} times {reason}" for reason, count in counts.most_common())
                raise DataError(
                    f"not one of the last {len(self.dropped)} rows can be trained on: {reasons}; the last: "
                    f"{item.detail}; look at them with tools/inspect_data.py"
                )
        return samples


class ConsumedSet:
    """The set of numbers that a lane has consumed: all below `low`, and low + k where bit k of `above` is set."""

    def __init__(self, low: int = 0, above: int = 0) -> None:
        self.low, self.above = low, above

    def __contains__(self, number: int) -> bool:
        offset = number - self.low
        return offset < 0 or bool(self.above >> offset & 1)

    def add(self, last: int, num: int) -> None:
        """Adds the `num` consecutive numbers up to and including `last`."""
        self.above |= ((1 << num) - 1) << (last - num + 1 - self.low)
        num_trailing_ones = (~self.above & (self.above + 1)).bit_length() - 1
        self.low += num_trailing_ones
        self.above >>= num_trailing_ones
