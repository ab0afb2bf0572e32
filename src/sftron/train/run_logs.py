"""The logs of a run: console, metrics, evaluations, ledger and wandb. A failed write does not end the run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import isfinite
from typing import Any

from sftron.data.types import Batch
from sftron.train import console
from sftron.train.evaluation import Evaluation
from sftron.train.ledger import LedgerWriter, open_ledger
from sftron.train.line_file import LineFile, drop_records_after, read_records
from sftron.train.metrics import StepMetrics
from sftron.train.run_directory import RunDirectory
from sftron.train.setup import Setup
from sftron.train.wandb import WandbRun


class RunLogs:
    """The logs of a run.

    Each log is opened as soon as its inputs are known; a log that is not open is skipped. Only the main rank writes
    them, except for the ledger, which has one file per rank.
    """

    def __init__(self, plan: Setup, directory: RunDirectory) -> None:
        self.trackers: Sequence[WandbRun] = ()
        self._plan, self._directory = plan, directory
        self._console: LineFile | None = None
        self._metrics: LineFile | None = None
        self._evaluations: LineFile | None = None
        self._ledger: LedgerWriter | None = None

    def open_console(self) -> None:
        if self._plan.ranks.is_main:
            self._console = LineFile(self._directory.console_log)
            console.log_to(self._console.append)

    def open(self, *, step: int, evaluated_step: int | None, data_state: dict[str, Any]) -> None:
        """Opens all logs except the console's, and removes the records after the point that the run resumes from.

        Args:
            step: The last finished step.
            evaluated_step: The step of the last evaluation; None if there was none.
            data_state: The state of the loader.
        """
        if self._plan.ranks.is_main:
            # After the loader has forked its workers: a fork while a wandb thread holds a lock could hang the worker.
            for tracker in self.trackers:
                tracker.start()
            drop_records_after(self._directory.metrics, step)
            self._metrics = LineFile(self._directory.metrics)
            if self._plan.data.is_evaluated:
                drop_records_after(self._directory.evaluations, -1 if evaluated_step is None else evaluated_step)
                self._evaluations = LineFile(self._directory.evaluations)
        if self._plan.config.logging.ledger:
            self._ledger = open_ledger(self._directory.folder, self._plan, step=step, state=data_state)

    def write_step(self, metrics: StepMetrics) -> None:
        if self._metrics:
            record = asdict(metrics)
            self._metrics.append(as_json(record))
            for tracker in self.trackers:
                tracker.log_step(metrics.step, record)

    def write_evaluation(self, evaluation: Evaluation) -> None:
        if self._evaluations:
            record = asdict(evaluation)
            self._evaluations.append(as_json(record))
            for tracker in self.trackers:
                tracker.log_evaluation(evaluation.step, evaluation.metrics(), record["answers"])

    def answers(self, step: int) -> list[dict[str, Any]] | None:
        """Returns the answers of the evaluation after `step`; None if there was none, and on other ranks."""
        records = read_records(self._directory.evaluations) if self._evaluations else ()
        return next((record["answers"] for record in records if record["step"] == step), None)

    def record(self, step: int, batches: Sequence[Batch], skipped: str | None = None) -> None:
        """Writes the rows of a step to the ledger."""
        if self._ledger:
            self._ledger.write(step, batches, skipped=skipped)

    def sync_ledger(self) -> None:
        """Flushes the ledger to disk, because it has to contain every step of a checkpoint."""
        if self._ledger:
            self._ledger.sync()

    def close(self, status: str) -> None:
        """Closes all logs; wandb may wait a minute for a slow server. `status` is the status in result.json."""
        for file in (self._ledger, self._evaluations, self._metrics):
            if file:
                file.close()
        if self._metrics:
            for tracker in self.trackers:
                tracker.finish(status)
        console.log_to(None)
        if self._console:
            self._console.close()


def as_json(record: Mapping[str, Any]) -> bytes:
    """Returns the record as strict JSON; numbers that are not finite become null."""
    return json.dumps(_finite(record), allow_nan=False).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    return None if isinstance(value, float) and not isfinite(value) else value
