"""The export of a checkpoint: its files besides the weights, its plan, and its card."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sftron.checkpoint.export import ExportPlan, opened, plan_export, write_export
from sftron.checkpoint.hf_export import ExportSource
from sftron.checkpoint.merge import MergeReport
from sftron.config import Config
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.models.quantization import as_computed
from sftron.regular_file import read_regular
from sftron.train.build_data import load_chat_tokenizer
from sftron.train.exports.base_model import read_base_model
from sftron.train.exports.model_card import MAX_CARD_BYTES, VERIFY_CARD, AdapterFacts, model_card
from sftron.train.logs import console
from sftron.train.revisions import model_folder, tokenizer_folder
from sftron.train.run import ExportParts, frozen_dtype


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


def plan_of_run(
    config: Config,
    parts: ExportParts,
    state: Mapping[str, Any],
    run_folder: Path,
    *,
    vocab_size: int,
    dtype: torch.dtype | None = None,
    merge: bool = False,
    repository: str | None = None,
) -> ExportPlan:
    """Returns the plan of an export of a run; see `plan_export`.

    Args:
        state: The state of a checkpoint; see `resume.run_facts`.
        vocab_size: The number of rows of the embeddings.
        repository: The repository on the Hub that the exports are pushed to, if any.
    """
    parts, lora = _with_verify_card(parts, run_folder), config.lora

    def card(report: MergeReport | None) -> str:
        facts = None
        if plan.spec is not None and (plan.is_adapter or report is not None):
            facts = AdapterFacts(spec=plan.spec, base_sha256=plan.base_sha256, merge=report)
        # An adapter whose merge has the root of the repository is in a folder of it.
        is_in_root = not (plan.is_adapter and lora is not None and lora.merge)
        return model_card(
            config,
            state,
            run_folder=run_folder,
            base=parts.base,
            chat_tokenizer=parts.chat_tokenizer,
            adapter=facts,
            repository=repository if is_in_root else None,
        )

    plan = plan_export(
        state,
        parts.source,
        vocab_size,
        dtype=dtype,
        model_dtype=getattr(torch, config.model.compute_dtype),
        merge=merge,
        base_model=parts.base.name,
        base_revision=parts.base.revision,
        read_base=partial(as_computed, dtype=frozen_dtype(config)),
        card=card,
    )
    return plan


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
    merge: bool = False,
) -> MergeReport | None:
    """Exports a checkpoint of the run with this configuration to `folder`; see `plan_of_run` and `write_export`.

    Args:
        parts: The files besides the weights; by default, they are read from the folders that the configuration names.
    """
    if parts is None:
        parts = read_export_parts(config, model_folder(config), load_chat_tokenizer(config))
    with opened(checkpoint, parts.source) as (state, read, vocab_size):
        run_folder = checkpoint.resolve().parents[1]
        plan = plan_of_run(config, parts, state, run_folder, vocab_size=vocab_size, merge=merge)
        return write_export(plan, read(), folder)
