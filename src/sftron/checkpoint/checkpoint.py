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

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sftron.checkpoint.agreement import Alone, Party, on_all, on_main
from sftron.checkpoint.atomic import begin, commit, discard, remove, write_file
from sftron.checkpoint.manifest import (
    MANIFEST,
    MODEL,
    OPTIMIZER,
    STATE,
    CheckpointError,
    file_name,
    manifest_text,
    steps_in,
)
from sftron.checkpoint.shards import Rows, ShardedTensors, own_rows, write_rows
from sftron.models.sharding import local_rows

StoredRows = Mapping[str, Mapping[str, Rows]]
"""What a rank writes, by the kind of its file, then by the name of the tensor."""


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
    rows = rows_to_store(model, optimizer, is_main=party.dp_rank == 0)
    folder = write_checkpoint(root / f"step-{step}", step, rows, state=state_text(step, state), party=party)
    if party.dp_rank == 0:
        prune(root, step, keep)
    return folder


def rows_to_store(model: nn.Module, optimizer: torch.optim.Optimizer, *, is_main: bool) -> StoredRows:
    """What this rank has to write: the memory of model and optimizer, not a copy."""
    return {kind: dict(own_rows(named, is_main=is_main)) for kind, named in _tensors(model, optimizer)}


def state_text(step: int, state: Mapping[str, Any]) -> bytes:
    return json.dumps({"step": step, **state}, indent=1).encode()


def write_checkpoint(folder: Path, step: int, rows: StoredRows, *, state: bytes, party: Party | None = None) -> Path:
    """Write a checkpoint as `folder`, replacing that; every rank has to call this. state: see `state_text`.

    Raises OSError, on all ranks, with `folder` as it was and nothing left beside it.
    """
    party = party or Alone()
    aside = Path(on_main(party, lambda: str(begin(folder))))
    try:
        written = on_all(party, lambda: _write_own(aside, rows, party))
        files = {name: entry for own in written for name, entry in own.items()}
        on_main(party, lambda: _complete(aside, folder, step, state, files, party.dp_world_size))
    except BaseException:
        if party.dp_rank == 0:
            discard(aside)
        raise
    return folder


def prune(root: Path, step: int, keep: int, best_step: int | None = None) -> None:
    """Remove all but the newest `keep` checkpoints up to `step` and the one of best_step, and what killed writers left
    behind."""
    for number in sorted((number for number in steps_in(root) if number <= step), reverse=True)[keep:]:
        if number != best_step:
            remove(root / f"step-{number}")
    for unfinished in root.glob("step-*.tmp-*"):
        discard(unfinished)


def _write_own(aside: Path, rows: StoredRows, party: Party) -> dict[str, Any]:
    names = {kind: file_name(kind, party.dp_rank, party.dp_world_size) for kind in rows}
    return {names[kind]: write_rows(aside / names[kind], named) for kind, named in rows.items()}


def _complete(
    aside: Path, folder: Path, step: int, state: bytes, files: Mapping[str, Mapping[str, Any]], num_ranks: int
) -> None:
    files = {**files, STATE: write_file(aside / STATE, [state])}
    write_file(aside / MANIFEST, [manifest_text(step, num_ranks, files)])
    commit(aside, folder)


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
