"""Files read by offset, and the fingerprint of what they hold.

Files are read with `pread`, not through a mapping: a mapped file that another process truncates kills the reader with
SIGBUS, where a short read is an error with a message. Offsets are explicit, so forked workers may share a descriptor.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

SCAN_BYTES = 8 * 2**20
_UP_TO_WHOLE = 256 * 2**20
_NUM_BLOCKS, _BLOCK_BYTES = 64, 2**20


class ShrunkError(OSError):
    """A file has become shorter since it was opened."""


class IndexedFile:
    """A file read by offset; picklable, and opened again by each process that needs it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = path.stat().st_size
        self._descriptor: int | None = None

    def read(self, start: int, end: int) -> bytes:
        """Bytes [start, end). Raises ShrunkError where the file no longer has them."""
        if self._descriptor is None:
            self._descriptor = self._open()
        parts = []
        while start < end:
            part = os.pread(self._descriptor, end - start, start)
            if not part:
                raise ShrunkError(shrunk(self.path, os.fstat(self._descriptor).st_size, self.size))
            parts.append(part)
            start += len(part)
        return b"".join(parts)

    def chunks(self, start: int, end: int) -> Iterator[tuple[int, np.ndarray]]:
        """Offset and uint8 bytes of one chunk of [start, end) after another."""
        for offset in range(start, end, SCAN_BYTES):
            yield offset, np.frombuffer(self.read(offset, min(offset + SCAN_BYTES, end)), np.uint8)

    def _open(self) -> int:
        return os.open(self.path, os.O_RDONLY)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_descriptor": None}

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # `close` is bound early: at the interpreter's end, the module os may be gone before this object.
        if (descriptor := getattr(self, "_descriptor", None)) is not None:
            close(descriptor)


def shrunk(path: Path, size: int, size_before: int) -> str:
    return f"{path} has {size} bytes, and had {size_before} when it was opened; leave data alone while it is in use"


def fingerprint_of(file: IndexedFile) -> str:
    """A hash of the content, whatever the file's name and time.

    Files up to 256 MB are hashed whole. Of larger ones, the size and 64 blocks of 1 MB, evenly spread from the first
    to the last, so that opening stays fast: a change between the blocks that keeps the size goes unnoticed.
    """
    digest = hashlib.sha256(str(file.size).encode())
    if file.size <= _UP_TO_WHOLE:
        for _, chunk in file.chunks(0, file.size):
            digest.update(chunk.data)
    else:
        for start in np.linspace(0, file.size - _BLOCK_BYTES, _NUM_BLOCKS).astype(np.int64):
            digest.update(file.read(int(start), int(start) + _BLOCK_BYTES))
    return digest.hexdigest()


def fingerprint_of_beginning(path: Path) -> str:
    """A hash of a file's size and first megabyte."""
    with path.open("rb") as file:
        return hashlib.sha256(f"{path.stat().st_size} ".encode() + file.read(2**20)).hexdigest()
