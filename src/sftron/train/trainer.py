"""The trainer: sets a run up and checks it, loads its weights, and trains to the result of the run."""

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from sftron.checkpoint.atomic import main_or_raise
from sftron.config import Config, dump_config
from sftron.data.loader import PackLoader
from sftron.data.types import DataError
from sftron.models.llama import LlamaForSFT
from sftron.train.build_data import make_loader
from sftron.train.build_model import load_model, make_optimizer
from sftron.train.build_run import build_run
from sftron.train.divergence import divergence
from sftron.train.evaluation import Evaluator
from sftron.train.exports.hub import HubPusher, require_hub
from sftron.train.health import require_finite
from sftron.train.logs import console
from sftron.train.logs.loss_chart import write_loss_chart
from sftron.train.logs.make_loggers import make_loggers, require_loggers
from sftron.train.logs.run_logs import RunLogs
from sftron.train.loop import TrainingLoop
from sftron.train.measured_memory import measure_step_memory
from sftron.train.outputs import RunExports
from sftron.train.preflight import require_one_folder
from sftron.train.progress import Progress
from sftron.train.ranks import start_ranks, with_mesh
from sftron.train.resume import Start, find_finished, find_start, load_start
from sftron.train.revisions import REVISIONS, find_commits, pin
from sftron.train.run import Settings
from sftron.train.run_directory import NOT_FINITE, RunDirectory, intact_records, read_result
from sftron.train.saving import Saver
from sftron.train.signals import StopRequest
from sftron.train.text import conclusion, description

EXIT_COMPLETED, EXIT_DIVERGED = 0, 3


class Trainer:
    """One training run.

    The constructor checks everything that can be checked without weights. Then call `build()` and `train()`, or
    `dry_run()`. The constructor and `build()` raise ValueError with a message for the user; `train()` raises DataError
    for a bad row. All ranks call the same methods.

    Args:
        plans: Whether only `dry_run()` is called, for which one process may stand for all ranks; see `start_ranks`.
    """

    model: LlamaForSFT
    optimizer: torch.optim.Optimizer
    loader: PackLoader
    """These three are there after `build()`, if there is anything left to train."""

    def __init__(self, config: Config, stop_request: StopRequest | None = None, *, plans: bool = False) -> None:
        self._started = time.perf_counter()
        parallelism = config.parallelism
        dp_shard = None if parallelism.dp_shard == "auto" else parallelism.dp_shard
        timeout_s = parallelism.timeout_seconds
        self.ranks = start_ranks(parallelism.dp_replicate, dp_shard, timeout_s, parallelism.context, plans=plans)
        console.start(self.ranks.is_main)
        self.stop_request = stop_request or StopRequest(prints=self.ranks.is_main)

        def ask_services() -> dict[str, str]:
            if not self.ranks.is_main:
                return {}
            require_loggers(config.logging)
            if config.hub.push_to is not None:
                require_hub(config.hub)
            return find_commits(config)

        self._commits = self.ranks.gather(self.ranks.all_or_raise(ask_services))[0]
        torch.manual_seed(config.general.seed)
        if config.general.deterministic:
            # cuBLAS reads this at its first matrix product. Without it, torch refuses every matrix product on a GPU.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        if config.general.deterministic == "layout":
            self.ranks = with_mesh(self.ranks)
            if self.ranks.device.type == "cpu":
                # Products are divided among threads, and torchrun gives each of several ranks one.
                torch.set_num_threads(1)
        self.config = pin(config, self._commits)
        self.directory = RunDirectory(self.config.run_dir, is_main=self.ranks.is_main)
        self.setup = build_run(self.config, self.ranks)
        self.progress = Progress.of(len(self.setup.data.preparation.datasets))
        self._evaluator = Evaluator(self.setup, lambda: self.ranks.any(self.stop_request.received))
        self._logs = RunLogs(self.setup, self.directory)
        self._pusher: HubPusher | None = None
        self._finished: str | None = None
        """The status in result.json of a run that has nothing left to do."""
        self._has_begun = False

    def run(self) -> int:
        """Calls `build()` and `train()`, for use in notebooks. Returns the exit status."""
        self.build()
        return self.train()

    # -- the start ---------------------------------------------------------------------------------------------------

    def build(self) -> None:
        """Locks the run directory and loads the weights, the optimizer and the checkpoint to resume from.

        If the run is complete and has nothing left to do, nothing is loaded and no file is touched.
        """
        if start := find_finished(self.setup, self.directory):
            self.progress = start.progress
            self._finished = str(read_result(self.directory.folder).get("status"))
            unused = [*map(str, start.changed_settings(self.setup)), *start.changes]
            conclusion.describe_finished(self.config, self._finished, self.progress.step, unused)
            return
        self.ranks.all_or_raise(self.directory.acquire)
        require_one_folder(self.directory.folder, self.ranks)
        self._logs.open_console()
        with self._failure_reported(ValueError):
            self.ranks.at("loading")
            self._build(find_start(self.setup, self.directory.checkpoints))

    def _build(self, start: Start) -> None:
        setup, config, directory, ranks = self.setup, self.config, self.directory, self.ranks
        settings = start.settings_now(setup)
        self._record_start(start, settings)
        self.model = ranks.all_or_raise(lambda: load_model(setup))
        self.optimizer = make_optimizer(config, self.model)
        # On a GPU, the padding is kept, because compilers and allocators work best with one shape.
        # On a CPU, it would only waste computation.
        on_gpu = ranks.device.type == "cuda"
        options = {"keep_tail": on_gpu, "pin_memory": on_gpu, "context": ranks.context}
        self.loader = make_loader(config, setup.data.dataset, **options)
        self._saver = Saver(
            directory.checkpoints,
            interval=config.checkpoints.interval,
            keep=config.checkpoints.keep_last,
            ranks=ranks,
            in_background=config.checkpoints.asynchronous,
        )
        load_start(start, setup, model=self.model, optimizer=self.optimizer, loader=self.loader)
        self.progress = start.progress
        if start.state:
            self._evaluator.resume(start.state["evaluation"], directory.checkpoints)
            self._saver.resume_from(self.progress.step, best_step=self._evaluator.best_step)
        require_finite(self.model, ranks, str(start.folder or f"model.path: {setup.model.folder}"))
        if config.hub.push_to is not None and ranks.is_main:
            self._pusher = HubPusher(config.hub, directory.folder)
        num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self._logs.loggers = make_loggers(setup, directory, start, num_parameters=num_parameters)
        self._loop = TrainingLoop(
            setup=setup,
            directory=directory,
            model=self.model,
            optimizer=self.optimizer,
            loader=self.loader,
            progress=self.progress,
            settings=settings,
            evaluator=self._evaluator,
            saver=self._saver,
            exports=RunExports(setup, directory, self.model, self.progress, settings, self._pusher),
            logs=self._logs,
            stop_request=self.stop_request,
            started=self._started,
        )
        self._loop.report_mix()

    def _record_start(self, start: Start, settings: Settings) -> None:
        """Writes what is known before the weights are loaded, and prints it."""
        setup, directory, is_done = self.setup, self.directory, start.is_done(self.setup)
        if not is_done or not (directory.folder / "config.yaml").exists():
            directory.write("config.yaml", settings.as_comment() + dump_config(setup.resolved_config))
        if self._commits:
            directory.write(REVISIONS, self._commits)
        self._has_begun = True
        directory.write_result("running")
        description.describe_settings(start.changed_settings(setup), is_done=is_done)
        description.describe_run(setup, directory)

    def dry_run(self) -> int:
        """Prints the description of the run, and the peak memory of a training step on maximal batches.

        No weight changes, and no run directory is written. One process that stands for several ranks reads no weights
        and measures nothing. Raises ValueError if the weights give no finite loss.
        """
        description.describe_run(self.setup, None)
        measured = None if self.ranks.is_planned else measure_step_memory(self.setup)
        description.describe_dry_run(self.setup, measured)
        return EXIT_COMPLETED

    # -- the whole run -----------------------------------------------------------------------------------------------

    def train(self) -> int:
        """Trains until the run is complete or a stop is requested, and writes the outcome to result.json.

        Returns the exit status.
        """
        if self._finished is not None:
            return _exit_status(self._finished)
        status = "failed"
        try:
            with self.stop_request.listening():
                try:
                    with self._failure_reported(DataError):
                        status = self._conclude(self._train())
                finally:  # not within _failure_reported: the result of the run is known
                    if self._pusher:
                        found = self._pusher.finish(lambda: status != "completed" or self.stop_request.received)
                        self.directory.add_to_result(hub=found)
        finally:
            self._saver.close()
            self._logs.close("failed" if status == NOT_FINITE else status)  # after the last save
        return _exit_status(status)

    def _train(self) -> str:
        """Opens the logs and trains. Returns "completed", "preempted" or NOT_FINITE."""
        loop = self._loop
        # This forks the loader's workers, so it comes before evaluation, trackers and saves start threads.
        batches = iter(self.loader)
        self._logs.open(step=self.progress.step, evaluated_step=self._evaluator.evaluated_step)
        if self._pusher:
            self._pusher.start()
        try:
            status = loop.train(batches)
            is_whole = status == "preempted" or not self.progress.non_finite_in_a_row
            return status if is_whole and loop.is_healthy() else NOT_FINITE
        except DataError:
            loop.save_before_failure()
            raise
        finally:
            console.hide_progress()
            loop.report_mix()

    def _conclude(self, status: str) -> str:
        """Saves, exports and reports. Returns "completed", "diverged", "preempted" or NOT_FINITE."""
        directory, loop, step = self.directory, self._loop, self.progress.step
        if status == NOT_FINITE:
            self._saver.wait()
            directory.write_result("failed", step=step, error=NOT_FINITE)
            self._draw()
            conclusion.conclude_not_finite(step, self._saver.saved_step)
            return status
        problem = exported = diverged = None
        if status == "completed":
            num_tokens = len(self.setup.data.chat_tokenizer.tokenizer)
            records = directory.metrics  # those before a resume included
            diverged = main_or_raise(self.ranks, lambda: divergence(intact_records(records), num_tokens))
        try:
            loop.save(self._saver.save_last)
        except OSError as error:
            problem = error  # raised after the export, which may still save the weights
        if status == "completed" and self.config.checkpoints.export_hf:
            if problem is None and loop.is_stop_requested():
                status = "preempted"  # training is complete and saved; the next start exports it
            else:
                exported = loop.exports.export_at_end(self._evaluator.best, is_pushed=diverged is None)
        if problem is not None:
            raise problem
        facts: dict[str, Any] = {}
        if status == "completed":
            if reason := loop.reason_of_early_end():
                facts["reason"] = reason
            if diverged:
                status, facts["error"] = "diverged", diverged
        directory.write_result(status, step=step, exported=exported and str(exported), **facts)
        if status != "preempted":
            before, after = (self._logs.answers(each) for each in (0, step))
            conclusion.show_answers(self.setup.data.questions, before, after)
        chart = self._draw()
        conclusion.conclude(
            status, directory.folder, step, exported=exported, chart=chart, divergence=facts.get("error")
        )
        return status

    def _draw(self) -> Path | None:
        return write_loss_chart(self.directory, self.config.general.run_name) if self.ranks.is_main else None

    def _failure_reported(self, refusal: type[ValueError]) -> AbstractContextManager[None]:
        """Writes the first failure of any rank to result.json.

        If this start was refused before it changed anything, the result.json of an earlier start is kept.
        """

        def report(failure: str) -> None:
            if self._has_begun or not read_result(self.directory.folder):
                self.directory.write_result("failed", step=self.progress.step, error=failure)

        return self.ranks.failure_reported(report, refusal=refusal)


def _exit_status(status: str) -> int:
    return EXIT_DIVERGED if status in (NOT_FINITE, "diverged") else EXIT_COMPLETED
