"""Named tensors stored in several safetensors files; each file holds the shards of one rank.

A shard is a box with an offset and a shape in each dimension. Any number of ranks, sharded along any dimension, can
therefore load the files of any other number. The offsets and the shapes of the whole tensors are in the metadata of
each file:

    {"shards": {"model.norm.weight": [[32], [64]], ...}}      name: [offset, shape of the whole]
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from sftron.checkpoint.atomic import write_file
from sftron.kernels.device import default_device, gpu_functions, is_gpu, pinned_bytes
from sftron.models.sharding import local_shard

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""The types of weights."""
_ALIGNMENT = 64
"""Tensors begin at multiples of this number of bytes in a buffer."""
_DTYPE_NAMES = {dtype: name for name, dtype in (DTYPES | {"U8": torch.uint8}).items()}


class CheckpointError(ValueError):
    """A checkpoint cannot be read or does not belong to this run; the message names both sides and the remedy."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A contiguous part of a tensor."""

    tensor: Tensor
    offset: tuple[int, ...]
    """The position of its first element in the whole tensor, for each dimension."""
    shape: tuple[int, ...]
    """The shape of the whole tensor."""


StoredShards = Mapping[str, Mapping[str, Shard]]
"""The shards that a rank writes, by kind of file (model or optimizer) and tensor name."""


def file_name(kind: str, rank: int, num_ranks: int) -> str:
    return f"{kind}.safetensors" if num_ranks == 1 else f"{kind}-{rank + 1:05d}-of-{num_ranks:05d}.safetensors"


def own_shards(named: Iterable[tuple[str, Tensor]], *, is_main: bool) -> Iterator[tuple[str, Shard]]:
    """Yields the shards that this rank writes, without copying them.

    Each shard is written by exactly one rank, and tensors that are equal on all ranks by the main rank.
    """
    for name, tensor in named:
        if _is_first_copy(tensor) if isinstance(tensor, DTensor) else is_main:
            local, offset = local_shard(tensor.detach())
            yield name, Shard(local, offset, tuple(tensor.shape))


def _is_first_copy(tensor: DTensor) -> bool:
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    return not any(number for number, kind in zip(coordinate, tensor.placements, strict=True) if kind.is_replicate())


class HostCopy:
    """Host memory for a copy of this rank's shards, allocated on the first copy and reused afterwards.

    It has the size of the rank's trained weights and optimizer state, 12 bytes per parameter, or about 6 with 8-bit
    moments: one buffer for each kind of file. For tensors on a GPU the buffers are pinned, so that copies run at the
    speed of the bus.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, shards: StoredShards) -> StoredShards:
        """Returns copies of the shards in host memory; they are valid until the next call."""
        copied = {kind: self._copy(kind, named) for kind, named in shards.items()}
        device = default_device()
        if is_gpu(device):
            gpu_functions(device).current_stream().synchronize()
        return copied

    def _copy(self, kind: str, named: Mapping[str, Shard]) -> dict[str, Shard]:
        bounds = [0, *accumulate(-(-shard.tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for shard in named.values())]
        if kind not in self._buffers or len(self._buffers[kind]) != bounds[-1]:
            on_gpu = any(shard.tensor.numel() and is_gpu(shard.tensor) for shard in named.values())
            self._buffers[kind] = pinned_bytes(bounds[-1]) if on_gpu else torch.empty(bounds[-1], dtype=torch.uint8)
        copied = {}
        for (name, shard), start in zip(named.items(), bounds[:-1], strict=True):
            own = self._buffers[kind][start : start + shard.tensor.nbytes].view(shard.tensor.dtype)
            copied[name] = replace(shard, tensor=own.view(shard.tensor.shape).copy_(shard.tensor, non_blocking=True))
        return copied


def write_shards(path: Path, named: Mapping[str, Shard]) -> dict[str, Any]:
    """Writes the file of one rank. Returns its {"size", "sha256"}. Raises OSError."""
    # Sorted, because the order of a loaded optimizer's state may differ, and equal states should give equal files.
    shards = {name: [shard.offset, shard.shape] for name, shard in sorted(named.items())}
    tensors = {name: shard.tensor for name, shard in named.items()}
    return write_tensors(path, tensors, {"format": "pt", "shards": json.dumps(shards)})


def write_tensors(
    path: Path, named: Mapping[str, Tensor], metadata: Mapping[str, str], make: Callable[[str], Tensor] | None = None
) -> dict[str, Any]:
    """Writes a new safetensors file and syncs it to disk. Returns its {"size", "sha256"}.

    It does not use the safetensors library, which neither hashes while writing nor syncs, and does not raise OSError
    for a full disk. The tensors may be on any device and are copied to the CPU one at a time.

    Args:
        make: Returns a tensor by its name, which may then be on the meta device.

    Raises:
        OSError: The file cannot be written.
        ValueError: The type of a tensor is neither in DTYPES nor uint8.
    """
    # Sorted by element size and then by name, as in the library, so that every tensor is aligned.
    ordered = sorted(named, key=lambda name: (-named[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in ordered:
        tensor = named[name]
        if tensor.dtype not in _DTYPE_NAMES:
            raise ValueError(f"{name} is {tensor.dtype}, but only {', '.join(map(str, _DTYPE_NAMES))} are written")
        start, end = end, end + tensor.nbytes
        dtype = _DTYPE_NAMES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    # The file format: an 8-byte length, a JSON header, and the data of the tensors.
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def chunks() -> Iterator[bytes | memoryview]:
        yield len(text).to_bytes(8, "little") + text
        for name in ordered:
            tensor = named[name] if make is None else make(name)
            yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data

    return write_file(path, chunks())


class _Part(NamedTuple):
    """A shard in an open file."""

    offset: tuple[int, ...]
    size: tuple[int, ...]
    file: Any


class ShardedTensors:
    """The tensors of one kind in a checkpoint, whichever ranks wrote them. Shards are read lazily in a `with` block.

    Raises:
        CheckpointError: On entering, a file cannot be read, or the files do not contain every element of a tensor
            once. The message has the name of the file.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.kind = folder, kind
        self._parts: dict[str, list[_Part]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for path in sorted(self.folder.glob(f"{self.kind}*.safetensors")):
                self._open(path, stack)
            for name, parts in self._parts.items():
                shape, boxes = self._shapes[name], [part[:2] for part in parts]
                if not _is_grid(shape, boxes):
                    raise CheckpointError(
                        f"{self.folder}: the parts of {name} do not cover its shape {list(shape)} once: their offsets "
                        f"and sizes are {sorted(boxes)}"
                    )
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _open(self, path: Path, stack: ExitStack) -> None:
        try:
            file = stack.enter_context(safe_open(path, framework="pt"))
            shards = json.loads((file.metadata() or {})["shards"])
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                offset, shape = (tuple(map(int, numbers)) for numbers in shards[name])
                size = tuple(file.get_slice(name).get_shape())
                if not len(offset) == len(size) == len(shape) or self._shapes.setdefault(name, shape) != shape:
                    raise ValueError(f"the metadata of {name} does not fit its shape, or contradicts another file")
                parts = self._parts.setdefault(name, [])
                if math.prod(size):  # the shard of a rank without rows is empty
                    parts.append(_Part(offset, size, file))
        except (SafetensorError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{path}: not a readable part of a checkpoint: {error}") from error

    def shapes(self) -> dict[str, torch.Size]:
        return {name: torch.Size(shape) for name, shape in self._shapes.items()}

    def read(self, name: str, offset: Sequence[int] | None = None, size: Sequence[int] | None = None) -> Tensor:
        """Returns a box of a tensor, by default all of it, without reading the rest."""
        offset = (0,) * len(self._shapes[name]) if offset is None else offset
        size = self._shapes[name] if size is None else size
        result: Tensor | None = None
        for part in self._parts[name]:
            sides = zip(part.offset, part.size, offset, size, strict=True)
            bounds = [(max(own, other), min(own + length, other + wanted)) for own, length, other, wanted in sides]
            if any(low >= high for low, high in bounds):
                continue
            found = part.file.get_slice(name)[_slices(bounds, part.offset)] if bounds else part.file.get_tensor(name)
            if found.shape == torch.Size(size):
                return found
            if result is None:
                result = torch.empty(tuple(size), dtype=found.dtype)
            result[_slices(bounds, offset)] = found
        return torch.empty(size) if result is None else result  # an empty box overlaps with no part


def _slices(bounds: list[tuple[int, int]], offset: Sequence[int]) -> tuple[slice, ...]:
    """Returns the bounds as slices of a tensor that begins at `offset`."""
    return tuple(slice(low - start, high - start) for (low, high), start in zip(bounds, offset, strict=True))


def _is_grid(shape: tuple[int, ...], boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Returns whether boxes, given by offset and size, divide each dimension and hold every element exactly once."""
    if not math.prod(shape):
        return not boxes
    spans = [sorted({(offset[n], offset[n] + size[n]) for offset, size in boxes}) for n in range(len(shape))]
    bounds = [([0, *(end for _, end in axis)], [*(start for start, _ in axis)]) for axis in spans]
    is_divided = all(ends == [*starts, length] for (ends, starts), length in zip(bounds, shape, strict=True))
    return is_divided and len({*boxes}) == len(boxes) == math.prod(map(len, spans))
