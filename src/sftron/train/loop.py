"""The loop over the steps of a run, with its evaluations, checkpoints and exports on the way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from sftron.data.digest import PackDigest, step_rows
from sftron.data.loader import PackLoader
from sftron.data.types import Batch
from sftron.models.exact_sums import ExactSums
from sftron.models.llama import LlamaForSFT
from sftron.models.loss import loss_function
from sftron.train.build_data import require_unchanged
from sftron.train.evaluation import Best, Evaluator
from sftron.train.flops import step_flops
from sftron.train.health import Health
from sftron.train.logs import console
from sftron.train.logs.run_logs import RunLogs
from sftron.train.objective import TokenLoss
from sftron.train.optimizer import set_learning_rate
from sftron.train.outputs import RunExports
from sftron.train.progress import Progress
from sftron.train.resume import run_state
from sftron.train.run import Settings, Setup, data_fingerprint
from sftron.train.run_directory import NOT_FINITE, RunDirectory
from sftron.train.sample import mix_report
from sftron.train.saving import Saver
from sftron.train.signals import StopRequest
from sftron.train.step import StepBatches, StepResult, measure_step, next_step_batches, train_step
from sftron.train.text import description

_MAX_NON_FINITE_IN_A_ROW = 3


@dataclass(kw_only=True)
class TrainingLoop:
    """The steps of a run, with its evaluations, checkpoints and exports on the way. Each method is a collective."""

    setup: Setup
    directory: RunDirectory
    model: LlamaForSFT
    optimizer: torch.optim.Optimizer
    loader: PackLoader
    progress: Progress
    settings: Settings
    evaluator: Evaluator
    saver: Saver
    exports: RunExports
    logs: RunLogs
    stop_request: StopRequest
    started: float | None
    """The `time.perf_counter()` at which the process started; None after the first step."""

    def __post_init__(self) -> None:
        self._ranks, self._config = self.setup.ranks, self.setup.config
        self._data_state: Mapping[str, Any] = self.loader.state_dict()
        """That of the loader after the last finished step."""
        self._packs: list[PackDigest] = []
        """Those of all ranks since the last step."""
        self._data = data_fingerprint(self._config, self.setup.data.dataset)
        self._health = Health(self.model, self._ranks, loss_function(self.setup.model.loss))
        is_exact = self._config.general.deterministic == "layout"
        self._sums = ExactSums(self.model, self._ranks.mesh) if is_exact else None
        self._seconds: dict[str, float] = {}
        """The time spent on checkpoints and evaluations since the last step."""

    def train(self, batches: Iterator[Batch]) -> str:
        """Trains until the run is done. Returns "completed", "preempted" or NOT_FINITE."""
        progress, length = self.progress, self.setup.length
        bar, num_empty = console.RunProgress(), 0
        if self.is_stop_requested() or not self._evaluate():
            return "preempted"
        if not self._is_done():
            self._export_on_the_way(only_if_missing=True)  # the run may have ended before this export
        while not self._is_done():
            started = time.perf_counter()
            fetched = self._fetch(batches)
            if fetched.counts.total.conversations == 0:
                # At the end of the data, some lanes run out before others. Without a conversation, there is no step.
                self._commit(fetched)
                num_empty += len(fetched.batches) * self._ranks.dp_world_size
                length.require_more_data(progress, num_empty, self.setup.data.dataset.num_lanes)
                continue
            num_empty = 0
            learning_rate, result = self._step(fetched)
            self._log(fetched, result, learning_rate, bar, seconds=time.perf_counter() - started)
            if not self._is_finite(result, fetched):
                return NOT_FINITE
            progress.require_few_dropped(self._config.data.max_dropped_share, length.rows_of_run(progress))
            is_save_due = self._ranks.is_main and self.saver.is_due(progress.step)
            wanted = self._ranks.any_of(stop=self.stop_request.received, save=is_save_due)
            if wanted["stop"] or not self._evaluate():
                return "preempted"
            self._export_on_the_way()
            with self._timed("checkpoint"):
                self.saver.poll()
            if wanted["save"] and self.saver.tried_step != progress.step:
                self.save(self.saver.save)
        if not self._evaluate():
            return "preempted"
        if reason := self.reason_of_early_end():
            console.write(f"ends early {reason}")
        return "completed"

    def reason_of_early_end(self) -> str | None:
        """Returns why the run is done before its full length; None if it has its full length, or is not done."""
        watched, evaluator = self.evaluator.watched, self.evaluator
        is_early = evaluator.is_patience_over and not self.setup.length.is_done(self.progress)
        return f"evaluation.patience: {watched.reason()}" if is_early and watched else None

    def _is_done(self) -> bool:
        return self.setup.length.is_done(self.progress) or self.evaluator.is_patience_over

    def is_stop_requested(self) -> bool:
        return self._ranks.any(self.stop_request.received)

    def _fetch(self, batches: Iterator[Batch]) -> StepBatches:
        """Returns the batches of the next step, and their counts over all ranks."""
        model, tokens = self.setup.model, self._config.tokens
        checkpointing = self._config.model.activation_checkpointing
        self._ranks.at(f"the data of step {self.progress.step + 1}")
        return next_step_batches(
            batches,
            tokens.batch_accumulation_per_replica,
            ranks=self._ranks,
            num_datasets=len(self.progress.datasets),
            flops_of=lambda own: step_flops(model.architecture, own, checkpointing, model.trained),
        )

    def _step(self, fetched: StepBatches) -> tuple[float, StepResult]:
        """Makes one optimizer step. Returns the learning rate and the result."""
        progress, interval = self.progress, self._config.logging.untrained_roles_interval
        if progress.step == self._config.optimizer.warmup_steps:
            progress.rows_at_peak = progress.rows
        is_first = self.started is not None
        if self.started is not None:
            console.write(f"first step {time.perf_counter() - self.started:.1f} s after the start")
            self.started = None
        learning_rate = self.setup.length.learning_rate(progress, fetched.counts.total.rows)
        set_learning_rate(self.optimizer, learning_rate)
        self._ranks.at(f"step {progress.step + 1}")
        wall, processor = time.perf_counter(), time.process_time()
        result = train_step(
            self.model,
            self.optimizer,
            fetched.batches,
            TokenLoss(
                loss_function=loss_function(self.setup.model.loss),
                num_datasets=len(progress.datasets),
                with_untrained=interval is not None and progress.step % interval == 0,
            ),
            max_grad_norm=self._config.optimizer.max_grad_norm,
            denominator=fetched.counts.weight_sum,
            router_aux_loss_coef=self.setup.model.router_aux_loss_coef,
            sum_over_ranks=self._ranks.sum,
            sums=self._sums,
        )
        if is_first and self._ranks.world_size == 1 and self._ranks.device.type == "cpu":
            description.warn_of_busy_cores(time.perf_counter() - wall, time.process_time() - processor)
        progress.step += 1
        self._commit(fetched)
        self._health.note(result, fetched.batches)
        return learning_rate, result

    def _commit(self, fetched: StepBatches) -> None:
        """Adds the fetched batches to the progress, the loader state and the next line of metrics.jsonl."""
        self.progress.add(fetched.counts)
        self._data_state = self.loader.state_dict()
        self._packs += fetched.packs

    def _rows(self) -> dict[str, Any]:
        """Returns the digest of all packs since the last call."""
        packs, self._packs = self._packs, []
        first_epoch, num_epochs = self._data_state["first_epoch"], self.setup.data.dataset.num_epochs
        return step_rows(packs, first_epoch=first_epoch, num_epochs=num_epochs, data=self._data)

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
        progress, num_steps = self.progress, self._config.tokens.train_steps
        metrics = measure_step(
            progress,
            fetched,
            result,
            learning_rate=learning_rate,
            preparation=self.setup.data.preparation,
            step_seconds=seconds,
            checkpoint_seconds=self._seconds.pop("checkpoint", 0.0),
            evaluation_seconds=self._seconds.pop("evaluation", 0.0),
            peak_tflops=self.setup.model.peak.tflops,
            ranks=self._ranks,
            changed_settings=self.settings.changed_at(progress.step),
            rows=self._rows(),
        )
        self.logs.write_step(metrics)
        bar.update(self.setup.length.share_done(progress), metrics.for_terminal(num_steps))
        if progress.step % self._config.logging.interval == 0 or result.skipped:
            console.write_short(metrics.as_line(num_steps), metrics.for_terminal(num_steps, bar.time_left))

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        """Adds the time in the context to `_seconds`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[what] = self._seconds.get(what, 0.0) + time.perf_counter() - started

    def _is_finite(self, result: StepResult, fetched: StepBatches) -> bool:
        """Returns False at the third consecutive step without a finite loss and gradient norm.

        Every such step prints the locations of its conversations.
        """
        if result.is_finite:
            self.progress.non_finite_in_a_row = 0
            return True
        self.progress.non_finite_in_a_row += 1
        locations = [self.setup.data.preparation.location(key) for each in fetched.batches for key in each.pack.keys]
        reports = self._ranks.gather({"rows": locations})[:: self._ranks.context.size]
        everyone = [each for facts in reports for each in facts["rows"]]
        console.write(f"           no update was made. In the batch: {', '.join(everyone)}")
        return self.progress.non_finite_in_a_row < _MAX_NON_FINITE_IN_A_ROW

    # -- evaluations, checkpoints and exports ------------------------------------------------------------------------

    def _evaluate(self) -> bool:
        """Evaluates if an evaluation is due. Returns False if a stop was requested before it was complete."""
        step, evaluator, best = self.progress.step, self.evaluator, self.evaluator.best
        if not evaluator.is_due(step, is_last=self.setup.length.is_done(self.progress)):
            return True
        self._ranks.at(f"the evaluation after step {step}")
        with self._timed("evaluation"):
            evaluation = evaluator.evaluate(self.model, step)
        if evaluation is None:
            return False
        self.logs.write_evaluation(evaluation)
        if evaluator.best and evaluator.best.step == step:
            self._save_best(best)
        return True

    def _save_best(self, before: Best | None) -> None:
        """Saves the new best checkpoint; if it cannot be saved, `before` stays the best."""
        step, evaluator, saver = self.progress.step, self.evaluator, self.saver
        saver.best_step = evaluator.best_step
        if saver.saved_step != step:
            self.save(saver.save)
            saver.wait()
        if saver.saved_step != step:
            evaluator.best = before
            saver.best_step = evaluator.best_step
        elif best := evaluator.best:
            facts = {"metric": best.metric, "value": best.value, "step": best.step}
            self.directory.write("best.json", facts | {"checkpoint": f"checkpoints/step-{best.step}"})

    def save(self, save: Callable[..., None]) -> None:
        """Saves the state after the last finished step with a method of the saver, unless the weights are broken.

        Raises DataError if the data files changed meanwhile, because the state would not describe what was trained.
        """
        step = self.progress.step
        require_unchanged(self.setup)
        self._ranks.at(f"saving step {step}")
        with self._timed("checkpoint"):
            if not self.is_healthy("saved"):
                return
            self.logs.sync_steps()  # first, so that metrics.jsonl contains every step of the checkpoint
            state = run_state(self.setup, self._data_state, self.progress, self.settings)
            state["evaluation"] = self.evaluator.state()
            save(step, model=self.model, optimizer=self.optimizer, state=state)
        self.report_mix()

    def save_before_failure(self) -> None:
        """Saves the last complete step before a bad row ends the run."""
        step = self.progress.step
        try:
            self.save(self.saver.save_last)
            if self.saver.saved_step == step:
                console.write(f"saved      step {step}, the last one before the failure")
        except OSError as error:
            console.write(f"WARNING    step {step} could not be saved: {error}")

    def is_healthy(self, done: str = "") -> bool:
        """Returns whether the weights give a finite loss and gradients; those of a checkpoint were already checked.

        If they do not, and `done` is given, prints that they are not `done`.
        """
        step = self.progress.step
        is_healthy = self.saver.saved_step == step or self._health.is_proven(step)
        if done and not is_healthy:
            console.write(
                f"WARNING    the weights after step {step} give no finite loss and gradients, so they are not {done}. "
                "Lower optimizer.learning_rate if that happens again"
            )
        return is_healthy

    def _export_on_the_way(self, *, only_if_missing: bool = False) -> None:
        """Exports if an export is due. A failed one does not end the run: the checkpoints hold the same weights."""
        interval, step = self._config.checkpoints.export_interval, self.progress.step
        if not interval or step == 0 or step % interval:
            return
        if only_if_missing and self.exports.is_there(step):
            return
        if not self.is_healthy("exported"):
            return
        try:
            with self._timed("checkpoint"):
                self.exports.export(is_last=False)
        except OSError as error:
            console.write(f"WARNING    the export of step {step} could not be written: {error}")

    def report_mix(self) -> None:
        """Writes mix_report.json: the planned and the trained amount of each data set."""
        data = self.setup.data
        report = mix_report(self._config, data.preparation, data.sample, data.projection, self.progress)
        self.directory.write("mix_report.json", report | {"fingerprints": data.fingerprints})
