"""What a checkpoint holds of a run beside weights and optimizer; taken, and put back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sftron.checkpoint.checkpoint import load_checkpoint
from sftron.data.loader import PackLoader
from sftron.models.llama import LlamaForSFT
from sftron.train import console
from sftron.train.description import describe_change
from sftron.train.model_card import hardware
from sftron.train.plan import RunPlan
from sftron.train.progress import Progress
from sftron.train.resume import Start
from sftron.train.settings import Settings


def run_state(
    plan: RunPlan,
    data_state: Mapping[str, Any],
    progress: Progress,
    settings: Settings,
) -> dict[str, Any]:
    """JSON, as of the last finished step. All ranks have to call it. data_state: this rank's loader's."""
    return {**run_facts(plan, progress, settings), "data": _data_state(plan, data_state)}


def run_facts(plan: RunPlan, progress: Progress, settings: Settings) -> dict[str, Any]:
    """What of it is the same on every rank."""
    return {
        "progress": progress.state(),
        "settings": settings.state(),
        "fingerprint": plan.fingerprint,
        "stop_token_ids": sorted(plan.sample.stop_ids),
        "hardware": hardware(plan.ranks),
    }


def _data_state(plan: RunPlan, data_state: Mapping[str, Any]) -> dict[str, Any]:
    """Where the data stands: the lanes of all ranks, which have had equally many packs."""
    states = plan.ranks.gather(data_state)
    assert len({state["next_pack"] for state in states}) == 1
    return {**states[0], "lanes": {lane: text for state in states for lane, text in state["lanes"].items()}}


def resume_run(
    start: Start, plan: RunPlan, *, model: LlamaForSFT, optimizer: torch.optim.Optimizer, loader: PackLoader
) -> Progress | None:
    """Put the checkpoint's state into model, optimizer and loader; its progress, or None where only weights are taken.

    Raises CheckpointError where the checkpoint is another model's.
    """
    load_checkpoint(start.folder, model=model, optimizer=None if start.weights_only else optimizer)
    progress = start.progress
    if progress is None:
        console.say(f"weights    of {start.folder}; step, data and optimizer begin anew")
        return None
    console.say(f"resumed    {start.folder}, after step {progress.step}")
    if not start.changes:
        loader.load_state_dict(start.state["data"])
        return progress
    progress.change_data(len(plan.preparation.datasets))
    loader.start_epoch(progress.first_epoch, next_pack=start.state["data"].get("next_pack"))
    describe_change(start.changes, progress.first_epoch)
    return progress
