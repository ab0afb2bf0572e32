"""Converts a run's checkpoint, a Hugging Face folder or an adapter, and reads every tensor back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import torch

from sftron.checkpoint.adapter import read_adapter, vllm_limits
from sftron.checkpoint.adapter_config import CONFIG as ADAPTER
from sftron.checkpoint.checkpoint import MANIFEST
from sftron.checkpoint.export import (
    ExportPlan,
    check_export,
    hf_to_checkpoint,
    lora_of,
    opened,
    plan_export,
    write_export,
)
from sftron.checkpoint.model_folder import stop_ids_of
from sftron.checkpoint.source import ExportSource, hub_id
from sftron.config import load_config
from sftron.errors import show
from sftron.models.fusion import NamedTensors
from sftron.train.build_data import load_chat_tokenizer
from sftron.train.exports.exporter import Exporter
from sftron.train.exports.model_card import AdapterFacts, plain_model_card
from sftron.train.revisions import export_source, model_folder


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
        merge: Merges a checkpoint of adapters into its base.
        dtype: The type of a Hugging Face folder (by default, the run's) or of an adapter (float32).
        stop_token_ids: The ids that end a turn; by default, those that the run has trained.
        overrides: Overrides of the configuration of the checkpoint's run.

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
        chat_tokenizer = load_chat_tokenizer(config)
        base = export_source(config, model_folder(config), chat_tokenizer)
    else:
        raise ValueError(f"{source} is not in a run directory; give the model's folder (--model)")
    with opened(source, base, stop_token_ids) as (state, read, vocab_size):
        if config is not None and chat_tokenizer is not None:
            exporter = Exporter(config, base, chat_tokenizer, state, run_config.parent, vocab_size=vocab_size)
            plan = exporter.plan(dtype=dtype, merge=merge)
        else:
            spec = None if merge else lora_of(state)
            card = plain_model_card(base.model, state["step"], None if spec is None else AdapterFacts(spec=spec))
            plan = plan_export(
                state,
                base,
                vocab_size,
                dtype=dtype,
                model_dtype=torch.bfloat16,
                merge=merge,
                base_model=base.model.name if hub_id(base.model.name) else str(model),
                base_revision=base.model.revision,
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

    The tokenizer and the stop tokens are those of the adapter's folder, where it has them.
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
        card=lambda _: card,
    )
    return _write_and_check(plan, adapter.tensors.items, target)


def _write_and_check(plan: ExportPlan, read: Callable[[], NamedTensors], target: Path) -> tuple[int, list[str]]:
    report = write_export(plan, read(), target)
    for line in report.lines() if report else ():
        show(line)
    return check_export(plan, read(), target)
