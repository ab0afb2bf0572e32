"""Several data sets by their share of the tokens, within a lane.

A lane keeps an account for each data set: the tokens of the conversations it has drawn from it. Each data set has its
own order, epochs and cursor, and repeats for ever. The next conversation comes from one that has no more than its share
of all tokens so far; of those, from the one whose next conversation ends first, if each were trained at a rate of its
weight. So no account is ever further from its share, above or below, than the longest conversation: the bound of
Bennett and Zhang, WF2Q: worst-case fair weighted fair queueing (INFOCOM 1996), whose packets are conversations here.

    shares 1/2 1/4 1/4, all lengths equal     draws  0 1 0 2 0 1 0 2 ...
    shares 1/2 1/2, lengths 6 and 2           draws  1 0 1 1 1 0 1 1 ...

What is drawn depends on lengths, so the state holds the accounts as of the low-water mark, and the draws above it are
made again on resume; what has left already is then read for its length only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import gcd, lcm

from sftron.data.lanes.sampler import ConsumedSet, Drawn, RunReader, Stream, parse_state
from sftron.data.types import Dropped


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """The smallest whole numbers in proportion to the weights as they are written: 0.1 and 0.25 are 2 and 5."""
    exact = [Fraction(str(weight)) for weight in weights]
    whole = [int(weight * lcm(*(each.denominator for each in exact))) for weight in exact]
    return tuple(weight // gcd(*whole) for weight in whole)


@dataclass(slots=True)
class _Account:
    """A data set in a lane.

    pace: in proportion to 1 / weight; tokens x pace is the time they take at the data set's rate.
    tokens: of the conversations drawn. low_tokens, low_cursor: of those below the low-water mark, and their rows.
    ahead: conversations read and not drawn yet; num_read: rows read.
    """

    reader: RunReader
    weight: int
    pace: int
    tokens: int = 0
    low_tokens: int = 0
    low_cursor: int = 0
    ahead: deque[Drawn] = field(default_factory=deque)
    num_read: int = 0

    def start_at(self, cursor: int, tokens: int) -> None:
        self.num_read = self.low_cursor = cursor
        self.tokens = self.low_tokens = tokens
        self.ahead.clear()
        self.reader.dropped.clear()

    def next(self, num_wanted: int) -> Drawn:
        """The next conversation; `num_wanted` rows are read where none is at hand."""
        while not self.ahead:
            numbers = range(self.num_read, self.num_read + num_wanted)
            self.num_read = numbers.stop
            self.ahead.extend(self.reader.read(numbers))
        return self.ahead[0]


class Mixture:
    """Draws from several endless streams, each in proportion to its weight in tokens. See `Draws`.

    weights: whole numbers. The state is "cursor.tokens of each stream at the low-water mark:bitmap above it".
    """

    def __init__(self, lane: int, num_lanes: int, streams: Sequence[Stream], weights: Sequence[int]) -> None:
        common = lcm(*weights)
        self._accounts = [
            _Account(RunReader(lane, num_lanes, stream), weight, common // weight)
            for stream, weight in zip(streams, weights, strict=True)
        ]
        self._weight_sum = sum(weights)
        self._tokens = self._next = 0
        self._consumed = ConsumedSet()
        # Of each draw from the low-water mark on: its number and account, that account's cursor after it, its tokens.
        self._above_low: deque[tuple[int, _Account, int, int]] = deque()

    def draw(self, limit: int, oldest: int | None) -> list[Drawn]:
        drawn = []
        while len(drawn) < limit:
            account = self._furthest_behind(limit)
            taken = account.ahead.popleft()
            length = len(taken.conversation)
            account.tokens += length
            self._tokens += length
            number = self._next + len(taken.dropped)
            self._next = number + 1
            self._above_low.append((number, account, taken.number + 1, length))
            if not self._consumed.has_left(number):
                drawn.append(Drawn(number, taken.conversation, taken.dropped))
        return drawn

    def leave(self, drawn: Drawn) -> None:
        self._consumed.leave(drawn.number, len(drawn.dropped) + 1)
        while self._above_low and self._above_low[0][0] < self._consumed.low:
            _, account, account.low_cursor, length = self._above_low.popleft()
            account.low_tokens += length

    def leave_rest(self) -> tuple[Dropped, ...]:
        return ()

    def state(self) -> str:
        accounts = ",".join(f"{account.low_cursor:x}.{account.low_tokens:x}" for account in self._accounts)
        return f"{accounts}:{self._consumed.above:x}"

    def load_state(self, state: str) -> None:
        numbers, above = parse_state(state, len(self._accounts))
        for account, (cursor, tokens) in zip(self._accounts, numbers, strict=True):
            account.start_at(cursor, tokens)
        self._tokens = sum(account.tokens for account in self._accounts)
        self._next = sum(account.low_cursor for account in self._accounts)
        self._consumed = ConsumedSet(self._next, above)
        self._above_low.clear()

    def _furthest_behind(self, num_wanted: int) -> _Account:
        """The one to draw from, its next conversation at hand. Of equal ones the first in place."""
        best, soonest = None, 0
        for account in self._accounts:
            if account.tokens * self._weight_sum <= account.weight * self._tokens:
                num_to_read = 1 + num_wanted * account.weight // self._weight_sum
                end = (account.tokens + len(account.next(num_to_read).conversation)) * account.pace
                if best is None or end < soonest:
                    best, soonest = account, end
        assert best is not None
        return best
