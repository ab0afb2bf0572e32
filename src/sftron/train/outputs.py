"""The exports of a run: its weights on the way and at the end, and the best ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from sftron.checkpoint.atomic import gather_or_raise, main_or_raise
from sftron.checkpoint.export import opened, write_export
from sftron.checkpoint.merge import logits_of
from sftron.data.types import Dropped
from sftron.models.adapters import AdapterStart, LoraSpec
from sftron.models.llama import LlamaForSFT
from sftron.models.sharding import whole
from sftron.train.build_model import adapter_tensors, load_whole_model
from sftron.train.evaluation import Best
from sftron.train.exports.exporter import Exporter, export_checkpoint
from sftron.train.exports.hub import HubPusher
from sftron.train.logs import console
from sftron.train.progress import Progress
from sftron.train.resume import run_facts
from sftron.train.run import RunData, Settings, Setup
from sftron.train.run_directory import RunDirectory

_NUM_TEXTS, _MOST_TOKENS = 4, 128


@dataclass
class RunExports:
    """Exports the weights of a run, and pushes them to the Hub. All ranks call the same methods at the same step."""

    setup: Setup
    directory: RunDirectory
    model: LlamaForSFT
    progress: Progress
    settings: Settings
    is_healthy: Callable[[int, str], bool]
    """That of the saver: whether the weights after a step may be exported."""

    def __post_init__(self) -> None:
        lora = self.setup.config.lora
        self._is_merged = lora is not None and lora.merge
        hub, is_main = self.setup.config.hub, self.setup.ranks.is_main
        self.pusher = HubPusher(hub, self.directory.folder) if hub.push_to is not None and is_main else None

    def start(self) -> None:
        """Starts the pushes to the Hub."""
        if self.pusher:
            self.pusher.start()

    def finish(self, should_hurry: Callable[[], bool]) -> None:
        """Waits for the pushes to the Hub, and adds them to result.json; see `HubPusher.finish`."""
        if self.pusher:
            self.directory.add_to_result(hub=self.pusher.finish(should_hurry))

    def export_on_the_way(self, *, only_if_missing: bool = False) -> None:
        """Exports if an export is due. A failed one does not end the run: the checkpoints hold the same weights."""
        interval, step = self.setup.config.checkpoints.export_interval, self.progress.step
        if not interval or step == 0 or step % interval:
            return
        if (only_if_missing and self.is_there(step)) or not self.is_healthy(step, "exported"):
            return
        try:
            self.export(is_last=False)
        except OSError as error:
            console.write(f"WARNING    the export of step {step} could not be written: {error}")

    def is_there(self, step: int) -> bool:
        """Returns whether all exports of a step have been written."""
        return self.setup.ranks.any(self.setup.ranks.is_main and self.directory.is_exported(self.setup.config, step))

    def export(self, *, is_last: bool, is_pushed: bool = True) -> Path:
        """Exports the weights after the last step and points the link `latest` at them. Raises OSError on all ranks.

        With adapters, it writes adapter/step-N and, merged, hf/step-N; otherwise hf/step-N. Exports that hub.every
        selects are pushed to the Hub if `is_pushed`.
        """
        self.setup.ranks.at("the export")
        setup, step, hub = self.setup, self.progress.step, self.setup.config.hub
        is_due = is_last or hub.every == "exports" or (isinstance(hub.every, int) and step % hub.every == 0)
        pusher = self.pusher if is_due and is_pushed else None
        facts, vocab_size = run_facts(setup, self.progress, self.settings), setup.model.architecture.vocab_size
        exporter = self._exporter(facts, vocab_size, repository=hub.push_to if pusher else None)
        if setup.model.adapters is not None:
            tensors, texts = adapter_tensors(self.model), texts_of(setup.data)
            logits = logits_of(self.model, texts) if self._is_merged else []
            write = partial(self._write_adapters, exporter, step, tensors, logits)
            folder = Path(main_or_raise(self.setup.ranks, lambda: str(write())))
        else:
            folder = self.directory.hf(step)
            self._export_model(exporter, folder)
        if self.setup.ranks.is_main:
            self.directory.point("latest", folder)
            if pusher:
                self._push(pusher, folder)
        return folder

    def _exporter(self, state: Mapping[str, Any], vocab_size: int, *, repository: str | None) -> Exporter:
        config, source, chat_tokenizer = (
            self.setup.config,
            self.setup.model.export_source,
            self.setup.data.chat_tokenizer,
        )
        assert source is not None
        options = {"vocab_size": vocab_size, "repository": repository}
        return Exporter(config, source, chat_tokenizer, state, self.directory.folder, **options)

    def _push(self, pusher: HubPusher, exported: Path) -> None:
        """Pushes what was exported: the model or, with lora.merge: false, the adapter to the root of the repository.

        With lora.merge, the adapter is pushed to the folder adapter, whether the merge was accepted or not.
        """
        step = self.progress.step
        adapter = self.directory.adapter(step)
        if self._is_merged:
            pusher.push(adapter, step, "adapter")
        if exported != adapter or not self._is_merged:
            pusher.push(exported, step)

    def _export_model(self, exporter: Exporter, folder: Path) -> None:
        weights = ((name, whole(each.detach())) for name, each in self.model.named_parameters())

        def gather_the_rest() -> None:  # the other ranks wait for this one, as each holds a shard of the weights
            for _ in weights:
                pass

        def write() -> None:
            try:
                write_export(exporter.plan(), weights, folder)
            finally:
                gather_the_rest()

        gather_or_raise(self.setup.ranks, write if self.setup.ranks.is_main else gather_the_rest)

    def _write_adapters(
        self, exporter: Exporter, step: int, tensors: Mapping[str, Tensor], logits: Sequence[Tensor]
    ) -> Path:
        """Writes adapter/step-N and, if it is wanted and accepted, the merge hf/step-N. Returns the last one.

        Args:
            tensors: The tensors of the adapter by `peft_name`.
            logits: The logits of the adapted model for `texts_of`; not used without a merge.
        """
        folder, merged_folder = self.directory.adapter(step), self.directory.hf(step)
        exporter.write_adapter(tensors, folder)
        if not self._is_merged:
            return folder
        texts = texts_of(self.setup.data)
        merge = exporter.write_merged(tensors, merged_folder, trained=self.model, texts=texts, logits=logits)
        self.directory.record_merge(step, merge)
        return merged_folder if merge["is_accepted"] else folder

    def export_at_end(self, best: Best | None, *, is_pushed: bool) -> Path:
        """Exports the final model, and `best` unless its folder exists already. Raises OSError for the former.

        If the best one cannot be exported, a warning is printed; the run is complete without it.
        """
        exported, directory = self.export(is_last=True, is_pushed=is_pushed), self.directory
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
            folder = main_or_raise(self.setup.ranks, write)
            also = f" (also {directory.folder / 'best'})" if directory.names("best", Path(folder)) else ""
            console.write(f"best       step {best.step}, {best.metric} {best.value:.4f}: {folder}{also}")
        except OSError as error:
            console.write(f"WARNING    the best, step {best.step}, could not be exported: {error}")
        return exported

    def _write_best(self, step: int) -> None:
        """Exports the checkpoint of a step, unless that is done. Raises ValueError or OSError."""
        setup, directory = self.setup, self.directory
        config, source, checkpoint = setup.config, setup.model.export_source, directory.checkpoints / f"step-{step}"
        assert source is not None
        if directory.is_exported(config, step):
            return
        if config.lora is None:
            read = {"source": source, "chat_tokenizer": setup.data.chat_tokenizer}
            export_checkpoint(config, checkpoint, directory.hf(step), **read)
            return
        with opened(checkpoint, source) as (state, read, vocab_size):
            tensors = dict(read())
        logits = []
        if config.lora.merge:  # it is compared with the model of that step, which is loaded for it
            start = AdapterStart(spec=LoraSpec.from_dict(state["lora"]), tensors=tensors)
            logits = logits_of(load_whole_model(setup, start), texts_of(setup.data))
        self._write_adapters(self._exporter(state, vocab_size, repository=None), step, tensors, logits)


def texts_of(data: RunData) -> list[list[int]]:
    """Returns the first tokens of a few evaluation prompts or, if there are none, of sampled conversations."""
    prompts = [data.chat_tokenizer.encode_prompt(question.messages) for question in data.questions]
    sampled = [row[0].input_ids.tolist() for row in data.sample.rows if not isinstance(row, Dropped)]
    return [ids[:_MOST_TOKENS] for ids in (prompts or sampled)[:_NUM_TEXTS]]
