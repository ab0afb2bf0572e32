"""The exports of a run: when they are written and where, and what is pushed to the Hub; and `sftron convert`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sftron.checkpoint.adapter import read_adapter, vllm_limits
from sftron.checkpoint.adapter_config import CONFIG as ADAPTER
from sftron.checkpoint.atomic import gather_or_raise, main_or_raise, remove
from sftron.checkpoint.checkpoint import MANIFEST
from sftron.checkpoint.export import (
    ExportPlan,
    check_export,
    hf_to_checkpoint,
    lora_of,
    open_weights,
    plan_export,
    write_export,
)
from sftron.checkpoint.hf_weights import StreamedBase, load_model
from sftron.checkpoint.merge import MOST_KL, MergeReport, largest_kl, logits_of
from sftron.checkpoint.model_folder import stop_ids_of
from sftron.checkpoint.source import ExportSource, hub_id
from sftron.config import Config, load_config
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.types import Dropped
from sftron.errors import show
from sftron.models.adapters import AdapterStart, LoraSpec
from sftron.models.fusion import NamedTensors
from sftron.models.llama import LlamaForSFT
from sftron.models.quantization import NF4, dtype_name
from sftron.models.sharding import whole
from sftron.regular_file import read_regular
from sftron.train.build_data import load_chat_tokenizer
from sftron.train.build_model import adapter_tensors, load_whole_model
from sftron.train.evaluation import Best
from sftron.train.hub import HubPusher
from sftron.train.logs import console
from sftron.train.model_card import MAX_CARD_BYTES, VERIFY_CARD, AdapterFacts, model_card, plain_model_card
from sftron.train.places import export_source, find_places
from sftron.train.progress import Progress
from sftron.train.resume import run_facts
from sftron.train.run import RunData, Settings, Setup, frozen_dtype
from sftron.train.run_directory import RunDirectory

_NUM_TEXTS, _MOST_TOKENS = 4, 128


# --- When and where ---


@dataclass
class RunExports:
    """Exports the weights of a run, and pushes them to the Hub. All ranks call the same methods at the same step."""

    setup: Setup
    directory: RunDirectory
    model: LlamaForSFT
    progress: Progress
    settings: Settings
    is_healthy: Callable[[int, str], bool]
    """`Saver.is_healthy`: whether a step's weights may be exported."""

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
        """Exports if an export is due. A failure does not end the run, because the checkpoints hold the same
        weights."""
        interval, step = self.setup.config.checkpoints.export_interval, self.progress.step
        if not interval or step == 0 or step % interval:
            return
        if (only_if_missing and self.is_there(step)) or not self.is_healthy(step, "exported"):
            return
        try:
            self.export(is_last=False)
        except OSError as error:
            console.warn(f"could not write the export of step {step}: {error}")

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

    def _exporter(self, state: Mapping[str, Any], vocab_size: int, *, repository: str | None = None) -> Exporter:
        source = self.setup.model.export_source
        assert source is not None
        return Exporter(
            config=self.setup.config,
            source=source,
            chat_tokenizer=self.setup.data.chat_tokenizer,
            state=state,
            run_folder=self.directory.folder,
            vocab_size=vocab_size,
            repository=repository,
        )

    def _push(self, pusher: HubPusher, exported: Path) -> None:
        """Pushes what was exported: the model or, with lora.merge: false, the adapter to the root of the repository.

        With lora.merge, pushes the adapter to the folder adapter, whether the merge was accepted or not.
        """
        step = self.progress.step
        adapter = self.directory.adapter(step)
        if self._is_merged:
            pusher.push(adapter, step, "adapter")
        if exported != adapter or not self._is_merged:
            pusher.push(exported, step)

    def _export_model(self, exporter: Exporter, folder: Path) -> None:
        weights = ((name, whole(each.detach())) for name, each in self.model.named_parameters())

        def gather_the_rest() -> None:  # the other ranks wait for this one, because each holds a shard of the weights
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
        """Writes adapter/step-N and, if requested and accepted, the merge hf/step-N. Returns the last one written.

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

    def export_at_end(self, best: Best | None, *, is_pushed: bool, has_forgotten: bool) -> Path | None:
        """Exports the final model, and `best` unless its folder exists already. Raises OSError for the former.

        If it cannot export the best one, it prints a warning; the run is complete without it. If the final model
        `has_forgotten` more than a limit allows, it exports only the best one, and `latest` links to that, too. Without
        a best one, earlier links and best.json are removed.
        """
        exported = None if has_forgotten else self.export(is_last=True, is_pushed=is_pushed)
        directory = self.directory
        if best is None:
            if has_forgotten and self.setup.ranks.is_main:
                directory.remove_link("latest")
                directory.remove_link("best")
                (directory.folder / "best.json").unlink(missing_ok=True)
            return exported
        is_written = exported is not None and best.step == self.progress.step

        def write() -> str:
            try:
                if not is_written:
                    self._write_best(best.step)
            except ValueError as error:  # the checkpoint has been damaged since it was saved
                raise OSError(str(error)) from error
            is_model = directory.hf(best.step).is_dir()
            folder = directory.hf(best.step) if is_model else directory.adapter(best.step)
            directory.point("best", folder)
            if has_forgotten:
                directory.point("latest", folder)
            return str(folder)

        try:
            folder = main_or_raise(self.setup.ranks, write)
            also = f" (also {directory.folder / 'best'})" if directory.names("best", Path(folder)) else ""
            console.write(f"best       step {best.step}, {best.words}: {folder}{also}")
            return exported or Path(folder)
        except OSError as error:
            console.warn(f"could not export the best checkpoint, step {best.step}: {error}")
        return exported

    def _write_best(self, step: int) -> None:
        """Exports the checkpoint of a step unless that was done before. Raises ValueError or OSError.

        With limits it is exported again, because the model card of an earlier export may have others.
        """
        setup, directory = self.setup, self.directory
        config, source, checkpoint = setup.config, setup.model.export_source, directory.checkpoints / f"step-{step}"
        assert source is not None
        if directory.is_exported(config, step) and not config.evaluation.keep:
            return
        with open_weights(checkpoint, source) as (state, read, vocab_size):
            exporter = self._exporter(state, vocab_size)
            if config.lora is None:
                write_export(exporter.plan(), read(), directory.hf(step))
                return
            tensors = dict(read())
        logits = []
        if config.lora.merge:  # loads that step's model to compare the merge with
            start = AdapterStart(spec=LoraSpec.from_dict(state["lora"]), tensors=tensors)
            logits = logits_of(load_whole_model(setup, start, folder=directory.folder), texts_of(setup.data))
        self._write_adapters(exporter, step, tensors, logits)


def texts_of(data: RunData) -> list[list[int]]:
    """Returns the first tokens of a few evaluation prompts or, without prompts, of sampled conversations."""
    prompts = [question.ids(data.chat_tokenizer) for question in data.questions]
    sampled = [row[0].input_ids.tolist() for row in data.sample.rows if not isinstance(row, Dropped)]
    return [ids[:_MOST_TOKENS] for ids in (prompts or sampled)[:_NUM_TEXTS]]


# --- The exports of one state ---


@dataclass(kw_only=True)
class Exporter:
    """Plans and writes the exports of one state of a run, on the main rank."""

    config: Config
    source: ExportSource
    chat_tokenizer: ChatTokenizer
    state: Mapping[str, Any]
    """The state of a checkpoint; see `resume.run_facts`."""
    run_folder: Path
    """The run's folder. If it has a card of `sftron verify`, exports copy it."""
    vocab_size: int
    """The number of rows of the embeddings."""
    repository: str | None = None
    """The repository on the Hub that the exports are pushed to, if any."""

    def __post_init__(self) -> None:
        if not (card := self.run_folder / VERIFY_CARD).is_file():
            return
        try:
            files = {**self.source.files, VERIFY_CARD: read_regular(card, MAX_CARD_BYTES)}
            self.source = replace(self.source, files=files)
        except (OSError, ValueError) as error:
            console.warn(f"the export leaves out {card}: it {error}")

    def plan(self, *, dtype: torch.dtype | None = None, merge: bool = False) -> ExportPlan:
        """Returns the plan of an export; see `plan_export`."""
        config, source, lora = self.config, self.source, self.config.lora

        def card(report: MergeReport | None) -> str:
            facts = None
            if plan.spec is not None and (plan.is_adapter or report is not None):
                in_nf4 = frozen_dtype(config) == NF4
                facts = AdapterFacts(spec=plan.spec, base_sha256=plan.base_sha256, merge=report, in_nf4=in_nf4)
            # If the merge is in the root of the repository, the adapter is in a folder.
            is_in_root = not (plan.is_adapter and lora is not None and lora.merge)
            return model_card(
                config,
                self.state,
                run_folder=self.run_folder,
                base=source.model,
                chat_tokenizer=self.chat_tokenizer,
                adapter=facts,
                repository=self.repository if is_in_root else None,
            )

        plan = plan_export(
            self.state,
            source,
            self.vocab_size,
            dtype=dtype,
            model_dtype=getattr(torch, config.model.compute_dtype),
            merge=merge,
            base_model=source.model.name,
            base_dtype=frozen_dtype(config),
            card=card,
        )
        return plan

    def write_adapter(self, tensors: Mapping[str, Tensor], folder: Path) -> None:
        """Writes an adapter folder of tensors by `peft_name`. Raises OSError."""
        plan = self.plan()
        write_export(plan, tensors.items(), folder)
        in_nf4 = " in NF4, as README.md in it shows" if plan.base_dtype == NF4 else ""
        console.write(f"adapter    {folder}, which peft loads onto {plan.base_model}{in_nf4}")
        for limit in vllm_limits(plan.spec) if plan.spec else ():
            console.write(f"           {limit}")

    def write_merged(
        self,
        tensors: Mapping[str, Tensor],
        folder: Path,
        *,
        trained: LlamaForSFT,
        texts: Sequence[Sequence[int]],
        logits: Sequence[Tensor],
    ) -> dict[str, Any]:
        """Writes the merged model unless its next-token distributions differ too much from the trained model's.

        Args:
            trained: The trained model; the merged one computes in the same way.
            texts, logits: A few texts, and the logits of the trained model for each.

        Returns:
            The measurements of the merge, as JSON values; is_accepted is False if the folder was not written.

        Raises:
            OSError: The folder cannot be written, or the base model has changed since the run started.
        """
        unchecked, plan = folder.with_name(f"{folder.name}.unchecked"), self.plan(merge=True)
        try:
            report = write_export(plan, tensors.items(), unchecked)
        except ValueError as error:
            raise OSError(f"the adapter cannot be merged: {error}") from error
        assert report is not None
        merged = load_model(
            unchecked,
            trained.attention,
            trained.compute_dtype,
            trained.rope_tables.num_positions,
            adapters=AdapterStart(spec=LoraSpec(ranks={}, alphas={})),  # freezes all weights
            frozen_dtype=plan.dtype,
            device=trained.head_weight.device,
            stream=None if trained.stream is None else StreamedBase(unchecked, ""),
        )
        kl = largest_kl(logits, logits_of(merged, texts))
        if merged.stream:
            merged.stream.close()
        is_accepted = kl <= MOST_KL  # False for NaN
        measured = f"KL of at most {kl:.1e} from the trained model, {MOST_KL:g} allowed"
        if is_accepted:
            remove(folder)
            unchecked.rename(folder)
            console.write(f"merged     {folder}: {measured}")
        else:
            remove(unchecked)
            console.warn(
                f"not merged: {measured}. Serve the adapter, or merge it in float32: sftron convert "
                f"{self.run_folder / 'checkpoints' / folder.name} TARGET --merge --dtype float32"
            )
        for line in report.lines():
            console.write(f"           {line}")
        measures = {"lost": report.lost, "largest_kl": kl, "allowed_kl": MOST_KL, "is_accepted": is_accepted}
        return {"dtype": dtype_name(plan.dtype), **measures}


# --- Conversion ---


def convert(
    source: Path,
    target: Path,
    *,
    model: Path | None = None,
    merge: bool = False,
    dtype: torch.dtype | None = None,
    stop_token_ids: Collection[int] | None = None,
    overrides: Sequence[str] = (),
) -> tuple[int, list[str]]:
    """Converts a checkpoint, a Hugging Face folder or an adapter, and compares every tensor after reading it back.

    Args:
        model: The base of an adapter, or the model's folder for a checkpoint outside a run directory.
        merge: Whether to merge a checkpoint of adapters into its base.
        dtype: The type of a Hugging Face folder (by default, the run's) or of an adapter (float32).
        stop_token_ids: The ids that end a turn; by default, the ones that the run trained.
        overrides: Overrides for the configuration of the checkpoint's run.

    Returns:
        The number of tensors, and the names of those that differ.

    Raises:
        ValueError: The source cannot be used, or the target exists.
        OSError: The target cannot be written.
    """
    if target.exists():
        raise ValueError(f"{target} already exists; choose another folder")
    if (source / ADAPTER).is_file():
        return _merge_adapter(source, target, model, dtype or torch.bfloat16, stop_token_ids)
    if not (source / MANIFEST).is_file():
        return hf_to_checkpoint(source, target)
    run_config, config, chat_tokenizer = source.resolve().parents[1] / "config.yaml", None, None
    if model is not None:
        base = ExportSource.read(model)
    elif run_config.is_file():
        config = load_config(run_config, overrides)
        places = find_places(config)
        chat_tokenizer = load_chat_tokenizer(config, places.tokenizer)
        base = export_source(config, places, chat_tokenizer)
    else:
        raise ValueError(f"{source} is not in a run directory; give the model's folder (--model)")
    with open_weights(source, base, stop_token_ids) as (state, read, vocab_size):
        if config is not None and chat_tokenizer is not None:
            of_run: dict[str, Any] = {"config": config, "source": base, "chat_tokenizer": chat_tokenizer}
            exporter = Exporter(**of_run, state=state, run_folder=run_config.parent, vocab_size=vocab_size)
            plan = exporter.plan(dtype=dtype, merge=merge)
        else:
            spec, in_nf4 = None if merge else lora_of(state), _was_in_nf4(state)
            facts = None if spec is None else AdapterFacts(spec=spec, in_nf4=in_nf4)
            card = plain_model_card(base.model, state["step"], facts)
            plan = plan_export(
                state,
                base,
                vocab_size,
                dtype=dtype,
                model_dtype=torch.bfloat16,
                merge=merge,
                base_model=base.model.name if hub_id(base.model.name) else str(model),
                base_dtype=NF4 if in_nf4 else None,
                card=lambda _: card,
            )
        compared = _write_and_check(plan, read, target)
    if plan.spec is not None and plan.is_adapter:
        for line in vllm_limits(plan.spec):
            show(f"WARNING    {line}")
    return compared


def _merge_adapter(
    source: Path, target: Path, model: Path | None, dtype: torch.dtype, stop_token_ids: Collection[int] | None
) -> tuple[int, list[str]]:
    """Merges an adapter folder into its base; see `convert`.

    Takes the tokenizer and the stop tokens from the adapter's folder if it has them.
    """
    if model is None:
        raise ValueError(f"{source} is an adapter; give the folder of its base (--model)")
    has_tokenizer = any((source / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    base = ExportSource.read(model, source if has_tokenizer else None)
    adapter, card = read_adapter(source, base.architecture), plain_model_card(base.model, None)
    plan = ExportPlan(
        source=base,
        dtype=dtype,
        stop_token_ids=list(stop_ids_of(source)) if stop_token_ids is None else stop_token_ids,
        vocab_size=adapter.vocab_size,
        spec=adapter.spec,
        is_merged=True,
        base_dtype=NF4 if adapter.in_nf4 else None,
        card=lambda _: card,
    )
    return _write_and_check(plan, adapter.tensors.items, target)


def _was_in_nf4(state: Mapping[str, Any]) -> bool:
    """Returns whether a checkpoint's adapters were trained on a base in NF4."""
    settings = state.get("settings")  # a converted checkpoint has none
    return bool(settings) and Settings.from_state(settings).config["model"].get("frozen_dtype") == "nf4"


def _write_and_check(plan: ExportPlan, read: Callable[[], NamedTensors], target: Path) -> tuple[int, list[str]]:
    if plan.is_merged and plan.base_dtype == NF4:
        show("merged onto the base's matrices in NF4, on which the adapter was trained")
    report = write_export(plan, read(), target)
    for line in report.lines() if report else ():
        show(line)
    return check_export(plan, read(), target)
