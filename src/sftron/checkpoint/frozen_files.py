"""The files from which frozen weights are streamed: those of a model, and the matrices in NF4, made once by a run."""

from __future__ import annotations

import hashlib
import json
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from sftron.checkpoint.atomic import write_file
from sftron.checkpoint.shards import DTYPES, write_tensors

NF4_FILE, NF4_FACTS = "frozen-nf4.safetensors", "frozen-nf4.json"
_BYTES_AT_A_TIME = 2**24
"""What is read at a time of a tensor whose type changes."""


class FrozenWeightsError(OSError):
    """The frozen weights of a run can no longer be read; the message names the file and the remedy."""


class Stamp(NamedTuple):
    """What tells two contents of a file apart: no program can set the ctime, which every write renews."""

    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, file: int | Path) -> Stamp:
        """Returns the stamp of a path or an open file. Raises OSError."""
        status = os.fstat(file) if isinstance(file, int) else file.stat()
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def require_stamps(stamps: Mapping[Path, Stamp]) -> None:
    """Raises ValueError if a file is no longer the one whose stamp was taken."""
    for path, known in stamps.items():
        if (now := Stamp.of(path)) != known:
            raise ValueError(
                f"{path} changed after the run had computed its digest: {known} then, {now} now. Restore the file, and "
                "start the run again"
            )


class Place(NamedTuple):
    """Where a tensor is stored."""

    path: Path
    dtype: torch.dtype
    shape: torch.Size
    offset: int
    """The position of its first byte in the file."""


def places_in(path: Path) -> dict[str, Place]:
    """Returns the places of the tensors in a safetensors file that was opened before, so its header is valid."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    types = DTYPES | {"U8": torch.uint8}
    return {
        name: Place(path, types[at["dtype"]], torch.Size(at["shape"]), 8 + length + at["data_offsets"][0])
        for name, at in header.items()
        if at.get("dtype") in types
    }


class FrozenFiles:
    """Reads parts of files into tensors, and finds files that change while it has them open.

    They are read, not mapped: of a file that became shorter, or of a disk that is gone, a mapping ends the process by
    SIGBUS, without a message. What is read stays in the page cache either way.

    Args:
        parts: The places that make up each native tensor, as rows of it, in order.
    """

    def __init__(self, parts: Mapping[str, Sequence[Place]]) -> None:
        self._parts = parts
        self._open: dict[Path, int] = {}
        weakref.finalize(self, _close, self._open)
        for path in {place.path for each in parts.values() for place in each}:
            self._open[path] = os.open(path, os.O_RDONLY)
        self._stamps = {path: Stamp.of(file) for path, file in self._open.items()}

    def fill(self, name: str, out: Tensor) -> None:
        """Reads a whole tensor into `out`, a contiguous tensor on the CPU of any float type. Raises OSError."""
        flat, first = out.view(-1), 0
        for place in self._parts[name]:
            size = place.shape.numel()
            self._read(place, 0, flat[first : first + size])
            first += size
        assert first == len(flat), (name, first, out.shape)

    def fill_rows(self, name: str, rows: Sequence[int], out: Tensor) -> None:
        """Reads some rows of a tensor of one part into `out`, [len(rows), ...]. Raises OSError."""
        (place,) = self._parts[name]
        width = place.shape[1:].numel()
        for row, own in zip(rows, out.view(len(rows), -1), strict=True):
            self._read(place, row * width, own)

    def _read(self, place: Place, first: int, out: Tensor) -> None:
        """Reads len(out) elements from the element `first` on."""
        size = place.dtype.itemsize
        start = place.offset + first * size
        if place.dtype == out.dtype:
            self._read_bytes(place.path, start, out.view(torch.uint8))
        else:
            num = _BYTES_AT_A_TIME // size
            stored = torch.empty(min(num, len(out)), dtype=place.dtype)
            for part in out.split(num):
                self._read_bytes(place.path, start, stored[: len(part)].view(torch.uint8))
                part.copy_(stored[: len(part)])
                start += part.numel() * size
        if (now := Stamp.of(self._open[place.path])) != (before := self._stamps[place.path]):
            raise FrozenWeightsError(
                f"{place.path} changed while the run streamed its weights: {before} before, {now} now. Restore the "
                "file, and repeat the command to continue"
            )

    def _read_bytes(self, path: Path, offset: int, out: Tensor) -> None:
        rest, position = memoryview(out.numpy().data), offset
        while rest:
            try:
                count = os.preadv(self._open[path], [rest], position)
            except OSError as error:
                problem = f"{path}: cannot be read at byte {position:,}: {error.strerror}"
                raise FrozenWeightsError(f"{problem}. Repair the disk, and repeat the command to continue") from error
            if count == 0:
                raise FrozenWeightsError(
                    f"{path} ends at byte {position:,}, but its weights end at {position + len(rest):,}. Restore the "
                    "file, and repeat the command to continue"
                )
            rest, position = rest[count:], position + count


def _close(files: dict[Path, int]) -> None:
    for file in files.values():
        with suppress(OSError):
            os.close(file)


# --- NF4 ---


def make_nf4_file(
    folder: Path, base: str, shapes: Mapping[str, torch.Size], make: Callable[[str], Tensor]
) -> dict[Path, Stamp]:
    """Stores matrices in NF4 in a file of `folder`, unless an intact one of this base is there.

    Args:
        base: The digest of the base model.
        shapes: The shape of each matrix as it is stored.
        make: Returns a matrix in NF4.

    Returns the stamp of the file with this content.

    Raises ValueError if the file cannot be written, or a matrix has weights that are not finite.
    """
    path, facts = folder / NF4_FILE, folder / NF4_FACTS
    try:
        return _stamp_of_nf4_file(path, facts, base, shapes, make)
    except OSError as error:
        with suppress(OSError):  # a part of it, which would fill the disk
            path.unlink()
        size = sum(shape.numel() for shape in shapes.values())
        raise ValueError(
            f"model.frozen_base: stream cannot store the weights in NF4 in {error.filename or path}: "
            f"{error.strerror or error}. Free {size:,} bytes there (a --dry-run writes to TMPDIR), "
            "and start the run again"
        ) from error


def _stamp_of_nf4_file(
    path: Path, facts: Path, base: str, shapes: Mapping[str, torch.Size], make: Callable[[str], Tensor]
) -> dict[Path, Stamp]:
    if path.exists() and (stamp := Stamp.of(path)) and _is_intact(path, facts, base):
        return {path: stamp}
    for old in (facts, path):
        old.unlink(missing_ok=True)
    # The facts come last: a file without them was not finished.
    stored = {name: torch.empty(shape, dtype=torch.uint8, device="meta") for name, shape in shapes.items()}
    written = write_tensors(path, stored, {"base": base}, make)
    stamp = Stamp.of(path)
    write_file(facts, [json.dumps({"base": base, **written}).encode()])
    return {path: stamp}


def _is_intact(path: Path, facts: Path, base: str) -> bool:
    try:
        known = json.loads(facts.read_bytes())
        with path.open("rb") as file:
            return known["base"] == base and hashlib.file_digest(file, "sha256").hexdigest() == known["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
