"""Named tensors over several safetensors files: of each tensor, a file holds the rows that one rank had.

A tensor is split along its first dimension only, as FSDP2 does, so that any number of ranks finds its rows again in the
files of any other. A file's own metadata says where its rows begin.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from sftron.checkpoint.tensor_file import write_tensors
from sftron.models.sharding import local_rows


@dataclass(frozen=True, slots=True)
class Rows:
    """tensor: rows [first_row, first_row + len(tensor)) of one of `num_rows` rows; a scalar is its own only row."""

    tensor: Tensor
    first_row: int
    num_rows: int


def own_rows(named: Iterable[tuple[str, Tensor]], *, is_main: bool) -> Iterator[tuple[str, Rows]]:
    """What this rank has to write: each row of a tensor is written by one rank; what all ranks have alike, by the main
    one. The rows are the tensors' own memory."""
    for name, tensor in named:
        if isinstance(tensor, DTensor):
            if _is_first_copy(tensor):
                rows, first = local_rows(tensor.detach())
                yield name, Rows(rows, first, tensor.shape[0])
        elif is_main:
            yield name, Rows(tensor.detach(), 0, len(tensor) if tensor.ndim else 1)


def _is_first_copy(tensor: DTensor) -> bool:
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    return not any(place for place, kind in zip(coordinate, tensor.placements, strict=True) if kind.is_replicate())


def write_rows(path: Path, named: Mapping[str, Rows]) -> dict[str, Any]:
    """Write a rank's file: its {"size", "sha256"}. Raises OSError."""
    # Sorted, as an optimizer that was loaded has its state in another order, and the same state makes the same file.
    places = {name: [rows.first_row, rows.num_rows] for name, rows in sorted(named.items())}
    tensors = {name: rows.tensor for name, rows in named.items()}
    return write_tensors(path, tensors, {"format": "pt", "rows": json.dumps(places)})


class ShardedTensors:
    """The tensors of `folder`'s files of one kind, whoever wrote them; opened by `with`, read by rows.

    Raises: ValueError, naming the file, where one cannot be read, or the files together do not hold every row once.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.kind = folder, kind
        self._parts: dict[str, list[tuple[int, int, Any]]] = {}
        self._num_rows: dict[str, int] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for path in sorted(
                path for pattern in ("", "-*-of-*") for path in self.folder.glob(f"{self.kind}{pattern}.safetensors")
            ):
                self._open(path, stack)
            self._stack = stack.pop_all()
        for name, parts in self._parts.items():
            parts.sort(key=lambda part: part[:2])
            bounds = [0, *(end for _, end, _ in parts)]
            if bounds[:-1] != [first for first, _, _ in parts] or bounds[-1] != self._num_rows[name]:
                raise ValueError(f"{self.folder}: the files do not hold every row of {name} once: {bounds}")
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _open(self, path: Path, stack: ExitStack) -> None:
        try:
            file = stack.enter_context(safe_open(path, framework="pt"))
            places = json.loads((file.metadata() or {}).get("rows", "{}"))
            for name in file.keys():  # noqa: SIM118  (no mapping)
                shape = file.get_slice(name).get_shape()
                length = shape[0] if shape else 1
                first, num_rows = places.get(name, (0, length))
                self._parts.setdefault(name, []).append((int(first), int(first) + length, file))
                self._num_rows[name] = int(num_rows)
        except (SafetensorError, OSError, ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: not a readable part of a checkpoint: {error}") from error

    def shapes(self) -> dict[str, torch.Size]:
        """Of the whole tensors."""
        return {name: self._shape(name) for name in self._parts}

    def _shape(self, name: str) -> torch.Size:
        own = self._parts[name][0][2].get_slice(name).get_shape()
        return torch.Size([self._num_rows[name], *own[1:]] if own else [])

    def read(self, name: str, first: int = 0, end: int | None = None) -> Tensor:
        """Rows [first, end) of a tensor, the rest of it not read; a scalar whole."""
        end = self._num_rows[name] if end is None else end
        parts = []
        for start, stop, file in self._parts[name]:
            if not file.get_slice(name).get_shape():
                return file.get_tensor(name)
            low, high = max(first, start), min(end, stop)
            if low < high or (first == end and not parts):
                parts.append(file.get_slice(name)[max(low - start, 0) : max(high - start, 0)])
        return parts[0] if len(parts) == 1 else torch.cat(parts)
