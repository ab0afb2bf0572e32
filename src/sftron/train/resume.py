"""Which checkpoint a run resumes from, and whether its data is still the same, or may have changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sftron.checkpoint.atomic import ProcessGroup, main_or_raise
from sftron.checkpoint.manifest import (
    CheckpointError,
    Found,
    newest_checkpoint,
    read_state,
    set_aside_newer,
    verify_checkpoint,
)
from sftron.models.architecture import is_of_the_model
from sftron.train import console
from sftron.train.health import NOT_FINITE
from sftron.train.plan import RunPlan
from sftron.train.progress import Progress, RunLength
from sftron.train.run_directory import RunDirectory, read_result
from sftron.train.settings import Change, Settings

_LONGEST_SHOWN = 40


def require_sound(path: Path, ranks: ProcessGroup | None = None) -> None:
    """Raises CheckpointError where a checkpoint that was asked for is broken; every rank has to ask."""
    if problem := verify_checkpoint(path, ranks):
        raise CheckpointError(f"checkpoints.resume: {path}: {problem}")


def find_checkpoint(resume: str, checkpoints: Path, ranks: ProcessGroup | None = None) -> Found:
    """What checkpoints.resume asks for: auto, never, or a path; every rank has to ask. Raises CheckpointError."""
    if resume == "auto":
        return newest_checkpoint(checkpoints, ranks)
    if resume == "never":
        if newest_checkpoint(checkpoints, ranks).folder:
            raise CheckpointError(
                f"checkpoints.resume is never, but {checkpoints} holds checkpoints of an earlier run; choose another "
                "general.run_name, or remove them"
            )
        return Found(None, ())
    require_sound(Path(resume), ranks)
    return Found(Path(resume), ())


def read_run_state(folder: Path) -> dict[str, Any]:
    """The state of a run's checkpoint. Raises CheckpointError for anything else."""
    state = read_state(folder)
    for name in ("progress", "data", "fingerprint", "settings"):
        if not isinstance(state.get(name), dict):
            raise CheckpointError(
                f"{folder / 'state.json'} has no {name}; resume from another checkpoint, or begin with its weights "
                "(checkpoints.load: weights)"
            )
    return state


def changes(*, ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """What differs between two fingerprints, "name: a in the checkpoint, b now"."""
    return [
        f"{name}: {_short(theirs.get(name))} in the checkpoint, {_short(ours.get(name))} now"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]


def require_same_data(
    folder: Path, *, ours: Mapping[str, str], theirs: Mapping[str, str], allow_change: bool
) -> list[str]:
    """What of the data has changed since the checkpoint; nothing, unless that is allowed.

    Raises CheckpointError naming what differs: pack n would not be the one that the checkpoint counts on (law 5).
    """
    changed = changes(ours=ours, theirs=theirs)
    if changed and not (allow_change and not any(map(is_of_the_model, changed))):
        raise CheckpointError(
            f"{folder} was made with other data settings, and going on would repeat or lose conversations:\n  "
            + "\n  ".join(changed)
            + "\nSet them back, or start another run (general.run_name). checkpoints.allow_data_change: true "
            "goes on with other data, though not with another model, and begins the next epoch"
        )
    return changed


def require_same_model(folder: Path, *, ours: Mapping[str, str], theirs: Mapping[str, str]) -> None:
    """Raises CheckpointError where weights are those of another architecture, even one with the same shapes."""
    ours, theirs = ({name: text for name, text in each.items() if is_of_the_model(name)} for each in (ours, theirs))
    if changed := changes(ours=ours, theirs=theirs):
        raise CheckpointError(f"{folder} has the weights of another model than model.path:\n  " + "\n  ".join(changed))


def require_an_epoch_left(progress: Progress, num_epochs: int | None) -> None:
    """Raises CheckpointError where other data may not begin another epoch. progress: of the checkpoint."""
    dealt = 1 + max(count.latest_epoch for count in progress.datasets)
    if num_epochs is not None and dealt >= num_epochs:
        raise CheckpointError(
            f"the data has changed, and {dealt} epochs have begun without it, but tokens.train_epochs is {num_epochs}; "
            "raise it, or set the data back"
        )


def _short(value: str | None) -> str:
    if value is None:
        return "absent"
    value = str(value)  # a checkpoint may hold anything
    return value if len(value) <= _LONGEST_SHOWN else f"{value[:12]}..."


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
    for aside in main_or_raise(plan.ranks, lambda: list(map(str, set_aside_newer(checkpoints, start.state["step"])))):
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

    step = main_or_raise(plan.ranks, find_step)
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
