"""Several data sets by their share of the tokens, within a lane.

A lane keeps an account for each data set: the tokens of the conversations it has fetched from it. Each data set has its
own order, epochs and cursor, and repeats without end. The next conversation comes from one that has no more than its
share of all tokens so far; of those, from the one whose next conversation ends first, if each were trained at a rate of
its weight. So no account is ever further from its share, above or below, than the longest conversation: the bound of
Bennett and Zhang, WF2Q: worst-case fair weighted fair queueing (INFOCOM 1996), whose packets are conversations here.

    shares 1/2 1/4 1/4, all lengths equal     fetched  0 1 0 2 0 1 0 2 ...
    shares 1/2 1/2, lengths 6 and 2           fetched  1 0 1 1 1 0 1 1 ...

What is fetched depends on lengths, so the state holds the accounts as of the low-water mark, and the choices above it
are made again on resume; what is consumed already is then read for its length only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import gcd, lcm

from sftron.data.lanes.sampler import ConsumedSet, LaneReader, Sample, Stream, parse_state
from sftron.data.types import Dropped


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Returns the smallest whole numbers in proportion to the weights as written: 0.1 and 0.25 are 2 and 5."""
    exact = [Fraction(str(weight)) for weight in weights]
    whole = [int(weight * lcm(*(each.denominator for each in exact))) for weight in exact]
    return tuple(weight // gcd(*whole) for weight in whole)


@dataclass(slots=True)
class _Account:
    """A data set in a lane."""

    reader: LaneReader
    weight: int
    pace: int
    """In proportion to 1 / weight; tokens x pace is the time they take at the data set's rate."""
    tokens: int = 0
    """Tokens of the conversations fetched."""
    low_tokens: int = 0
    """Tokens of those below the low-water mark."""
    low_cursor: int = 0
    """Rows of those below the low-water mark."""
    ahead: deque[Sample] = field(default_factory=deque)
    """Conversations that are read, and not fetched yet."""
    num_read: int = 0

    def load_state(self, cursor: int, tokens: int) -> None:
        self.num_read = self.low_cursor = cursor
        self.tokens = self.low_tokens = tokens
        self.ahead.clear()
        self.reader.dropped.clear()

    def peek(self, num_wanted: int) -> Sample:
        """Returns the next conversation; `num_wanted` rows are read where none is ahead."""
        while not self.ahead:
            numbers = range(self.num_read, self.num_read + num_wanted)
            self.num_read = numbers.stop
            self.ahead.extend(self.reader.read(numbers))
        return self.ahead[0]


class Mixture:
    """Samples several endless streams, each in proportion to its weight in tokens; see `Sampler`.

    The weights are whole numbers. The state is "cursor.tokens of each stream at the low-water mark:bitmap above it".
    """

    def __init__(self, lane: int, num_lanes: int, streams: Sequence[Stream], weights: Sequence[int]) -> None:
        common = lcm(*weights)
        self._accounts = [
            _Account(LaneReader(lane, num_lanes, stream), weight, common // weight)
            for stream, weight in zip(streams, weights, strict=True)
        ]
        self._weight_sum = sum(weights)
        self._tokens = self._next = 0
        self._consumed = ConsumedSet()
        # Of each sample from the low-water mark on: its number and account, that account's cursor after it, its tokens.
        self._above_low: deque[tuple[int, _Account, int, int]] = deque()

    def fetch(self, limit: int, oldest: int | None) -> list[Sample]:
        samples = []
        while len(samples) < limit:
            account = self._furthest_behind(limit)
            sample = account.ahead.popleft()
            length = len(sample.conversation)
            account.tokens += length
            self._tokens += length
            number = self._next + len(sample.dropped)
            self._next = number + 1
            self._above_low.append((number, account, sample.number + 1, length))
            if number not in self._consumed:
                samples.append(Sample(number, sample.conversation, sample.dropped))
        return samples

    def consume(self, sample: Sample) -> None:
        self._consumed.add(sample.number, len(sample.dropped) + 1)
        while self._above_low and self._above_low[0][0] < self._consumed.low:
            _, account, account.low_cursor, length = self._above_low.popleft()
            account.low_tokens += length

    def consume_rest(self) -> tuple[Dropped, ...]:
        return ()

    def state(self) -> str:
        accounts = ",".join(f"{account.low_cursor:x}.{account.low_tokens:x}" for account in self._accounts)
        return f"{accounts}:{self._consumed.above:x}"

    def load_state(self, state: str) -> None:
        numbers, above = parse_state(state, len(self._accounts))
        for account, (cursor, tokens) in zip(self._accounts, numbers, strict=True):
            account.load_state(cursor, tokens)
        self._tokens = sum(account.tokens for account in self._accounts)
        self._next = sum(account.low_cursor for account in self._accounts)
        self._consumed = ConsumedSet(self._next, above)
        self._above_low.clear()

    def _furthest_behind(self, num_wanted: int) -> _Account:
        """Returns the one to fetch from, its next conversation ahead; the first of equal ones."""
        best, soonest = None, 0
        for account in self._accounts:
            if account.tokens * self._weight_sum <= account.weight * self._tokens:
                num_to_read = 1 + num_wanted * account.weight // self._weight_sum
                end = (account.tokens + len(account.peek(num_to_read).conversation)) * account.pace
                if best is None or end < soonest:
                    best, soonest = account, end
        assert best is not None
        return best
