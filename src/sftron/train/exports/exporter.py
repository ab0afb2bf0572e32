"""Exports of a run: a whole model, an adapter, and a merge of the two that is checked against the adapter."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sftron.checkpoint.adapter import vllm_limits, write_adapter
from sftron.checkpoint.atomic import remove
from sftron.checkpoint.checkpoint import read_state
from sftron.checkpoint.convert import BASE_WEIGHTS, checkpoint_to_adapter, checkpoint_to_hf, lora_of, require_base
from sftron.checkpoint.hf_export import ExportSource, export_hf
from sftron.checkpoint.hf_weights import load_model
from sftron.checkpoint.merge import MOST_KL, MergeReport, largest_kl, logits_of, merged_weights
from sftron.config import Config
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.models.adapters import AdapterStart, LoraSpec
from sftron.models.fusion import NamedTensors
from sftron.models.llama import LlamaForSFT
from sftron.models.quantization import as_computed, dtype_name
from sftron.regular_file import read_regular
from sftron.train.exports.base_model import read_base_model
from sftron.train.exports.model_card import MAX_CARD_BYTES, VERIFY_CARD, AdapterFacts, model_card
from sftron.train.logs import console
from sftron.train.run import ExportParts
from sftron.train.start.lora import frozen_dtype
from sftron.train.start.revisions import model_folder, tokenizer_folder
from sftron.train.start.run_data import load_chat_tokenizer


def read_export_parts(config: Config, base_folder: Path, chat_tokenizer: ChatTokenizer) -> ExportParts:
    """Reads the parts of an export. Raises ValueError if the model or tokenizer folder lacks a file that it needs."""
    with tempfile.TemporaryDirectory() as saved:
        if config.tokenizer.add_tokens:
            chat_tokenizer.tokenizer.save_pretrained(saved)
            tokenizer_files = Path(saved)
        else:
            tokenizer_files = tokenizer_folder(config, download=False)
        source = ExportSource.read(base_folder, tokenizer_files)
    if config.tokenizer.chat_template:
        source = source.with_chat_template(chat_tokenizer.template.source)
    return ExportParts(source, read_base_model(config.model.path, base_folder), chat_tokenizer)


class Exporter:
    """Writes the exports of one state of a run, on the main rank.

    Args:
        parts: The files besides the weights.
        state: The state of a checkpoint; see `resume.run_facts`.
        vocab_size: The number of rows of the embeddings.
        repository: The repository on the Hub that the exports are pushed to, if any.
    """

    def __init__(
        self,
        config: Config,
        parts: ExportParts,
        state: Mapping[str, Any],
        run_folder: Path,
        *,
        vocab_size: int,
        repository: str | None,
    ) -> None:
        self._config, self._state, self._run_folder, self._repository = config, state, run_folder, repository
        self._parts = _with_verify_card(parts, run_folder)
        self._vocab_size = vocab_size
        self._dtype: torch.dtype = getattr(torch, config.model.compute_dtype)

    def write_model(self, weights: NamedTensors, folder: Path) -> None:
        """Writes a Hugging Face folder. Raises OSError."""
        export_hf(
            weights,
            folder,
            source_folder=self._parts.source,
            dtype=self._dtype,
            stop_token_ids=self._state["stop_token_ids"],
            vocab_size=self._vocab_size,
            model_card=self._card(None),
        )

    def write_adapter(self, tensors: Mapping[str, Tensor], spec: LoraSpec, folder: Path) -> None:
        """Writes an adapter folder of tensors by `peft_name`. Raises OSError."""
        facts = AdapterFacts(spec=spec, base_sha256=self._state["fingerprint"][BASE_WEIGHTS])
        write_adapter(
            folder,
            tensors,
            spec,
            source=self._parts.source,
            base_model=self._parts.base.name,
            base_revision=self._parts.base.revision,
            stop_token_ids=self._state["stop_token_ids"],
            vocab_size=self._vocab_size,
            model_card=self._card(facts),
        )
        console.write(f"adapter    {folder}, which peft loads onto {self._parts.base.name}")
        for limit in vllm_limits(spec):
            console.write(f"           {limit}")

    def write_merged(
        self,
        tensors: Mapping[str, Tensor],
        spec: LoraSpec,
        folder: Path,
        *,
        trained: LlamaForSFT,
        texts: Sequence[Sequence[int]],
        logits: Sequence[Tensor],
    ) -> dict[str, Any]:
        """Writes the merged model, unless its next tokens differ too much from those of the trained model.

        Args:
            trained: The model that was trained; the merged one is computed in the same way.
            texts, logits: A few texts, and the logits of the trained model for each.

        Returns:
            The measurements of the merge, as JSON values; is_accepted is False if the folder was not written.

        Raises:
            OSError: The folder cannot be written, or the base model has changed since the run started.
        """
        unchecked = folder.with_name(f"{folder.name}.unchecked")
        try:
            report = self._write_unchecked(tensors, spec, unchecked)
        except ValueError as error:
            raise OSError(f"the adapter cannot be merged: {error}") from error
        merged = load_model(
            unchecked,
            trained.attention,
            trained.compute_dtype,
            trained.rope_tables.num_positions,
            adapters=AdapterStart(spec=LoraSpec(ranks={}, alphas={})),  # freezes all weights
            frozen_dtype=self._dtype,
            device=trained.head_weight.device,
        )
        kl = largest_kl(logits, logits_of(merged, texts))
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
        return {"dtype": dtype_name(self._dtype), **measures}

    def _write_unchecked(self, tensors: Mapping[str, Tensor], spec: LoraSpec, folder: Path) -> MergeReport:
        """Writes the merged model. Raises ValueError or OSError."""
        source, report = self._parts.source, MergeReport(self._dtype)
        require_base(source.folder, self._state["fingerprint"])
        read_base = partial(as_computed, dtype=frozen_dtype(self._config))
        weights = merged_weights(source.folder, tensors, spec, report, read_base=read_base)
        facts = AdapterFacts(spec=spec, base_sha256=self._state["fingerprint"][BASE_WEIGHTS], merge=report)
        self.write_model(weights, folder)
        # The report is complete only now that all weights have been written.
        (folder / "README.md").write_text(self._card(facts), encoding="utf-8")
        return report

    def _card(self, adapter: AdapterFacts | None) -> str:
        """Returns the card; it names the repository unless the export is an adapter whose merge has the root."""
        lora = self._config.lora
        is_in_root = adapter is None or adapter.merge is not None or lora is None or not lora.merge
        repository = self._repository if is_in_root else None
        return model_card(
            self._config,
            self._state,
            run_folder=self._run_folder,
            base=self._parts.base,
            chat_tokenizer=self._parts.chat_tokenizer,
            adapter=adapter,
            repository=repository,
        )


def _with_verify_card(parts: ExportParts, run_folder: Path) -> ExportParts:
    """Adds the card of `sftron verify` to the files of an export, if the run directory has one."""
    if not (card := run_folder / VERIFY_CARD).is_file():
        return parts
    try:
        files = {**parts.source.files, VERIFY_CARD: read_regular(card, MAX_CARD_BYTES)}
    except (OSError, ValueError) as error:
        console.write(f"WARNING    {card} is not exported: it {error}")
        return parts
    return replace(parts, source=replace(parts.source, files=files))


def export_checkpoint(
    config: Config,
    checkpoint: Path,
    folder: Path,
    *,
    parts: ExportParts | None = None,
    dtype: torch.dtype | None = None,
    stop_token_ids: Collection[int] | None = None,
    merge: bool = False,
) -> MergeReport | None:
    """Exports a checkpoint of the run with this configuration to `folder`.

    A checkpoint of adapters becomes an adapter folder or, with `merge`, the merged model.

    Args:
        parts: The files besides the weights; by default, they are read from the folders that the configuration names.
        dtype: The dtype of the exported weights; by default, the run's compute dtype, or float32 for adapters.
        stop_token_ids: The stop tokens; by default, those in the checkpoint.

    Returns:
        What rounding lost in the merge, if there is one.

    Raises:
        ValueError: If the checkpoint or a source folder cannot be used.
        OSError: If the export cannot be written.
    """
    if parts is None:
        parts = read_export_parts(config, model_folder(config), load_chat_tokenizer(config))
    run_folder = checkpoint.resolve().parents[1]
    parts = _with_verify_card(parts, run_folder)
    state = read_state(checkpoint)
    spec, base = lora_of(state), parts.base
    facts = None if spec is None else AdapterFacts(spec=spec, base_sha256=state["fingerprint"][BASE_WEIGHTS])
    card = partial(model_card, config, state, run_folder=run_folder, base=base, chat_tokenizer=parts.chat_tokenizer)
    options: dict[str, Any] = {"source": parts.source, "stop_token_ids": stop_token_ids}
    if facts is not None and not merge:
        options |= {"base_model": base.name, "base_revision": base.revision, "model_card": card(adapter=facts)}
        checkpoint_to_adapter(checkpoint, folder, dtype=dtype or torch.float32, **options)
        return None
    export_dtype: torch.dtype = dtype or getattr(torch, config.model.compute_dtype)
    read_base = partial(as_computed, dtype=frozen_dtype(config))
    report = checkpoint_to_hf(checkpoint, folder, dtype=export_dtype, read_base=read_base, model_card=card(), **options)
    if facts is not None:  # the report is complete only now
        (folder / "README.md").write_text(card(adapter=replace(facts, merge=report)), encoding="utf-8")
    return report
