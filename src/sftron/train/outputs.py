"""The exports of a run: its weights on the way and at the end, and the best ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from sftron.checkpoint.adapter import vllm_limits
from sftron.checkpoint.atomic import all_or_raise, main_or_raise, remove
from sftron.checkpoint.export import ExportPlan, read_trained_adapter, write_export
from sftron.checkpoint.hf_weights import load_model
from sftron.checkpoint.merge import MOST_KL, largest_kl, logits_of
from sftron.data.types import Dropped
from sftron.models.adapters import AdapterStart, LoraSpec
from sftron.models.llama import LlamaForSFT
from sftron.models.quantization import dtype_name
from sftron.models.sharding import whole
from sftron.train.build_model import adapter_tensors, load_whole_model
from sftron.train.evaluation import Best
from sftron.train.exports.exporter import export_checkpoint, plan_of_run
from sftron.train.exports.hub import HubPusher
from sftron.train.logs import console
from sftron.train.progress import Progress
from sftron.train.resume import run_facts
from sftron.train.run import RunData, Settings, Setup
from sftron.train.run_directory import RunDirectory

_NUM_TEXTS, _MOST_TOKENS = 4, 128
PlanMaker = Callable[..., ExportPlan]
"""Makes the plan of an export of one state of the run; `merge` is its argument."""


@dataclass(frozen=True)
class RunExports:
    """Exports the weights of a run. All ranks call the same methods at the same step."""

    setup: Setup
    directory: RunDirectory
    model: LlamaForSFT
    progress: Progress
    settings: Settings
    pusher: HubPusher | None
    """What pushes exports to the Hub, on the main rank; None if nothing is pushed."""

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
        make_plan = self._plan_of(facts, vocab_size, repository=hub.push_to if pusher else None)
        if setup.model.adapters is not None:
            tensors, texts = adapter_tensors(self.model), texts_of(setup.data)
            logits = logits_of(self.model, texts) if self._is_merged else []
            write = partial(self._write_adapters, make_plan, step, tensors, logits)
            folder = Path(main_or_raise(self.setup.ranks, lambda: str(write())))
        else:
            folder = self.directory.hf(step)
            self._export_model(make_plan, folder)
        if self.setup.ranks.is_main:
            self.directory.point("latest", folder)
            if pusher:
                self._push(pusher, folder)
        return folder

    @property
    def _is_merged(self) -> bool:
        lora = self.setup.config.lora
        return lora is not None and lora.merge

    def _plan_of(self, state: Mapping[str, Any], vocab_size: int, *, repository: str | None) -> PlanMaker:
        """Returns `plan_of_run` for a state of the run; `merge` is left to the caller."""
        config, parts, folder = self.setup.config, self.setup.model.export_parts, self.directory.folder
        assert parts is not None
        return partial(plan_of_run, config, parts, state, folder, vocab_size=vocab_size, repository=repository)

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

    def _export_model(self, make_plan: PlanMaker, folder: Path) -> None:
        weights = ((name, whole(each.detach())) for name, each in self.model.named_parameters())

        def gather_the_rest() -> None:  # the other ranks wait for this one, as each holds a shard of the weights
            for _ in weights:
                pass

        def write() -> None:
            try:
                write_export(make_plan(), weights, folder)
            finally:
                gather_the_rest()

        all_or_raise(self.setup.ranks, write if self.setup.ranks.is_main else gather_the_rest)

    def _write_adapters(
        self, make_plan: PlanMaker, step: int, tensors: Mapping[str, Tensor], logits: Sequence[Tensor]
    ) -> Path:
        """Writes adapter/step-N and, if it is wanted and accepted, the merge hf/step-N. Returns the last one.

        Args:
            tensors: The tensors of the adapter by `peft_name`.
            logits: The logits of the adapted model for `texts_of`; not used without a merge.
        """
        plan, folder = make_plan(), self.directory.adapter(step)
        write_export(plan, tensors.items(), folder)
        console.write(f"adapter    {folder}, which peft loads onto {plan.base_model}")
        for limit in vllm_limits(plan.spec) if plan.spec else ():
            console.write(f"           {limit}")
        if not self._is_merged:
            return folder
        merged_folder = self.directory.hf(step)
        merge = self._write_merged(make_plan(merge=True), tensors, merged_folder, logits)
        self.directory.record_merge(step, merge)
        return merged_folder if merge["is_accepted"] else folder

    def _write_merged(
        self, plan: ExportPlan, tensors: Mapping[str, Tensor], folder: Path, logits: Sequence[Tensor]
    ) -> dict[str, Any]:
        """Writes the merged model, unless its next tokens differ too much from those of the adapted model.

        Returns the measurements of the merge, as JSON values; is_accepted is False if the folder was not written.
        Raises OSError if the folder cannot be written, or the base model has changed since the run started.
        """
        unchecked, trained = folder.with_name(f"{folder.name}.unchecked"), self.model
        try:
            report = write_export(plan, tensors.items(), unchecked)
        except ValueError as error:
            raise OSError(f"the adapter cannot be merged: {error}") from error
        assert report is not None
        merged = load_model(  # computed as the trained model is
            unchecked,
            trained.attention,
            trained.compute_dtype,
            trained.rope_tables.num_positions,
            adapters=AdapterStart(spec=LoraSpec(ranks={}, alphas={})),  # freezes all weights
            frozen_dtype=plan.dtype,
            device=trained.head_weight.device,
        )
        kl = largest_kl(logits, logits_of(merged, texts_of(self.setup.data)))
        is_accepted = kl <= MOST_KL  # False for NaN
        measured = f"KL {kl:.1e} at most from the trained model, and {MOST_KL:g} is allowed"
        if is_accepted:
            remove(folder)
            unchecked.rename(folder)
            console.write(f"merged     {folder}: {measured}")
        else:
            remove(unchecked)
            console.write(
                f"WARNING    not merged: {measured}. Serve the adapter, or merge it in float32 "
                "(`sftron convert --dtype float32`)"
            )
        for line in report.lines():
            console.write(f"           {line}")
        measures = {"lost": report.lost, "largest_kl": kl, "allowed_kl": MOST_KL, "is_accepted": is_accepted}
        return {"dtype": dtype_name(plan.dtype), **measures}

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
            also = f"(also {directory.folder / 'best'})"
            console.write(f"best       step {best.step}, {best.metric} {best.value:.4f}: {folder} {also}")
        except OSError as error:
            console.write(f"WARNING    the best, step {best.step}, could not be exported: {error}")
        return exported

    def _write_best(self, step: int) -> None:
        """Exports the checkpoint of a step, unless that is done. Raises ValueError or OSError."""
        setup, directory = self.setup, self.directory
        config, parts, checkpoint = setup.config, setup.model.export_parts, directory.checkpoints / f"step-{step}"
        assert parts is not None
        if directory.is_exported(config, step):
            return
        if config.lora is None:
            export_checkpoint(config, checkpoint, directory.hf(step), parts=parts)
            return
        state, tensors, vocab_size = read_trained_adapter(checkpoint, parts.source)
        logits = []
        if config.lora.merge:  # it is compared with the model of that step, which is loaded for it
            start = AdapterStart(spec=LoraSpec.from_dict(state["lora"]), tensors=tensors)
            logits = logits_of(load_whole_model(setup, start), texts_of(setup.data))
        self._write_adapters(self._plan_of(state, vocab_size, repository=None), step, tensors, logits)


def texts_of(data: RunData) -> list[list[int]]:
    """Returns the first tokens of a few evaluation prompts or, if there are none, of sampled conversations."""
    prompts = [data.chat_tokenizer.encode_prompt(question.messages) for question in data.questions]
    sampled = [row[0].input_ids.tolist() for row in data.sample.rows if not isinstance(row, Dropped)]
    return [ids[:_MOST_TOKENS] for ids in (prompts or sampled)[:_NUM_TEXTS]]
