"""Checkpoints of a run. They are atomic (law 12), use no pickle, and can be loaded with any number of ranks.

    checkpoints/step-20/
        model.safetensors       parameters, under their native (fused) names
        optimizer.safetensors   "exp_avg/<parameter>", "exp_avg_sq/<parameter>", "step/<parameter>" if trained
        state.json              everything else: step, data position, counters
        MANIFEST.json           size and sha256 of the files above; written last

Each rank writes its own shards; with several ranks the files are model-00001-of-00004.safetensors and so on
(shards.py). When loading, each rank reads only its own shards from any set of files. A checkpoint is published by a
rename (atomic.py); a folder without a valid manifest does not count as a checkpoint.
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
"""The shards that a rank writes, by the kind of file (model or optimizer) and the name of the tensor."""


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
    """Writes `root/step-<step>`, then removes all older checkpoints except the newest `keep`, and unfinished folders.

    Every rank has to call this with the same `root` on a shared file system. Only one run may write to `root` at a
    time.

    Args:
        state: JSON values; those of the main rank are written.

    Raises:
        OSError: The checkpoint cannot be written. The error is raised on all ranks, and older checkpoints are
            unchanged.
    """
    ranks = ranks or SingleProcess()
    shards = shards_to_store(model, optimizer, is_main=ranks.dp_rank == 0)
    folder = write_checkpoint(root / f"step-{step}", step, shards, state=state_text(step, state), ranks=ranks)
    if ranks.dp_rank == 0:
        prune(root, step, keep)
    return folder


def shards_to_store(model: nn.Module, optimizer: torch.optim.Optimizer, *, is_main: bool) -> StoredShards:
    """Returns the shards that this rank writes; they share the memory of model and optimizer."""
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
    """Writes a checkpoint to `folder`, replacing any old one. Every rank has to call this.

    Args:
        state: The content of state.json, from `state_text`.

    Raises:
        OSError: The checkpoint cannot be written. The error is raised on all ranks; `folder` is then unchanged, and no
            unfinished folder remains.
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
    """Removes the checkpoints up to `step` except the newest `keep` and best_step, and folders of killed writers."""
    for number in sorted((number for number in steps_in(root) if number <= step), reverse=True)[keep:]:
        if number != best_step:
            remove(root / f"step-{number}")
    for unfinished in root.glob("step-*.tmp-*"):
        discard(unfinished)


def load_checkpoint(folder: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Restores parameters and optimizer state in place; each rank reads its own shards.

    Without an optimizer, only the parameters are restored.

    Raises:
        CheckpointError: Names or shapes do not match. Nothing has been changed then.
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
    """Returns the names of the parameters that the optimizer trains, in the order of the indices in its state_dict."""
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
    """Returns a stored tensor with the same sharding as `parameter`."""
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


# --- Writing during training: tensors are copied to host memory and written by a thread ---


class HostCopy:
    """Host memory for a copy of this rank's shards, allocated on the first copy and reused afterwards.

    It has the size of the rank's master weights and optimizer state, 12 bytes per parameter. For tensors on a GPU the
    memory is pinned, so that copies run at the speed of the bus.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], Tensor] = {}

    def take(self, shards: StoredShards) -> StoredShards:
        """Returns copies of the shards in host memory; they are valid until the next call."""
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
    """A function call in a daemon thread, which does not keep the process alive at exit."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # raised again by wait
            self._error = error

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits until the call ends or the timeout expires, and raises the exception of the call, if any."""
        self._thread.join(timeout_s)
        if not self.is_running and self._error is not None:
            raise self._error
