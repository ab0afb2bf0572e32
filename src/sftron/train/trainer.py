"""A run on one page: its dimensions, data and model, its optimizer, what it resumes, and its steps to the result."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from sftron.checkpoint.atomic import main_or_raise
from sftron.checkpoint.frozen_files import FrozenWeightsError
from sftron.config import Config, dump_config
from sftron.data.loader import PackLoader, death_of_worker
from sftron.data.types import Batch, DataError
from sftron.kernels.device import is_gpu
from sftron.models.llama import LlamaForSFT
from sftron.models.sharding import mesh_of_one_rank
from sftron.train.build_data import make_loader, require_unchanged
from sftron.train.build_model import load_run_model, make_optimizer
from sftron.train.build_run import build_run, require_one_folder
from sftron.train.divergence import divergence
from sftron.train.dry_run import measure_step_memory
from sftron.train.evaluation import Evaluator
from sftron.train.exports import RunExports
from sftron.train.extension import (
    NO_EXTENSION,
    Callback,
    ComputeMetrics,
    Events,
    Extension,
    ExtensionError,
    MakeOptimizer,
    load_extension,
)
from sftron.train.hub import require_hub
from sftron.train.logs import console
from sftron.train.logs.run_logs import RunLogs, make_loggers, require_loggers
from sftron.train.loop import Steps
from sftron.train.objective import Objective
from sftron.train.places import REVISIONS
from sftron.train.progress import Progress
from sftron.train.ranks import Ranks, start_ranks
from sftron.train.resume import Start, find_finished, find_start, load_start, require_whole_epochs, run_state
from sftron.train.run import Settings, Setup
from sftron.train.run_directory import NOT_FINITE, RunDirectory, intact_records, read_result
from sftron.train.sample import mix_report
from sftron.train.saving import Saver
from sftron.train.signals import StopRequest
from sftron.train.step import require_finite
from sftron.train.text import conclusion, description

EXIT_COMPLETED, EXIT_DIVERGED, EXIT_FORGOT = 0, 3, 4


def open_trainer(
    config: Config,
    stop_request: StopRequest | None = None,
    *,
    objective: Objective | None = None,
    data: Any = None,
    callbacks: Sequence[Callback] = (),
    optimizer: MakeOptimizer | None = None,
    compute_metrics: ComputeMetrics | None = None,
) -> Trainer | CompletedRun:
    """Opens a run: checks it, locks its directory, and loads its weights, its optimizer and what it resumes.

    Every rank calls this. If the run is complete and has nothing left to do, this loads nothing and touches no file.

    Args:
        objective: What is minimized; by default `TokenLoss`.
        data: The rows of the first data set, in place of its path: a sequence, or a `datasets.Dataset`.
        callbacks: What is called at the events of the run.
        optimizer: Makes the optimizer from the named parameters that are trained; by default, that of the section
            `optimizer`, whose schedule and clipping hold for it as well.
        compute_metrics: Computes numbers from the answers to `evaluation.prompts`.

    Raises:
        ValueError: On all ranks, with a message for the user.
    """
    started = time.perf_counter()
    # Dimensions, data and model. There are no weights yet.
    given = Extension(
        objective=objective, data=data, callbacks=callbacks, optimizer=optimizer, compute_metrics=compute_metrics
    )
    setup = open_setup(config, extension=given)
    config, ranks = setup.config, setup.ranks
    stop_request = stop_request or StopRequest(prints=ranks.is_main)
    directory = RunDirectory(config.run_dir, is_main=ranks.is_main)
    if finished := find_finished(setup, directory):
        return _completed_run(setup, directory, finished)
    ranks.all_or_raise(directory.acquire)
    require_one_folder(directory.folder, ranks)
    if (own := setup.resolved_config.extend) is not None:
        directory.extended = f"{own.setup}, source {own.source}"
    logs = RunLogs(setup, directory)
    logs.open_console()
    has_begun, progress = False, Progress.of(len(setup.data.preparation.datasets))

    def report(failure: str) -> None:
        # If this start is refused before it changes anything, the result.json of an earlier start is kept.
        if has_begun or not read_result(directory.folder):
            directory.write_result("failed", step=progress.step, error=failure)

    with ranks.failure_reported(report, refusal=ValueError):
        ranks.at("loading")
        start = find_start(setup, directory.checkpoints)
        settings = _write_settings(setup, directory, start)
        has_begun = True
        directory.write_result("running")
        description.describe_settings(start.changed_settings(setup), is_done=start.is_done(setup))
        description.describe_run(setup, directory)
        # Weights, optimizer and loader
        model = ranks.all_or_raise(lambda: load_run_model(setup, directory.folder))
        made_optimizer = make_optimizer(config, model, setup.extension)
        # On a GPU, the padding is kept, because compilers and allocators work best with one shape.
        # On a CPU, it would only waste computation.
        on_gpu = is_gpu(ranks.device)
        loader = make_loader(config, setup.data.dataset, keep_tail=on_gpu, pin_memory=on_gpu, context=ranks.context)
        # Resume
        load_start(start, setup, model=model, optimizer=made_optimizer, loader=loader)
        progress = start.progress
        trainer = Trainer(
            setup,
            directory,
            logs,
            stop_request,
            start,
            settings,
            model=model,
            optimizer=made_optimizer,
            loader=loader,
            started=started,
        )
        require_finite(model, ranks, str(start.folder or f"model.path: {setup.model.folder}"))
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        logs.loggers = make_loggers(setup, directory, start, num_parameters=num_parameters)
        trainer.report_mix()
    return trainer


def open_setup(config: Config, *, plans: bool = False, extension: Extension = NO_EXTENSION) -> Setup:
    """Opens and checks everything in a run except its weights: its dimensions, its data and its model.

    Every rank calls this.

    Args:
        plans: Whether only `dry_run` follows, for which one process may stand for all ranks; see `start_ranks`.
        extension: The parts that a user's code gives; by default, those of `extend.setup`.

    Raises:
        ValueError: On all ranks, with a message for the user; DataError is a subclass.
    """
    parallelism = config.parallelism
    dp_shard = None if parallelism.dp_shard == "auto" else parallelism.dp_shard
    timeout_s = parallelism.timeout_seconds
    ranks = start_ranks(parallelism.dp_replicate, dp_shard, timeout_s, parallelism.context, plans=plans)
    console.start(ranks.is_main)
    ranks.all_or_raise(lambda: _require_services(config) if ranks.is_main else None)
    torch.manual_seed(config.general.seed)
    if extension is NO_EXTENSION or not extension.parts:
        extension = ranks.all_or_raise(lambda: load_extension(config.extend, config.model.path))
    elif config.extend is not None and not config.extend.was_given_in_python:
        raise ValueError("extend: the configuration and the arguments of open_trainer both give parts; use one")
    return build_run(config, _deterministic(config, ranks), extension)


def dry_run(setup: Setup) -> int:
    """Prints the description of the run, and the peak memory of a training step on maximal batches.

    No weight changes, and no run directory is written. One process that stands for several ranks reads no weights
    and measures nothing. Returns the exit status.

    Raises:
        ValueError: The weights give no finite loss.
    """
    description.describe_run(setup, None)
    measured = None if setup.ranks.is_planned else measure_step_memory(setup)
    description.describe_dry_run(setup, measured)
    return EXIT_COMPLETED


def _require_services(config: Config) -> None:
    require_loggers(config.logging)
    if config.hub.push_to is not None:
        require_hub(config.hub)


def _deterministic(config: Config, ranks: Ranks) -> Ranks:
    """Sets torch to what general.deterministic asks for. Returns the ranks, with a mesh if any layout is to compute the
    same. Raises ValueError."""
    if config.general.deterministic:
        # cuBLAS reads this at its first matrix product. Without it, torch refuses every matrix product on a GPU.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # It finds reads of new memory in tests, and writes each activation and gradient once more.
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    if config.general.deterministic != "layout":
        return ranks
    if 1 < ranks.world_size == config.parallelism.dp_replicate:
        raise ValueError(
            f"parallelism.dp_replicate: {config.parallelism.dp_replicate} copies, one on each rank, but FSDP2 "
            "adds their gradients as floats, which breaks general.deterministic: layout: set dp_replicate to 1"
        )
    if ranks.device.type == "cpu":
        # Products are divided among threads, and torchrun gives each of several ranks one.
        torch.set_num_threads(1)
    return replace(ranks, mesh=ranks.mesh or mesh_of_one_rank(ranks.device))


def _write_settings(setup: Setup, directory: RunDirectory, start: Start) -> Settings:
    """Writes the configuration and the commits of the run. Returns its settings from this start on."""
    settings = start.settings_now(setup)
    if not start.is_done(setup) or not (directory.folder / "config.yaml").exists():
        directory.write("config.yaml", settings.as_comment() + dump_config(setup.resolved_config))
    if setup.commits:
        directory.write(REVISIONS, dict(setup.commits))
    return settings


@dataclass(frozen=True, slots=True)
class CompletedRun:
    """A run that is complete and has nothing left to do."""

    config: Config
    directory: RunDirectory
    progress: Progress
    status: str
    """The status in result.json."""

    def train(self) -> int:
        """Returns the exit status, as the trainer of the run has done."""
        return _exit_status(self.status)


def _completed_run(setup: Setup, directory: RunDirectory, start: Start) -> CompletedRun:
    status = str(read_result(directory.folder).get("status"))
    unused = [*map(str, start.changed_settings(setup)), *start.changes]
    conclusion.describe_finished(setup.config, status, start.progress.step, unused)
    return CompletedRun(setup.config, directory, start.progress, status)


class Trainer:
    """Trains a run that `open_trainer` has opened, to its result. All ranks call the same methods.

    Attributes:
        model, optimizer, loader: What the run trains, updates and reads.
        progress: The counts of the run so far.
        directory: The run directory, which is locked.
        stop_request: If it is received, the run saves and ends after its step.
    """

    def __init__(
        self,
        setup: Setup,
        directory: RunDirectory,
        logs: RunLogs,
        stop_request: StopRequest,
        start: Start,
        settings: Settings,
        *,
        model: LlamaForSFT,
        optimizer: torch.optim.Optimizer,
        loader: PackLoader,
        started: float,
    ) -> None:
        """`start` is loaded into model, optimizer and loader; `started` is the `time.perf_counter()` of the start."""
        self.setup, self.config, self.ranks = setup, setup.config, setup.ranks
        self.directory, self.stop_request, self.progress = directory, stop_request, start.progress
        self.model, self.optimizer, self.loader = model, optimizer, loader
        self._settings, self._logs = settings, logs
        self._events = logs.events = Events(setup.extension.callbacks, is_main=setup.ranks.is_main)
        self._evaluator = Evaluator(setup.config, setup.data, setup.ranks, self._is_stop_requested, setup.extension)
        self._saver = Saver(
            setup.ranks,
            setup.config.checkpoints,
            directory,
            model,
            optimizer,
            loss=setup.model.loss,
            state=self._state,
            require_unchanged=partial(require_unchanged, setup),
            on_saved=lambda step: self._events.call("on_save", step, directory.checkpoints / f"step-{step}"),
        )
        if start.state:
            self._evaluator.resume(start.state["evaluation"], directory.checkpoints)
            self._saver.resume_from(self.progress.step, self._evaluator.best)
        self._exports = RunExports(setup, directory, model, self.progress, settings, self._saver.is_healthy)
        self._steps = Steps(setup, model, optimizer, loader, self.progress, settings, logs, started=started)

    def train(self) -> int:
        """Trains until the run is complete or a stop is requested, and writes the outcome to result.json.

        Returns the exit status. Raises DataError for a bad row.
        """
        status, has_ended = "failed", False
        try:
            with self.stop_request.listening():
                try:
                    with self.ranks.failure_reported(self._report, refusal=DataError):
                        status = self._conclude(self._train())
                        self._events.call("on_end", "failed" if status == NOT_FINITE else status)
                        has_ended = True
                        self._require_callbacks()
                finally:  # not within failure_reported: the result of the run is known
                    self._exports.finish(lambda: status != "completed" or self.stop_request.received)
        finally:
            if not has_ended:
                self._events.call("on_end", "failed")
            if self.model.stream:
                self.model.stream.close()
            self._saver.close()
            self._logs.close("failed" if status == NOT_FINITE else status)  # after the last save
        return _exit_status(status)

    def _train(self) -> str:
        """Opens the logs and trains. Returns "completed", "preempted" or NOT_FINITE."""
        # This forks the loader's workers, so it comes before evaluation, trackers and saves start threads.
        batches = iter(self.loader)
        self._logs.open(step=self.progress.step, evaluated_step=self._evaluator.evaluated_step)
        self._exports.start()
        self._events.call("on_start", self.progress.step, self.directory.folder)
        try:
            status = self._make_steps(batches)
            is_whole = status == "preempted" or not self.progress.non_finite_in_a_row
            return status if is_whole and self._saver.is_healthy(self.progress.step) else NOT_FINITE
        except FrozenWeightsError:
            if self.ranks.world_size == 1:  # other ranks may still be in the step
                self._saver.save_before_failure(self.progress.step)
            raise
        except (DataError, ExtensionError) as error:
            if isinstance(error, DataError) or error.may_save:
                self._saver.save_before_failure(self.progress.step)
            raise
        except RuntimeError as error:
            if death := death_of_worker(error):
                raise death from None
            raise
        finally:
            console.hide_progress()
            self.report_mix()

    def _make_steps(self, batches: Iterator[Batch]) -> str:
        progress = self.progress
        if self._is_stop_requested() or not self._evaluate():
            return "preempted"
        if not self._is_done():
            self._exports.export_on_the_way(only_if_missing=True)  # the run may have ended before this export
        while not self._is_done():
            if self.setup.extension.changes_model:
                self._events.call("on_before_step", progress.step + 1, self.model, on_all_ranks=True)
                self._require_callbacks(may_save=False)
            made = self._steps.next(batches)
            if made is None:
                continue
            self._saver.note(*made)
            if not self._steps.is_finite(*made):
                return NOT_FINITE
            progress.require_few_dropped(self.config.data.max_dropped_share, self.setup.length.rows_of_run(progress))
            is_save_due = self.ranks.is_main and self._saver.is_due(progress.step)
            has_failed = self._events.error is not None
            wanted = self.ranks.any_of(stop=self.stop_request.received, save=is_save_due, callback=has_failed)
            if wanted["callback"]:
                self._require_callbacks()
            if wanted["stop"] or not self._evaluate():
                return "preempted"
            with self._logs.timed("checkpoint"):
                if not self._evaluator.exceeded:
                    self._exports.export_on_the_way()
                self._saver.poll()
                if wanted["save"] and self._saver.tried_step != progress.step:
                    self._saver.save(progress.step)
        if not self._evaluate():
            return "preempted"
        self._require_callbacks()
        if reason := self._reason_of_early_end():
            console.write(f"ends early {reason}")
        else:
            require_whole_epochs(self.setup, self._steps.data_state, progress)
        return "completed"

    def _conclude(self, status: str) -> str:
        """Saves, exports and reports. Returns "completed", "diverged", "forgot", "preempted" or NOT_FINITE."""
        directory, step, exceeded = self.directory, self.progress.step, self._evaluator.exceeded
        if status == NOT_FINITE:
            self._saver.wait()
            directory.write_result("failed", step=step, error=NOT_FINITE)
            conclusion.conclude_not_finite(directory, step, self._saver.saved_step)
            return status
        problem = exported = diverged = None
        if status == "completed":
            num_tokens = len(self.setup.data.chat_tokenizer.tokenizer)
            records = directory.metrics  # those before a resume included
            diverged = main_or_raise(self.ranks, lambda: divergence(intact_records(records), num_tokens))
        try:
            self._saver.save(step, is_last=True)
            main_or_raise(self.ranks, self._logs.require_files)
        except OSError as error:
            problem = error  # raised after the export, which may still save the weights
        if status == "completed" and self.config.checkpoints.export_hf:
            if problem is None and self._is_stop_requested():
                status = "preempted"  # training is complete and saved; the next start exports it
            else:
                is_good = not (diverged or exceeded)
                exported = self._exports.export_at_end(
                    self._evaluator.best, is_pushed=is_good, has_forgotten=bool(exceeded)
                )
        if problem is not None:
            raise problem
        facts: dict[str, Any] = {}
        if status == "completed":
            if reason := self._reason_of_early_end():
                facts["reason"] = reason
            if kept := self._evaluator.kept_facts:
                facts["kept"] = kept
            if exceeded:
                status, facts["error"] = "forgot", "; ".join(exceeded)
            if diverged:
                status, facts["error"] = "diverged", diverged
        directory.write_result(status, step=step, exported=exported and str(exported), **facts)
        if status != "preempted":
            before, after = (self._logs.answers(each) for each in (0, step))
            conclusion.show_answers(self.setup.data.questions, before, after)
        conclusion.conclude(status, directory, step, exported=exported, error=facts.get("error"))
        return status

    def _require_callbacks(self, *, may_save: bool = True) -> None:
        """Raises ExtensionError on all ranks if a callback has raised on any. Every rank calls this."""
        if not self.setup.extension.callbacks:
            return
        everyone = self.ranks.gather({"problem": self._events.problem})
        if problem := next((facts["problem"] for facts in everyone if facts["problem"]), ""):
            saved = "The last finished step is saved" if may_save else "The next start reads the newest checkpoint"
            what = f"{problem}. {saved}" if self.progress.step else problem
            raise ExtensionError(what, may_save=may_save) from self._events.error

    def _is_done(self) -> bool:
        is_early = self._evaluator.is_patience_over or bool(self._evaluator.exceeded)
        return self.setup.length.is_done(self.progress) or is_early

    def _reason_of_early_end(self) -> str | None:
        """Returns why the run is done before its full length; None if it has its full length."""
        return None if self.setup.length.is_done(self.progress) else self._evaluator.reason_of_end

    def _is_stop_requested(self) -> bool:
        return self.ranks.any(self.stop_request.received)

    def _report(self, failure: str) -> None:
        self.directory.write_result("failed", step=self.progress.step, error=failure)

    def _evaluate(self) -> bool:
        """Evaluates if an evaluation is due. Returns False if a stop was requested before it was complete."""
        step, evaluator, best = self.progress.step, self._evaluator, self._evaluator.best
        if not evaluator.is_due(step, is_last=self.setup.length.is_done(self.progress)):
            return True
        self.ranks.at(f"the evaluation after step {step}")
        with self._logs.timed("evaluation"):
            evaluation = evaluator.evaluate(self.model, step)
        if evaluation is None:
            return False
        self._logs.write_evaluation(evaluation)
        if evaluator.best_step == step:
            with self._logs.timed("checkpoint"):
                self._saver.save_best(step, evaluator, best)
        return True

    def _state(self) -> dict[str, Any]:
        """Returns the run state as of the last finished step, and flushes the logs first. Every rank calls this."""
        self._logs.sync_steps()
        self.report_mix()
        state = run_state(self.setup, self._steps.data_state, self.progress, self._settings)
        return state | {"evaluation": self._evaluator.state()}

    def report_mix(self) -> None:
        """Writes mix_report.json: the planned and the trained amount of each data set."""
        data = self.setup.data
        report = mix_report(self.config, data.preparation, data.sample, data.projection, self.progress)
        self.directory.write("mix_report.json", report | {"fingerprints": data.fingerprints})


def _exit_status(status: str) -> int:
    return {NOT_FINITE: EXIT_DIVERGED, "diverged": EXIT_DIVERGED, "forgot": EXIT_FORGOT}.get(status, EXIT_COMPLETED)
