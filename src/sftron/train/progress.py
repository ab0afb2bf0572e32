"""The progress of a run: its counters, which checkpoints store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import reduce
from typing import Any

import numpy as np

from sftron.data.types import IGNORE_INDEX, Batch, DataError, Pack

_NUM_ROWS_BEFORE_JUDGING = 200


def add_trees(one: Any, other: Any) -> Any:
    """Returns the sum of two trees of counts, by element; a field of a dataclass may have its own "add"."""
    if is_dataclass(one) and not isinstance(one, type):
        pairs = {each: (getattr(one, each.name), getattr(other, each.name)) for each in fields(one)}
        return type(one)(**{each.name: each.metadata.get("add", add_trees)(*pair) for each, pair in pairs.items()})
    if isinstance(one, dict):
        return {key: one.get(key, 0) + other.get(key, 0) for key in one | other}
    if isinstance(one, list):
        return [add_trees(*pair) for pair in zip(one, other, strict=True)]
    return one + other


@dataclass(slots=True)
class DataSetCount:
    """Counts of the rows of one data set that have been consumed."""

    conversations: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    """The number of rows that were not trained on, by reason."""
    latest_epoch: int = field(default=0, metadata={"add": max})
    """The highest epoch of any consumed row, counted from 0."""
    first_epoch: int = field(default=0, metadata={"add": max})
    """The first epoch, counted from 0; it is above 0 if the run had other data before."""

    @property
    def num_dropped(self) -> int:
        return sum(self.dropped.values())

    @property
    def rows(self) -> int:
        """The number of rows, including dropped ones."""
        return self.conversations + self.num_dropped

    def epochs(self, num_rows: int | None) -> float:
        """Returns how many times the rows were consumed; for a stream (`num_rows` None), the number of whole epochs."""
        return float(self.latest_epoch) if num_rows is None else self.first_epoch + self.rows / num_rows


@dataclass(slots=True)
class StepCounts:
    """Counts of the data that one step consumes, on one rank or on all ranks."""

    datasets: list[DataSetCount]
    truncated: int = 0
    num_packs: int = 0
    num_positions: int = 0
    """The number of tokens in the packs, including padding."""
    sum_squared_lengths: int = 0
    """The sum over documents of their squared length, without padding."""
    weight_sum: float = 0.0
    """The sum of the loss weights, which is the denominator of the step's loss."""

    @classmethod
    def of(cls, batches: Sequence[Batch], num_datasets: int) -> StepCounts:
        counts = cls([DataSetCount() for _ in range(num_datasets)])
        for batch in batches:
            pack = batch.pack
            counts.truncated += pack.num_truncated
            counts.num_packs += 1
            counts.num_positions += len(pack.input_ids)
            counts.weight_sum += batch.weight_sum
            lengths = np.diff(pack.cu_seqlens.clip(max=pack.num_tokens)).astype(np.int64)
            counts.sum_squared_lengths += int(lengths @ lengths)
            for key, length, num_trained in zip(pack.keys, *_conversation_tokens(pack), strict=True):
                count = counts.datasets[key.source]
                count.conversations += 1
                count.tokens += length
                count.trained_tokens += num_trained
            for drop in pack.dropped_rows:
                dropped = counts.datasets[drop.key.source].dropped
                dropped[drop.reason] = dropped.get(drop.reason, 0) + 1
            for key in (*pack.keys, *(drop.key for drop in pack.dropped_rows)):
                count = counts.datasets[key.source]
                count.latest_epoch = max(count.latest_epoch, key.epoch)
        return counts

    @classmethod
    def sum_of(cls, states: Sequence[Mapping[str, Any]]) -> StepCounts:
        """Returns the sum of the counts of all ranks, each given by asdict()."""
        ranks = [cls(**{**each, "datasets": [DataSetCount(**count) for count in each["datasets"]]}) for each in states]
        return reduce(add_trees, ranks)

    @property
    def total(self) -> DataSetCount:
        """The sum over data sets."""
        return reduce(add_trees, self.datasets)


@dataclass(slots=True)
class Progress:
    """Counters over the whole run."""

    datasets: list[DataSetCount]
    """The counts of each data set, in the order of data.datasets."""
    step: int = 0
    rows_at_peak: int = 0
    """The number of rows that were consumed when the warm-up ended, if its length is configured in steps."""
    truncated: int = 0
    non_finite_in_a_row: int = 0
    before: DataSetCount = field(default_factory=DataSetCount)
    """The counts of all earlier data versions together."""
    rows_beyond: int = 0
    """The number of rows of epochs beyond tokens.train_epochs that were trained while the run was to be longer."""

    @classmethod
    def of(cls, num_datasets: int) -> Progress:
        """Returns the progress of a new run."""
        return cls([DataSetCount() for _ in range(num_datasets)])

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Progress:
        """Returns the progress that a checkpoint has, given by asdict()."""
        datasets = [DataSetCount(**count) for count in state["datasets"]]
        if not datasets:
            raise ValueError("datasets is empty")
        return cls(**{**state, "datasets": datasets, "before": DataSetCount(**state["before"])})

    @property
    def total(self) -> DataSetCount:
        """The sum over data sets and earlier data versions."""
        return reduce(add_trees, self.datasets, self.before)

    @property
    def rows(self) -> int:
        """The number of rows consumed so far, including dropped ones."""
        return self.total.rows

    @property
    def first_epoch(self) -> int:
        """The first epoch of the current data version."""
        return self.datasets[0].first_epoch

    def epochs(self, num_rows: int) -> float:
        """Returns the position in epochs of `num_rows` rows; epochs of earlier data versions count as whole."""
        return self.first_epoch + (self.rows - self.before.rows) / num_rows

    def change_data(self, num_datasets: int) -> None:
        """Starts the counts of a new data version; its first epoch follows the latest epoch that has begun."""
        self.before, self.rows_beyond = self.total, 0
        epoch = self.before.latest_epoch + 1
        self.datasets = [DataSetCount(first_epoch=epoch, latest_epoch=epoch) for _ in range(num_datasets)]

    def add(self, counts: StepCounts) -> None:
        self.truncated += counts.truncated
        self.datasets = add_trees(self.datasets, counts.datasets)

    def require_few_dropped(self, max_share: float, num_rows: int | None = None) -> None:
        """Raises DataError if more than `max_share` of the consumed rows were dropped.

        The check applies after 200 rows, or after `num_rows` rows if these are fewer.

        Args:
            num_rows: The number of rows in the whole run, if known.
        """
        count = reduce(add_trees, self.datasets)
        enough = _NUM_ROWS_BEFORE_JUDGING
        if num_rows is not None:
            enough = min(enough, num_rows - self.before.rows)
        if count.rows >= enough and count.num_dropped > max_share * count.rows:
            raise DataError(too_many_dropped(count.num_dropped, count.rows, max_share, count.dropped))


def _conversation_tokens(pack: Pack) -> tuple[list[int], list[int]]:
    """Returns the number of tokens and of trained tokens for each conversation of a pack."""
    if not pack.keys:
        return [], []
    bounds = pack.conversation_bounds
    # The last sum includes the padding, which has no labels.
    trained = np.add.reduceat(pack.labels != IGNORE_INDEX, bounds[:-1], dtype=np.int64)
    return np.diff(bounds).tolist(), trained.tolist()


def too_many_dropped(num_dropped: int, num_rows: int, max_share: float, reasons: Mapping[str, int]) -> str:
    """Returns the problem with its remedy, which depends on the reasons."""
    by_reason = ", ".join(f"{number} {reason}" for reason, number in Counter(reasons).most_common())
    longer = "raise tokens.sequence_length, " if "overlong" in reasons else ""
    return (
        f"{num_dropped} of {num_rows} rows were dropped ({by_reason}), more than data.max_dropped_share {max_share} "
        f"allows. Look at them with `sftron inspect`, then mend the data, {longer}or allow a larger share."
    )
