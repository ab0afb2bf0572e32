"""Compressed files by random access: unpacked once, when opened, into an unnamed temporary file.

Compressed text can only be read from its beginning. The unpacked copy has no name and is keyed by nothing, so no later
run can find it stale, and it is gone with the last process that has it open, however that ends.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from sftron.data.indexed_file import SCAN_BYTES, IndexedFile
from sftron.data.types import DataError

CODECS = {".gz": "gzip", ".zst": "zstd"}


class UnpackedFile(IndexedFile):
    """The content of a .gz or .zst file. Forked workers share the copy; one that unpickles it unpacks for itself."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor, self.size = _unpack(path)

    def _open(self) -> int:
        descriptor, size = _unpack(self.path)
        if size != self.size:
            os.close(descriptor)
            problem = f"unpacks to {size} bytes, and to {self.size} when it was opened"
            raise DataError(f"{self.path}: {problem}; leave data alone while it is in use", reason="file_changed")
        return descriptor


def _unpack(path: Path) -> tuple[int, int]:
    """Descriptor and size of a temporary file with the content."""
    with TemporaryCopy(path) as copy:
        for chunk in unpacked_chunks(path):
            copy.write(chunk)
        return os.dup(copy.fileno()), copy.size


def unpacked_chunks(path: Path, num_bytes: int = SCAN_BYTES) -> Iterator[bytes]:
    """The content of a .gz or .zst file, some bytes at a time.

    Raises DataError, with the offset, where it is cut off or broken.
    """
    import pyarrow

    size = path.stat().st_size
    if not size:
        raise DataError(f"{path}: has 0 bytes, and even an empty file packs to more; copy or download it again")
    num_unpacked = 0
    with pyarrow.OSFile(str(path)) as raw, pyarrow.CompressedInputStream(raw, CODECS[path.suffix]) as unpacked:
        try:
            while chunk := unpacked.read(num_bytes):
                yield chunk
                num_unpacked += len(chunk)
        except OSError as error:  # also of a broken stream
            found = f"cannot be unpacked near byte {raw.tell()} of {size}, after {num_unpacked} bytes of content"
            raise DataError(f"{path}: {found}: {error}; copy or download it again") from error


class TemporaryCopy:
    """An unnamed temporary file, written once; takes at most nine tenths of the space that is free when it is made.

    original: what it is made of, for messages.
    """

    def __init__(self, original: Path) -> None:
        self.size = 0
        self._original = original
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  closed by __exit__
        self._free = shutil.disk_usage(tempfile.gettempdir()).free

    def write(self, data: memoryview | bytes) -> None:
        """Append. Raises DataError where that would fill the disk."""
        self.size += len(data)
        if self.size > self._free * 9 // 10:
            raise DataError(
                f"{self._original}: unpacks to {self.size:,} bytes or more, and {tempfile.gettempdir()} has only "
                f"{self._free:,} free; set TMPDIR to a folder with more, or stream the data (streaming: true)"
            )
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]

    def fileno(self) -> int:
        return self._file.fileno()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
