"""Where a run goes on from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sftron.checkpoint.agreement import on_main
from sftron.checkpoint.manifest import set_aside_newer
from sftron.train import console
from sftron.train.plan import RunPlan
from sftron.train.resume import find_checkpoint, read_run_state, require_an_epoch_left, require_same_data


@dataclass(frozen=True, slots=True)
class Start:
    """The checkpoint that a run goes on from. changes: what of its data is another now, on purpose."""

    folder: Path
    state: dict[str, Any]
    changes: list[str]


def find_start(plan: RunPlan, checkpoints: Path) -> Start | None:
    """What checkpoints.resume asks for, if there is any; newer ones make way for it. Every rank has to call this.

    Raises CheckpointError where it cannot be used, or its data is not ours and may not be.
    """
    found = find_checkpoint(plan.config.checkpoints.resume, checkpoints, plan.ranks)
    folder = found.folder
    if folder is None:
        return None
    state = read_run_state(folder)
    changed = require_same_data(
        folder,
        ours=plan.fingerprint,
        theirs=state["fingerprint"],
        allow_change=plan.config.checkpoints.allow_data_change,
    )
    if changed:
        require_an_epoch_left(state["progress"], plan.config.tokens.train_epochs)
    for problem in found.rejected:
        console.say(f"broken     {problem}")
    for aside in on_main(plan.ranks, lambda: list(map(str, set_aside_newer(checkpoints, state["step"])))):
        console.say(f"set aside  {aside}")
    return Start(folder, state, changed)
