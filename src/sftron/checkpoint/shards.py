"""Named tensors stored in several safetensors files, each of which holds the shards of one rank.

A shard is a box with an offset and a shape in each dimension. Any number of ranks, sharded along any dimension, can
therefore load the files of any other number. The offsets and the shapes of the whole tensors are in the metadata of
each file:

    {"shards": {"model.norm.weight": [[32], [64]], ...}}      name: [offset, shape of the whole]
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from sftron.checkpoint.atomic import write_file
from sftron.models.sharding import local_shard

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Shard:
    """A contiguous part of a tensor."""

    tensor: Tensor
    offset: tuple[int, ...]
    """The position of its first element in the whole tensor, for each dimension."""
    shape: tuple[int, ...]
    """The shape of the whole tensor."""


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


def write_shards(path: Path, named: Mapping[str, Shard]) -> dict[str, Any]:
    """Writes the file of one rank. Returns its {"size", "sha256"}. Raises OSError."""
    # Sorted, because the order of a loaded optimizer's state may differ, and equal states should give equal files.
    shards = {name: [shard.offset, shard.shape] for name, shard in sorted(named.items())}
    tensors = {name: shard.tensor for name, shard in named.items()}
    return write_tensors(path, tensors, {"format": "pt", "shards": json.dumps(shards)})


def write_tensors(path: Path, named: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, Any]:
    """Writes a new safetensors file and syncs it to disk. Returns its {"size", "sha256"}.

    It does not use the safetensors library, which neither hashes while writing nor syncs, and does not raise OSError
    for a full disk. The tensors may be on any device and are copied to the CPU one at a time.

    Raises:
        OSError: The file cannot be written.
        ValueError: The type of a tensor is not in DTYPES.
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
            yield named[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data

    return write_file(path, chunks())


@dataclass(frozen=True, slots=True)
class _Part:
    """A shard in an open file."""

    offset: tuple[int, ...]
    size: tuple[int, ...]
    file: Any

    def overlap(self, offset: Sequence[int], size: Sequence[int]) -> list[tuple[int, int]]:
        """Returns the bounds of the intersection with a box, for each dimension of the whole tensor."""
        return [
            (max(own, other), min(own + own_size, other + other_size))
            for own, own_size, other, other_size in zip(self.offset, self.size, offset, size, strict=True)
        ]


def _slices(bounds: list[tuple[int, int]], offset: Sequence[int]) -> tuple[slice, ...]:
    """Returns the bounds as slices of a tensor that begins at `offset`."""
    return tuple(slice(low - start, high - start) for (low, high), start in zip(bounds, offset, strict=True))


class ShardedTensors:
    """The tensors of one kind in a checkpoint, whichever ranks wrote them. Shards are read lazily in a `with` block.

    Raises:
        ValueError: On entering, a file cannot be read, or the files do not contain every element of a tensor exactly
            once. The message has the name of the file.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.kind = folder, kind
        self._parts: dict[str, list[_Part]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for path in sorted(
                path for pattern in ("", "-*-of-*") for path in self.folder.glob(f"{self.kind}{pattern}.safetensors")
            ):
                self._open(path, stack)
            self._stack = stack.pop_all()
        for name, parts in self._parts.items():
            if not _fill(self._shapes[name], [part for part in parts if math.prod(part.size)]):
                boxes = sorted((part.offset, part.size) for part in parts)
                raise ValueError(
                    f"{self.folder}: the files do not hold every number of {name}, {list(self._shapes[name])}, once: "
                    f"the offsets and sizes are {boxes}"
                )
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _open(self, path: Path, stack: ExitStack) -> None:
        try:
            file = stack.enter_context(safe_open(path, framework="pt"))
            shards = json.loads((file.metadata() or {})["shards"])
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                offset, shape = (tuple(map(int, each)) for each in shards[name])
                size = tuple(file.get_slice(name).get_shape())
                if not len(offset) == len(size) == len(shape) or self._shapes.setdefault(name, shape) != shape:
                    raise ValueError(f"the metadata of {name} does not fit its shape, or that of another file")
                self._parts.setdefault(name, []).append(_Part(offset, size, file))
        except (SafetensorError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path}: not a readable part of a checkpoint: {error}") from error

    def shapes(self) -> dict[str, torch.Size]:
        return {name: torch.Size(shape) for name, shape in self._shapes.items()}

    def read(self, name: str, offset: Sequence[int] | None = None, size: Sequence[int] | None = None) -> Tensor:
        """Returns a box of a tensor, by default all of it, without reading the rest."""
        offset = (0,) * len(self._shapes[name]) if offset is None else offset
        size = self._shapes[name] if size is None else size
        result: Tensor | None = None
        for part in self._parts[name]:
            bounds = part.overlap(offset, size)
            if any(low >= high for low, high in bounds):
                continue
            found = part.file.get_slice(name)[_slices(bounds, part.offset)] if bounds else part.file.get_tensor(name)
            if found.shape == torch.Size(size):
                return found
            if result is None:
                result = torch.empty(tuple(size), dtype=found.dtype)
            result[_slices(bounds, offset)] = found
        return torch.empty(size) if result is None else result  # an empty box overlaps with no part


def _fill(shape: tuple[int, ...], parts: Sequence[_Part]) -> bool:
    """Returns whether the parts, which form a grid, contain every element of a tensor exactly once."""
    if not math.prod(shape):
        return not parts
    num_cells = 1
    for dimension, length in enumerate(shape):
        spans = sorted({(part.offset[dimension], part.offset[dimension] + part.size[dimension]) for part in parts})
        bounds = [0, *(end for _, end in spans)]
        if bounds[:-1] != [start for start, _ in spans] or bounds[-1] != length:
            return False
        num_cells *= len(spans)
    return len({(part.offset, part.size) for part in parts}) == len(parts) == num_cells
