"""Which wandb run a run is: one, however often it is stopped and goes on; another for a copy of it."""

from __future__ import annotations

import json
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sftron.checkpoint.manifest import CheckpointError, read_state
from sftron.train import console
from sftron.train.resume import Start

FILE = "wandb.json"
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
_MAX_BYTES = 10_000


@dataclass(frozen=True, slots=True)
class WandbIdentity:
    """id: the wandb run's. continued_from: the run that this one began with, where that is another one: {"run_name",
    "wandb_id", "step"}, each None where it is not known."""

    id: str
    run_name: str
    continued_from: dict[str, Any] | None = None

    def state(self) -> dict[str, str]:
        """For a checkpoint."""
        return {"id": self.id, "run_name": self.run_name}


def find_identity(folder: Path, run_name: str, start: Start | None) -> WandbIdentity:
    """The first of these that there is decides, and the run directory remembers it:

    1. WANDB_RUN_ID of the environment, which a sweep's agent sets.
    2. wandb.json of the run directory, unless the directory is a copy of another one that still has it.
    3. The checkpoint that the run goes on from, if it is this run's own.

    Else it is a new wandb run. folder: the run directory, whose file is written.
    """
    ours = _read(folder)
    theirs = _of_checkpoint(start)
    is_copy = ours is not None and _is_copy(folder, ours)
    if wanted := os.environ.get("WANDB_RUN_ID"):
        identity = WandbIdentity(wanted, run_name, ours["continued_from"] if ours and not is_copy else None)
    elif ours is not None and not is_copy:
        identity = WandbIdentity(ours["id"], run_name, ours["continued_from"])
    elif ours is None and theirs is not None and _is_own(folder, run_name, start, theirs):
        identity = WandbIdentity(theirs["wandb_id"], run_name)
    else:
        identity = WandbIdentity(secrets.token_hex(6), run_name, theirs or (ours and _origin(ours)))
    _write(folder, identity)
    return identity


def _of_checkpoint(start: Start | None) -> dict[str, Any] | None:
    """What the checkpoint tells of the run that wrote it, in the form of `continued_from`."""
    if start is None:
        return None
    try:
        state = read_state(start.folder)
    except CheckpointError:
        return None
    told = state.get("wandb")
    told = told if isinstance(told, dict) else {}
    wandb_id, run_name = told.get("id"), told.get("run_name")
    return {
        "run_name": run_name if isinstance(run_name, str) else None,
        "wandb_id": wandb_id if isinstance(wandb_id, str) and _ID.fullmatch(wandb_id) else None,
        "step": state["step"],
    }


def _is_own(folder: Path, run_name: str, start: Start | None, theirs: dict[str, Any]) -> bool:
    if start is None or theirs["wandb_id"] is None or theirs["run_name"] != run_name:
        return False
    return start.folder.parent.resolve() == (folder / "checkpoints").resolve()


def _is_copy(folder: Path, ours: dict[str, Any]) -> bool:
    """Whether the directory that wandb.json was written in is another one and still there: else it was moved here."""
    written_in = Path(ours["folder"])
    other = _read(written_in)
    return other is not None and other["id"] == ours["id"] and not written_in.samefile(folder)


def _origin(ours: dict[str, Any]) -> dict[str, Any]:
    return {"run_name": ours["run_name"], "wandb_id": ours["id"], "step": None}


def _read(folder: Path) -> dict[str, Any] | None:
    try:
        with (folder / FILE).open("rb") as file:
            found = json.loads(file.read(_MAX_BYTES))
        if _ID.fullmatch(found["id"]) and isinstance(found["folder"], str) and isinstance(found["run_name"], str):
            continued_from = found.get("continued_from")
            return {**found, "continued_from": continued_from if isinstance(continued_from, dict) else None}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    return None


def _write(folder: Path, identity: WandbIdentity) -> None:
    facts = {
        "id": identity.id,
        "run_name": identity.run_name,
        "folder": str(folder.resolve()),
        "continued_from": identity.continued_from,
    }
    aside = folder / f"{FILE}.tmp"
    try:
        aside.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        aside.replace(folder / FILE)
    except OSError as error:
        console.say(f"WARNING    {folder / FILE} cannot be written ({error.strerror}); checkpoints have the wandb id")
