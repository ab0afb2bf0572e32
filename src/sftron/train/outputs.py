"""The outputs of a run: evaluations, checkpoints, exports and the mix report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sftron.checkpoint.atomic import all_or_raise, main_or_raise
from sftron.checkpoint.convert import read_trained_adapter
from sftron.data.loader import PackLoader
from sftron.models.adapters import AdapterStart, LoraSpec
from sftron.models.llama import LlamaForSFT
from sftron.models.sharding import whole
from sftron.train.best import Best
from sftron.train.divergence import divergence
from sftron.train.evaluation import Evaluator
from sftron.train.exports.exporter import Exporter, export_checkpoint
from sftron.train.exports.hub import HubPusher
from sftron.train.logs import console
from sftron.train.logs.run_logs import RunLogs
from sftron.train.metrics import Stopwatch
from sftron.train.progress import Progress
from sftron.train.resume import run_facts, run_state
from sftron.train.run import Setup
from sftron.train.run_directory import RunDirectory, intact_records
from sftron.train.saving import Saver
from sftron.train.settings import Settings
from sftron.train.start.lora import adapter_tensors, logits_of, texts_of
from sftron.train.start.preflight import Health
from sftron.train.start.run_data import DataWatch
from sftron.train.start.sample import mix_report
from sftron.train.start.setup import load_whole_model


@dataclass(slots=True, kw_only=True, eq=False)
class TrainingState:
    """Everything that training changes."""

    model: LlamaForSFT
    optimizer: torch.optim.Optimizer
    loader: PackLoader
    progress: Progress
    settings: Settings
    data_state: Mapping[str, Any]
    """The loader's state after the last finished step."""


class RunOutputs:
    """Evaluates, saves, exports and reports the state of a run. All ranks call the same methods at the same step.

    Attributes:
        divergence: A sentence on how the losses of the run diverged; None if they did not, and before `judge`.
    """

    def __init__(
        self,
        setup: Setup,
        directory: RunDirectory,
        state: TrainingState,
        *,
        pusher: HubPusher | None,
        saver: Saver,
        evaluator: Evaluator,
        health: Health,
        logs: RunLogs,
        data_watch: DataWatch,
    ) -> None:
        self.checkpoint_time, self.evaluation_time = Stopwatch(), Stopwatch()
        self.pusher, self.saver, self.evaluator, self.health = pusher, saver, evaluator, health
        self._setup, self._ranks, self._directory, self._state = setup, setup.ranks, directory, state
        self._logs, self._data_watch = logs, data_watch
        self.divergence: str | None = None

    # -- evaluations -------------------------------------------------------------------------------------------------

    def evaluate(self, *, is_last: bool) -> bool:
        """Evaluates if an evaluation is due. Returns False if a stop was requested before it was complete."""
        step, evaluator, best = self._state.progress.step, self.evaluator, self.evaluator.best
        if not evaluator.is_due(step, is_last=is_last):
            return True
        self._ranks.at(f"the evaluation after step {step}")
        with self.evaluation_time:
            evaluation = evaluator.evaluate(self._state.model, step)
        if evaluation is None:
            return False
        self._logs.write_evaluation(evaluation)
        if evaluator.best is not best:
            self._save_best(best)
        return True

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def is_healthy(self) -> bool:
        """Returns whether the weights give a finite loss and gradients; those of a checkpoint were already checked."""
        step = self._state.progress.step
        return self.saver.saved_step == step or self.health.is_proven(step)

    def save(self) -> None:
        """Saves the state after the last finished step, possibly in the background, unless its weights are broken."""
        self._save(self.saver.save)

    def save_last(self) -> None:
        """Saves like `save`, but returns only when the checkpoint is complete. Raises OSError."""
        self._save(self.saver.save_last)

    def _save(self, save: Callable[..., None]) -> None:
        """Saves with `save`, unless the weights are broken.

        Raises DataError if the data files changed meanwhile, because the state would not describe what was trained.
        """
        state, step = self._state, self._state.progress.step
        self._data_watch.require_unchanged(self._setup)
        self._ranks.at(f"saving step {step}")
        with self.checkpoint_time:
            if not self.is_healthy():
                self._warn_of_broken_weights("saved")
                return
            self._logs.sync_ledger()  # first, so that the ledger contains every step of the checkpoint
            saved = run_state(self._setup, state.data_state, state.progress, state.settings)
            saved["evaluation"] = self.evaluator.state()
            save(step, model=state.model, optimizer=state.optimizer, state=saved)
        self.report_mix()

    def save_before_failure(self) -> None:
        """Saves the last complete step before a bad row ends the run."""
        step = self._state.progress.step
        try:
            self.save_last()
            if self.saver.saved_step == step:
                console.write(f"saved      step {step}, the last one before the failure")
        except OSError as error:
            console.write(f"WARNING    step {step} could not be saved: {error}")

    def _save_best(self, before: Best | None) -> None:
        """Saves the new best checkpoint; if it cannot be saved, `before` stays the best."""
        step, evaluator = self._state.progress.step, self.evaluator
        self.saver.best_step = evaluator.best_step
        if self.saver.saved_step != step:
            self.save()
            self.saver.wait()
        if self.saver.saved_step != step:
            evaluator.best = before
            self.saver.best_step = evaluator.best_step
        elif best := evaluator.best:
            facts = {"metric": best.metric, "value": best.value, "step": best.step}
            self._directory.write("best.json", facts | {"checkpoint": f"checkpoints/step-{best.step}"})

    def _warn_of_broken_weights(self, what: str) -> None:
        console.write(
            f"WARNING    the weights after step {self._state.progress.step} give no finite loss and gradients, so they "
            f"are not {what}. Lower optimizer.learning_rate if that happens again"
        )

    def judge(self) -> None:
        """Sets `divergence` from the losses of the whole run, those before a resume included. Every rank calls this."""
        vocab_size = len(self._setup.data.chat_tokenizer.tokenizer)
        self.divergence = main_or_raise(
            self._ranks, lambda: divergence(intact_records(self._directory.metrics), vocab_size)
        )

    # -- exports -----------------------------------------------------------------------------------------------------

    def export(self, *, is_last: bool) -> Path:
        """Exports the weights after the last step and points the link `latest` at them. Raises OSError on all ranks.

        With adapters, it writes adapter/step-N and, merged, hf/step-N; otherwise hf/step-N. Exports that hub.every
        selects are pushed to the Hub, except the last one of a run that has diverged.
        """
        self._ranks.at("the export")
        setup, state, step = self._setup, self._state, self._state.progress.step
        assert setup.model.export_parts is not None
        facts = run_facts(setup, state.progress, state.settings)
        exporter = Exporter(
            setup.config,
            setup.model.export_parts,
            facts,
            self._directory.folder,
            vocab_size=setup.model.architecture.vocab_size,
            repository=setup.config.hub.push_to if self._is_push_due(is_last=is_last) else None,
        )
        if setup.model.adapters is not None:
            folder = self._export_adapters(exporter, setup.model.adapters.start.spec)
        else:
            folder = self._directory.hf(step)
            self._export_model(exporter, folder)
        if self._ranks.is_main:
            self._directory.point("latest", folder)
            if self._is_push_due(is_last=is_last):
                self._push(folder)
        return folder

    def _is_push_due(self, *, is_last: bool) -> bool:
        every, step = self._setup.config.hub.every, self._state.progress.step
        is_due = is_last or every == "exports" or (isinstance(every, int) and step % every == 0)
        return self.pusher is not None and is_due and self.divergence is None

    def _push(self, exported: Path) -> None:
        """Pushes what was exported: the model or, with lora.merge: false, the adapter to the root of the repository.

        With lora.merge, the adapter is pushed to the folder adapter, whether the merge was accepted or not.
        """
        config, step = self._setup.config, self._state.progress.step
        assert self.pusher is not None
        adapter = self._directory.adapter(step)
        if config.lora is not None and config.lora.merge:
            self.pusher.push(adapter, step, "adapter")
        if exported != adapter or (config.lora is not None and not config.lora.merge):
            self.pusher.push(exported, step)

    def _export_model(self, exporter: Exporter, folder: Path) -> None:
        weights = ((name, whole(each.detach())) for name, each in self._state.model.named_parameters())

        def gather_the_rest() -> None:  # the other ranks wait for this one, as each holds a shard of the weights
            for _ in weights:
                pass

        def write() -> None:
            try:
                exporter.write_model(weights, folder)
            finally:
                gather_the_rest()

        all_or_raise(self._ranks, write if self._ranks.is_main else gather_the_rest)

    def _export_adapters(self, exporter: Exporter, spec: LoraSpec) -> Path:
        """Writes adapter/step-N and, if it is wanted and accepted, the merge hf/step-N. Returns the last one."""
        setup, model, step = self._setup, self._state.model, self._state.progress.step
        folder, merged_folder = self._directory.adapter(step), self._directory.hf(step)
        is_merged = setup.config.lora is not None and setup.config.lora.merge
        tensors, texts = adapter_tensors(model), texts_of(setup.data)
        logits = logits_of(model, texts) if is_merged else []

        def write() -> str:
            exporter.write_adapter(tensors, spec, folder)
            if not is_merged:
                return str(folder)
            merge = exporter.write_merged(tensors, spec, merged_folder, trained=model, texts=texts, logits=logits)
            self._directory.record_merge(step, merge)
            return str(merged_folder if merge["is_accepted"] else folder)

        return Path(main_or_raise(self._ranks, write))

    def export_at_end(self) -> Path:
        """Exports the final model, and the best one unless its folder exists already. Raises OSError for the former.

        If the best one cannot be exported, a warning is printed; the run is complete without it.
        """
        exported, best, directory = self.export(is_last=True), self.evaluator.best, self._directory
        if best is None:
            return exported

        def write() -> str:
            try:
                self._write_best(best.step)
            except ValueError as error:  # the checkpoint has been damaged since it was saved
                raise OSError(str(error)) from error
            is_model = directory.hf(best.step).is_dir()
            folder = directory.hf(best.step) if is_model else directory.adapter(best.step)
            directory.point("best", folder)
            return str(folder)

        try:
            folder = main_or_raise(self._ranks, write)
            also = f"(also {directory.folder / 'best'})"
            console.write(f"best       step {best.step}, {best.metric} {best.value:.4f}: {folder} {also}")
        except OSError as error:
            console.write(f"WARNING    the best, step {best.step}, could not be exported: {error}")
        return exported

    def _write_best(self, step: int) -> None:
        """Exports the checkpoint of a step, unless that is done. Raises ValueError or OSError."""
        setup, directory = self._setup, self._directory
        config, parts, checkpoint = setup.config, setup.model.export_parts, directory.checkpoints / f"step-{step}"
        assert parts is not None
        if directory.is_exported(config, step):
            return
        if config.lora is None:
            export_checkpoint(config, checkpoint, directory.hf(step), parts=parts)
            return
        state, tensors, vocab_size = read_trained_adapter(checkpoint, parts.source)
        start = AdapterStart(spec=LoraSpec.from_dict(state["lora"]), tensors=tensors)
        exporter = Exporter(config, parts, state, directory.folder, vocab_size=vocab_size, repository=None)
        exporter.write_adapter(tensors, start.spec, directory.adapter(step))
        if config.lora.merge:
            # The merge is compared with the model of that step, which is loaded for it.
            texts = texts_of(setup.data)
            logits = logits_of(load_whole_model(setup, start), texts)
            merge = exporter.write_merged(
                tensors, start.spec, directory.hf(step), trained=self._state.model, texts=texts, logits=logits
            )
            directory.record_merge(step, merge)

    def export_on_the_way(self, *, only_if_missing: bool = False) -> None:
        """Exports if an export is due.

        A failed export does not end the run, because the checkpoints hold the same weights.

        Args:
            only_if_missing: Export only if the folder does not exist yet.
        """
        config, step = self._setup.config, self._state.progress.step
        interval = config.checkpoints.export_interval
        if not interval or step == 0 or step % interval:
            return
        if only_if_missing and self._ranks.any(self._ranks.is_main and self._directory.is_exported(config, step)):
            return
        if not self.is_healthy():
            self._warn_of_broken_weights("exported")
            return
        try:
            with self.checkpoint_time:
                self.export(is_last=False)
        except OSError as error:
            console.write(f"WARNING    the export of step {step} could not be written: {error}")

    # -- the mix -----------------------------------------------------------------------------------------------------

    def report_mix(self) -> None:
        """Writes mix_report.json: the planned and the trained amount of each data set."""
        data = self._setup.data
        report = mix_report(self._setup.config, data.preparation, data.sample, data.projection, self._state.progress)
        self._directory.write("mix_report.json", report | {"fingerprints": data.fingerprints})
