"""A run's checkpoints: whole or not at all (law 12), without pickle, for any number of ranks.

    checkpoints/step-20/
        model.safetensors       parameters, native (fused) names
        optimizer.safetensors   "exp_avg/<parameter>", "exp_avg_sq/<parameter>", "step/<parameter>" of what is trained
        state.json              everything else: step, data position, counters
        MANIFEST.json           size and sha256 of the files above; written last

Each rank writes its own part, of several as model-00001-of-00004.safetensors and so on (shards.py), and reads its own
part out of whatever files there are. Published by rename (atomic.py). A folder without a manifest that holds is no
checkpoint.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sftron.checkpoint.atomic import (
    ProcessGroup,
    SingleProcess,
    all_or_raise,
    begin,
    commit,
    discard,
    main_or_raise,
    remove,
    write_file,
)
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
from sftron.checkpoint.shards import Shard, ShardedTensors, own_shards, write_shards
from sftron.models.sharding import local_shard

StoredShards = Mapping[str, Mapping[str, Shard]]
"""What a rank writes, by the kind of its file, then by the name of the tensor."""


def save_checkpoint(
    root: Path,
    step: int,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    keep: int,
    ranks: ProcessGroup | None = None,
) -> Path:
    """Writes `root/step-<step>`, then removes all but the newest `keep` up to it, and what killed writers left.

    Every rank has to call this, with the same `root`, which all of them see; one run at a time writes to it. state:
    JSON values, of which the main rank's are written.

    Raises OSError, on all ranks, with older checkpoints as they were.
    """
    ranks = ranks or SingleProcess()
    shards = shards_to_store(model, optimizer, is_main=ranks.dp_rank == 0)
    folder = write_checkpoint(root / f"step-{step}", step, shards, state=state_text(step, state), ranks=ranks)
    if ranks.dp_rank == 0:
        prune(root, step, keep)
    return folder


def shards_to_store(model: nn.Module, optimizer: torch.optim.Optimizer, *, is_main: bool) -> StoredShards:
    """Returns what this rank has to write: the memory of model and optimizer, not a copy."""
    moments = (
        (f"{field}/{name}", value)
        for name, parameter in model.named_parameters()
        for field, value in optimizer.state.get(parameter, {}).items()
    )
    kinds = {MODEL: model.named_parameters(), OPTIMIZER: moments}
    return {kind: dict(own_shards(named, is_main=is_main)) for kind, named in kinds.items()}


def state_text(step: int, state: Mapping[str, Any]) -> bytes:
    return json.dumps({"step": step, **state}, indent=1).encode()


def write_checkpoint(
    folder: Path, step: int, shards: StoredShards, *, state: bytes, ranks: ProcessGroup | None = None
) -> Path:
    """Writes a checkpoint as `folder`, replacing that; every rank has to call this. state: see `state_text`.

    Raises OSError, on all ranks, with `folder` as it was and nothing left next to it.
    """
    ranks = ranks or SingleProcess()
    unfinished = Path(main_or_raise(ranks, lambda: str(begin(folder))))

    def write_own() -> dict[str, Any]:
        names = {kind: file_name(kind, ranks.dp_rank, ranks.dp_world_size) for kind in shards}
        return {names[kind]: write_shards(unfinished / names[kind], named) for kind, named in shards.items()}

    try:
        files = {name: entry for own in all_or_raise(ranks, write_own) for name, entry in own.items()}

        def complete() -> None:
            files[STATE] = write_file(unfinished / STATE, [state])
            write_file(unfinished / MANIFEST, [manifest_text(step, ranks.dp_world_size, files)])
            commit(unfinished, folder)

        main_or_raise(ranks, complete)
    except BaseException:
        if ranks.dp_rank == 0:
            discard(unfinished)
        raise
    return folder


def prune(root: Path, step: int, keep: int, best_step: int | None = None) -> None:
    """Removes all but the newest `keep` checkpoints up to `step` and that of best_step, and killed writers' folders."""
    for number in sorted((number for number in steps_in(root) if number <= step), reverse=True)[keep:]:
        if number != best_step:
            remove(root / f"step-{number}")
    for unfinished in root.glob("step-*.tmp-*"):
        discard(unfinished)


def load_checkpoint(folder: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Restores parameters and optimizer state in place, or without an optimizer the parameters alone; each rank reads
    its own part.

    Raises CheckpointError where names or shapes do not match, before anything is changed.
    """
    parameters = dict(model.named_parameters())  # a tied head appears once
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    try:
        with ShardedTensors(folder, MODEL) as stored, ShardedTensors(folder, OPTIMIZER) as moments:
            _require_same_shapes(folder / "model.safetensors", model=shapes, stored=stored.shapes())
            if optimizer is not None:
                _require_same_trained(folder, _trained(parameters, optimizer), moments)
            for name, parameter in parameters.items():
                local, offset = local_shard(parameter.detach())
                local.copy_(stored.read(name, offset, local.shape))
            if optimizer is not None:
                _restore(optimizer, parameters, moments)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def _trained(parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> list[str]:
    """Returns the names of what the optimizer trains, in the order of its state_dict's numbers."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def _require_same_shapes(path: Path, *, model: Mapping[str, torch.Size], stored: Mapping[str, torch.Size]) -> None:
    def words(shape: torch.Size | None) -> str:
        return "absent" if shape is None else str(list(shape))

    wrong = [
        f"{name}: the model's {words(model.get(name))}, the checkpoint's {words(stored.get(name))}"
        for name in sorted(model.keys() | stored.keys())
        if model.get(name) != stored.get(name)
    ]
    if wrong:
        raise CheckpointError(f"{path} holds another model; {len(wrong)} tensors differ: " + "; ".join(wrong[:5]))


def _require_same_trained(folder: Path, trained: list[str], moments: ShardedTensors) -> None:
    stored = {key.partition("/")[2] for key in moments.shapes()}
    if stored and stored != set(trained):  # none before the first update
        only_now, only_then = sorted(set(trained) - stored)[:3], sorted(stored - set(trained))[:3]
        raise CheckpointError(
            f"{folder}: the optimizer's state is not of the parameters that are trained now: only now "
            f"{', '.join(only_now) or 'none'}; only in the checkpoint {', '.join(only_then) or 'none'}. Train the same "
            "parameters, or begin with its weights (checkpoints.load: weights)"
        )


def _restore(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor], moments: ShardedTensors) -> None:
    numbers = {name: number for number, name in enumerate(_trained(parameters, optimizer))}
    state: dict[int, dict[str, Tensor]] = {}
    for key, shape in moments.shapes().items():
        field, _, name = key.partition("/")
        value = _read_like(parameters[name], moments, key) if shape else moments.read(key)
        state.setdefault(numbers[name], {})[field] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _read_like(parameter: Tensor, stored: ShardedTensors, key: str) -> Tensor:
    """Returns a stored tensor, laid out over the ranks as `parameter` is."""
    local, offset = local_shard(parameter.detach())
    own = stored.read(key, offset, local.shape)
    if not isinstance(parameter, DTensor):
        return own
    return DTensor.from_local(
        own.to(local.device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


# --- Writing during training: tensors are copied to host memory, which a thread then writes ---


class HostCopy:
    """Memory for a copy of what this rank writes, taken at the first copy and used again for every later one.

    It has the size of the rank's masters and optimizer state, 12 bytes a parameter. Of a GPU's tensors it is pinned, so
    that a copy runs at the speed of the bus.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], Tensor] = {}

    def take(self, shards: StoredShards) -> StoredShards:
        """Returns the same shards, in memory that training does not touch; the copy before this one is overwritten."""
        copied = {
            kind: {name: replace(each, tensor=self._copy((kind, name), each.tensor)) for name, each in named.items()}
            for kind, named in shards.items()
        }
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return copied

    def _copy(self, key: tuple[str, str], tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[key] = buffer
        return buffer.copy_(tensor, non_blocking=True)


class Background:
    """One call in a thread of its own. The thread does not keep a process alive that ends."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # for the loop to raise
            self._error = error

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> None:
        """PoolDelay for the call to end, and raises what it has raised."""
        self._thread.join(timeout_s)
        if not self.is_running and self._error is not None:
            raise self._error
