"""Converts a run's checkpoint, a Hugging Face folder or an adapter, and reads every tensor back."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path

import torch

from sftron.checkpoint.adapter import read_adapter, vllm_limits
from sftron.checkpoint.adapter_config import CONFIG as ADAPTER
from sftron.checkpoint.checkpoint import MANIFEST, read_state
from sftron.checkpoint.convert import (
    adapter_to_hf,
    checkpoint_to_adapter,
    checkpoint_to_hf,
    differing,
    differing_in_adapter,
    differing_weights,
    hf_to_checkpoint,
    lora_of,
)
from sftron.checkpoint.hf_export import ExportSource
from sftron.checkpoint.merge import MergeReport, merged_weights
from sftron.checkpoint.model_folder import read_config
from sftron.config import load_config
from sftron.errors import show
from sftron.models.adapters import LoraSpec
from sftron.models.quantization import as_computed
from sftron.train.exports.base_model import hub_id, read_base_model
from sftron.train.exports.exporter import export_checkpoint
from sftron.train.exports.model_card import AdapterFacts, plain_model_card
from sftron.train.start.lora import frozen_dtype
from sftron.train.start.revisions import model_folder


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
        hf_to_checkpoint(source, target)
        return differing(target, source)
    state, run_config = read_state(source), source.resolve().parents[1] / "config.yaml"
    spec = None if merge else lora_of(state)  # of the adapter that the target will be
    read_base = None
    if model is not None:
        _convert_alone(source, target, model, dtype, stop_token_ids, state["step"], spec)
    elif run_config.is_file():
        config = load_config(run_config, overrides)
        model = model_folder(config)
        _show_merge(export_checkpoint(config, source, target, dtype=dtype, stop_token_ids=stop_token_ids, merge=merge))
        read_base = partial(as_computed, dtype=frozen_dtype(config))
    else:
        raise ValueError(f"{source} is not in a run directory; give the model's folder (--model)")
    if spec is None:
        return differing(source, target, model, read_base)
    for line in vllm_limits(spec):
        show(f"WARNING    {line}")
    return differing_in_adapter(source, target, model)


def _convert_alone(
    source: Path,
    target: Path,
    model: Path,
    dtype: torch.dtype | None,
    stop_token_ids: Collection[int] | None,
    step: int,
    spec: LoraSpec | None,
) -> None:
    """Converts a checkpoint outside a run directory, to an adapter if `spec` describes one; see `convert`."""
    base = read_base_model(str(model), model)
    card = plain_model_card(base, step, None if spec is None else AdapterFacts(spec=spec))
    common = {"source": ExportSource.read(model), "stop_token_ids": stop_token_ids, "model_card": card}
    if spec is None:
        _show_merge(checkpoint_to_hf(source, target, dtype=dtype or torch.bfloat16, **common))
    else:
        common |= {"base_model": base.name if hub_id(base.name) else str(model), "base_revision": base.revision}
        checkpoint_to_adapter(source, target, dtype=dtype or torch.float32, **common)


def _merge_adapter(
    source: Path, target: Path, model: Path | None, dtype: torch.dtype, stop_token_ids: Collection[int] | None
) -> tuple[int, list[str]]:
    """Merges an adapter folder into its base; see `convert`."""
    if model is None:
        raise ValueError(f"{source} is an adapter; give the folder of its base (--model)")
    found = read_adapter(source, read_config(model))
    card = plain_model_card(read_base_model(str(model), model), None)
    _show_merge(adapter_to_hf(source, target, base=model, dtype=dtype, stop_token_ids=stop_token_ids, model_card=card))
    weights = merged_weights(model, found.tensors, found.spec, MergeReport(dtype))
    return differing_weights(weights, target)


def _show_merge(report: MergeReport | None) -> None:
    for line in report.lines() if report else ():
        show(line)
