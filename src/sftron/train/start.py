"""Where a run goes on from."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sftron.checkpoint.agreement import on_main
from sftron.checkpoint.manifest import read_state, set_aside_newer
from sftron.checkpoint.publish import restore_replaced
from sftron.train import console
from sftron.train.health import NOT_FINITE
from sftron.train.plan import RunPlan
from sftron.train.resume import (
    find_checkpoint,
    read_run_state,
    require_an_epoch_left,
    require_same_data,
    require_same_model,
    require_sound,
)


@dataclass(frozen=True, slots=True)
class Start:
    """The checkpoint that a run goes on from. changes: what of its data is another now, on purpose.

    weights_only: of the checkpoint, nothing else is taken; its state is left empty.
    """

    folder: Path
    state: dict[str, Any]
    changes: list[str]
    weights_only: bool = False


def find_start(plan: RunPlan, checkpoints: Path) -> Start | None:
    """What checkpoints.resume asks for, if there is any; newer ones make way for it. Every rank has to call this.

    Raises CheckpointError where it cannot be used, or its data is not ours and may not be.
    """
    options = plan.config.checkpoints
    for restored in on_main(plan.ranks, lambda: list(map(str, restore_replaced(checkpoints)))):
        console.say(f"restored   {restored}, which was about to be replaced when the run was killed")
    weights_only = options.load == "weights"
    # Weights begin a run; what that run has saved itself is where it goes on.
    found = find_checkpoint("auto" if weights_only else options.resume, checkpoints, plan.ranks)
    folder = found.folder
    if folder is None:
        return _start_with_weights(plan, Path(options.resume)) if weights_only else None
    state = read_run_state(folder)
    changed = require_same_data(
        folder,
        ours=plan.fingerprint,
        theirs=state["fingerprint"],
        allow_change=options.allow_data_change,
    )
    if changed:
        require_an_epoch_left(state["progress"], plan.config.tokens.train_epochs)
    for problem in found.rejected:
        console.say(f"broken     {problem}")
    if (ended := _step_without_finite_loss(checkpoints.parent)) is not None:
        console.say(
            f"goes back  the run ended after step {ended} without a finite loss; {folder} is the newest checkpoint, "
            "and its weights gave one"
        )
    for aside in on_main(plan.ranks, lambda: list(map(str, set_aside_newer(checkpoints, state["step"])))):
        console.say(f"set aside  {aside}")
    return Start(folder, state, changed)


def _step_without_finite_loss(run_folder: Path) -> int | None:
    """The last step of a run that ended with status 3, by result.json, for the console of the main rank."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        result = json.loads((run_folder / "result.json").read_text(encoding="utf-8"))
        return int(result["step"]) if result["error"] == NOT_FINITE else None
    return None


def _start_with_weights(plan: RunPlan, folder: Path) -> Start:
    require_sound(folder, plan.ranks)
    theirs = read_state(folder).get("fingerprint")
    require_same_model(folder, ours=plan.fingerprint, theirs=theirs if isinstance(theirs, dict) else {})
    return Start(folder, {}, [], weights_only=True)
