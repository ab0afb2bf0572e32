"""Validation of checkpoints: a checkpoint is valid if its files are exactly those described by MANIFEST.json.

    {"step": 20, "num_ranks": 1, "files": {"model.safetensors": {"size": ..., "sha256": ...}, ...}}

This detects flipped bits, zeroed pages, truncated, missing or additional files, and the manifest of another folder,
before anything is loaded.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sftron.checkpoint.atomic import ProcessGroup, SingleProcess, all_or_raise, main_or_raise

MODEL, OPTIMIZER = "model", "optimizer"
MANIFEST, STATE = "MANIFEST.json", "state.json"
_STEP_FOLDER = re.compile(r"step-(\d{1,18})", re.ASCII)
_MAX_JSON_BYTES = 64 * 2**20
"""The maximum size. The state of 240 lanes takes at most 64 KB, and a manifest about 100 bytes per file."""


class CheckpointError(ValueError):
    """A checkpoint cannot be read or does not belong to this run; the message names both sides and the remedy."""


@dataclass(frozen=True, slots=True)
class Found:
    """The newest valid checkpoint, if any, and the problems of newer ones that were rejected."""

    folder: Path | None
    rejected: tuple[str, ...]


def file_name(kind: str, rank: int, num_ranks: int) -> str:
    return f"{kind}.safetensors" if num_ranks == 1 else f"{kind}-{rank + 1:05d}-of-{num_ranks:05d}.safetensors"


def manifest_text(step: int, num_ranks: int, files: Mapping[str, Mapping[str, Any]]) -> bytes:
    return json.dumps({"step": step, "num_ranks": num_ranks, "files": files}, indent=1).encode()


def newest_checkpoint(root: Path, ranks: ProcessGroup | None = None) -> Found:
    """Returns the newest valid checkpoint under root. Every rank has to call this; each verifies a share of the files.

    Raises:
        CheckpointError: There are checkpoints, but all of them are broken.
    """
    ranks = ranks or SingleProcess()
    rejected: list[str] = []
    for step in main_or_raise(ranks, lambda: sorted(steps_in(root), reverse=True)):
        folder = root / f"step-{step}"
        if problem := verify_checkpoint(folder, ranks):
            rejected.append(f"{folder}: {problem}")
        else:
            return Found(folder, tuple(rejected))
    if rejected:
        raise CheckpointError(
            "no checkpoint of this run can be used:\n  " + "\n  ".join(rejected) + "\n"
            "Starting again would lose the run: move them away, or set checkpoints.resume: never"
        )
    return Found(None, ())


def set_aside_newer(root: Path, step: int) -> list[Path]:
    """Renames the checkpoints after `step` to step-N.aside, so that they are not confused with new checkpoints of a run
    that resumes from `step`. Returns the new paths."""
    moved = []
    for number in sorted(number for number in steps_in(root) if number > step):
        taken = len(list(root.glob(f"step-{number}.aside*")))
        aside = root / f"step-{number}.aside{f'-{taken + 1}' if taken else ''}"
        moved.append((root / f"step-{number}").rename(aside))
    return moved


def steps_in(root: Path) -> list[int]:
    if not root.is_dir():
        return []
    return [int(found[1]) for path in root.iterdir() if (found := _STEP_FOLDER.fullmatch(path.name))]


def verify_checkpoint(folder: Path, ranks: ProcessGroup | None = None) -> str | None:
    """Returns the problem with a checkpoint's files, or None if all of them match the manifest.

    Every rank has to call this; each verifies a share of the files.
    """
    ranks = ranks or SingleProcess()
    problems = all_or_raise(ranks, partial(_problem, folder, ranks.dp_rank, ranks.dp_world_size))
    return next((problem for problem in problems if problem), None)


def _problem(folder: Path, rank: int, num_ranks: int) -> str | None:
    """Returns the problem with this rank's share of the files, or None."""
    try:
        manifest = _read_json(folder / MANIFEST)
        promised = {str(name): (int(entry["size"]), str(entry["sha256"])) for name, entry in manifest["files"].items()}
        num_writers, step = int(manifest["num_ranks"]), int(manifest["step"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    if outside := [name for name in promised if Path(name).name != name or name in ("", ".", "..")]:
        return f"{MANIFEST} names {outside[0]!r}, which is no file of this folder"
    own_step = _STEP_FOLDER.fullmatch(folder.name)
    if own_step and step != int(own_step[1]):
        return f"{MANIFEST} is that of step {step}"
    if problem := _wrong_names(promised.keys(), num_writers):
        return f"{MANIFEST} {problem}"
    # Names that begin with a dot are ignored, because some file systems create such files.
    found = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    if unknown := sorted(found - promised.keys() - {MANIFEST}):
        return f"{unknown[0]} is not in {MANIFEST}"
    for name in sorted(promised)[rank::num_ranks]:
        try:
            problem = _wrong_content(folder / name, *promised[name])
        except OSError as error:
            problem = f"cannot be read ({error})"
        if problem:
            return f"{name} {problem}"
    return None


def _wrong_names(promised: Any, num_writers: int) -> str | None:
    """Returns the problem with the file names in a manifest of `num_writers` ranks, or None."""
    if num_writers < 1:
        return f"states {num_writers} ranks"
    ranks = range(min(num_writers, len(promised)))  # bounded, because the stated number may be huge
    due = [STATE, *(file_name(kind, rank, num_writers) for kind in (MODEL, OPTIMIZER) for rank in ranks)]
    if missing := [name for name in due if name not in promised]:
        return f"does not name {missing[0]}"
    if len(promised) != len(due):
        unknown = min(set(promised) - set(due))
        return f"names {unknown}, which is no file of a checkpoint of {num_writers} ranks"
    return None


def _wrong_content(path: Path, size: int, digest: str) -> str | None:
    if path.is_symlink():
        return f"is a link to {path.readlink()}; a checkpoint holds its files itself"
    if not path.is_file():
        return "is missing"
    if path.stat().st_size != size:
        return f"has {path.stat().st_size} bytes, the manifest states {size}"
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != digest:
            return "does not have the manifest's sha256"
    return None


def read_state(folder: Path) -> dict[str, Any]:
    """Returns the content of state.json.

    Raises:
        CheckpointError: The file cannot be read or has no valid step.
    """
    path = folder / STATE
    try:
        state = _read_json(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); resume from another checkpoint") from error
    step = state.get("step") if isinstance(state, dict) else None
    if type(step) is not int or step < 0:
        raise CheckpointError(f"{path} holds no step, a number not below 0; resume from another checkpoint")
    return state


def _read_json(path: Path) -> Any:
    """Returns the content of a JSON file.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not a regular file, not JSON, or larger than any file that a run writes.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise ValueError("it is a link, or no regular file")
    with path.open("rb") as file:
        data = file.read(_MAX_JSON_BYTES + 1)
    if len(data) > _MAX_JSON_BYTES:
        raise ValueError(f"it has more than {_MAX_JSON_BYTES} bytes")
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
