"""Resume: the run state that a checkpoint stores, the choice of the checkpoint to resume from, and its loading."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from sftron.checkpoint.atomic import main_or_raise
from sftron.checkpoint.checkpoint import (
    CheckpointError,
    LatestCheckpoint,
    load_checkpoint,
    newest_checkpoint,
    read_state,
    set_aside_newer,
    steps_in,
    verify_checkpoint,
)
from sftron.data.loader import PackLoader
from sftron.kernels.device import device_name, is_gpu
from sftron.models.architecture import is_of_the_model
from sftron.models.llama import LlamaForSFT
from sftron.regular_file import where_missing
from sftron.train.evaluation import Best, best_metric, is_patience_over
from sftron.train.keep import comparable_losses, is_within, named_now, problems
from sftron.train.logs import console
from sftron.train.progress import Progress
from sftron.train.ranks import Ranks
from sftron.train.run import Change, Settings, Setup, changes
from sftron.train.run_directory import RunDirectory, read_result
from sftron.visible_text import counted

# --- The state of a run ---


def run_state(setup: Setup, data_state: Mapping[str, Any], progress: Progress, settings: Settings) -> dict[str, Any]:
    """Returns the state after the last finished step, as JSON values. Every rank calls this.

    Args:
        data_state: The state of this rank's loader. The result joins the lanes of all ranks, which have consumed the
            same number of packs.
    """
    return {**run_facts(setup, progress, settings), "data": _data_state_of_all(setup, data_state)}


def _data_state_of_all(setup: Setup, data_state: Mapping[str, Any]) -> dict[str, Any]:
    states = setup.ranks.gather(data_state)
    assert len({state["next_pack"] for state in states}) == 1
    return {**states[0], "lanes": {lane: text for state in states for lane, text in state["lanes"].items()}}


def require_whole_epochs(setup: Setup, data_state: Mapping[str, Any], progress: Progress) -> None:
    """Raises RuntimeError if a row of tokens.train_epochs was not consumed. Every rank calls this."""
    lanes = _data_state_of_all(setup, data_state)["lanes"]
    setup.length.require_whole_epochs(progress, lanes, setup.data.dataset.num_lanes)


def run_facts(setup: Setup, progress: Progress, settings: Settings) -> dict[str, Any]:
    """Returns the part of the state that is equal on every rank."""
    return {
        "progress": asdict(progress),
        "settings": settings.state(),
        "fingerprint": setup.fingerprint,
        "lora": None if setup.model.adapters is None else setup.model.adapters.start.spec.as_dict(),
        "stop_token_ids": sorted(setup.data.sample.stop_ids),
        "hardware": _hardware(setup.ranks),
    }


def _hardware(ranks: Ranks) -> str:
    """Returns the number and the name of the devices, such as `8 x NVIDIA H100 80GB HBM3`."""
    name = device_name(ranks.device) if is_gpu(ranks.device) else f"CPU ({platform.machine()})"
    return f"{ranks.world_size} x {name}"


# --- Compatibility with the current model and data ---


def _require_same_model(folder: Path, *, saved: Any, now: Mapping[str, str]) -> None:
    """Raises CheckpointError if the weights belong to another architecture, even one with the same shapes."""
    differences = changes(saved=saved if isinstance(saved, dict) else {}, now=now)
    if changed := [change for change in differences if is_of_the_model(change)]:
        raise CheckpointError(f"{folder} does not fit the model in model.path:\n  " + "\n  ".join(changed))


# --- Finding the checkpoint ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a run starts from: the checkpoint that it resumes, the weights of another run, or the model's own."""

    folder: Path | None = None
    """The checkpoint; None to use the weights of model.path."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """The run state of the checkpoint to resume; else empty."""
    changes: Sequence[str] = ()
    """The differences between its data and the current data; checkpoints.allow_data_change permits them."""
    progress: Progress
    settings: Settings
    watched: Best | None = None
    """The best evaluation by the metric of evaluation.patience, if it was set."""

    def is_done(self, setup: Setup) -> bool:
        """Returns whether the run is complete: it has its full length, or evaluation.patience or a limit of
        evaluation.keep ended it."""
        sets = setup.data.evaluation_sets
        is_early = is_patience_over(setup.config, sets, self.watched) or bool(self.exceeded(setup))
        return setup.length.is_done(self.progress) or is_early

    def exceeded(self, setup: Setup) -> list[str]:
        """Returns how sets of evaluation.keep exceed the limits in force now that end the run."""
        sets = setup.data.evaluation_sets
        return problems(sets, comparable_losses(sets, self.state["evaluation"]), "stop") if self.state else []

    def changed_settings(self, setup: Setup) -> tuple[Change, ...]:
        """Returns every key whose value differs from the one in the checkpoint; none for a new run."""
        return self.settings.changes_to(setup.settings, after_step=self.progress.step)

    def settings_now(self, setup: Setup) -> Settings:
        """Returns the settings of the run from this start on; for a complete run, the checkpoint's."""
        if self.is_done(setup):
            return self.settings
        changes = self.settings.changes + self.changed_settings(setup)
        return Settings(setup.settings.config, changes)


def find_start(setup: Setup, checkpoints: Path) -> Start:
    """Returns the checkpoint that checkpoints.resume selects, if any, and sets newer checkpoints aside.

    Every rank calls this. Raises CheckpointError if the checkpoint cannot be used, or if its data differs and
    checkpoints.allow_data_change does not permit it.
    """
    options, num_epochs = setup.config.checkpoints, setup.config.tokens.train_epochs
    found = _find(setup, checkpoints)
    if found.folder is None:
        folder = None
        if options.load == "weights":
            folder = _verified(setup, Path(options.resume))
            _require_same_model(folder, saved=read_state(folder).get("fingerprint"), now=setup.fingerprint)
        progress = Progress.of(len(setup.data.preparation.datasets))
        return Start(folder=folder, progress=progress, settings=setup.settings)
    start = _read_start(setup, found.folder)
    begun = 1 + max(count.latest_epoch for count in start.progress.datasets)
    if start.changes and num_epochs is not None and begun >= num_epochs:
        raise CheckpointError(
            f"the data has changed, and {begun} epochs began with the old data, but tokens.train_epochs is "
            f"{num_epochs}; raise it, or restore the data"
        )
    for problem in found.rejected:
        console.write(f"broken     {problem}", is_needed=True)
    for aside in main_or_raise(setup.ranks, lambda: list(map(str, set_aside_newer(checkpoints, start.state["step"])))):
        console.write(f"set aside  {aside}", is_needed=True)
    return start


def find_finished(setup: Setup, directory: RunDirectory) -> Start | None:
    """Returns the last checkpoint of a completed run if no step, evaluation or export is left to do; else None.

    It only reads, so the run directory need not be locked. Every rank calls this. Raises CheckpointError as
    `find_start` does.
    """
    options, ranks = setup.config.checkpoints, setup.ranks

    def status() -> str:
        return "" if options.resume == "never" else str(read_result(directory.folder).get("status"))

    if (ended := main_or_raise(ranks, status)) not in ("completed", "diverged", "forgot"):
        return None
    found = _find(setup, directory.checkpoints)
    if found.folder is None or found.folder.resolve().parent != directory.checkpoints.resolve():
        return None
    start = _read_start(setup, found.folder)
    # With other data, `find_start` determines how many rows are left to train.
    if not start.is_done(setup) or (start.changes and setup.config.tokens.train_epochs is not None):
        return None
    exceeded = bool(start.exceeded(setup))
    if ended != "diverged" and exceeded != (ended == "forgot"):  # a limit was changed
        return None
    evaluation, step, sets = start.state["evaluation"], start.progress.step, setup.data.evaluation_sets
    exported = set() if exceeded else {step}
    best = evaluation["best"] if best_metric(setup.config) else None
    if best and is_within(sets, comparable_losses(sets, evaluation), best["kept"]):
        exported.add(best["step"])

    def is_all_there() -> bool:
        is_exported = not options.export_hf or all(directory.is_exported(setup.config, step) for step in exported)
        return is_exported and (not setup.data.is_evaluated or evaluation["evaluated_step"] == step)

    return start if main_or_raise(ranks, is_all_there) else None


def _find(setup: Setup, checkpoints: Path) -> LatestCheckpoint:
    """Returns the checkpoint that checkpoints.resume selects, if any. Every rank calls this."""
    options = setup.config.checkpoints
    # With load: weights, the named checkpoint only starts the run; a restart resumes from the run's own checkpoints.
    if options.resume == "auto" or options.load == "weights":
        return newest_checkpoint(checkpoints, setup.ranks)
    if options.resume != "never":
        return LatestCheckpoint(_verified(setup, Path(options.resume)), ())
    if main_or_raise(setup.ranks, lambda: steps_in(checkpoints)):
        raise CheckpointError(
            f"checkpoints.resume is never, but {checkpoints} holds checkpoints of an earlier run; choose another "
            "general.run_name, or remove them"
        )
    return LatestCheckpoint(None, ())


def _verified(setup: Setup, folder: Path) -> Path:
    """Returns `folder` if it is a valid checkpoint. Raises CheckpointError if it is damaged."""
    if problem := verify_checkpoint(folder, setup.ranks):
        problem += "" if folder.is_dir() else where_missing(folder)
        raise CheckpointError(f"checkpoints.resume: {folder}: {problem}; name another checkpoint")
    return folder


def _read_start(setup: Setup, folder: Path) -> Start:
    """Reads the state of a checkpoint and compares its data and model with the current ones.

    Raises CheckpointError if the state is invalid, or if the data differs without checkpoints.allow_data_change: pack n
    would then differ from the pack n of the checkpoint (law 5).
    """
    state = read_state(folder)
    try:
        progress, settings = Progress.from_state(state["progress"]), Settings.from_state(state["settings"])
        watched = (best := state["evaluation"]["watched"]) and Best(**named_now(best))
        changed = changes(saved=state["fingerprint"], now=setup.fingerprint)
        if not changed:
            setup.length.count_rows_beyond(progress, state["data"]["lanes"], setup.data.dataset.num_lanes)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{folder / 'state.json'}: is not the state of a run ({error!r}); resume from another checkpoint, or load "
            "only its weights (checkpoints.load: weights)"
        ) from error
    may_change = setup.config.checkpoints.allow_data_change and not any(map(is_of_the_model, changed))
    if changed and not may_change:
        reason = "other data settings, and continuing would repeat or lose conversations"
        if any(map(is_of_the_model, changed)):
            reason = "another model, so its weights and moments do not fit this one"
        raise CheckpointError(
            f"{folder} was made with {reason}:\n  "
            + "\n  ".join(changed)
            + "\nRestore them, or start another run (general.run_name)"
            + (
                ""
                if any(map(is_of_the_model, changed))
                else ". To go on with the other data at its next epoch, set checkpoints.allow_data_change: true"
            )
        )
    return Start(folder=folder, state=state, changes=changed, progress=progress, settings=settings, watched=watched)


# --- Loading it ---


def load_start(
    start: Start, setup: Setup, *, model: LlamaForSFT, optimizer: torch.optim.Optimizer, loader: PackLoader
) -> None:
    """Loads the checkpoint, if there is one, into model, optimizer and loader; with other data, starts its counts.

    Raises CheckpointError if the checkpoint belongs to another model.
    """
    progress = start.progress
    if start.folder is None:
        return
    load_checkpoint(start.folder, model=model, optimizer=optimizer if start.state else None)
    if not start.state:
        console.write(f"weights    loaded from {start.folder}; step, data position and optimizer start from zero")
        return
    console.write(f"resumed    {start.folder}, after step {progress.step}")
    if not start.changes:
        loader.load_state_dict(start.state["data"])
        if progress.rows_beyond:
            num_epochs = setup.config.tokens.train_epochs
            verb = "is" if progress.rows_beyond == 1 else "are"
            console.write(
                f"epochs     {counted(progress.rows_beyond, 'rows')} beyond tokens.train_epochs: {num_epochs} {verb} "
                f"trained already; the run ends when epoch {(num_epochs or 0) - 1} is complete"
            )
        return
    progress.change_data(len(setup.data.preparation.datasets))
    loader.start_epoch(progress.first_epoch, next_pack=start.state["data"].get("next_pack"))
    console.write("data       has changed since the checkpoint, as checkpoints.allow_data_change allows:")
    for change in start.changes:
        console.write(f"             {change}")
    console.write(
        f"           epoch {progress.first_epoch}, counted from 0, begins with it; the rest of earlier epochs is not "
        "trained"
    )
