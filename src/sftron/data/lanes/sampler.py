"""What a lane draws: its rows one after another, each until it has left, whenever the lane is stopped (law 6).

The rows are numbered as they are drawn. What has left is a low-water mark, below which all has, and a bitmap above it.
What is pending is the rest, and is read again on resume.

A dropped row leaves with the conversation that was drawn behind it. Counted when it is read it would run ahead: a pool
of 256 is read for the first pack of some ten conversations, and 2 % of dropped rows would look like a third.
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
    """The epochs of one data set, or of several numbered through, one after another: an endless stream of positions.

    read: what became of the rows at these positions, in their order; a pure function of each position.
    num_rows: rows an epoch; None where it is not known.
    """

    read: Callable[[Sequence[int]], Sequence[LabeledConversation | MeasuredRow | Dropped]]
    num_rows: int | None


# A tuple, as one is made for every row; a frozen dataclass takes three times as long.
class Drawn(NamedTuple):
    """A conversation with its number in the lane, and the dropped rows, numbered before it, that leave with it."""

    number: int
    conversation: LabeledConversation | MeasuredRow
    dropped: tuple[Dropped, ...]


class Draws(Protocol):
    """Conversations in the order in which a lane pools them. Nothing that is decided here depends on `limit`."""

    def draw(self, limit: int, oldest: int | None) -> list[Drawn]:
        """The next ones, up to `limit`; none only at the end, or where the pool may reach no further.

        oldest: number of the oldest conversation that is pending, if any is.

        Raises DataError when two epochs of the lane, and a thousand rows, hold none to train on.
        """
        ...

    def leave(self, drawn: Drawn) -> None:
        """It has left the lane, and its dropped rows with it."""
        ...

    def leave_rest(self) -> tuple[Dropped, ...]:
        """Where all conversations have left and no other will come: the dropped rows behind them leave as well."""
        ...

    def state(self) -> str:
        """What has left, in hexadecimal; some dozens of bytes."""
        ...

    def load_state(self, state: str) -> None:
        """Go on after `state`: what was pending is drawn again."""
        ...


_NUMBER = "(?:0|[1-9a-f][0-9a-f]{0,14})"
_LANE_STATE = re.compile(rf"({_NUMBER}|{_NUMBER}\.{_NUMBER}(?:,{_NUMBER}\.{_NUMBER})*):(0|[1-9a-f][0-9a-f]*)")
_LONGEST_STATE = 2**20
"""Room for four million dropped rows in a row."""


def parse_state(state: str, num_accounts: int | None) -> tuple[list[list[int]], int]:
    """The numbers before the colon, and the bitmap behind it. num_accounts: of data sets with weights, else None.

    Raises ValueError for what no lane has written.
    """
    match = _LANE_STATE.fullmatch(state) if len(state) <= _LONGEST_STATE else None
    numbers = [[int(number, 16) for number in low.split(".")] for low in match[1].split(",")] if match else []
    wanted = (1, 1) if num_accounts is None else (num_accounts, 2)
    if match is None or (len(numbers), len(numbers[0])) != wanted:
        form = "low:bitmap" if num_accounts is None else f"cursor.tokens of {num_accounts} data sets:bitmap"
        raise ValueError(f"the lane state {state[:60]!r} is none; wanted {form}, in hexadecimal: resume from another")
    return numbers, int(match[2], 16)


def low_cursors(state: str) -> list[int]:
    """Of each stream of a lane, the first row that may be read again after `state`, counted within the lane."""
    return [int(low.split(".")[0], 16) for low in state.split(":")[0].split(",")]


class OneStream:
    """The rows of a single stream, each once an epoch. Position g of it is number g // num_lanes of lane g % num_lanes.

    num_epochs: None for an endless stream. The state is "low-water mark:bitmap".
    """

    def __init__(self, lane: int, num_lanes: int, stream: Stream, *, num_epochs: int | None) -> None:
        self._lane, self._num_lanes = lane, num_lanes
        self._num_rows, self._num_epochs = stream.num_rows, num_epochs
        self._reader = RunReader(lane, num_lanes, stream)
        self._consumed = ConsumedSet()
        self._next = 0

    def draw(self, limit: int, oldest: int | None) -> list[Drawn]:
        while numbers := self._numbers(limit, oldest):
            if drawn := self._reader.read(numbers):
                return drawn
        return []

    def leave(self, drawn: Drawn) -> None:
        self._consumed.leave(drawn.number, len(drawn.dropped) + 1)

    def leave_rest(self) -> tuple[Dropped, ...]:
        rest = tuple(self._reader.dropped) if self._next >= self._stop(self._next) else ()
        if rest:
            self._consumed.leave(self._next - 1, len(rest))
            self._reader.dropped.clear()
        return rest

    def state(self) -> str:
        return f"{self._consumed.low:x}:{self._consumed.above:x}"

    def load_state(self, state: str) -> None:
        ([low],), above = parse_state(state, None)
        self._consumed = ConsumedSet(low, above)
        self._next = self._consumed.low
        self._reader.dropped.clear()

    def _numbers(self, limit: int, oldest: int | None) -> list[int]:
        """The next ones to read: those that have not left already."""
        numbers, number = [], self._next
        while self._consumed.has_left(number):
            number += 1
        stop = self._stop(number if oldest is None else oldest)
        while len(numbers) < limit and number < stop:
            if not self._consumed.has_left(number):
                numbers.append(number)
            number += 1
        self._next = number
        return numbers

    def _stop(self, oldest: int) -> float:
        """The first number that may not be drawn while `oldest` is pending: that of the epoch after the next.

        A pool that reached further would deal small sets out of order, many epochs at once.
        """
        if self._num_rows is None:
            return math.inf
        epoch = (self._lane + oldest * self._num_lanes) // self._num_rows + 2
        if self._num_epochs is not None:
            epoch = min(epoch, self._num_epochs)
        return -((self._lane - epoch * self._num_rows) // self._num_lanes)


class RunReader:
    """Reads a lane's share of a stream in order, and puts dropped rows with the conversation behind them.

    dropped: those read since the last conversation.
    """

    def __init__(self, lane: int, num_lanes: int, stream: Stream) -> None:
        self._lane, self._num_lanes, self._stream = lane, num_lanes, stream
        self._most_dropped = max(_MOST_DROPPED_IN_A_ROW, 2 * (stream.num_rows or 0) // num_lanes)
        self.dropped: list[Dropped] = []

    def read(self, numbers: Sequence[int]) -> list[Drawn]:
        """The conversations among the lane's rows of these numbers; numbered by their rows."""
        drawn = []
        items = self._stream.read([self._lane + number * self._num_lanes for number in numbers])
        for number, item in zip(numbers, items, strict=True):
            if isinstance(item, Dropped):
                self.dropped.append(item)
                if len(self.dropped) > self._most_dropped:
                    raise self._none_kept()
            else:
                drawn.append(Drawn(number, item, tuple(self.dropped)))
                self.dropped.clear()
        return drawn

    def _none_kept(self) -> DataError:
        counts = Counter(drop.reason for drop in self.dropped)
        reasons = ", ".join(f"{count} times {reason}" for reason, count in counts.most_common())
        return DataError(
            f"not one of the last {len(self.dropped)} rows can be trained on: {reasons}; the last: "
            f"{self.dropped[-1].detail}; look at them with tools/inspect_data.py"
        )


class ConsumedSet:
    """The numbers that a lane has consumed: all below `low`, and low + k where bit k of `above` is set."""

    def __init__(self, low: int = 0, above: int = 0) -> None:
        self.low, self.above = low, above

    def has_left(self, number: int) -> bool:
        offset = number - self.low
        return offset < 0 or bool(self.above >> offset & 1)

    def leave(self, last: int, num: int) -> None:
        """`num` numbers leave, of which `last` is the last."""
        self.above |= ((1 << num) - 1) << (last - num + 1 - self.low)
        num_trailing_ones = (~self.above & (self.above + 1)).bit_length() - 1
        self.low += num_trailing_ones
        self.above >>= num_trailing_ones
