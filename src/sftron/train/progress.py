"""The progress of a run: its counters, which checkpoints store, and the run length and learning rate from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import reduce
from typing import Any

import numpy as np

from sftron.config import Config
from sftron.data.types import IGNORE_INDEX, Batch, DataError, Pack
from sftron.train.optimizer import learning_rate_factor

_NUM_ROWS_BEFORE_JUDGING = 200


def added(one: Any, other: Any) -> Any:
    """Returns the sum of two trees of counts, by element; a field of a dataclass may have its own "add"."""
    if is_dataclass(one) and not isinstance(one, type):
        pairs = {each: (getattr(one, each.name), getattr(other, each.name)) for each in fields(one)}
        return type(one)(**{each.name: each.metadata.get("add", added)(*pair) for each, pair in pairs.items()})
    if isinstance(one, dict):
        return {key: one.get(key, 0) + other.get(key, 0) for key in one | other}
    if isinstance(one, list):
        return [added(*pair) for pair in zip(one, other, strict=True)]
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
        return reduce(added, ranks)

    @property
    def total(self) -> DataSetCount:
        """The sum over data sets."""
        return reduce(added, self.datasets)


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
        return reduce(added, self.datasets, self.before)

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
        self.before = self.total
        epoch = self.before.latest_epoch + 1
        self.datasets = [DataSetCount(first_epoch=epoch, latest_epoch=epoch) for _ in range(num_datasets)]

    def add(self, counts: StepCounts) -> None:
        self.truncated += counts.truncated
        self.datasets = added(self.datasets, counts.datasets)

    def require_few_dropped(self, max_share: float, num_rows: int | None = None) -> None:
        """Raises DataError if more than `max_share` of the consumed rows were dropped.

        The check applies after 200 rows, or after `num_rows` rows if these are fewer.

        Args:
            num_rows: The number of rows in the whole run, if known.
        """
        count = reduce(added, self.datasets)
        enough = _NUM_ROWS_BEFORE_JUDGING
        if num_rows is not None:
            enough = min(enough, num_rows - self.before.rows)
        if count.rows >= enough and count.num_dropped > max_share * count.rows:
            reasons = ", ".join(f"{number} {reason}" for reason, number in Counter(count.dropped).most_common())
            raise DataError(f"{too_many_dropped(count.num_dropped, count.rows, max_share)} By reason: {reasons}")


def _conversation_tokens(pack: Pack) -> tuple[list[int], list[int]]:
    """Returns the number of tokens and of trained tokens for each conversation of a pack."""
    if not pack.keys:
        return [], []
    bounds = pack.conversation_bounds
    # The last sum includes the padding, which has no labels.
    trained = np.add.reduceat(pack.labels != IGNORE_INDEX, bounds[:-1], dtype=np.int64)
    return np.diff(bounds).tolist(), trained.tolist()


def too_many_dropped(num_dropped: int, num_rows: int, max_share: float) -> str:
    return (
        f"{num_dropped} of {num_rows} rows were dropped, more than data.max_dropped_share {max_share} allows. Look at "
        "them with `sftron inspect`, then mend the data, raise tokens.sequence_length, or allow a larger share."
    )


def schedule_progress(
    progress: Progress, *, warmup_steps: float, train_steps: int | None, num_rows: int | None, step_rows: int
) -> tuple[float, float]:
    """Returns the progress of the warm-up and of the decay after it, for the next step; each ends at 1.

    The warm-up of W steps is at (n + 1) / (W + 1) in step n, counted from 0, so the first rate is above zero and step W
    has the peak. The run is measured in steps if their number is configured, and otherwise in rows, because the number
    of steps in an epoch is known only at its end. A warm-up that is a share of the run is measured in the same unit,
    so it is a function of the position alone, and a resume goes on with it.

    Args:
        warmup_steps: The length of the warm-up in steps if it is an int, and as a share of the run if it is a float.
        num_rows: The number of rows in all epochs together.
        step_rows: The number of rows that the next step consumes.
    """
    total = num_rows if train_steps is None else train_steps
    assert total is not None
    done, size = (progress.rows, step_rows) if train_steps is None else (progress.step, 1)
    if isinstance(warmup_steps, float):
        end = warmup_steps * total
        warm_up = (done + size) / (end + size)
    else:
        end = progress.rows_at_peak if train_steps is None else warmup_steps
        warm_up = (progress.step + 1) / (warmup_steps + 1)
    return warm_up, (done - end) / max(1, total - end)


@dataclass(frozen=True, slots=True)
class RunLength:
    """The length of a run, in steps or epochs, and the values that depend on it."""

    config: Config
    num_rows: int | None
    """The number of rows in an epoch of the current data version; None if it is unknown, and the length is in steps."""

    def rows_of_run(self, progress: Progress) -> int | None:
        """Returns the number of rows in the whole run; None if its length is given in steps."""
        num_epochs = self.config.tokens.train_epochs
        if self.num_rows is None or num_epochs is None:
            return None
        return progress.before.rows + self.num_rows * (num_epochs - progress.first_epoch)

    def is_done(self, progress: Progress) -> bool:
        if (train_steps := self.config.tokens.train_steps) is not None:
            return progress.step >= train_steps
        rows = self.rows_of_run(progress)
        return rows is not None and progress.rows >= rows

    def share_done(self, progress: Progress) -> float:
        if (train_steps := self.config.tokens.train_steps) is not None:
            return progress.step / train_steps
        return progress.rows / (self.rows_of_run(progress) or 1)

    def require_more_data(self, progress: Progress, num_empty: int, num_lanes: int) -> None:
        """Raises RuntimeError if `num_empty` packs in a row had no conversation, so that every lane is exhausted, but
        not all rows have been counted."""
        if num_empty >= num_lanes and not self.is_done(progress):
            raise RuntimeError(
                f"the data has ended at {progress.rows} of {self.rows_of_run(progress)} rows: {num_empty} packs in a "
                "row had no conversation. Were the data files changed while the run read them?"
            )

    def learning_rate(self, progress: Progress, step_rows: int) -> float:
        """Returns the learning rate of the next step, which consumes `step_rows` rows."""
        options = self.config.optimizer
        warm_up, decay = schedule_progress(
            progress,
            warmup_steps=options.warmup_steps,
            train_steps=self.config.tokens.train_steps,
            num_rows=self.rows_of_run(progress),
            step_rows=step_rows,
        )
        return options.learning_rate * learning_rate_factor(
            options.schedule,
            warm_up=warm_up,
            decay=decay,
            min_ratio=options.min_learning_rate_ratio,
            decay_share=options.decay_share,
        )
