"""Lanes: which conversation goes to which pack, for any number of ranks and workers (laws 5 and 6).

The shuffled epochs, one after another, are one stream of positions; with weights, each data set is a stream of its own.
Position g of a stream belongs to lane g mod V, and pack n comes from lane n mod V. A lane packs what it is dealt and
knows nothing of the others, so that whoever owns it gets the same packs out of it.

    V = 3    positions   0 1 2 3 4 5 6 7 8 ...       packs   0 1 2 3 4 5 ...
             lane        0 1 2 0 1 2 0 1 2           lane    0 1 2 0 1 2

A lane's state is what has left it (see draws.py); so it is some dozens of bytes after any number of steps.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from sftron.data.lanes.sampler import Drawn, Draws
from sftron.data.packing import Packing
from sftron.data.types import Dropped, LabeledConversation, MeasuredRow, count_dropped

AUTO_NUM_LANES = 48
"""Where the rows are too many to plan their packing (row_lengths.py)."""


@dataclass(frozen=True, slots=True)
class LaneDeal:
    """What a lane gives for one pack. conversations: none once the lane has drained; as its stream reads them.

    dropped_rows: rows dropped on the way to them.
    """

    conversations: tuple[LabeledConversation | MeasuredRow, ...]
    dropped_rows: tuple[Dropped, ...]

    @property
    def dropped(self) -> Counter[tuple[int, str]]:
        """Rows dropped, by (data set, reason)."""
        return count_dropped(self.dropped_rows)


@dataclass(slots=True)
class Waits:
    """How many packs of its lane a conversation saw leave from the pool before it left: the most, and the sum of all.

    Counted by whoever deals, from where it started or went on.
    """

    num_conversations: int = 0
    total: int = 0
    longest: int = 0

    def add(self, waited: int) -> None:
        self.num_conversations += 1
        self.total += waited
        self.longest = max(self.longest, waited)

    @property
    def mean(self) -> float:
        return self.total / max(1, self.num_conversations)


class Lane:
    """One lane: the pool of its pending conversations, filled from its draws and emptied pack by pack."""

    def __init__(self, draws: Draws, *, packing: Packing, token_budget: int, waits: Waits) -> None:
        self._draws, self._packing, self._token_budget, self._waits = draws, packing, token_budget, waits
        # Of one length: what is pending, its tokens, and the number of the pack that it first could have gone to.
        self._pool: list[Drawn] = []
        self._lengths: list[int] = []
        self._since: list[int] = []
        self._num_dealt = 0

    def deal(self) -> LaneDeal:
        """The next pack of this lane.

        Raises DataError when two epochs of the lane, and a thousand rows, hold none to train on.
        """
        self._fill_pool()
        chosen = self._packing.choose(self._lengths, self._token_budget) if self._pool else []
        dealt = [self._pool[index] for index in chosen]
        for index in reversed(chosen):
            self._waits.add(self._num_dealt - self._since[index])
            del self._pool[index], self._lengths[index], self._since[index]
        for drawn in dealt:
            self._draws.leave(drawn)
        self._num_dealt += 1
        dropped = [drop for drawn in dealt for drop in drawn.dropped]
        if not self._pool:
            dropped += self._draws.leave_rest()
        return LaneDeal(tuple(drawn.conversation for drawn in dealt), tuple(dropped))

    def state(self) -> str:
        """What has left the lane."""
        return self._draws.state()

    def load_state(self, state: str) -> None:
        """Go on after `state`; pending conversations are read again when the lane is next asked."""
        self._draws.load_state(state)
        self._pool, self._lengths, self._since = [], [], []

    def _fill_pool(self) -> None:
        while (num_wanted := self._packing.pool_size - len(self._pool)) > 0:
            drawn = self._draws.draw(num_wanted, self._pool[0].number if self._pool else None)
            if not drawn:
                return
            self._pool += drawn
            self._lengths += [len(each.conversation) for each in drawn]
            self._since += [self._num_dealt] * len(drawn)
