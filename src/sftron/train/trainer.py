"""The trainer: sets a run up and checks it, loads its weights, and trains."""

from __future__ import annotations

import json
import os
import time
from contextlib import AbstractContextManager

import torch

from sftron.config import Config, dump_config
from sftron.data.types import DataError
from sftron.models.loss import loss_function
from sftron.train.evaluation import Evaluator
from sftron.train.exports.hub import HubPusher, require_hub
from sftron.train.logs import console
from sftron.train.logs.make_loggers import make_loggers, require_loggers
from sftron.train.logs.run_logs import RunLogs
from sftron.train.loop import TrainingLoop
from sftron.train.optimizer import set_learning_rate
from sftron.train.outputs import RunOutputs, TrainingState
from sftron.train.progress import DataSetCount, Progress, RunLength
from sftron.train.ranks import start_ranks
from sftron.train.resume import Start, changed_settings, find_finished, find_start, load_start, settings_of
from sftron.train.run_directory import NOT_FINITE, RunDirectory, read_result
from sftron.train.saving import Saver
from sftron.train.settings import Settings
from sftron.train.signals import StopRequest
from sftron.train.start import description
from sftron.train.start.measured_memory import peak_of_step, resident_memory
from sftron.train.start.preflight import Health, require_finite, require_one_folder
from sftron.train.start.revisions import REVISIONS, find_commits, pin
from sftron.train.start.run_data import DataWatch, maximal_batch, measure_rows_once
from sftron.train.start.setup import load_model, make_loader, make_optimizer, set_up
from sftron.train.step import loss_of

EXIT_COMPLETED, EXIT_DIVERGED = 0, 3


class Trainer:
    """One training run.

    The constructor checks everything that can be checked without weights. Then call `build()` and `train()`, or
    `dry_run()`. The constructor and `build()` raise ValueError with a message for the user; `train()` raises DataError
    for a bad row.
    """

    def __init__(self, config: Config, stop_request: StopRequest | None = None) -> None:
        self._started = time.perf_counter()
        self.config = config
        parallelism = config.parallelism
        dp_shard = None if parallelism.dp_shard == "auto" else parallelism.dp_shard
        self.ranks = start_ranks(parallelism.dp_replicate, dp_shard, parallelism.timeout_seconds)
        console.start(self.ranks.is_main)
        self.stop_request = stop_request or StopRequest(prints=self.ranks.is_main)
        self.ranks.all_or_raise(lambda: self._require_services() if self.ranks.is_main else None)
        torch.manual_seed(config.general.seed)
        if config.general.deterministic:
            # cuBLAS reads this at its first matrix product. Without it, torch refuses every matrix product on a GPU.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        commits = self.ranks.all_or_raise(lambda: find_commits(self.config) if self.ranks.is_main else {})
        self._commits = self.ranks.gather(commits)[0]
        self.config = config = pin(config, self._commits)
        self.directory = RunDirectory(config.run_dir, is_main=self.ranks.is_main)
        self._data_watch = DataWatch(config)
        self.setup = set_up(config, self.ranks)
        self._new_row_lengths = measure_rows_once(self.setup, self.directory.row_lengths)
        self._length = RunLength(config, self.setup.data.preparation.num_rows)
        self._logs = RunLogs(self.setup, self.directory)
        self._evaluator = Evaluator(self.setup, lambda: self.ranks.any(self.stop_request.received))
        self.progress = Progress([DataSetCount() for _ in self.setup.data.preparation.datasets])
        self._finished: str | None = None
        self._has_begun = False

    def _require_services(self) -> None:
        require_loggers(self.config.logging)
        require_hub(self.config.hub)

    def run(self) -> int:
        """Calls `build()` and `train()`, for use in notebooks. Returns the exit status."""
        self.build()
        return self.train()

    # -- the start ---------------------------------------------------------------------------------------------------

    def build(self) -> None:
        """Locks the run directory and loads the weights, the optimizer and the checkpoint to resume from.

        If the run is complete and has nothing left to do, nothing is loaded and no file is touched.
        """
        if finished := find_finished(self.setup, self.directory, self._length):
            start, self.progress = finished
            self._finished = str(read_result(self.directory.folder).get("status"))
            unused = [*map(str, changed_settings(self.setup, start)), *start.changes]
            description.describe_finished(self.config, self._finished, self.progress.step, unused)
            return
        self.ranks.all_or_raise(self.directory.acquire)
        require_one_folder(self.directory.folder, self.ranks)
        self._logs.open_console()
        with self._failure_reported(ValueError):
            self.ranks.at("loading")
            self._build(find_start(self.setup, self.directory.checkpoints))

    def _build(self, start: Start | None) -> None:
        setup, directory, checkpoints = self.setup, self.directory, self.config.checkpoints
        settings = self._record_start(start)
        self.model = self.ranks.all_or_raise(lambda: load_model(setup))
        self.optimizer = make_optimizer(self.config, self.model)
        self.loader = make_loader(setup)
        saver = Saver(
            directory.checkpoints,
            interval=checkpoints.interval,
            keep=checkpoints.keep_last,
            ranks=self.ranks,
            in_background=checkpoints.asynchronous,
        )
        if start is not None:
            progress = load_start(start, setup, model=self.model, optimizer=self.optimizer, loader=self.loader)
            if progress is not None:
                self.progress = progress
                self._evaluator.resume(start.state, directory.checkpoints)
                saver.resume_from(progress.step, best_step=self._evaluator.best_step)
        origin = f"model.path: {setup.model.folder}" if start is None else str(start.folder)
        require_finite(self.model, self.ranks, origin)
        self._state = TrainingState(
            model=self.model,
            optimizer=self.optimizer,
            loader=self.loader,
            progress=self.progress,
            settings=settings,
            data_state=self.loader.state_dict(),
        )
        is_pushed = self.config.hub.push_to is not None and self.ranks.is_main
        self._outputs = RunOutputs(
            setup,
            directory,
            self._state,
            pusher=HubPusher(self.config.hub, directory.folder) if is_pushed else None,
            saver=saver,
            evaluator=self._evaluator,
            health=Health(self.model, self.ranks, loss_function(setup.model.loss)),
            logs=self._logs,
            data_watch=self._data_watch,
        )
        num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self._logs.loggers = make_loggers(setup, directory, start, num_parameters=num_parameters)
        self._outputs.report_mix()

    def _record_start(self, start: Start | None) -> Settings:
        """Writes what is known before the weights are loaded, prints it, and returns the settings of the run."""
        setup, directory = self.setup, self.directory
        is_done = start is not None and start.is_done(setup, self._length)
        settings = settings_of(setup, start, is_done=is_done)
        if not is_done or not (directory.folder / "config.yaml").exists():
            directory.write("config.yaml", settings.as_comment() + dump_config(setup.resolved_config))
        if self._commits:
            directory.write(REVISIONS, self._commits)
        if self._new_row_lengths is not None:
            directory.write(directory.row_lengths.name, json.dumps(self._new_row_lengths, separators=(",", ":")) + "\n")
        self._has_begun = True
        directory.write_result("running")
        description.describe_settings(changed_settings(setup, start), is_done=is_done)
        description.describe_run(setup, directory)
        return settings

    def dry_run(self) -> int:
        """Prints the description of the run, and the peak memory of a training step on maximal batches.

        No weight changes, and no run directory is written. Raises ValueError if the weights give no finite loss.
        """
        setup, ranks = self.setup, self.ranks
        description.describe_run(setup, None)
        baseline = resident_memory()
        console.write("dry run    loading the weights")
        model = ranks.all_or_raise(lambda: load_model(setup))
        require_finite(model, ranks, f"model.path: {setup.model.folder}")
        optimizer, batch = make_optimizer(self.config, model), maximal_batch(self.config)
        set_learning_rate(optimizer, 0.0)
        tokens = f"{setup.data.dataset.token_budget:,} tokens"
        console.write(f"dry run    making a training step on two batches of {tokens}, to measure its memory")
        with peak_of_step(model, ranks.device, baseline) as peak:
            loss = loss_of(model, batch, loss_function(setup.model.loss))
            if not torch.isfinite(loss):
                problem = f"the loss of a batch of one token is {loss.item()}"
                raise ValueError(f"{problem}: {setup.model.folder} holds broken weights")
            loss.backward()
            optimizer.step()
            if self.config.tokens.batch_accumulation_per_replica == 1:
                model.zero_grad(set_to_none=True)
            # With the optimizer's state, which the first step has made.
            loss_of(model, batch, loss_function(setup.model.loss)).backward()
        description.describe_dry_run(setup, peak())
        return EXIT_COMPLETED

    # -- training ----------------------------------------------------------------------------------------------------

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
                        loop = TrainingLoop(
                            self.setup,
                            self._state,
                            self._outputs,
                            self._logs,
                            length=self._length,
                            stop_request=self.stop_request,
                            started=self._started,
                        )
                        status = loop.run(self.directory)
                finally:  # not within _failure_reported: the result of the run is known
                    self._finish_pushes(status)
        finally:
            self._outputs.saver.close()
            self._logs.close("failed" if status == NOT_FINITE else status)  # after the last save
        return _exit_status(status)

    def _finish_pushes(self, status: str) -> None:
        """Waits for the pushes, and adds their outcome to result.json."""
        if pusher := self._outputs.pusher:
            found = pusher.finish(lambda: status != "completed" or self.stop_request.received)
            self.directory.add_to_result(hub=found)

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
