"""The training loop, from the first batch to the result of the run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sftron.data.types import Batch, DataError
from sftron.models.loss import loss_function
from sftron.train.flops import step_flops
from sftron.train.logs import console
from sftron.train.logs.loss_chart import write_loss_chart
from sftron.train.logs.run_logs import RunLogs
from sftron.train.optimizer import set_learning_rate
from sftron.train.outputs import RunOutputs, TrainingState
from sftron.train.progress import RunLength
from sftron.train.run import Setup
from sftron.train.run_directory import NOT_FINITE, RunDirectory
from sftron.train.signals import StopRequest
from sftron.train.start import description
from sftron.train.step import StepBatches, StepResult, measure_step, next_step_batches, train_step

_MAX_NON_FINITE_IN_A_ROW = 3


class TrainingLoop:
    """Trains step by step until the run is done or a stop is requested.

    Args:
        started: The `time.perf_counter()` at which the process started.
    """

    def __init__(
        self,
        setup: Setup,
        state: TrainingState,
        outputs: RunOutputs,
        logs: RunLogs,
        *,
        length: RunLength,
        stop_request: StopRequest,
        started: float,
    ) -> None:
        self._setup, self._state, self._outputs, self._logs = setup, state, outputs, logs
        self._stop_request = stop_request
        self._started: float | None = started
        self._config, self._ranks, self._progress = setup.config, setup.ranks, state.progress
        self._length = length

    def run(self, directory: RunDirectory) -> str:
        """Trains, saves and exports. Returns "completed", "diverged", "preempted" or NOT_FINITE."""
        outputs, progress, loader = self._outputs, self._progress, self._state.loader
        batches = iter(loader)  # forks its workers, so it comes before evaluation, trackers and saves start threads
        evaluated_step = outputs.evaluator.evaluated_step
        self._logs.open(step=progress.step, evaluated_step=evaluated_step, data_state=loader.state_dict())
        if outputs.pusher:
            outputs.pusher.start()
        try:
            status = self._loop(batches)
            is_whole = status == "preempted" or not progress.non_finite_in_a_row
            if status != NOT_FINITE and not (is_whole and outputs.is_healthy()):
                status = NOT_FINITE
        except DataError:
            outputs.save_before_failure()
            raise
        finally:
            console.hide_progress()
            outputs.report_mix()
        step = progress.step
        if status == NOT_FINITE:
            outputs.saver.wait()
            directory.write_result("failed", step=step, error=NOT_FINITE)
            self._draw(directory)
            description.conclude_not_finite(step, outputs.saver.saved_step)
            return status
        problem = exported = None
        if status == "completed":
            outputs.judge()
        try:
            outputs.save_last()
        except OSError as error:
            problem = error  # raised after the export, which may still save the weights
        if status == "completed" and self._config.checkpoints.export_hf:
            if problem is None and self._is_stop_requested():
                status = "preempted"  # training is complete and saved; the next start exports it
            else:
                exported = outputs.export_at_end()
        if problem is not None:
            raise problem
        facts: dict[str, Any] = {"reason": reason} if (reason := self._reason(status)) else {}
        if status == "completed" and outputs.divergence:
            status, facts = "diverged", facts | {"error": outputs.divergence}
        directory.write_result(status, step=step, exported=exported and str(exported), **facts)
        if status != "preempted":
            before, after = (self._logs.answers(each) for each in (0, step))
            description.show_answers(self._setup.data.questions, before, after)
        chart = self._draw(directory)
        description.conclude(
            status, directory.folder, step, exported=exported, chart=chart, divergence=facts.get("error")
        )
        return status

    def _reason(self, status: str) -> str | None:
        """Returns why a completed run ended before its full length; None if it did not."""
        watched = self._outputs.evaluator.watched
        is_early = status == "completed" and not self._length.is_done(self._progress)
        return f"evaluation.patience: {watched.reason()}" if is_early and watched else None

    def _draw(self, directory: RunDirectory) -> Path | None:
        return write_loss_chart(directory, self._config.general.run_name) if self._ranks.is_main else None

    def _loop(self, batches: Iterator[Batch]) -> str:
        """Trains until the run is done. Returns "completed", "preempted" or NOT_FINITE."""
        progress, length, outputs = self._progress, self._length, self._outputs
        bar, num_empty = console.RunProgress(), 0
        if self._is_stop_requested() or not self._evaluate():
            return "preempted"
        if not (length.is_done(progress) or outputs.evaluator.is_patience_over):
            outputs.export_on_the_way(only_if_missing=True)  # the run may have ended before this export
        while not (length.is_done(progress) or outputs.evaluator.is_patience_over):
            started = time.perf_counter()
            fetched = self._fetch(batches)
            if fetched.counts.conversations == 0:
                # At the end of the data, some lanes run out before others. Without a conversation, there is no step.
                self._commit(fetched)
                num_empty += len(fetched.batches) * self._ranks.dp_world_size
                length.require_more_data(progress, num_empty, self._setup.data.dataset.num_lanes)
                continue
            num_empty = 0
            learning_rate, result = self._step(fetched)
            self._log(fetched, result, learning_rate, bar, seconds=time.perf_counter() - started)
            if not self._is_finite(result, fetched.batches):
                return NOT_FINITE
            max_dropped_share = self._config.data.max_dropped_share
            progress.require_few_dropped(max_dropped_share, length.rows_of_run(progress))
            is_save_due = self._ranks.is_main and outputs.saver.is_due(progress.step)
            wanted = self._ranks.any_of(stop=self._stop_request.received, save=is_save_due)
            if wanted["stop"] or not self._evaluate():
                return "preempted"
            outputs.export_on_the_way()
            with outputs.checkpoint_time:
                outputs.saver.poll()
            if wanted["save"] and outputs.saver.tried_step != progress.step:
                outputs.save()
        if not self._evaluate():
            return "preempted"
        if reason := self._reason("completed"):
            console.write(f"ends early {reason}")
        return "completed"

    def _fetch(self, batches: Iterator[Batch]) -> StepBatches:
        """Returns the batches of the next step, and their counts over all ranks."""
        model, tokens = self._setup.model, self._config.tokens
        checkpointing = self._config.model.activation_checkpointing
        self._ranks.at(f"the data of step {self._progress.step + 1}")
        return next_step_batches(
            batches,
            tokens.batch_accumulation_per_replica,
            ranks=self._ranks,
            num_datasets=len(self._progress.datasets),
            flops_of=lambda own: step_flops(model.architecture, own, checkpointing, model.trained),
        )

    def _log(
        self,
        fetched: StepBatches,
        result: StepResult,
        learning_rate: float,
        bar: console.RunProgress,
        *,
        seconds: float,
    ) -> None:
        """Writes the metrics of the step that was made in `seconds`, and prints them."""
        progress, outputs, num_steps = self._progress, self._outputs, self._config.tokens.train_steps
        metrics = measure_step(
            progress,
            fetched,
            result,
            learning_rate=learning_rate,
            preparation=self._setup.data.preparation,
            step_seconds=seconds,
            checkpoint_seconds=outputs.checkpoint_time.take(),
            evaluation_seconds=outputs.evaluation_time.take(),
            peak_tflops=self._setup.model.peak.tflops,
            ranks=self._ranks,
            changed_settings=self._state.settings.changed_at(progress.step),
        )
        self._logs.write_step(metrics)
        bar.update(self._length.share_done(progress), metrics.in_short(num_steps))
        if progress.step % self._config.logging.interval == 0 or result.skipped:
            console.write_short(metrics.as_line(num_steps), metrics.for_terminal(num_steps, bar.time_left))

    def _step(self, fetched: StepBatches) -> tuple[float, StepResult]:
        """Makes one optimizer step. Returns the learning rate and the result."""
        progress, interval = self._progress, self._config.logging.untrained_roles_interval
        if progress.step == self._config.optimizer.warmup_steps:
            progress.rows_at_peak = progress.rows
        is_first = self._started is not None
        if self._started is not None:
            console.write(f"first step {time.perf_counter() - self._started:.1f} s after the start")
            self._started = None
        learning_rate = self._length.learning_rate(progress, fetched.counts.rows)
        set_learning_rate(self._state.optimizer, learning_rate)
        self._ranks.at(f"step {progress.step + 1}")
        wall, processor = time.perf_counter(), time.process_time()
        result = train_step(
            self._state.model,
            self._state.optimizer,
            fetched.batches,
            max_grad_norm=self._config.optimizer.max_grad_norm,
            loss_function=loss_function(self._setup.model.loss),
            weight_sum=fetched.counts.weight_sum,
            num_datasets=len(progress.datasets),
            router_aux_loss_coef=self._setup.model.router_aux_loss_coef,
            with_untrained=interval is not None and progress.step % interval == 0,
            sum_over_ranks=self._ranks.sum,
        )
        if is_first and self._ranks.world_size == 1 and self._ranks.device.type == "cpu":
            description.warn_of_busy_cores(time.perf_counter() - wall, time.process_time() - processor)
        progress.step += 1
        self._commit(fetched, result.skipped)
        self._outputs.health.note(result, fetched.batches)
        return learning_rate, result

    def _commit(self, fetched: StepBatches, skipped: str | None = None) -> None:
        """Adds the fetched batches to the progress, the loader state and the ledger."""
        self._progress.add(fetched.counts)
        self._state.data_state = self._state.loader.state_dict()
        self._logs.write_rows(self._progress.step, fetched.batches, skipped)

    def _evaluate(self) -> bool:
        return self._outputs.evaluate(is_last=self._length.is_done(self._progress))

    def _is_stop_requested(self) -> bool:
        return self._ranks.any(self._stop_request.received)

    def _is_finite(self, result: StepResult, batches: Sequence[Batch]) -> bool:
        """Returns False at the third consecutive step without a finite loss and gradient norm.

        Every such step logs the locations of its conversations. Every rank calls this.
        """
        if result.is_finite:
            self._progress.non_finite_in_a_row = 0
            return True
        self._progress.non_finite_in_a_row += 1
        locations = [self._setup.data.preparation.location(key) for batch in batches for key in batch.pack.keys]
        everyone = [each for facts in self._ranks.gather({"rows": locations}) for each in facts["rows"]]
        console.write(f"           no update was made. In the batch: {', '.join(everyone)}")
        return self._progress.non_finite_in_a_row < _MAX_NON_FINITE_IN_A_ROW
