"""Lanes: the assignment of conversations to packs, for any number of ranks and workers (laws 5 and 6).

A lane is a virtual shard of the data. The shuffled epochs, one after another, form one stream of positions; with
weights, each data set is a stream of its own. With V lanes, position g of a stream belongs to lane g mod V, and pack n
comes from lane n mod V. A lane packs its own rows independently of the other lanes, so its packs are the same whichever
rank or worker owns it.

    V = 3    positions   0 1 2 3 4 5 6 7 8 ...       packs   0 1 2 3 4 5 ...
             lane        0 1 2 0 1 2 0 1 2           lane    0 1 2 0 1 2

A lane's state is the set of rows that were consumed (see sampler.py): a few dozen bytes, after any number of steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sftron.data.lanes.sampler import Sample, Sampler
from sftron.data.packing import Packing
from sftron.data.types import Dropped, LabeledConversation, MeasuredRow

AUTO_NUM_LANES = 48
"""The number of lanes with `data.num_lanes: auto` if there are too many rows to plan their packing (row_lengths.py)."""


class LanePack(NamedTuple):
    """The conversations of one pack, none once the lane has ended, and the dropped rows that are consumed with them."""

    conversations: tuple[LabeledConversation | MeasuredRow, ...]
    dropped_rows: tuple[Dropped, ...]


@dataclass(slots=True)
class PoolDelay:
    """Statistics of how long conversations stay in a pool, in packs of their lane.

    They cover this process, from the position at which it started or resumed.
    """

    num_conversations: int = 0
    total: int = 0
    longest: int = 0

    @property
    def mean(self) -> float:
        return self.total / max(1, self.num_conversations)


class Lane:
    """One lane: a pool of pending conversations, which is filled from a sampler and emptied pack by pack."""

    def __init__(self, sampler: Sampler, *, packing: Packing, token_budget: int, delay: PoolDelay) -> None:
        self._sampler, self._packing, self._token_budget, self._delay = sampler, packing, token_budget, delay
        # Three lists of equal length: the pending samples, their lengths in tokens, and the number of the first pack
        # that each could have been in.
        self._pool: list[Sample] = []
        self._lengths: list[int] = []
        self._since: list[int] = []
        self._num_packs = 0

    def next_pack(self) -> LanePack:
        """Returns the next pack, and marks its rows as consumed.

        Raises:
            DataError: Two epochs of the lane, and at least a thousand rows, hold no row to train on.
        """
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
        """Returns which rows were consumed, as the sampler encodes it."""
        return self._sampler.state()

    def load_state(self, state: str) -> None:
        """Resumes after `state`; conversations that were pending are read again for the next pack."""
        self._sampler.load_state(state)
        self._pool, self._lengths, self._since = [], [], []

    def _fill_pool(self) -> None:
        while (num_wanted := self._packing.pool_size - len(self._pool)) > 0:
            samples = self._sampler.fetch(num_wanted, self._pool[0].number if self._pool else None)
            if not samples:
                return
            self._pool += samples
            self._lengths += [len(each.conversation) for each in samples]
            self._since += [self._num_packs] * len(samples)

    def _count_delay(self, num_packs: int) -> None:
        self._delay.num_conversations += 1
        self._delay.total += num_packs
        self._delay.longest = max(self._delay.longest, num_packs)
