"""All that a run writes line by line: metrics, evaluations, ledger, console, trackers. None of them can end it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sftron.data.types import Batch
from sftron.train import console
from sftron.train.evaluation import Evaluation
from sftron.train.evaluation_log import EvaluationLog
from sftron.train.ledger import LedgerWriter, open_ledger
from sftron.train.line_file import LineFile
from sftron.train.metrics import MetricsLog, Tracker
from sftron.train.run_directory import RunDirectory
from sftron.train.setup import Setup
from sftron.train.step_metrics import StepMetrics


class RunLogs:
    """Opened one after another, as the run comes to know what they need; what is not open is not written.

    The main rank writes them, but for the ledger, which every rank has a part of.
    """

    def __init__(self, plan: Setup, directory: RunDirectory) -> None:
        self.trackers: Sequence[Tracker] = ()
        self.evaluations: EvaluationLog | None = None
        self._plan, self._directory = plan, directory
        self._console: LineFile | None = None
        self._metrics: MetricsLog | None = None
        self._ledger: LedgerWriter | None = None

    def open_console(self) -> None:
        if self._plan.ranks.is_main:
            self._console = LineFile(self._directory.console_log)
            console.log_to(self._console.append)

    def open(
        self,
        *,
        step: int,
        evaluated_step: int | None,
        data_state: dict[str, Any],
    ) -> None:
        """step: the last one made. evaluated_step: the last one that was evaluated. data_state: the
        loader's."""
        if self._plan.ranks.is_main:
            for tracker in self.trackers:
                tracker.start()
            self._metrics = MetricsLog(self._directory.metrics, resumed_step=step, trackers=self.trackers)
            if self._plan.data.evaluation_sets or self._plan.data.questions:
                self.evaluations = EvaluationLog(
                    self._directory.evaluations, evaluated_step=evaluated_step, trackers=self.trackers
                )
        if self._plan.config.logging.ledger:
            self._ledger = open_ledger(self._directory.folder, self._plan, step=step, state=data_state)

    def write_step(self, metrics: StepMetrics) -> None:
        if self._metrics:
            self._metrics.write(metrics)

    def write_evaluation(self, evaluation: Evaluation) -> None:
        if self.evaluations:
            self.evaluations.write(evaluation)

    def record(self, step: int, batches: Sequence[Batch], skipped: str | None = None) -> None:
        """Which rows were dealt, to the ledger."""
        if self._ledger:
            self._ledger.write(step, batches, skipped=skipped)

    def sync_ledger(self) -> None:
        """Before a checkpoint, so that it knows every step of it."""
        if self._ledger:
            self._ledger.sync()

    def close(self, status: str) -> None:
        """Closes all logs; `status` is that of `Tracker.finish`, which may wait a minute for a slow server."""
        if self._ledger:
            self._ledger.close()
        if self.evaluations:
            self.evaluations.close()
        if self._metrics:
            self._metrics.close(status)
        console.log_to(None)
        if self._console:
            self._console.close()
