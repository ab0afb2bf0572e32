"""Which checkpoint a run goes on from, and whether its data is still the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sftron.checkpoint.agreement import Party
from sftron.checkpoint.native import CheckpointError, Found, newest_checkpoint, verify_checkpoint

_LONGEST_SHOWN = 40


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
    if problem := verify_checkpoint(Path(resume), party):
        raise CheckpointError(f"checkpoints.resume: {resume}: {problem}")
    return Found(Path(resume), ())


def require_same_data(folder: Path, *, ours: Mapping[str, str], theirs: Mapping[str, str]) -> None:
    """Raises CheckpointError naming what differs: pack n would not be the one that the checkpoint counts on (law 5)."""
    changed = [
        f"{name}: {_short(theirs.get(name))} in the checkpoint, {_short(ours.get(name))} now"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]
    if changed:
        raise CheckpointError(
            f"{folder} was made with other data settings, and going on would repeat or lose conversations:\n  "
            + "\n  ".join(changed)
            + "\nSet them back, or start another run (general.run_name)"
        )


def _short(value: str | None) -> str:
    if value is None:
        return "absent"
    return value if len(value) <= _LONGEST_SHOWN else f"{value[:12]}..."
