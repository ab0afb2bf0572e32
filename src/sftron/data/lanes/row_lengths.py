"""Planned packing: from the length of every row, each rank computes all packs, and it tokenizes only its own rows.

A lane packs by lengths alone. Once the lengths are known, any number of ranks and loader workers can compute the packs
of a single lane without reading each other's rows. An epoch then ends in one pack that is not full, instead of one for
each of many lanes. If best-fit decreasing of all rows would fill an epoch better than the pool, as with many rows near
half the budget, the lane packs by best-fit decreasing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sftron.data.lanes.lane import EpochFetcher, Lane, PoolDelay, Stream
from sftron.data.lanes.order import ShuffledOrder
from sftron.data.packing import PoolPacking, best_fit_decreasing
from sftron.data.prepare import Preparation
from sftron.data.types import ConversationKey, DataError, Dropped, LabeledConversation, MeasuredRow

_ENOUGH_PACKS = 3_000
"""With at least this many packs per epoch, 48 lanes waste less than 1 % of them at the end of an epoch: half a pack per
lane, in all about 23 packs more than a single lane."""
_MOST_MEASURED_ROWS = 500_000
"""Measuring this many rows takes a few minutes, the most that a start may spend on its data."""
_NUM_ESTIMATED_FROM = 200
_CHUNK = 256
_LARGEST_LOSS = 0.005
"""The share of a budget by which the pool's packs may be emptier than best-fit decreasing's."""
_NUM_POOLS = 8
"""The least number of pools of conversations over which to measure the fill of an endless stream."""


def is_plannable(preparation: Preparation, token_budget: int) -> bool:
    """Returns whether the rows are few enough to measure, and the packs so few that lanes would waste more than 1 %.

    This is a pure function of the data, the tokenizer and the options, so packs do not depend on the machine (law 5).

    Raises:
        DataError: One of the rows from which the mean length is estimated is bad.
    """
    num_rows = None if preparation.is_streamed else preparation.num_rows
    if num_rows is None or num_rows > _MOST_MEASURED_ROWS:
        return False
    if num_rows <= _ENOUGH_PACKS:
        return True  # each pack holds at least one row
    rows = np.linspace(0, num_rows - 1, _NUM_ESTIMATED_FROM).astype(int).tolist()
    tokens = sum(length for length in measure_rows(preparation, rows) if isinstance(length, int))
    return tokens / len(rows) * num_rows < _ENOUGH_PACKS * token_budget


def is_best_fit_fuller(lengths: Sequence[int], packing: PoolPacking, token_budget: int, *, is_endless: bool) -> bool:
    """Returns whether the pool fills the packs of an epoch at least half a point less than best-fit decreasing.

    In an endless run, the last packs of an epoch hold rows of the next one, so the pool is measured over several
    epochs.

    Args:
        lengths: The lengths of the conversations of an epoch, in its order.
    """
    rows = [MeasuredRow(ConversationKey(0, row), length) for row, length in enumerate(lengths)]
    stream = Stream(lambda positions: [rows[position % len(rows)] for position in positions], len(rows))

    def num_packs(num_epochs: int) -> int:
        fetcher = EpochFetcher(0, 1, stream, num_epochs=num_epochs)
        lane = Lane(fetcher, packing=packing, token_budget=token_budget, delay=PoolDelay())
        return sum(1 for _ in iter(lambda: lane.next_pack().conversations, ()))

    packs_full, packs_best = sum(lengths) / token_budget, len(best_fit_decreasing(lengths, token_budget))
    several = 1 + _NUM_POOLS * packing.pool_size // max(1, len(rows))
    return packs_best > 0 and all(
        packs_full * num_epochs / num_packs(num_epochs) < packs_full / packs_best - _LARGEST_LOSS
        for num_epochs in ((1, several) if is_endless else (1,))
    )


def measure_rows(preparation: Preparation, rows: Sequence[int]) -> list[int | str]:
    """Returns for each row its number of tokens, or the reason why it is dropped.

    The rows of all data sets are numbered consecutively. Raises DataError for a bad row, unless `on_bad_row` is "skip".
    """
    measured: list[int | str] = []
    for start in range(0, len(rows), _CHUNK):
        tokenized = preparation.tokenize_many([preparation.key(row) for row in rows[start : start + _CHUNK]])
        measured += [each.reason if isinstance(each, Dropped) else len(each) for each in tokenized]
    return measured


def lengths_of_epoch(row_lengths: Sequence[int | str], seed: int) -> list[int]:
    """Returns the lengths of the conversations of the first epoch, in its order, from the result of `measure_rows`."""
    order, _ = ShuffledOrder(len(row_lengths), seed=seed).compute(np.arange(len(row_lengths)))
    return [length for row in order.tolist() if isinstance(length := row_lengths[row], int)]


def measured_row(key: ConversationKey, measured: int | str) -> MeasuredRow | Dropped:
    """Returns a row by its result of `measure_rows`; the detail of a dropped one is empty until `read_measured`."""
    return MeasuredRow(key, measured) if isinstance(measured, int) else Dropped(measured, "", key)


def read_measured(
    preparation: Preparation, measured: Sequence[LabeledConversation | MeasuredRow | Dropped]
) -> tuple[Sequence[LabeledConversation], tuple[Dropped, ...]]:
    """Reads the measured rows of a pack: its conversations, and the dropped rows.

    Raises DataError if a row's length, or the reason for dropping it, has changed since it was measured.
    """

    def words(row: LabeledConversation | MeasuredRow | Dropped) -> str:
        return f"dropped as {row.reason}" if isinstance(row, Dropped) else f"{len(row)} tokens"

    read = preparation.read_many([each.key for each in measured])
    for before, now in zip(measured, read, strict=True):
        if (found := words(now)) != (expected := words(before)):
            raise DataError(
                f"{preparation.location(now.key)}: {found}, but {expected} when the rows were measured at the start; "
                "the data or its tokenizer has changed since: restore it, or start another run"
            )
    conversations = [each for each in read if isinstance(each, LabeledConversation)]
    return conversations, tuple(each for each in read if isinstance(each, Dropped))
