"""Where a run goes on from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sftron.checkpoint.agreement import on_main
from sftron.checkpoint.manifest import CheckpointError, read_state, set_aside_newer
from sftron.train import console
from sftron.train.health import NOT_FINITE
from sftron.train.plan import RunPlan
from sftron.train.progress import Progress
from sftron.train.resume import (
    find_checkpoint,
    read_run_state,
    require_an_epoch_left,
    require_same_data,
    require_same_model,
    require_sound,
)
from sftron.train.run_directory import RunDirectory
from sftron.train.run_length import RunLength
from sftron.train.run_result import read_result
from sftron.train.settings import Change, Settings


@dataclass(frozen=True, slots=True)
class Start:
    """The checkpoint that a run goes on from. changes: what of its data is another now, on purpose.

    weights_only: of the checkpoint, nothing else is taken; its state is left empty, progress and settings None.
    """

    folder: Path
    state: dict[str, Any]
    changes: list[str]
    weights_only: bool = False
    progress: Progress | None = None
    settings: Settings | None = None


def find_start(plan: RunPlan, checkpoints: Path) -> Start | None:
    """What checkpoints.resume asks for, if there is any; newer ones make way for it. Every rank has to call this.

    Raises CheckpointError where it cannot be used, or its data is not ours and may not be.
    """
    options = plan.config.checkpoints
    weights_only = options.load == "weights"
    # Weights begin a run; what that run has saved itself is where it goes on.
    found = find_checkpoint("auto" if weights_only else options.resume, checkpoints, plan.ranks)
    folder = found.folder
    if folder is None:
        return _start_with_weights(plan, Path(options.resume)) if weights_only else None
    start = _start_of(plan, folder)
    if start.changes and start.progress:
        require_an_epoch_left(start.progress, plan.config.tokens.train_epochs)
    for problem in found.rejected:
        console.say(f"broken     {problem}")
    if (ended := _step_without_finite_loss(checkpoints.parent)) is not None:
        console.say(
            f"goes back  the run ended after step {ended} without a finite loss; {folder} is the newest checkpoint, "
            "and its weights gave one"
        )
    for aside in on_main(plan.ranks, lambda: list(map(str, set_aside_newer(checkpoints, start.state["step"])))):
        console.say(f"set aside  {aside}")
    return start


def _start_of(plan: RunPlan, folder: Path) -> Start:
    """Raises CheckpointError where its state is not what a run keeps, or its data is not ours and may not be."""
    state = read_run_state(folder)
    changed = require_same_data(
        folder,
        ours=plan.fingerprint,
        theirs=state["fingerprint"],
        allow_change=plan.config.checkpoints.allow_data_change,
    )
    try:
        progress, settings = Progress.from_state(state["progress"]), Settings.from_state(state)
    except ValueError as error:
        raise CheckpointError(f"{folder / 'state.json'}: {error}") from error
    known, num_datasets = len(progress.datasets), len(plan.preparation.datasets)
    if not changed and known != num_datasets:
        raise CheckpointError(
            f"{folder / 'state.json'}: progress.datasets counts {known} data sets, and data.datasets has "
            f"{num_datasets}; resume from another checkpoint (checkpoints.resume)"
        )
    return Start(folder, state, changed, progress=progress, settings=settings)


def find_finished(plan: RunPlan, directory: RunDirectory, length: RunLength) -> Start | None:
    """The last checkpoint of a completed run, where these settings leave nothing to do: no step, evaluation or export.

    Only reads, so that it may be called without the run directory's lock; every rank has to call it. Raises
    CheckpointError as `find_start` does.
    """
    resume = "auto" if plan.config.checkpoints.load == "weights" else plan.config.checkpoints.resume

    def find_step() -> int | None:
        result = read_result(directory.folder)
        step = result.get("step")
        if resume == "never" or result.get("status") != "completed" or type(step) is not int:
            return None
        try:
            state = read_run_state(directory.checkpoints / f"step-{step}")
            is_done = length.is_done(Progress.from_state(state["progress"]))
            evaluation = state.get("evaluation") or {}
            is_evaluated = not plan.evaluates or evaluation.get("evaluated_step") == step
            wanted = [step] if plan.config.checkpoints.export_hf else []
            if wanted and plan.config.checkpoints.keep_best and evaluation.get("best"):
                wanted.append(evaluation["best"]["step"])
        except (ValueError, AttributeError, KeyError, TypeError):
            return None  # `find_start` names what is wrong with it
        return step if is_done and is_evaluated and all(directory.hf(each).is_dir() for each in wanted) else None

    step = on_main(plan.ranks, find_step)
    if step is None:
        return None
    found = find_checkpoint(resume, directory.checkpoints, plan.ranks)
    if found.folder is None or found.folder.resolve() != (directory.checkpoints / f"step-{step}").resolve():
        return None
    start = _start_of(plan, found.folder)
    # How many rows of other data are left to train is for `find_start` to find out.
    return None if start.changes and plan.config.tokens.train_epochs is not None else start


def changed_settings(plan: RunPlan, start: Start | None) -> tuple[Change, ...]:
    """Every key that has another value now than in the run that `start` is of; none for a run that begins."""
    if start is None or start.settings is None or start.progress is None:
        return ()
    return start.settings.changes_to(Settings.of(plan.resolved_config), after_step=start.progress.step)


def settings_of(plan: RunPlan, start: Start | None, *, is_done: bool) -> Settings:
    """The settings of a run that begins, or goes on from `start`. is_done: no step is left to be made with new ones."""
    now = Settings.of(plan.resolved_config)
    if start is None or start.settings is None:
        return now
    return start.settings if is_done else Settings(now.config, start.settings.changes + changed_settings(plan, start))


def _step_without_finite_loss(run_folder: Path) -> int | None:
    """The last step of a run that ended with status 3, by result.json, for the console of the main rank."""
    result = read_result(run_folder)
    step = result.get("step")
    return step if result.get("error") == NOT_FINITE and type(step) is int else None


def _start_with_weights(plan: RunPlan, folder: Path) -> Start:
    require_sound(folder, plan.ranks)
    theirs = read_state(folder).get("fingerprint")
    require_same_model(folder, ours=plan.fingerprint, theirs=theirs if isinstance(theirs, dict) else {})
    return Start(folder, {}, [], weights_only=True)
