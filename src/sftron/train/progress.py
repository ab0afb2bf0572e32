"""How far the run is: its counters, which a checkpoint holds, and what follows from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from sftron.config import Config
from sftron.data.types import IGNORE_INDEX, Batch, DataError, Pack
from sftron.train.optimizer import learning_rate_factor

_NUM_ROWS_BEFORE_JUDGING = 200


@dataclass(slots=True)
class DataSetCount:
    """The rows of one data set that have been consumed."""

    conversations: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """Rows that were not trained on, by reason."""
    latest_epoch: int = 0
    first_epoch: int = 0
    """Counted from 0; later where other data came first."""

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> DataSetCount:
        return cls(**{**state, "dropped": Counter(state["dropped"])})

    def state(self) -> dict[str, Any]:
        # asdict() makes a Counter of pairs out of a Counter.
        return {**asdict(self), "dropped": dict(self.dropped)}

    def add(self, other: DataSetCount) -> None:
        self.conversations += other.conversations
        self.tokens += other.tokens
        self.trained_tokens += other.trained_tokens
        self.dropped += other.dropped
        self.latest_epoch = max(self.latest_epoch, other.latest_epoch)

    @property
    def rows(self) -> int:
        return self.conversations + self.dropped.total()

    def epochs(self, num_rows: int | None) -> float:
        """Returns how often its rows were consumed; of a stream, whose `num_rows` is None, the whole epochs."""
        return float(self.latest_epoch) if num_rows is None else self.first_epoch + self.rows / num_rows


@dataclass(slots=True)
class StepCounts:
    """What one step consumes, of one rank or of all of them."""

    datasets: list[DataSetCount]
    truncated: int = 0
    num_packs: int = 0
    num_positions: int = 0
    """Tokens of the packs, padding included."""
    sum_squared_lengths: int = 0
    """Over the documents that attention sees, without padding."""
    weight_sum: float = 0.0
    """Of the losses; the step's denominator."""

    @classmethod
    def of(cls, batches: Sequence[Batch], num_datasets: int) -> StepCounts:
        counts = cls([DataSetCount() for _ in range(num_datasets)])
        for batch in batches:
            counts._add_pack(batch.pack)
            counts.weight_sum += batch.weight_sum
        return counts

    def _add_pack(self, pack: Pack) -> None:
        self.truncated += pack.num_truncated
        self.num_packs += 1
        self.num_positions += len(pack.input_ids)
        lengths = np.diff(pack.cu_seqlens.clip(max=pack.num_tokens)).astype(np.int64)
        self.sum_squared_lengths += int(lengths @ lengths)
        for key, length, num_trained in zip(pack.keys, *_conversation_tokens(pack), strict=True):
            self.datasets[key.source].add(DataSetCount(1, length, num_trained, latest_epoch=key.epoch))
        for drop in pack.dropped_rows:
            dropped = DataSetCount(dropped=Counter({drop.reason: 1}), latest_epoch=drop.key.epoch)
            self.datasets[drop.key.source].add(dropped)

    def state(self) -> dict[str, Any]:
        return {**asdict(self), "datasets": [count.state() for count in self.datasets]}

    @classmethod
    def sum_of(cls, states: Sequence[Mapping[str, Any]]) -> StepCounts:
        """Returns the counts of all ranks, from the `state` of each."""
        total = cls([DataSetCount() for _ in states[0]["datasets"]])
        for state in states:
            for count, other in zip(total.datasets, state["datasets"], strict=True):
                count.add(DataSetCount.from_state(other))
            total.truncated += state["truncated"]
            total.num_packs += state["num_packs"]
            total.num_positions += state["num_positions"]
            total.sum_squared_lengths += state["sum_squared_lengths"]
            total.weight_sum += state["weight_sum"]
        return total

    @property
    def conversations(self) -> int:
        return sum(count.conversations for count in self.datasets)

    @property
    def tokens(self) -> int:
        return sum(count.tokens for count in self.datasets)

    @property
    def trained_tokens(self) -> int:
        return sum(count.trained_tokens for count in self.datasets)


@dataclass(slots=True)
class Progress:
    """Counts over the whole run."""

    datasets: list[DataSetCount]
    """In the order of data.datasets."""
    step: int = 0
    rows_at_peak: int = 0
    """Rows when the warm-up ended."""
    truncated: int = 0
    non_finite_in_a_row: int = 0
    before: DataSetCount = field(default_factory=DataSetCount)
    """All data that the run had before its data was changed, together."""

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Progress:
        """Raises ValueError for anything else."""
        try:
            datasets = [DataSetCount.from_state(count) for count in state["datasets"]]
            if not datasets:
                raise TypeError("datasets is empty")
            return cls(**{**state, "datasets": datasets, "before": DataSetCount.from_state(state["before"])})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the checkpoint's progress is not what a run counts ({error!r})") from error

    def state(self) -> dict[str, Any]:
        before, *datasets = [count.state() for count in self._all]
        return {**asdict(self), "datasets": datasets, "before": before}

    @property
    def _all(self) -> list[DataSetCount]:
        return [self.before, *self.datasets]

    @property
    def first_epoch(self) -> int:
        """The number of the first epoch of the data in force."""
        return self.datasets[0].first_epoch

    @property
    def rows(self) -> int:
        """Rows consumed so far, dropped ones included."""
        return sum(count.rows for count in self._all)

    @property
    def tokens(self) -> int:
        return sum(count.tokens for count in self._all)

    @property
    def trained_tokens(self) -> int:
        return sum(count.trained_tokens for count in self._all)

    @property
    def dropped(self) -> Counter[str]:
        """Rows by reason, of all data sets."""
        return sum((count.dropped for count in self._all), Counter())

    def epochs(self, num_rows: int) -> float:
        """Returns how often the rows of the data in force were consumed, where an epoch has `num_rows`; earlier epochs
        count as whole."""
        return self.first_epoch + (self.rows - self.before.rows) / num_rows

    def change_data(self, num_datasets: int) -> None:
        """Begins to count for other data, whose first epoch has the number after the latest one that has begun."""
        self.before = DataSetCount(
            conversations=sum(count.conversations for count in self._all),
            tokens=self.tokens,
            trained_tokens=self.trained_tokens,
            dropped=self.dropped,
            latest_epoch=max(count.latest_epoch for count in self._all),
        )
        epoch = self.before.latest_epoch + 1
        self.datasets = [DataSetCount(first_epoch=epoch, latest_epoch=epoch) for _ in range(num_datasets)]

    def add(self, counts: StepCounts) -> None:
        self.truncated += counts.truncated
        for count, added in zip(self.datasets, counts.datasets, strict=True):
            count.add(added)

    def require_few_dropped(self, max_share: float, num_rows: int | None = None) -> None:
        """Raises DataError once too large a share of the rows is not trained on.

        num_rows: Those of the whole run, where known; fewer than 200 are judged when all of them are consumed.
        """
        rows, dropped = self.rows - self.before.rows, self.dropped - self.before.dropped
        enough = _NUM_ROWS_BEFORE_JUDGING
        if num_rows is not None:
            enough = min(enough, num_rows - self.before.rows)
        if rows >= enough and dropped.total() > max_share * rows:
            reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.most_common())
            raise DataError(f"{too_many_dropped(dropped.total(), rows, max_share)} By reason: {reasons}")


def _conversation_tokens(pack: Pack) -> tuple[list[int], list[int]]:
    """Returns the tokens and the trained tokens of each conversation of a pack."""
    if not pack.keys:
        return [], []
    bounds = pack.conversation_bounds
    # The last sum runs on through the padding, which has no label.
    trained = np.add.reduceat(pack.labels != IGNORE_INDEX, bounds[:-1], dtype=np.int64)
    return np.diff(bounds).tolist(), trained.tolist()


def too_many_dropped(num_dropped: int, num_rows: int, max_share: float) -> str:
    return (
        f"{num_dropped} of {num_rows} rows were dropped, more than data.max_dropped_share {max_share} allows. Look at "
        "them with tools/inspect_data.py, then mend the data, raise tokens.sequence_length, or allow a larger share."
    )


def decay_progress(progress: Progress, *, warmup_steps: int, train_steps: int | None, num_rows: int | None) -> float:
    """Returns the share of the way from the end of the warm-up to the end of training, for the step about to be made.

    In steps where their number is given; else in rows, as the steps of an epoch are known only when it is over.
    num_rows: Those of all epochs together.
    """
    if train_steps is not None:
        return (progress.step - warmup_steps) / max(1, train_steps - warmup_steps)
    assert num_rows is not None
    return (progress.rows - progress.rows_at_peak) / max(1, num_rows - progress.rows_at_peak)


@dataclass(frozen=True, slots=True)
class RunLength:
    """When the run is over, and what depends on it."""

    config: Config
    num_rows: int | None
    """Those of an epoch of the data in force; None where it is unknown, and the configuration gives the steps."""

    def rows_of_run(self, progress: Progress) -> int | None:
        """Returns the rows of the whole run; None where only the steps are given."""
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
        """Raises RuntimeError where every lane has drained, after `num_empty` packs in a row without conversations, and
        not all rows have been counted."""
        if num_empty >= num_lanes and not self.is_done(progress):
            raise RuntimeError(
                f"the data has ended at {progress.rows} of {self.rows_of_run(progress)} rows: {num_empty} packs in a "
                "row had no conversation. Were the data files changed while the run read them?"
            )

    def learning_rate(self, progress: Progress) -> float:
        """Returns the rate of the step about to be made."""
        options = self.config.optimizer
        return options.learning_rate * learning_rate_factor(
            options.schedule,
            step=progress.step,
            warmup_steps=options.warmup_steps,
            decay_progress=decay_progress(
                progress,
                warmup_steps=options.warmup_steps,
                train_steps=self.config.tokens.train_steps,
                num_rows=self.rows_of_run(progress),
            ),
            min_ratio=options.min_learning_rate_ratio,
            decay_share=options.decay_share,
        )
