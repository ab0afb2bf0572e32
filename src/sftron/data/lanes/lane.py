"""Lanes: the assignment of conversations to packs, for any number of ranks and workers (laws 5 and 6).

A lane is a virtual shard of the data. The shuffled epochs, one after another, form one stream of positions; with
weights, each data set is a stream of its own. With V lanes, position g of a stream belongs to lane g mod V, and pack n
comes from lane n mod V. A lane packs its own rows independently of the other lanes, so its packs are the same whichever
rank or worker owns it.

    V = 3    positions   0 1 2 3 4 5 6 7 8 ...       packs   0 1 2 3 4 5 ...
             lane        0 1 2 0 1 2 0 1 2           lane    0 1 2 0 1 2

A lane's rows are numbered as they are fetched. Its state is the set of consumed numbers, a few dozen bytes after any
number of steps: a low-water mark, below which all are consumed, and a bitmap above it. All other rows that were fetched
are pending, and a resume reads them again.

A dropped row is consumed with the conversation that was fetched after it. If it were counted when it is read, the count
would run ahead of the packs: a pool of 256 is read for a first pack of about ten conversations, so 2 % of dropped rows
would look like a third.
"""

from __future__ import annotations

import math
import re
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sftron.data.packing import Packing
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
class Fetched(NamedTuple):
    """A conversation with its number in the lane, and the dropped rows directly before it."""

    number: int
    conversation: LabeledConversation | MeasuredRow
    dropped: tuple[Dropped, ...]


class LanePack(NamedTuple):
    """The conversations of one pack (none once the lane has ended), and the dropped rows consumed with them."""

    conversations: tuple[LabeledConversation | MeasuredRow, ...]
    dropped_rows: tuple[Dropped, ...]


@dataclass(slots=True)
class PoolDelay:
    """Statistics of how long conversations stay in a pool, in packs of their lane, since this process started."""

    num_conversations: int = 0
    total: int = 0
    longest: int = 0

    @property
    def mean(self) -> float:
        return self.total / max(1, self.num_conversations)


class Fetcher(ABC):
    """Fetches a lane's conversations in the order in which they are pooled, and records which were consumed."""

    def __init__(self) -> None:
        self._consumed = ConsumedSet()

    @abstractmethod
    def fetch(self, limit: int, oldest: int | None) -> list[Fetched]:
        """Returns the next conversations, at most `limit`. Their order does not depend on any `limit`.

        The list is empty only at the end, or where the next conversation is too far ahead of `oldest`, the number of
        the oldest pending conversation.

        Raises:
            DataError: Two epochs of the lane, and at least a thousand rows, hold no row to train on.
        """

    def consume(self, fetched: Fetched) -> None:
        """Marks the conversation and its dropped rows as consumed."""
        self._consumed.add(fetched.number, len(fetched.dropped) + 1)

    def consume_rest(self) -> tuple[Dropped, ...]:
        """Marks the dropped rows after the last conversation as consumed, and returns them, once the lane has ended."""
        return ()

    @abstractmethod
    def state(self) -> str:
        """Returns which numbers were consumed, in hexadecimal."""

    @abstractmethod
    def load_state(self, state: str) -> None:
        """Resumes after `state`; rows that were pending are fetched again."""


class Lane:
    """One lane: a pool of pending conversations, which is filled by a fetcher and emptied pack by pack."""

    def __init__(self, fetcher: Fetcher, *, packing: Packing, token_budget: int, delay: PoolDelay) -> None:
        self._fetcher, self._packing, self._token_budget, self._delay = fetcher, packing, token_budget, delay
        # Three lists of equal length: the pending conversations, their lengths in tokens, and the number of the first
        # pack that each could have been in.
        self._pool: list[Fetched] = []
        self._lengths: list[int] = []
        self._since: list[int] = []
        self._num_packs = 0

    def next_pack(self) -> LanePack:
        """Returns the next pack, and marks its rows as consumed. Raises DataError as `Fetcher.fetch` does."""
        self._fill_pool()
        indices = self._packing.choose(self._lengths, self._token_budget) if self._pool else []
        chosen = [self._pool[index] for index in indices]
        for index in reversed(indices):
            delay = self._num_packs - self._since[index]
            self._delay.num_conversations += 1
            self._delay.total += delay
            self._delay.longest = max(self._delay.longest, delay)
            del self._pool[index], self._lengths[index], self._since[index]
        self._num_packs += 1
        for each in chosen:
            self._fetcher.consume(each)
        dropped = [drop for each in chosen for drop in each.dropped]
        if not self._pool:
            dropped += self._fetcher.consume_rest()
        return LanePack(tuple(each.conversation for each in chosen), tuple(dropped))

    def state(self) -> str:
        """Returns which rows were consumed."""
        return self._fetcher.state()

    def load_state(self, state: str) -> None:
        """Resumes after `state`; conversations that were pending are read again for the next pack."""
        self._fetcher.load_state(state)
        self._pool, self._lengths, self._since = [], [], []

    def _fill_pool(self) -> None:
        while (num_wanted := self._packing.pool_size - len(self._pool)) > 0:
            fetched = self._fetcher.fetch(num_wanted, self._pool[0].number if self._pool else None)
            if not fetched:
                return
            self._pool += fetched
            self._lengths += [len(each.conversation) for each in fetched]
            self._since += [self._num_packs] * len(fetched)


class EpochFetcher(Fetcher):
    """Fetches the rows of a single stream, each row once per epoch.

    Position g of the stream is number g // num_lanes of lane g % num_lanes. `num_epochs` is None for an endless stream.
    At most `num_pooled_epochs` epochs are pending at once. The state is "low-water mark:bitmap".
    """

    def __init__(
        self, lane: int, num_lanes: int, stream: Stream, *, num_epochs: int | None, num_pooled_epochs: int = 2
    ) -> None:
        super().__init__()
        self._lane, self._num_lanes, self._num_pooled_epochs = lane, num_lanes, num_pooled_epochs
        self._num_rows, self._num_epochs = stream.num_rows, sys.maxsize if num_epochs is None else num_epochs
        self._reader = LaneReader(lane, num_lanes, stream)
        self._next = 0

    def fetch(self, limit: int, oldest: int | None) -> list[Fetched]:
        while numbers := self._numbers(limit, oldest):
            if fetched := self._reader.read(numbers):
                return fetched
        return []

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
        """Returns the first number that may not be fetched while `oldest` is pending: the end of the last pooled epoch.

        Without this bound, the pool would hold many epochs of a small data set at once and consume them out of order.
        """
        if self._num_rows is None:
            return math.inf
        oldest_epoch = (self._lane + oldest * self._num_lanes) // self._num_rows
        epoch = min(oldest_epoch + self._num_pooled_epochs, self._num_epochs)
        return -((self._lane - epoch * self._num_rows) // self._num_lanes)


class LaneReader:
    """Reads a lane's rows of a stream in order, and attaches dropped rows to the conversation after them."""

    def __init__(self, lane: int, num_lanes: int, stream: Stream) -> None:
        self._lane, self._num_lanes, self._stream = lane, num_lanes, stream
        self._most_dropped = max(_MOST_DROPPED_IN_A_ROW, 2 * (stream.num_rows or 0) // num_lanes)
        self.dropped: list[Dropped] = []
        """The rows that were dropped after the last conversation."""

    def read(self, numbers: Sequence[int]) -> list[Fetched]:
        """Returns the conversations among the lane's rows with these numbers. Raises DataError as `Fetcher.fetch`."""
        fetched = []
        items = self._stream.read([self._lane + number * self._num_lanes for number in numbers])
        for number, item in zip(numbers, items, strict=True):
            if not isinstance(item, Dropped):
                fetched.append(Fetched(number, item, tuple(self.dropped)))
                self.dropped.clear()
                continue
            self.dropped.append(item)
            if len(self.dropped) > self._most_dropped:
                counts = Counter(drop.reason for drop in self.dropped)
                reasons = ", ".join(f"{count} times {reason}" for reason, count in counts.most_common())
                raise DataError(
                    f"none of the last {len(self.dropped)} rows can be trained on: {reasons}; the last: "
                    f"{item.detail}; run `sftron inspect` to see the rows"
                )
        return fetched


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


_NUMBER = "(?:0|[1-9a-f][0-9a-f]{0,14})"
_LANE_STATE = re.compile(rf"({_NUMBER}|{_NUMBER}\.{_NUMBER}(?:,{_NUMBER}\.{_NUMBER})*):(0|[1-9a-f][0-9a-f]*)")


def parse_state(state: str, num_accounts: int | None) -> tuple[list[list[int]], int]:
    """Returns the numbers before the colon of a lane's state and the bitmap after it.

    `num_accounts` is the number of data sets if they have weights, else None. Raises ValueError for an invalid state.
    """
    match = _LANE_STATE.fullmatch(state)
    numbers = [[int(number, 16) for number in low.split(".")] for low in match[1].split(",")] if match else []
    if match is None or [len(each) for each in numbers] != ([1] if num_accounts is None else [2] * num_accounts):
        form = "low:bitmap" if num_accounts is None else f"cursor.tokens of {num_accounts} data sets:bitmap"
        raise ValueError(f"the lane state is {state[:60]!r}; wanted {form}, in hexadecimal; use another checkpoint")
    return numbers, int(match[2], 16)


def num_consumed(lanes: Mapping[Any, str], num_lanes: int, num_positions: int) -> int:
    """Returns how many of the first `num_positions` positions of a stream the lanes have consumed.

    Args:
        lanes: The states of the lanes of a single stream, by their number.

    Raises:
        ValueError: A state is invalid.
    """
    total = 0
    for lane, state in lanes.items():
        ([low],), above = parse_state(state, None)
        end = max(0, -((int(lane) - num_positions) // num_lanes))
        total += min(low, end) + (above & (1 << max(0, end - low)) - 1).bit_count()
    return total
