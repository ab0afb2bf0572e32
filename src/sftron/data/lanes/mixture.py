"""Mixes several data sets within a lane, in proportion to their shares of the tokens.

A lane keeps an account for each data set: the number of tokens that it has fetched from it. Each data set has its own
order, epochs and cursor, and repeats without end. The next conversation comes from a data set that has at most its
share of all tokens fetched so far. Among those, it comes from the one whose next conversation would end first if the
tokens of each data set were consumed at a rate equal to its weight. So no account ever differs from its share by more
than the longest conversation. This is the bound of Bennett and Zhang, WF2Q: worst-case fair weighted fair queueing
(INFOCOM 1996); their packets are conversations here.

    shares 1/2 1/4 1/4, all lengths equal     fetched  0 1 0 2 0 1 0 2 ...
    shares 1/2 1/2, lengths 6 and 2           fetched  1 0 1 1 1 0 1 1 ...

The choices depend on lengths. So the state holds the accounts at the low-water mark (see lane.py), and a resume
repeats the choices above it; rows there that were already consumed are read again, but only for their lengths.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import lcm

from sftron.data.lanes.lane import ConsumedSet, Fetched, Fetcher, LaneReader, Stream, parse_state


@dataclass(slots=True)
class _Account:
    """The account of one data set in a lane."""

    reader: LaneReader
    weight: int
    pace: int
    """An integer in proportion to 1 / weight; tokens x pace is the time that tokens take at the data set's rate."""
    tokens: int = 0
    """The number of tokens of the conversations fetched."""
    low_tokens: int = 0
    low_cursor: int = 0
    """The number of tokens and of rows below the low-water mark."""
    ahead: deque[Fetched] = field(default_factory=deque)
    """The conversations that are read but not fetched yet."""
    num_read: int = 0

    def load_state(self, cursor: int, tokens: int) -> None:
        self.num_read = self.low_cursor = cursor
        self.tokens = self.low_tokens = tokens
        self.ahead.clear()
        self.reader.dropped.clear()

    def peek(self, num_wanted: int) -> Fetched:
        """Returns the next conversation; if none is ahead, `num_wanted` rows are read at a time."""
        while not self.ahead:
            numbers = range(self.num_read, self.num_read + num_wanted)
            self.num_read = numbers.stop
            self.ahead.extend(self.reader.read(numbers))
        return self.ahead[0]


class MixtureFetcher(Fetcher):
    """Fetches the rows of several endless streams in proportion to their weights, in tokens.

    The weights are integers. The state is "cursor.tokens,cursor.tokens,...:bitmap", in hexadecimal: the account of each
    stream at the low-water mark, and the bitmap of the consumed numbers above it.
    """

    def __init__(self, lane: int, num_lanes: int, streams: Sequence[Stream], weights: Sequence[int]) -> None:
        super().__init__()
        common = lcm(*weights)
        self._accounts = [
            _Account(LaneReader(lane, num_lanes, stream), weight, common // weight)
            for stream, weight in zip(streams, weights, strict=True)
        ]
        self._weight_sum = sum(weights)
        self._tokens = self._next = 0
        # For each one from the low-water mark on: number, account, the account's cursor after it, length in tokens.
        self._above_low: deque[tuple[int, _Account, int, int]] = deque()

    def fetch(self, limit: int, oldest: int | None) -> list[Fetched]:
        fetched = []
        while len(fetched) < limit:
            account = self._next_account(limit)
            each = account.ahead.popleft()
            length = len(each.conversation)
            account.tokens += length
            self._tokens += length
            number = self._next + len(each.dropped)
            self._next = number + 1
            self._above_low.append((number, account, each.number + 1, length))
            if number not in self._consumed:
                fetched.append(Fetched(number, each.conversation, each.dropped))
        return fetched

    def consume(self, fetched: Fetched) -> None:
        super().consume(fetched)
        while self._above_low and self._above_low[0][0] < self._consumed.low:
            _, account, account.low_cursor, length = self._above_low.popleft()
            account.low_tokens += length

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

    def _next_account(self, num_wanted: int) -> _Account:
        """Returns the account to fetch from, with its next conversation read; the first of several that tie."""
        best, soonest = None, 0
        for account in self._accounts:
            if account.tokens * self._weight_sum <= account.weight * self._tokens:
                num_to_read = 1 + num_wanted * account.weight // self._weight_sum
                end = (account.tokens + len(account.peek(num_to_read).conversation)) * account.pace
                if best is None or end < soonest:
                    best, soonest = account, end
        assert best is not None
        return best
