"""The run: data and model checked and built in named steps, then one loop."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from sftron.config import Config, dump_config
from sftron.data.types import Batch, DataError
from sftron.models.loss import loss_function
from sftron.train import console
from sftron.train.build import build_loader, build_model, build_optimizer
from sftron.train.data_watch import DataWatch
from sftron.train.description import (
    conclude,
    conclude_not_finite,
    describe_finished,
    describe_run,
    describe_settings,
    show_answers,
)
from sftron.train.dry_run import dry_run
from sftron.train.evaluation import Best, Evaluator
from sftron.train.export import export_best, export_model
from sftron.train.flops import StepFlops, step_flops
from sftron.train.health import NOT_FINITE, Health, require_finite
from sftron.train.measured_rows import measure_once
from sftron.train.metrics import Stopwatch
from sftron.train.nodes import download_once, require_alike, require_one_folder
from sftron.train.optimizer import set_learning_rate
from sftron.train.plan import plan_run
from sftron.train.progress import DataSetCount, Progress, RunLength
from sftron.train.projection import mix_report
from sftron.train.ranks import peak_memory_bytes, start_ranks
from sftron.train.resume import Start, changed_settings, find_finished, find_start, settings_of
from sftron.train.run_directory import RunDirectory, read_result
from sftron.train.run_logs import RunLogs
from sftron.train.run_state import resume_run, run_state
from sftron.train.saving import Saver
from sftron.train.signals import StopRequest
from sftron.train.step import StepResult, measure_step, next_step_batches, train_step
from sftron.train.wandb import make_wandb, require_wandb

EXIT_COMPLETED, EXIT_NOT_FINITE = 0, 3
_MAX_NON_FINITE_IN_A_ROW = 3


class Trainer:
    """One run: making it checks all that can be checked without weights, then `build()` and `train()`, or `dry_run()`.

    Making and building raise ValueError with a message for the user; training raises DataError for a bad row.
    """

    def __init__(self, config: Config, stop_request: StopRequest | None = None) -> None:
        self._started: float | None = time.perf_counter()
        self.config = config
        shard = config.parallelism.dp_shard
        self.ranks = start_ranks(
            config.parallelism.dp_replicate, None if shard == "auto" else shard, config.parallelism.timeout_seconds
        )
        console.speak(self.ranks.is_main)
        self.stop_request = stop_request or StopRequest(speaks=self.ranks.is_main)
        self.ranks.together(lambda: require_wandb(config.logging.wandb) if self.ranks.is_main else None)
        self._make_reproducible()
        self.directory = RunDirectory(config.run_dir, is_main=self.ranks.is_main)
        download_once(config, self.ranks)
        self._data_watch = DataWatch(config)
        self.plan = self.ranks.together(lambda: plan_run(config, self.ranks))
        require_alike(self.plan)
        self._measured_rows = measure_once(self.plan, self.directory.row_lengths)
        self.progress = Progress([DataSetCount() for _ in self.plan.preparation.datasets])
        self._length = RunLength(config, self.plan.preparation.num_rows)
        self._logs = RunLogs(self.plan, self.directory)
        self._saver = Saver(
            self.directory.checkpoints,
            interval=config.checkpoints.interval,
            keep=config.checkpoints.keep_last,
            ranks=self.ranks,
            in_background=config.checkpoints.asynchronous,
        )
        self._evaluator = Evaluator(self.plan, lambda: self.ranks.any(self.stop_request.received))
        self._status = "failed"
        self._finished: Start | None = None
        self._has_begun = False
        self._checkpoint_time, self._evaluation_time = Stopwatch(), Stopwatch()

    def _make_reproducible(self) -> None:
        torch.manual_seed(self.config.general.seed)
        if self.config.general.deterministic:
            # cuBLAS reads this when its first product is made; without it, torch refuses every matrix product on a GPU.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)

    # -- the run ----------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """`build()` and `train()`, for notebooks. Returns the exit status."""
        self.build()
        return self.train()

    def build(self) -> None:
        """Take the run directory and load weights, optimizer and the checkpoint to go on from.

        Of a completed run that has nothing left to do, nothing is loaded and no file is touched.
        """
        self._finished = find_finished(self.plan, self.directory, self._length)
        if self._finished is not None and self._finished.progress is not None:
            self.progress = self._finished.progress
            unused = [*map(str, changed_settings(self.plan, self._finished)), *self._finished.changes]
            describe_finished(self.config, self.progress.step, unused)
            return
        self.ranks.together(self.directory.acquire)
        require_one_folder(self.directory.folder, self.ranks)
        self._logs.open_console()
        with self._failure_reported(ValueError):
            self._build()

    def _build(self) -> None:
        self.ranks.at("loading")
        start = find_start(self.plan, self.directory.checkpoints)
        is_done = start is not None and start.progress is not None and self._length.is_done(start.progress)
        self._settings = settings_of(self.plan, start, is_done=is_done)
        if not is_done or not (self.directory.folder / "config.yaml").exists():
            self.directory.write_config(self._settings.as_comment() + dump_config(self.plan.resolved_config))
        if self._measured_rows is not None:
            self.directory.write_row_lengths(self._measured_rows)
        self._has_begun = True
        self.directory.write_result("running")
        describe_settings(changed_settings(self.plan, start), is_done=is_done)
        describe_run(self.plan, samples=self.directory.samples)
        self.model = self.ranks.together(lambda: build_model(self.plan))
        self.optimizer = build_optimizer(self.plan, self.model)
        self.loader = build_loader(self.plan)
        if start is not None:
            self._resume(start)
        require_finite(self.model, self.ranks, str(start.folder if start else f"model.path: {self.plan.model_folder}"))
        self._health = Health(self.model, self.ranks, loss_function(self.plan.loss))
        self._data_state = self.loader.state_dict()
        wandb = make_wandb(
            self.plan,
            self.directory,
            start,
            num_parameters=sum(parameter.numel() for parameter in self.model.parameters()),
            step=self.progress.step,
        )
        self._logs.trackers = [wandb] if wandb else []
        self._report_mix()

    def _resume(self, start: Start) -> None:
        progress = resume_run(start, self.plan, model=self.model, optimizer=self.optimizer, loader=self.loader)
        if progress is not None:
            self.progress = progress
            self._saver.go_on_from(progress.step)
            self._evaluator.resume(start.state, self.directory.checkpoints)
            self._saver.best_step = self._evaluator.best_step

    def train(self) -> int:
        """Train to the end, or until asked to stop; result.json tells how it ended. Returns the exit status."""
        if self._finished is not None:
            return EXIT_COMPLETED
        try:
            with self.stop_request.listening(), self._failure_reported(DataError):
                return self._train()
        finally:
            self._saver.close()
            self._logs.close(self._status)  # after the last save

    def _failure_reported(self, refusal: type[ValueError]) -> AbstractContextManager[None]:
        """Writes the failure that came first to result.json, unless a refused start has left a finished run as it was,
        whose result.json stays."""

        def report(failure: str) -> None:
            if self._has_begun or not read_result(self.directory.folder):
                self.directory.write_result("failed", step=self.progress.step, error=failure)

        return self.ranks.failure_reported(report, refusal=refusal)

    def _train(self) -> int:
        batches = iter(self.loader)  # forks its workers, before evaluation, trackers and saves have threads beside them
        self._logs.open(
            step=self.progress.step,
            evaluated_step=self._evaluator.evaluated_step,
            data_state=self.loader.state_dict(),
        )
        try:
            status = self._loop(batches)
            is_whole = status == "preempted" or not self.progress.non_finite_in_a_row
            if status != "not finite" and not (is_whole and self._is_healthy()):
                status = "not finite"
        except DataError:
            self._save_before_failure()
            raise
        finally:
            console.hide_progress()
            self._report_mix()
        if status == "not finite":
            self._saver.settle()
            self.directory.write_result("failed", step=self.progress.step, error=NOT_FINITE)
            conclude_not_finite(self.progress.step, self._saver.saved_step)
            return EXIT_NOT_FINITE
        problem = exported = None
        try:
            self._save(self._saver.save_last)
        except OSError as error:
            problem = error  # raised once the model is exported: the weights are worth another try
        if status == "completed" and self.config.checkpoints.export_hf:
            if problem is None and self.ranks.any(self.stop_request.received):
                status = "preempted"  # all is trained and saved; the next start has to export it
            else:
                exported = self._export()
                if self._evaluator.best:
                    export_best(self.plan, self.directory, self._evaluator.best)
        if problem is not None:
            raise problem
        self.directory.write_result(status, step=self.progress.step, exported=exported and str(exported))
        if status == "completed":
            before, after = (self._logs.answers(step) for step in (0, self.progress.step))
            show_answers(self.plan.questions, before, after)
        self._status = status
        conclude(status, self.directory.folder, self.progress.step, exported)
        return EXIT_COMPLETED

    def _loop(self, batches: Iterator[Batch]) -> str:
        """Steps until done: "completed", "preempted" or "not finite"."""
        options = self.config
        bar = console.RunProgress()
        num_empty = 0
        if self.ranks.any(self.stop_request.received) or not self._evaluate():
            return "preempted"
        if not self._length.is_done(self.progress):
            self._export_on_the_way(anew=False)  # of the step gone on from: whatever ended the run came before it
        while not self._length.is_done(self.progress):
            started = time.perf_counter()
            self.ranks.at(f"the data of step {self.progress.step + 1}")
            deal = next_step_batches(
                batches,
                options.tokens.batch_accumulation_per_replica,
                ranks=self.ranks,
                num_datasets=len(self.progress.datasets),
                flops_of=self._flops_of,
            )
            if deal.counts.conversations == 0:
                # At the end of the data, some lanes have drained before others: nothing to do, and no step.
                self.progress.add(deal.counts)
                self._data_state = self.loader.state_dict()
                self._logs.record(self.progress.step, deal.batches)
                num_empty += len(deal.batches) * self.ranks.dp_world_size
                self._length.require_more_data(self.progress, num_empty, self.plan.dataset.num_lanes)
                continue
            num_empty = 0
            if self.progress.step == options.optimizer.warmup_steps:
                self.progress.rows_at_peak = self.progress.rows
            learning_rate = self._length.learning_rate(self.progress)
            set_learning_rate(self.optimizer, learning_rate)
            if self._started is not None:
                console.say(f"first step {started - self._started:.1f} s after the start")
                self._started = None
            self.ranks.at(f"step {self.progress.step + 1}")
            result = train_step(
                self.model,
                self.optimizer,
                deal.batches,
                max_grad_norm=options.optimizer.max_grad_norm,
                loss_function=loss_function(self.plan.loss),
                weight_sum=deal.counts.weight_sum,
                num_datasets=len(self.progress.datasets),
                with_untrained=self._measures_untrained(),
                sum_over_ranks=self.ranks.sum,
            )
            self.progress.step += 1
            self.progress.add(deal.counts)
            self._data_state = self.loader.state_dict()
            self._health.note(result, deal.batches)
            self._logs.record(self.progress.step, deal.batches, result.skipped)
            metrics = measure_step(
                self.progress,
                deal,
                result,
                learning_rate=learning_rate,
                preparation=self.plan.preparation,
                step_seconds=time.perf_counter() - started,
                checkpoint_seconds=self._checkpoint_time.take(),
                evaluation_seconds=self._evaluation_time.take(),
                peak_tflops=self.plan.peak.tflops,
                peak_memory_bytes=peak_memory_bytes(self.ranks.device),
                num_ranks=self.ranks.dp_world_size,
                changed_settings=self._settings.changed_at(self.progress.step),
            )
            self._logs.write_step(metrics)
            num_steps = options.tokens.train_steps
            bar.update(self._length.share_done(self.progress), metrics.in_short(num_steps))
            if self.progress.step % options.logging.interval == 0 or result.skipped:
                console.say_in_short(metrics.as_line(num_steps), metrics.for_terminal(num_steps, bar.time_left))
            if not self._is_finite(result, deal.batches):
                return "not finite"
            self.progress.require_few_dropped(options.data.max_dropped_share, self._length.rows_of_run(self.progress))
            is_save_due = self.ranks.is_main and self._saver.is_due(self.progress.step)
            asked = self.ranks.any_of(stop=self.stop_request.received, save=is_save_due)
            if asked["stop"] or not self._evaluate():
                return "preempted"
            self._export_on_the_way()
            with self._checkpoint_time:
                self._saver.look()
            if asked["save"] and self._saver.tried_step != self.progress.step:
                self._save(self._saver.save)
        return "completed" if self._evaluate() else "preempted"

    def _evaluate(self) -> bool:
        """Where it is due; False where the run was asked to stop before it was done."""
        step, best = self.progress.step, self._evaluator.best
        if not self._evaluator.is_due(step, is_last=self._length.is_done(self.progress)):
            return True
        self.ranks.at(f"the evaluation after step {step}")
        with self._evaluation_time:
            evaluation = self._evaluator.evaluate(self.model, step)
        if evaluation is None:
            return False
        self._logs.write_evaluation(evaluation)
        if self._evaluator.best is not best:
            self._keep_best(best)
        return True

    def _keep_best(self, before: Best | None) -> None:
        """Save what has just become the best; where that cannot be, the best stays the one before."""
        best = self._evaluator.best
        self._saver.best_step = self._evaluator.best_step
        if self._saver.saved_step != self.progress.step:
            self._save(self._saver.save)
            self._saver.settle()
        if self._saver.saved_step != self.progress.step:
            self._evaluator.best = before
            self._saver.best_step = self._evaluator.best_step
        elif best:
            self.directory.write_best(best.record())

    def _flops_of(self, batches: Sequence[Batch]) -> StepFlops:
        return step_flops(self.plan.llama_config, batches, self.config.model.activation_checkpointing)

    def _measures_untrained(self) -> bool:
        """Whether the next step does, the first of every interval."""
        interval = self.config.logging.untrained_roles_interval
        return interval is not None and self.progress.step % interval == 0

    def _is_finite(self, result: StepResult, batches: Sequence[Batch]) -> bool:
        """False after three steps in a row without a finite loss and gradient; each names its conversations."""
        if result.is_finite:
            self.progress.non_finite_in_a_row = 0
            return True
        self.progress.non_finite_in_a_row += 1
        own = [self.plan.preparation.location(key) for batch in batches for key in batch.pack.keys]
        places = [place for facts in self.ranks.gather({"places": own}) for place in facts["places"]]
        console.say(f"           no update was made. In the batch: {', '.join(places)}")
        return self.progress.non_finite_in_a_row < _MAX_NON_FINITE_IN_A_ROW

    # -- saving and looking ------------------------------------------------------------------------------------------

    def _is_healthy(self) -> bool:
        """Whether the weights are those of a checkpoint, which were proven, or can be proven now."""
        step = self.progress.step
        return self._saver.saved_step == step or self._health.is_proven(step)

    def _save(self, save: Callable[..., None]) -> None:
        """Save the state as of the last finished step, unless its weights are broken. The ledger goes first, so as to
        know every step of it.

        Raises DataError where the data was changed meanwhile: what was trained would not be what the state says.
        """
        self._data_watch.require_unchanged(self.plan)
        self.ranks.at(f"saving step {self.progress.step}")
        with self._checkpoint_time:
            if not self._is_healthy():
                self._warn_of_broken_weights("saved")
                return
            self._logs.sync_ledger()
            state = run_state(self.plan, self._data_state, self.progress, self._settings)
            state["evaluation"] = self._evaluator.state()
            save(self.progress.step, model=self.model, optimizer=self.optimizer, state=state)
        self._report_mix()

    def _save_before_failure(self) -> None:
        """Save the last whole step before a row that cannot be trained on ends the run, on all ranks alike."""
        try:
            self._save(self._saver.save_last)
            if self._saver.saved_step == self.progress.step:
                console.say(f"saved      step {self.progress.step}, the last one before the failure")
        except OSError as error:
            console.say(f"WARNING    step {self.progress.step} could not be saved: {error}")

    def _warn_of_broken_weights(self, what: str) -> None:
        console.say(
            f"WARNING    the weights after step {self.progress.step} give no finite loss and gradients, so they are "
            f"not {what}. Lower optimizer.learning_rate if that happens again"
        )

    def _report_mix(self) -> None:
        """What of each data set is to be trained, and what has been."""
        preparation = self.plan.preparation
        self.directory.write_mix_report(
            mix_report(self.config, preparation, self.plan.sample, self.plan.projection, self.progress)
            | {"fingerprints": self.plan.data_fingerprints}
        )

    def _export(self) -> Path:
        self.ranks.at("the export")
        folder = self.directory.hf(self.progress.step)
        export_model(
            self.plan,
            self.model,
            folder,
            progress=self.progress,
            settings=self._settings,
            run_folder=self.directory.folder,
        )
        if self.ranks.is_main:
            self.directory.point("latest", folder)
        return folder

    def _export_on_the_way(self, *, anew: bool = True) -> None:
        """Where it is due; not `anew`: only where it is not there. The run goes on without an export that cannot be
        written; the checkpoints hold the same weights."""
        interval, step = self.config.checkpoints.export_interval, self.progress.step
        if not interval or step == 0 or step % interval:
            return
        if not anew and self.ranks.any(self.ranks.is_main and self.directory.hf(step).exists()):
            return
        if not self._is_healthy():
            self._warn_of_broken_weights("exported")
            return
        try:
            with self._checkpoint_time:
                self._export()
        except OSError as error:
            console.say(f"WARNING    the export of step {step} could not be written: {error}")

    def dry_run(self) -> int:
        """See dry_run.py; nothing is written."""
        dry_run(self.plan)
        return EXIT_COMPLETED
