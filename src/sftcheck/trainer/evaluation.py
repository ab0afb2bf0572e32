"""The loss that a trainer's `evaluate` returns, and rows of its evaluation that are rows of its training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from sftcheck.batches import ids_of
from sftcheck.documents.truth import PlainText, read_row
from sftcheck.restore import preserve_attributes, restored
from sftcheck.trainer.recording import chosen_rows, select
from sftron.data.types import IGNORE_INDEX

_MOST_COMPARED = 20_000


@dataclass(frozen=True, slots=True)
class EvaluatedPair:
    """The `eval_loss` of two rows, each in a batch of its own."""

    num_labels: tuple[int, int]
    alone: tuple[float, float]
    """The `eval_loss` of each row as the only one."""
    together: float

    @property
    def ratio(self) -> float:
        """The loss of both rows by the number of their labels."""
        return float(np.average(self.alone, weights=self.num_labels))

    @property
    def gap(self) -> float:
        """How far the mean of both losses is from the ratio."""
        return abs(sum(self.alone) / 2 - self.ratio)


def unlike_pair(rows: Sequence[Any], budget: int) -> list[int]:
    """Returns the numbers of the rows with the fewest and the most labels, of those that are short enough."""
    sizes = [0 if (ids := ids_of(row)) is None else len(ids) for row in rows]
    limit = max(budget, *sorted(sizes)[:2])
    short = [n for n, size in enumerate(sizes) if size <= limit]
    order = sorted(short, key=lambda n: _num_labels(rows[n]))
    trained = [n for n in order if _num_labels(rows[n])] or order
    return [trained[0], trained[-1]]


def _num_labels(row: Any) -> int:
    if not isinstance(row, Mapping):
        return 0
    if (labels := row.get("labels")) is not None:
        return int((np.asarray(labels) != IGNORE_INDEX).sum())
    for name in ("completion_mask", "assistant_masks"):
        if row.get(name) is not None:
            return int(np.sum(row[name]))
    return len(str(row)) if (ids := ids_of(row)) is None else len(ids)


@contextmanager
def evaluated_by_rows(trainer: Any) -> Iterator[None]:
    """Lets `evaluate` make batches of one row, as in the middle of the training, without callbacks."""
    handler = trainer.callback_handler
    with (
        preserve_attributes(trainer.state),
        restored(trainer, "is_in_train"),  # else bf16_full_eval changes the type of the weights
        restored(handler, "callbacks"),
        restored(trainer.args, "per_device_eval_batch_size"),
    ):
        trainer.is_in_train, handler.callbacks, trainer.args.per_device_eval_batch_size = True, [], 1
        yield


def num_shared_rows(training: Any, evaluation: Any) -> int:
    """Returns how many rows of the evaluation are rows of the training, of 20,000 of each at most."""
    try:
        trained = set(_keys(training))
        return sum(key in trained for key in _keys(evaluation))
    except Exception:  # of rows that cannot be read, which the checks name
        return 0


def _keys(data: Any) -> Iterator[bytes | str]:
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        return
    sample = select(data, chosen_rows(len(data), _MOST_COMPARED))
    for n in range(len(sample)):
        row = sample[n]
        if (ids := ids_of(row)) is not None:
            yield ids.tobytes()
        elif isinstance(row, Mapping) and (content := next(read_row(row), None)) is not None:
            yield content.text if isinstance(content, PlainText) else repr(content.messages)
