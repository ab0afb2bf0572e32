"""Lanes: which conversation goes to which pack, for any number of ranks and workers (laws 5 and 6).

A lane is a virtual shard of the data. The shuffled epochs, one after another, are one stream of positions; with
weights, each data set is a stream of its own. Position g of a stream belongs to lane g mod V, and pack n comes from
lane n mod V. A lane packs its own rows without regard to the others, so whoever owns it gets the same packs out of it.

    V = 3    positions   0 1 2 3 4 5 6 7 8 ...       packs   0 1 2 3 4 5 ...
             lane        0 1 2 0 1 2 0 1 2           lane    0 1 2 0 1 2

A lane's state is what was consumed (see sampler.py); so it has a few dozen bytes after any number of steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sftron.data.lanes.sampler import Sample, Sampler
from sftron.data.packing import Packing
from sftron.data.types import Dropped, LabeledConversation, MeasuredRow

AUTO_NUM_LANES = 48
"""Where the rows are too many to plan their packing (row_lengths.py)."""


class LanePack(NamedTuple):
    """The conversations of one pack, none once the lane has drained, and the rows dropped on the way to them."""

    conversations: tuple[LabeledConversation | MeasuredRow, ...]
    dropped_rows: tuple[Dropped, ...]


@dataclass(slots=True)
class PoolDelay:
    """How many packs of its lane a conversation stayed in the pool for: the most, and the sum over all.

    It counts in this process, from where the lane started or resumed.
    """

    num_conversations: int = 0
    total: int = 0
    longest: int = 0

    @property
    def mean(self) -> float:
        return self.total / max(1, self.num_conversations)


class Lane:
    """One lane: the pool of its pending conversations, filled from its sampler and emptied pack by pack."""

    def __init__(self, sampler: Sampler, *, packing: Packing, token_budget: int, delay: PoolDelay) -> None:
        self._sampler, self._packing, self._token_budget, self._delay = sampler, packing, token_budget, delay
        # Equally long: what is pending, its tokens, and the number of the first pack that it could have gone to.
        self._pool: list[Sample] = []
        self._lengths: list[int] = []
        self._since: list[int] = []
        self._num_packs = 0

    def next_pack(self) -> LanePack:
        """Raises DataError when two epochs of the lane, and a thousand rows, hold none to train on."""
        self._fill_pool()
        indices = self._packing.choose(self._lengths, self._token_budget) if self._pool else []
        chosen = [self._pool[index] for index in indices]
        for index in reversed(indices):
            self._count_delay(self._num_packs - self._since[index])
            del self._pool[index], self._lengths[index], self._since[index]
        self._num_packs += 1
        for sample in chosen:
            self._sampler.consume(sample)
        dropped = [drop for sample in chosen for drop in sample.dropped]
        if not self._pool:
            dropped += self._sampler.consume_rest()
        return LanePack(tuple(sample.conversation for sample in chosen), tuple(dropped))

    def state(self) -> str:
        """Returns what was consumed."""
        return self._sampler.state()

    def load_state(self, state: str) -> None:
        """Continues after `state`; pending conversations are read again for the next pack."""
        self._sampler.load_state(state)
        self._pool, self._lengths, self._since = [], [], []

    def _fill_pool(self) -> None:
        while (num_wanted := self._packing.pool_size - len(self._pool)) > 0:
            samples = self._sampler.fetch(num_wanted, self._pool[0].number if self._pool else None)
            if not samples and sum(self._lengths) < self._token_budget:
                samples = self._sampler.fetch(1, None)  # a set of less than a pack fills it with later epochs
            if not samples:
                return
            self._pool += samples
            self._lengths += [len(each.conversation) for each in samples]
            self._since += [self._num_packs] * len(samples)

    def _count_delay(self, num_packs: int) -> None:
        self._delay.num_conversations += 1
        self._delay.total += num_packs
        self._delay.longest = max(self._delay.longest, num_packs)
