"""A run's checkpoints: whole or not at all (law 12), without pickle.

    checkpoints/step-20/
        model.safetensors       parameters, native (fused) names
        optimizer.safetensors   "exp_avg/<parameter>", "exp_avg_sq/<parameter>", "step/<parameter>"
        state.json              everything else: step, data position, counters
        MANIFEST.json           size and sha256 of the files above; written last

Published by rename (publish.py). A folder without a manifest that holds is no checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from sftron.checkpoint.publish import publish

_STEP_FOLDER = re.compile(r"step-(\d{1,18})", re.ASCII)
_MAX_JSON_BYTES = 64 * 2**20
"""The state of 240 lanes has 64 KB at most, and a manifest 100 bytes a file."""


class CheckpointError(ValueError):
    """A checkpoint cannot be read or does not belong to this run; the message names both sides and the remedy."""


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint that may be loaded, and what was found wrong with newer ones on the way to it."""

    folder: Path | None
    rejected: tuple[str, ...]


def save_checkpoint(
    root: Path, step: int, *, model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any], keep: int
) -> Path:
    """Write `root/step-<step>`, then remove all but the newest `keep` up to it, and what killed writers left behind.

    Raises OSError, leaving older ones alone. One run at a time writes to `root`.
    """

    def write(folder: Path) -> None:
        save_file(
            {name: tensor.contiguous() for name, tensor in _parameters(model).items()}, folder / "model.safetensors"
        )
        save_file(_optimizer_tensors(model, optimizer), folder / "optimizer.safetensors")
        (folder / "state.json").write_text(json.dumps({"step": step, **state}, indent=1))
        (folder / "MANIFEST.json").write_text(json.dumps(_manifest(folder), indent=1))

    published = publish(root / f"step-{step}", write)
    for number in sorted((number for number in _steps(root) if number <= step), reverse=True)[keep:]:
        shutil.rmtree(root / f"step-{number}")
    for unfinished in root.glob("step-*.tmp-*"):
        shutil.rmtree(unfinished)
    return published


def newest_checkpoint(root: Path) -> Found:
    """The newest checkpoint under root whose manifest holds. CheckpointError where there are only broken ones."""
    rejected: list[str] = []
    for step in sorted(_steps(root), reverse=True):
        folder = root / f"step-{step}"
        if problem := verify_checkpoint(folder):
            rejected.append(f"{folder}: {problem}")
        else:
            return Found(folder, tuple(rejected))
    if rejected:
        raise CheckpointError(
            "no checkpoint of this run can be used:\n  " + "\n  ".join(rejected) + "\n"
            "Starting anew would lose the run: move them away, or set checkpoints.resume: never"
        )
    return Found(None, ())


def set_aside_newer(root: Path, step: int) -> list[Path]:
    """Rename the checkpoints after `step` to step-N.aside, so that none of them is taken for, or counted with, those
    of the run that goes on from `step`. Returns the new paths."""
    moved = []
    for number in sorted(number for number in _steps(root) if number > step):
        taken = len(list(root.glob(f"step-{number}.aside*")))
        aside = root / f"step-{number}.aside{f'-{taken + 1}' if taken else ''}"
        moved.append((root / f"step-{number}").rename(aside))
    return moved


def verify_checkpoint(folder: Path) -> str | None:
    """What is wrong with a checkpoint's files, or None when each is as its manifest says."""
    try:
        manifest = _read_json(folder / "MANIFEST.json")
        promised = {str(name): (int(entry["size"]), str(entry["sha256"])) for name, entry in manifest["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        return f"MANIFEST.json cannot be read ({error})"
    for name in ("model.safetensors", "optimizer.safetensors", "state.json"):
        if name not in promised:
            return f"MANIFEST.json does not name {name}"
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        size, digest = promised[name]
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, the manifest says {size}"
        if _sha256(path) != digest:
            return f"{name} does not have the manifest's sha256"
    return None


def read_state(folder: Path) -> dict[str, Any]:
    """state.json as save_checkpoint has written it. Raises CheckpointError for anything else."""
    path = folder / "state.json"
    try:
        state = _read_json(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); resume from another checkpoint") from error
    step = state.get("step") if isinstance(state, dict) else None
    if type(step) is not int or step < 0:
        raise CheckpointError(f"{path} holds no step, a number not below 0; resume from another checkpoint")
    return state


def _read_json(path: Path) -> Any:
    """Raises OSError, or ValueError where it is no JSON or larger than any of ours."""
    with path.open("rb") as file:
        data = file.read(_MAX_JSON_BYTES + 1)
    if len(data) > _MAX_JSON_BYTES:
        raise ValueError(f"it has more than {_MAX_JSON_BYTES} bytes")
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def load_checkpoint(folder: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Restore parameters and optimizer state in place. Raises CheckpointError where names or shapes do not match."""
    ours, theirs = _parameters(model), load_file(folder / "model.safetensors")
    _require_same(folder / "model.safetensors", ours, theirs)
    with torch.no_grad():
        for name, parameter in ours.items():
            parameter.copy_(theirs[name])
    del theirs

    tensors = load_file(folder / "optimizer.safetensors")
    by_parameter: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        field, _, name = key.partition("/")
        by_parameter.setdefault(name, {})[field] = tensor
    numbers = _parameter_numbers(model, optimizer)
    if by_parameter and by_parameter.keys() != numbers.keys():
        missing = sorted(numbers.keys() ^ by_parameter.keys())
        raise CheckpointError(f"{folder / 'optimizer.safetensors'}: not the parameters of this model: {missing[:5]}")
    optimizer.load_state_dict(
        {
            "state": {numbers[name]: fields for name, fields in by_parameter.items()},
            "param_groups": optimizer.state_dict()["param_groups"],
        }
    )


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters())  # a tied head appears once


def _parameter_numbers(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """The number that the optimizer's state_dict gives each parameter."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    ordered = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    return {name: number for number, name in enumerate(ordered)}


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        f"{field}/{name}": value.contiguous()
        for name, parameter in model.named_parameters()
        for field, value in optimizer.state.get(parameter, {}).items()
    }


def _require_same(path: Path, ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> None:
    wrong = [
        f"{name}: ours {_shape(ours.get(name))}, the checkpoint's {_shape(theirs.get(name))}"
        for name in sorted(ours.keys() | theirs.keys())
        if _shape(ours.get(name)) != _shape(theirs.get(name))
    ]
    if wrong:
        raise CheckpointError(f"{path} holds another model; {len(wrong)} tensors differ: " + "; ".join(wrong[:5]))


def _shape(tensor: torch.Tensor | None) -> str:
    return "absent" if tensor is None else str(list(tensor.shape))


def _manifest(folder: Path) -> dict[str, Any]:
    files = sorted(path for path in folder.iterdir() if path.name != "MANIFEST.json")
    return {"files": {path.name: {"size": path.stat().st_size, "sha256": _sha256(path)} for path in files}}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _steps(root: Path) -> list[int]:
    if not root.is_dir():
        return []
    return [int(found[1]) for path in root.iterdir() if (found := _STEP_FOLDER.fullmatch(path.name))]
