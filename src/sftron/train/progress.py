"""How far the run is: all counters of it, which a checkpoint carries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sftron.data.types import Batch, DataError

_NUM_ROWS_BEFORE_JUDGING = 200


@dataclass(slots=True)
class Progress:
    """Counts over the whole run. rows: dealt so far, dropped ones included; rows_at_peak: when the warm-up ended."""

    step: int = 0
    rows: int = 0
    rows_at_peak: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    truncated: int = 0
    non_finite_in_a_row: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Progress:
        return cls(**{**state, "dropped": Counter(state["dropped"])})

    def state(self) -> dict[str, Any]:
        # asdict() makes a Counter of pairs out of a Counter.
        return {**asdict(self), "dropped": dict(self.dropped)}

    def add(self, batches: Sequence[Batch]) -> None:
        for pack in (batch.pack for batch in batches):
            self.rows += pack.num_rows
            self.tokens += pack.num_tokens
            self.trained_tokens += pack.num_trained_tokens
            self.truncated += pack.num_truncated
            self.dropped.update(pack.dropped)

    def require_few_dropped(self, max_share: float, num_rows: int | None = None) -> None:
        """Raises DataError once too large a share of the rows is not trained on.

        num_rows: of the whole run, where it is known; fewer than some hundred are judged when all of them are dealt.
        """
        enough = _NUM_ROWS_BEFORE_JUDGING if num_rows is None else min(_NUM_ROWS_BEFORE_JUDGING, num_rows)
        num_dropped = self.dropped.total()
        if self.rows >= enough and num_dropped > max_share * self.rows:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.dropped.most_common())
            raise DataError(f"{too_many_dropped(num_dropped, self.rows, max_share)} By reason: {reasons}")


def too_many_dropped(num_dropped: int, num_rows: int, max_share: float) -> str:
    return (
        f"{num_dropped} of {num_rows} rows were dropped, more than data.max_dropped_share {max_share} allows. Look at "
        "them with tools/inspect_data.py, then mend the data, raise tokens.sequence_length, or allow a larger share."
    )


def decay_progress(progress: Progress, *, warmup_steps: int, train_steps: int | None, num_rows: int | None) -> float:
    """Share of the way from the end of the warm-up to the end of training, for the step about to be made.

    In steps where their number is given; else in rows, as how many steps an epoch makes is known only when it is over.
    num_rows: of all epochs together.
    """
    if train_steps is not None:
        return (progress.step - warmup_steps) / max(1, train_steps - warmup_steps)
    assert num_rows is not None
    return (progress.rows - progress.rows_at_peak) / max(1, num_rows - progress.rows_at_peak)
