"""Where the numbers of a step are written: an object in metrics.jsonl, a point in each tracker."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Protocol

from sftron.train.line_file import LineFile, drop_lines_after
from sftron.train.step_metrics import StepMetrics

STEP = "step"
"""The x axis of every chart of a tracker."""


class Tracker(Protocol):
    """Something that shows a run's numbers elsewhere, such as wandb (wandb.py). None of its methods raises."""

    def start(self) -> None:
        """Begins, once the loader has forked its workers: before, no thread may hold what they need."""
        ...

    def log(self, step: int, numbers: Mapping[str, Any]) -> None:
        """Logs values by name, such as "eval/held_out/loss": numbers, and a `Table` where it can show one."""
        ...

    def finish(self, status: str) -> None:
        """Ends with the run's status: "completed", "preempted" or "failed"."""
        ...


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text, numbers and bools, each with a value for each column."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


def flat_numbers(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, int | float]]:
    """Yields every number with a name of its own, such as "datasets/x.jsonl/tokens": trackers draw no dictionaries."""
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from flat_numbers(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)):
            yield f"{prefix}{key}", value


class MetricsLog:
    """Writes the numbers of each step to metrics.jsonl, which cannot end a run (line_file.py), and to the trackers."""

    def __init__(self, path: Path, *, resumed_step: int, trackers: Sequence[Tracker] = ()) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        drop_lines_after(path, resumed_step)
        self._lines = LineFile(path)
        self._trackers = trackers

    def write(self, metrics: StepMetrics) -> None:
        record = asdict(metrics)
        self._lines.append(json.dumps(_finite(record), allow_nan=False).encode())
        for tracker in self._trackers:
            tracker.log(metrics.step, dict(flat_numbers(record)))

    def close(self, status: str) -> None:
        """Closes the file and the trackers; `status` is that of `Tracker.finish`."""
        self._lines.close()
        for tracker in self._trackers:
            tracker.finish(status)


def _finite(value: Any) -> Any:
    """JSON has no NaN; `skipped` says that a number was not finite."""
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    return None if isinstance(value, float) and not isfinite(value) else value
