"""The exports of a run: its weights on the way and at the end, and the best ones."""

from __future__ import annotations

from pathlib import Path

from sftron.checkpoint.atomic import all_or_raise, main_or_raise
from sftron.checkpoint.export import read_trained_adapter
from sftron.checkpoint.merge import logits_of
from sftron.data.types import Dropped
from sftron.models.adapters import AdapterStart, LoraSpec
from sftron.models.llama import LlamaForSFT
from sftron.models.sharding import whole
from sftron.train.best import Best
from sftron.train.build_model import adapter_tensors, load_whole_model
from sftron.train.exports.exporter import Exporter, export_checkpoint
from sftron.train.exports.hub import HubPusher
from sftron.train.logs import console
from sftron.train.progress import Progress
from sftron.train.resume import run_facts
from sftron.train.run import RunData, Setup
from sftron.train.run_directory import RunDirectory
from sftron.train.settings import Settings

_NUM_TEXTS, _MOST_TOKENS = 4, 128


class RunExports:
    """Exports the weights of a run. All ranks call the same methods at the same step.

    Args:
        pusher: What pushes exports to the Hub, on the main rank; None if nothing is pushed.
    """

    def __init__(
        self,
        setup: Setup,
        directory: RunDirectory,
        model: LlamaForSFT,
        progress: Progress,
        settings: Settings,
        pusher: HubPusher | None,
    ) -> None:
        self._setup, self._ranks, self._directory, self._model = setup, setup.ranks, directory, model
        self._progress, self._settings, self._pusher = progress, settings, pusher

    def is_there(self, step: int) -> bool:
        """Returns whether all exports of a step have been written."""
        return self._ranks.any(self._ranks.is_main and self._directory.is_exported(self._setup.config, step))

    def export(self, *, is_last: bool, is_pushed: bool = True) -> Path:
        """Exports the weights after the last step and points the link `latest` at them. Raises OSError on all ranks.

        With adapters, it writes adapter/step-N and, merged, hf/step-N; otherwise hf/step-N. Exports that hub.every
        selects are pushed to the Hub if `is_pushed`.
        """
        self._ranks.at("the export")
        setup, step, every = self._setup, self._progress.step, self._setup.config.hub.every
        assert setup.model.export_parts is not None
        facts = run_facts(setup, self._progress, self._settings)
        is_due = is_last or every == "exports" or (isinstance(every, int) and step % every == 0)
        pusher = self._pusher if is_due and is_pushed else None
        exporter = Exporter(
            setup.config,
            setup.model.export_parts,
            facts,
            self._directory.folder,
            vocab_size=setup.model.architecture.vocab_size,
            repository=setup.config.hub.push_to if pusher else None,
        )
        if setup.model.adapters is not None:
            folder = self._export_adapters(exporter)
        else:
            folder = self._directory.hf(step)
            self._export_model(exporter, folder)
        if self._ranks.is_main:
            self._directory.point("latest", folder)
            if pusher:
                self._push(pusher, folder)
        return folder

    def _push(self, pusher: HubPusher, exported: Path) -> None:
        """Pushes what was exported: the model or, with lora.merge: false, the adapter to the root of the repository.

        With lora.merge, the adapter is pushed to the folder adapter, whether the merge was accepted or not.
        """
        config, step = self._setup.config, self._progress.step
        adapter = self._directory.adapter(step)
        if config.lora is not None and config.lora.merge:
            pusher.push(adapter, step, "adapter")
        if exported != adapter or (config.lora is not None and not config.lora.merge):
            pusher.push(exported, step)

    def _export_model(self, exporter: Exporter, folder: Path) -> None:
        weights = ((name, whole(each.detach())) for name, each in self._model.named_parameters())

        def gather_the_rest() -> None:  # the other ranks wait for this one, as each holds a shard of the weights
            for _ in weights:
                pass

        def write() -> None:
            try:
                exporter.write_model(weights, folder)
            finally:
                gather_the_rest()

        all_or_raise(self._ranks, write if self._ranks.is_main else gather_the_rest)

    def _export_adapters(self, exporter: Exporter) -> Path:
        """Writes adapter/step-N and, if it is wanted and accepted, the merge hf/step-N. Returns the last one."""
        setup, model, step = self._setup, self._model, self._progress.step
        folder, merged_folder = self._directory.adapter(step), self._directory.hf(step)
        is_merged = setup.config.lora is not None and setup.config.lora.merge
        tensors, texts = adapter_tensors(model), texts_of(setup.data)
        logits = logits_of(model, texts) if is_merged else []

        def write() -> str:
            exporter.write_adapter(tensors, folder)
            if not is_merged:
                return str(folder)
            merge = exporter.write_merged(tensors, merged_folder, trained=model, texts=texts, logits=logits)
            self._directory.record_merge(step, merge)
            return str(merged_folder if merge["is_accepted"] else folder)

        return Path(main_or_raise(self._ranks, write))

    def export_at_end(self, best: Best | None, *, is_pushed: bool) -> Path:
        """Exports the final model, and `best` unless its folder exists already. Raises OSError for the former.

        If the best one cannot be exported, a warning is printed; the run is complete without it.
        """
        exported, directory = self.export(is_last=True, is_pushed=is_pushed), self._directory
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
        exporter.write_adapter(tensors, directory.adapter(step))
        if config.lora.merge:
            # The merge is compared with the model of that step, which is loaded for it.
            texts = texts_of(setup.data)
            logits = logits_of(load_whole_model(setup, start), texts)
            merge = exporter.write_merged(tensors, directory.hf(step), trained=self._model, texts=texts, logits=logits)
            directory.record_merge(step, merge)


def texts_of(data: RunData) -> list[list[int]]:
    """Returns the first tokens of a few evaluation prompts or, if there are none, of sampled conversations."""
    prompts = [data.chat_tokenizer.encode_prompt(question.messages) for question in data.questions]
    sampled = [row[0].input_ids.tolist() for row in data.sample.rows if not isinstance(row, Dropped)]
    return [ids[:_MOST_TOKENS] for ids in (prompts or sampled)[:_NUM_TEXTS]]
