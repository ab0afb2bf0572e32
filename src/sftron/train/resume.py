"""Which checkpoint a run goes on from, and whether its data is still the same, or may have changed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sftron.checkpoint.agreement import Party
from sftron.checkpoint.architecture import is_of_the_model
from sftron.checkpoint.manifest import CheckpointError, Found, newest_checkpoint, read_state, verify_checkpoint
from sftron.train.progress import Progress

_LONGEST_SHOWN = 40


def require_sound(path: Path, party: Party | None = None) -> None:
    """Raises CheckpointError where a checkpoint that was asked for is broken; every rank has to ask."""
    if problem := verify_checkpoint(path, party):
        raise CheckpointError(f"checkpoints.resume: {path}: {problem}")


def find_checkpoint(resume: str, checkpoints: Path, party: Party | None = None) -> Found:
    """What checkpoints.resume asks for: auto, never, or a path; every rank has to ask. Raises CheckpointError."""
    if resume == "auto":
        return newest_checkpoint(checkpoints, party)
    if resume == "never":
        if newest_checkpoint(checkpoints, party).folder:
            raise CheckpointError(
                f"checkpoints.resume is never, but {checkpoints} holds checkpoints of an earlier run; choose another "
                "general.run_name, or remove them"
            )
        return Found(None, ())
    require_sound(Path(resume), party)
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
