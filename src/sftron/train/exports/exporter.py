"""Exports of a run: a whole model, an adapter, and a merge of the two that is checked against the adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sftron.checkpoint.adapter import vllm_limits
from sftron.checkpoint.atomic import remove
from sftron.checkpoint.export import ExportPlan, opened, plan_export, write_export
from sftron.checkpoint.hf_weights import load_model
from sftron.checkpoint.merge import MOST_KL, MergeReport, largest_kl, logits_of
from sftron.checkpoint.source import ExportSource
from sftron.config import Config
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.models.adapters import AdapterStart, LoraSpec
from sftron.models.llama import LlamaForSFT
from sftron.models.quantization import as_computed, dtype_name
from sftron.regular_file import read_regular
from sftron.train.build_data import load_chat_tokenizer
from sftron.train.exports.model_card import MAX_CARD_BYTES, VERIFY_CARD, AdapterFacts, model_card
from sftron.train.logs import console
from sftron.train.revisions import export_source, model_folder
from sftron.train.run import frozen_dtype


class Exporter:
    """Plans and writes the exports of one state of a run, on the main rank.

    Args:
        state: The state of a checkpoint; see `resume.run_facts`.
        vocab_size: The number of rows of the embeddings.
        repository: The repository on the Hub that the exports are pushed to, if any.
    """

    def __init__(
        self,
        config: Config,
        source: ExportSource,
        chat_tokenizer: ChatTokenizer,
        state: Mapping[str, Any],
        run_folder: Path,
        *,
        vocab_size: int,
        repository: str | None = None,
    ) -> None:
        self._config, self._source, self._state = config, _with_verify_card(source, run_folder), state
        self._chat_tokenizer, self._run_folder = chat_tokenizer, run_folder
        self._vocab_size, self._repository = vocab_size, repository

    def plan(self, *, dtype: torch.dtype | None = None, merge: bool = False) -> ExportPlan:
        """Returns the plan of an export; see `plan_export`."""
        config, source, lora = self._config, self._source, self._config.lora

        def card(report: MergeReport | None) -> str:
            facts = None
            if plan.spec is not None and (plan.is_adapter or report is not None):
                facts = AdapterFacts(spec=plan.spec, base_sha256=plan.base_sha256, merge=report)
            # An adapter whose merge has the root of the repository is in a folder of it.
            is_in_root = not (plan.is_adapter and lora is not None and lora.merge)
            return model_card(
                config,
                self._state,
                run_folder=self._run_folder,
                base=source.model,
                chat_tokenizer=self._chat_tokenizer,
                adapter=facts,
                repository=self._repository if is_in_root else None,
            )

        plan = plan_export(
            self._state,
            source,
            self._vocab_size,
            dtype=dtype,
            model_dtype=getattr(torch, config.model.compute_dtype),
            merge=merge,
            base_model=source.model.name,
            base_revision=source.model.revision,
            read_base=partial(as_computed, dtype=frozen_dtype(config)),
            card=card,
        )
        return plan

    def write_adapter(self, tensors: Mapping[str, Tensor], folder: Path) -> None:
        """Writes an adapter folder of tensors by `peft_name`. Raises OSError."""
        plan = self.plan()
        write_export(plan, tensors.items(), folder)
        console.write(f"adapter    {folder}, which peft loads onto {plan.base_model}")
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
        """Writes the merged model, unless its next tokens differ too much from those of the trained model.

        Args:
            trained: The model that was trained; the merged one is computed in the same way.
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
        return {"dtype": dtype_name(plan.dtype), **measures}


def _with_verify_card(source: ExportSource, run_folder: Path) -> ExportSource:
    """Adds the card of `sftron verify` to the files of an export, if the run directory has one."""
    if not (card := run_folder / VERIFY_CARD).is_file():
        return source
    try:
        return replace(source, files={**source.files, VERIFY_CARD: read_regular(card, MAX_CARD_BYTES)})
    except (OSError, ValueError) as error:
        console.write(f"WARNING    {card} is not exported: it {error}")
        return source


def export_checkpoint(
    config: Config,
    checkpoint: Path,
    folder: Path,
    *,
    source: ExportSource | None = None,
    chat_tokenizer: ChatTokenizer | None = None,
    merge: bool = False,
) -> MergeReport | None:
    """Exports a checkpoint of the run with this configuration to `folder`; see `plan_export` and `write_export`.

    Args:
        source, chat_tokenizer: By default, they are read from the folders that the configuration names.
    """
    if chat_tokenizer is None:
        chat_tokenizer = load_chat_tokenizer(config)
    if source is None:
        source = export_source(config, model_folder(config), chat_tokenizer)
    with opened(checkpoint, source) as (state, read, vocab_size):
        run_folder = checkpoint.resolve().parents[1]
        exporter = Exporter(config, source, chat_tokenizer, state, run_folder, vocab_size=vocab_size)
        return write_export(exporter.plan(merge=merge), read(), folder)
