"""A run's checkpoints: whole or not at all (law 12), without pickle, for any number of ranks.

    checkpoints/step-20/
        model.safetensors       parameters, native (fused) names
        optimizer.safetensors   "exp_avg/<parameter>", "exp_avg_sq/<parameter>", "step/<parameter>"
        state.json              everything else: step, data position, counters
        MANIFEST.json           size and sha256 of the files above; written last

Each rank writes its own rows, of several as model-00001-of-00004.safetensors and so on (shards.py), and reads its own
rows out of whatever files there are. Published by rename (publish.py). A folder without a manifest that holds is no
checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sftron.checkpoint.agreement import Alone, Party, on_all, on_main
from sftron.checkpoint.publish import begin, commit, discard
from sftron.checkpoint.shards import Rows, ShardedTensors, file_name, own_rows, write_rows
from sftron.models.sharding import local_rows

MODEL, OPTIMIZER = "model", "optimizer"
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
    root: Path,
    step: int,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    keep: int,
    party: Party | None = None,
) -> Path:
    """Write `root/step-<step>`, then remove all but the newest `keep` up to it, and what killed writers left behind.

    state: JSON values, the main rank's are written. party: all ranks, each of which has to call this; `root` has to be
    a folder that all of them see.
    Raises OSError, on all ranks, leaving older checkpoints alone. One run at a time writes to `root`.
    """
    party = party or Alone()
    folder = root / f"step-{step}"
    rows = {kind: dict(own_rows(named, is_main=party.dp_rank == 0)) for kind, named in _tensors(model, optimizer)}
    aside = Path(on_main(party, lambda: str(begin(folder))))
    try:
        digests = on_all(party, lambda: _write_own(aside, rows, party))
        on_main(party, lambda: _complete(aside, folder, {"step": step, **state}, digests))
    except BaseException:
        if party.dp_rank == 0:
            discard(aside)
        raise
    if party.dp_rank == 0:
        for number in sorted((number for number in _steps(root) if number <= step), reverse=True)[keep:]:
            shutil.rmtree(root / f"step-{number}")
        for unfinished in root.glob("step-*.tmp-*"):
            shutil.rmtree(unfinished)
    return folder


def _write_own(aside: Path, rows: Mapping[str, Mapping[str, Rows]], party: Party) -> dict[str, Any]:
    names = [file_name(kind, party.dp_rank, party.dp_world_size) for kind in rows]
    for name, named in zip(names, rows.values(), strict=True):
        write_rows(aside / name, named)
    return {name: _size_and_digest(aside / name) for name in names}


def _complete(aside: Path, folder: Path, state: Mapping[str, Any], digests: list[dict[str, Any]]) -> None:
    (aside / "state.json").write_text(json.dumps(state, indent=1))
    files = {name: entry for own in digests for name, entry in own.items()}
    files["state.json"] = _size_and_digest(aside / "state.json")
    (aside / "MANIFEST.json").write_text(json.dumps({"files": files}, indent=1))
    commit(aside, folder)


def newest_checkpoint(root: Path, party: Party | None = None) -> Found:
    """The newest checkpoint under root whose manifest holds. CheckpointError where there are only broken ones.

    party: all ranks, each of which has to call this; they share the work of reading every file.
    """
    party = party or Alone()
    rejected: list[str] = []
    for step in on_main(party, lambda: sorted(_steps(root), reverse=True)):
        folder = root / f"step-{step}"
        if problem := verify_checkpoint(folder, party):
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


def verify_checkpoint(folder: Path, party: Party | None = None) -> str | None:
    """What is wrong with a checkpoint's files, or None when each is as its manifest says."""
    party = party or Alone()
    problems = on_all(party, partial(_problem, folder, party.dp_rank, party.dp_world_size))
    return next((problem for problem in problems if problem), None)


def _problem(folder: Path, rank: int, num_ranks: int) -> str | None:
    """What is wrong with this rank's share of the files."""
    try:
        manifest = _read_json(folder / "MANIFEST.json")
        promised = {str(name): (int(entry["size"]), str(entry["sha256"])) for name, entry in manifest["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        return f"MANIFEST.json cannot be read ({error})"
    if "state.json" not in promised:
        return "MANIFEST.json does not name state.json"
    for kind in (MODEL, OPTIMIZER):
        if not any(name.startswith(kind) for name in promised):
            return f"MANIFEST.json does not name {file_name(kind, 0, 1)}"
    if outside := [name for name in promised if Path(name).name != name or name in ("", ".", "..")]:
        return f"MANIFEST.json names {outside[0]!r}, which is no file of this folder"
    for name in sorted(promised)[rank::num_ranks]:
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


def load_checkpoint(folder: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Restore parameters and optimizer state in place; each rank reads its own rows.

    optimizer: None restores the weights alone.
    Raises CheckpointError where names or shapes do not match, before anything is changed.
    """
    parameters = dict(model.named_parameters())  # a tied head appears once
    try:
        with ShardedTensors(folder, MODEL) as stored, ShardedTensors(folder, OPTIMIZER) as moments:
            _require_same(folder / "model.safetensors", _shapes(parameters), stored.shapes())
            names = {key.partition("/")[2] for key in moments.shapes()}
            if optimizer is not None and names and names != parameters.keys():
                missing = sorted(parameters.keys() ^ names)
                raise CheckpointError(
                    f"{folder}: the optimizer's state is not of this model's parameters: {missing[:5]}"
                )
            for name, parameter in parameters.items():
                rows, first = local_rows(parameter.detach())
                rows.copy_(stored.read(name, first, first + len(rows)))
            if optimizer is not None:
                _restore(optimizer, model, moments)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def _restore(optimizer: torch.optim.Optimizer, model: nn.Module, stored: ShardedTensors) -> None:
    numbers, parameters = _parameter_numbers(model, optimizer), dict(model.named_parameters())
    state: dict[int, dict[str, Tensor]] = {}
    for key, shape in stored.shapes().items():
        field, _, name = key.partition("/")
        value = _like(parameters[name], partial(stored.read, key)) if shape else stored.read(key)
        state.setdefault(numbers[name], {})[field] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _like(parameter: Tensor, read: Any) -> Tensor:
    """A tensor laid out over the ranks as `parameter`; `read(first, end)` gives its rows."""
    rows, first = local_rows(parameter.detach())
    own = read(first, first + len(rows))
    if not isinstance(parameter, DTensor):
        return own
    return DTensor.from_local(
        own.to(rows.device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Iterator[tuple[str, Tensor]]]]:
    yield MODEL, model.named_parameters()
    yield (
        OPTIMIZER,
        (
            (f"{field}/{name}", value)
            for name, parameter in model.named_parameters()
            for field, value in optimizer.state.get(parameter, {}).items()
        ),
    )


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def _parameter_numbers(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """The number that the optimizer's state_dict gives each parameter."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    ordered = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    return {name: number for number, name in enumerate(ordered)}


def _require_same(path: Path, ours: Mapping[str, torch.Size], theirs: Mapping[str, torch.Size]) -> None:
    wrong = [
        f"{name}: ours {_words(ours.get(name))}, the checkpoint's {_words(theirs.get(name))}"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]
    if wrong:
        raise CheckpointError(f"{path} holds another model; {len(wrong)} tensors differ: " + "; ".join(wrong[:5]))


def _words(shape: torch.Size | None) -> str:
    return "absent" if shape is None else str(list(shape))


def _size_and_digest(path: Path) -> dict[str, Any]:
    return {"size": path.stat().st_size, "sha256": _sha256(path)}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _steps(root: Path) -> list[int]:
    if not root.is_dir():
        return []
    return [int(found[1]) for path in root.iterdir() if (found := _STEP_FOLDER.fullmatch(path.name))]
