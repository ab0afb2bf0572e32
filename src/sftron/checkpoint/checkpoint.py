"""Checkpoints of a run. They are atomic (law 12), use no pickle, and can be loaded with any number of ranks.

    checkpoints/step-20/
        model.safetensors       trained parameters, under their native (fused) names; for a whole model, frozen ones too
        optimizer.safetensors   "exp_avg/<parameter>", "exp_avg_sq/<parameter>", "step/<parameter>", and the block
                                scales of 8-bit moments
        state.json              everything else: step, data position, counters
        MANIFEST.json           {"step": 20, "num_ranks": 1, "files": {"model.safetensors": {"size", "sha256"}, ...}}

Each rank writes its own shards; with several ranks the files are model-00001-of-00004.safetensors and so on
(shards.py). When loading, each rank reads only its own shards from any set of files. A checkpoint is published by a
rename (atomic.py), and is valid if its files are exactly those that its manifest describes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from sftron.checkpoint.atomic import (
    ALONE,
    ProcessGroup,
    gather_or_raise,
    main_or_raise,
    publish,
    remove,
    remove_unfinished,
    write_file,
)
from sftron.checkpoint.shards import CheckpointError, ShardedTensors, StoredShards, file_name, own_shards, write_shards
from sftron.models.adapters import is_adapter
from sftron.models.sharding import local_shard
from sftron.regular_file import read_json_value

MODEL, OPTIMIZER = "model", "optimizer"
MANIFEST, STATE = "MANIFEST.json", "state.json"
_STEP_FOLDER = re.compile(r"step-(\d{1,18})", re.ASCII)
_MAX_JSON_BYTES = 64 * 2**20
"""The maximum size. The state of 240 lanes takes at most 64 KB; a manifest takes about 100 bytes per file."""

# --- Saving ---


def shards_to_store(model: nn.Module, optimizer: torch.optim.Optimizer, *, is_main: bool) -> StoredShards:
    """Returns the shards that this rank writes; they share the memory of model and optimizer."""
    trained, held = trained_parameters(model), held_parameters(model)
    moments = (
        (f"{field}/{name}", value)
        for name, parameter in trained.items()
        for field, value in optimizer.state.get(parameter, {}).items()
    )
    kinds = {MODEL: held.items(), OPTIMIZER: moments}
    return {kind: dict(own_shards(named, is_main=is_main)) for kind, named in kinds.items()}


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters that are trained, by native name; a tied head appears once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def held_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters that a checkpoint holds: the trained ones with adapters, else all, so that it is a whole
    model without its source."""
    named = dict(model.named_parameters())
    return trained_parameters(model) if any(map(is_adapter, named)) else named


def state_text(step: int, state: Mapping[str, Any]) -> bytes:
    return json.dumps({"step": step, **state}, indent=1).encode()


def write_checkpoint(
    folder: Path, step: int, shards: StoredShards, *, state: bytes, ranks: ProcessGroup = ALONE
) -> Path:
    """Writes a checkpoint to `folder`, replacing any old one. Every rank must call this.

    Args:
        state: The content of state.json, from `state_text`; the main rank writes its own.

    Raises:
        OSError: The checkpoint cannot be written. All ranks raise the error, `folder` is unchanged, and no unfinished
            folder remains.
    """

    def write(unfinished: Path) -> None:
        def write_own() -> dict[str, Any]:
            names = {kind: file_name(kind, ranks.rank, ranks.world_size) for kind in shards}
            return {names[kind]: write_shards(unfinished / names[kind], named) for kind, named in shards.items()}

        files = {name: entry for own in gather_or_raise(ranks, write_own) for name, entry in own.items()}

        def complete() -> None:
            files[STATE] = write_file(unfinished / STATE, [state])
            manifest = {"step": step, "num_ranks": ranks.world_size, "files": files}
            write_file(unfinished / MANIFEST, [json.dumps(manifest, indent=1).encode()])

        main_or_raise(ranks, complete)

    return publish(folder, write, ranks)


def prune(root: Path, step: int, keep: int, best_step: int | None = None) -> None:
    """Removes the checkpoints up to `step` except the newest `keep` and best_step, and folders of killed writers."""
    for number in sorted((number for number in steps_in(root) if number <= step), reverse=True)[keep:]:
        if number != best_step:
            remove(root / f"step-{number}")
    remove_unfinished(root)


# --- Finding and checking ---


@dataclass(frozen=True, slots=True)
class LatestCheckpoint:
    """The newest valid checkpoint, if any, and the problems of newer ones that were rejected."""

    folder: Path | None
    rejected: tuple[str, ...]


def newest_checkpoint(root: Path, ranks: ProcessGroup = ALONE) -> LatestCheckpoint:
    """Returns the newest valid checkpoint under root. Every rank must call this; each verifies a share of the files.

    Raises:
        CheckpointError: There are checkpoints, but all of them are broken.
    """
    rejected: list[str] = []
    for step in main_or_raise(ranks, lambda: sorted(steps_in(root), reverse=True)):
        folder = root / f"step-{step}"
        problem = verify_checkpoint(folder, ranks)
        if problem is None:
            return LatestCheckpoint(folder, tuple(rejected))
        rejected.append(f"{folder}: {problem}")
    if rejected:
        raise CheckpointError(
            "every checkpoint of this run is broken:\n  " + "\n  ".join(rejected) + "\n"
            "Starting over would lose the run. Move these checkpoints away, or choose another general.run_name"
        )
    return LatestCheckpoint(None, ())


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


def verify_checkpoint(folder: Path, ranks: ProcessGroup = ALONE) -> str | None:
    """Returns the problem with a checkpoint's files, or None if all of them match the manifest.

    Every rank must call this; each hashes a share of the files.
    """
    problems = gather_or_raise(ranks, lambda: _problem(folder, ranks.rank, ranks.world_size))
    return next((problem for problem in problems if problem), None)


def _problem(folder: Path, rank: int, num_ranks: int) -> str | None:
    try:
        files, num_writers, step = _read_manifest(folder)
    except ValueError as error:
        return str(error)
    if (named := _STEP_FOLDER.fullmatch(folder.name)) and step != int(named[1]):
        return f"{MANIFEST} belongs to step {step}"
    # Counted before the names are made, because the stated number may be huge.
    num_files = 1 + 2 * num_writers
    names = (file_name(kind, rank, num_writers) for kind in (MODEL, OPTIMIZER) for rank in range(num_writers))
    if num_writers < 1 or len(files) != num_files or files.keys() != {STATE, *names}:
        return f"{MANIFEST} does not list the {num_files} files that {num_writers} ranks write"
    # Names that begin with a dot are ignored, because some file systems create such files.
    found = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    if unknown := sorted(found - files.keys() - {MANIFEST}):
        return f"{unknown[0]} is not in {MANIFEST}"
    for name in sorted(files)[rank::num_ranks]:
        if problem := _wrong_content(folder / name, *files[name]):
            return f"{name} {problem}"
    return None


def _read_manifest(folder: Path) -> tuple[dict[str, tuple[int, str]], int, int]:
    """Returns the size and sha256 of each file, the number of ranks and the step. Raises ValueError."""
    try:
        manifest = _read_json(folder / MANIFEST)
        files = {name: (int(entry["size"]), str(entry["sha256"])) for name, entry in manifest["files"].items()}
        return files, int(manifest["num_ranks"]), int(manifest["step"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{MANIFEST} cannot be read ({error})") from error


def _wrong_content(path: Path, size: int, digest: str) -> str | None:
    if path.is_symlink():
        return f"is a link to {path.readlink()}; a checkpoint must hold the file itself"
    if not path.is_file():
        return "is missing"
    if path.stat().st_size != size:
        return f"has {path.stat().st_size} bytes, but the manifest says {size}"
    try:
        with path.open("rb") as file:
            is_same = hashlib.file_digest(file, "sha256").hexdigest() == digest
    except OSError as error:
        return f"cannot be read ({error})"
    return None if is_same else "does not have the manifest's sha256"


def read_state(folder: Path) -> dict[str, Any]:
    """Returns the content of state.json.

    Raises:
        CheckpointError: The file cannot be read, does not match the manifest, or has no valid step.
    """
    path = folder / STATE
    try:
        files, _, _ = _read_manifest(folder)
        if problem := _wrong_content(path, *files.get(STATE, (0, ""))):
            raise ValueError(f"it {problem}")
        state = _read_json(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); resume from another checkpoint") from error
    step = state.get("step") if isinstance(state, dict) else None
    if type(step) is not int or step < 0:
        raise CheckpointError(
            f"{path}: step is {step!r}, but must be an integer of at least 0; resume from another checkpoint"
        )
    return state


def _read_json(path: Path) -> Any:
    if path.is_symlink():
        raise ValueError("it is a link")
    return read_json_value(path, _MAX_JSON_BYTES)


# --- Loading ---


def load_checkpoint(folder: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Restores parameters and optimizer state in place; each rank reads its own shards.

    Without an optimizer, only the parameters are restored.

    Raises:
        CheckpointError: Names or shapes do not match. Nothing has been changed.
    """
    with ShardedTensors(folder, MODEL) as stored, ShardedTensors(folder, OPTIMIZER) as moments:
        # Earlier versions left out frozen parameters; the model has them from its source.
        parameters = {
            name: parameter
            for name, parameter in held_parameters(model).items()
            if parameter.requires_grad or name in stored.shapes()
        }
        shapes = {name: parameter.shape for name, parameter in parameters.items()}
        _require_same_shapes(folder, shapes, stored.shapes(), "It belongs to another model; resume from another one")
        state = None if optimizer is None else _read_optimizer_state(folder, optimizer, parameters, moments)
        for name, parameter in parameters.items():
            local, offset = local_shard(parameter.detach())
            local.copy_(stored.read(name, offset, local.shape))
    if optimizer is not None:
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _require_same_shapes(
    folder: Path, expected: Mapping[str, torch.Size], stored: Mapping[str, torch.Size], remedy: str
) -> None:
    def words(shape: torch.Size | None) -> str:
        return "absent" if shape is None else str(list(shape))

    wrong = [
        f"{name}: the model's {words(expected.get(name))}, the checkpoint's {words(stored.get(name))}"
        for name in sorted(expected.keys() | stored.keys())
        if expected.get(name) != stored.get(name)
    ]
    if wrong:
        raise CheckpointError(f"{folder}: {len(wrong)} tensors differ: {'; '.join(wrong[:5])}. {remedy}")


def _read_optimizer_state(
    folder: Path, optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor], moments: ShardedTensors
) -> dict[int, dict[str, Tensor]]:
    """Returns the stored state, sharded like the parameters, by the indices of the optimizer's state_dict."""
    name_of = {id(parameter): name for name, parameter in parameters.items()}
    trained = [name_of[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    stored = moments.shapes()
    if stored:  # none before the first update
        shapes_of = getattr(optimizer, "state_shapes", _adamw_shapes)
        fields = {name: shapes_of(parameters[name]) for name in trained}
        expected = {f"{field}/{name}": shape for name in trained for field, shape in fields[name].items()}
        remedy = (
            "Set optimizer.name to the optimizer of the checkpoint's run; with adamw_8bit, also resume with the same "
            "number of ranks, because each rank holds whole blocks of 256 values. Or load only the weights "
            "(checkpoints.load: weights)"
        )
        _require_same_shapes(folder, expected, stored, remedy)
    index_of = {name: index for index, name in enumerate(trained)}
    state: dict[int, dict[str, Tensor]] = {}
    for key, shape in stored.items():
        field, _, name = key.partition("/")
        value = _read_like(parameters[name], moments, key, shape) if shape else moments.read(key)
        state.setdefault(index_of[name], {})[field] = value
    return state


def _adamw_shapes(parameter: Tensor) -> dict[str, torch.Size]:
    return {"exp_avg": parameter.shape, "exp_avg_sq": parameter.shape, "step": torch.Size()}


def _read_like(parameter: Tensor, stored: ShardedTensors, key: str, shape: torch.Size) -> Tensor:
    """Returns a stored tensor of `shape` with the same sharding as `parameter`."""
    if not isinstance(parameter, DTensor):
        return stored.read(key)
    mesh, placements = parameter.device_mesh, parameter.placements
    size, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    shard = stored.read(key, offset, size).to(parameter.device)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(shard, mesh, placements, run_check=False, shape=shape, stride=stride)
