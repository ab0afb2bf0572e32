"""Reads rows of JSON text by random access: an index of byte offsets, and one read for each row.

JSON Lines files (`.jsonl`, and `.json` with one object per line) are read in place. Compressed files, `.json` files
that hold one list, and `.csv` files are converted to JSON lines in a temporary file when they are opened. The copy has
no name, so no later run can find a stale one, and it disappears with the last process that has it open.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np

from sftron.data.sources.json_text import WHITESPACE, excerpt, parse_json, parse_row, too_large
from sftron.data.types import DataError, Row

CODECS = {".gz": "gzip", ".zst": "zstd"}
BOM = b"\xef\xbb\xbf"
_SCAN_BYTES = 8 * 2**20
_HASHED_WHOLE_BYTES = 256 * 2**20
_NUM_HASHED_BLOCKS, _HASHED_BLOCK_BYTES = 64, 2**20
_IS_WHITESPACE = np.isin(np.arange(256), list(WHITESPACE))
_CSV_JSON_COLUMNS = frozenset({"messages", "conversations"})
"""The columns of a CSV file whose cells hold a list as JSON text."""


class JsonlSource:
    """The rows of a file of JSON text. Blank lines are not rows, but they count in line numbers.

    The index takes 8 bytes per line. A line longer than `max_row_bytes` is detected without reading it.
    """

    def __init__(self, path: Path, max_row_bytes: int) -> None:
        self.name = str(path)
        self._max_row_bytes = max_row_bytes
        self._has_lines = has_json_lines(path)
        is_converted = path.suffix in CODECS or not self._has_lines
        self._file = _ConvertedFile(path) if is_converted else OffsetFile(path)
        self.fingerprint = self._file.fingerprint
        self._starts, self._lines = self._index()

    def _index(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Returns the offsets of the lines and the numbers of the lines that are rows.

        The offsets, in bytes, are those at which lines begin, followed by that of the end. The numbers count from 0;
        they are None if all lines are rows.
        """
        size = self._file.size
        first = len(BOM) if self._file.read(0, min(len(BOM), size)) == BOM else 0
        starts, doubtful = [np.array([first])], [np.array([first])]
        for offset in range(first, size, _SCAN_BYTES):
            chunk = np.frombuffer(self._file.read(offset, min(offset + _SCAN_BYTES + 1, size)), np.uint8)
            after = np.flatnonzero(chunk[:_SCAN_BYTES] == ord("\n")) + 1
            starts.append(offset + after)
            # Nearly all lines begin with "{"; only a line that begins with white space may be blank.
            after = after[after < len(chunk)]
            doubtful.append(offset + after[_IS_WHITESPACE[chunk[after]]])
        starts = np.concatenate(starts)
        if starts[-1] < size:  # The last line has no newline.
            starts = np.append(starts, size + 1)
        lines = np.searchsorted(starts[:-1], np.concatenate(doubtful)).tolist()
        blank = [line for line in lines if line < len(starts) - 1 and self._is_blank(starts, line)]
        return starts, np.delete(np.arange(len(starts) - 1), blank) if blank else None

    def _is_blank(self, starts: np.ndarray, line: int) -> bool:
        start, end = int(starts[line]), int(starts[line + 1]) - 1
        return end - start <= self._max_row_bytes and not self._file.read(start, end).strip(WHITESPACE)

    def __len__(self) -> int:
        return len(self._starts) - 1 if self._lines is None else len(self._lines)

    def __getitem__(self, index: int) -> Row:
        location, line = self.locate(index), self._line(index)
        start, end = int(self._starts[line]), int(self._starts[line + 1]) - 1
        is_too_large = end - start > self._max_row_bytes
        try:
            data = self._file.read(start, min(end, start + 60) if is_too_large else end)
        except DataError as error:
            raise DataError(f"{location}: {error}", reason=error.reason) from error
        if is_too_large:
            raise too_large(location, end - start, self._max_row_bytes, data)
        return parse_row(data.strip(WHITESPACE), location)

    def locate(self, index: int) -> str:
        line = self._line(index)
        return f"{self.name}:{line + 1}" if self._has_lines else f"{self.name}, row {index}"

    def _line(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name} has {len(self)} rows, no row {index}")
        return index if self._lines is None else int(self._lines[index])


class OffsetFile:
    """Reads a file by byte offset. It is picklable; a process that unpickles it opens the file again.

    The file is read with `pread` rather than a memory map, as truncating a mapped file kills the process that reads it.
    `pread` takes the offset as an argument, so forked workers can share a descriptor.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = self._open()
        self.size = os.fstat(self._descriptor).st_size

    def _open(self) -> int:
        return os.open(self.path, os.O_RDONLY)

    def read(self, start: int, end: int) -> bytes:
        """Returns the bytes [start, end). Raises DataError if the file has become too short."""
        if self._descriptor is None:
            self._descriptor = self._open()
        parts = []
        while start < end:
            part = os.pread(self._descriptor, end - start, start)
            if not part:
                message = file_changed(self.path, os.fstat(self._descriptor).st_size, self.size)
                raise DataError(message, reason="file_changed")
            parts.append(part)
            start += len(part)
        return b"".join(parts)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the content, independent of the file's name and time.

        A file of up to 256 MB is hashed as a whole. For a larger file, so that it opens fast, the hash covers the size
        and 64 blocks of 1 MB, evenly spread from the first to the last. It misses a change between the blocks that
        keeps the size.
        """
        digest, size = hashlib.sha256(str(self.size).encode()), self.size
        if size <= _HASHED_WHOLE_BYTES:
            blocks = [(start, min(start + _SCAN_BYTES, size)) for start in range(0, size, _SCAN_BYTES)]
        else:
            starts = np.linspace(0, size - _HASHED_BLOCK_BYTES, _NUM_HASHED_BLOCKS).astype(np.int64).tolist()
            blocks = [(start, start + _HASHED_BLOCK_BYTES) for start in starts]
        for start, end in blocks:
            digest.update(self.read(start, end))
        return digest.hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_descriptor": None}

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # `close` is bound as a default, as the module `os` may be gone before this object when the interpreter exits.
        if (descriptor := getattr(self, "_descriptor", None)) is not None:
            close(descriptor)


class _ConvertedFile(OffsetFile):
    """A file converted to JSON lines in a temporary file. A process that unpickles it converts the file again."""

    def _open(self) -> int:
        size, free = 0, free_bytes()
        with tempfile.TemporaryFile() as copy, open_json_lines(self.path) as chunks:
            for chunk in chunks:
                size += copy.write(chunk)
                require_space(self.path, size, free)
            copy.flush()
            if size != getattr(self, "size", size):
                problem = f"converts to {size} bytes, and to {self.size} when it was opened"
                raise DataError(f"{self.path}: {problem}; leave data alone while it is in use", reason="file_changed")
            return os.dup(copy.fileno())


def file_changed(path: Path, size: int, size_before: int) -> str:
    return f"{path} has {size} bytes, and had {size_before} when it was opened; leave data alone while it is in use"


def free_bytes() -> int:
    """Returns the free bytes of the file system of temporary files."""
    return shutil.disk_usage(tempfile.gettempdir()).free


def require_space(path: Path, size: int, free: int) -> None:
    """Raises DataError if a copy of `size` bytes takes more than nine tenths of the `free` bytes before it."""
    if size > free * 9 // 10:
        problem = f"decompresses to {size:,} bytes or more, and {tempfile.gettempdir()} has only {free:,} free"
        remedy = "set TMPDIR to a folder with more, or stream the data (streaming: true)"
        raise DataError(f"{path}: {problem}; {remedy}")


# --- Conversion to JSON lines ---


def ending_of(path: Path) -> str:
    """Returns the extension of a file name, including that of its compression: `.jsonl.gz` for chats.jsonl.gz."""
    return "".join(path.suffixes[-2:]) if path.suffix in CODECS else path.suffix


def has_json_lines(path: Path) -> bool:
    """Returns whether a file holds one JSON object per line.

    Every .jsonl file does, no .csv file does, and a .json file does unless it begins with a list.
    """
    if ending_of(path).removesuffix(path.suffix if path.suffix in CODECS else "") != ".json":
        return ending_of(path).startswith(".jsonl")
    with _decompressed(path) as content:
        return not content.read(4096).removeprefix(BOM).lstrip(WHITESPACE).startswith(b"[")


@contextmanager
def open_json_lines(path: Path, chunk_bytes: int = _SCAN_BYTES) -> Iterator[Iterator[bytes]]:
    """Opens a file as an iterator over chunks of JSON lines; a chunk may end within a line. Raises DataError."""
    has_lines = has_json_lines(path)
    with _decompressed(path) as content:
        if has_lines:
            yield iter(lambda: content.read(chunk_bytes), b"")
            return
        rows = _csv_rows(path, content) if ending_of(path).startswith(".csv") else _rows_of_list(path, content)
        yield (json.dumps(row).encode() + b"\n" for row in rows)


@contextmanager
def _decompressed(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file for reading, with decompression if its extension is .gz or .zst.

    Raises:
        DataError: The file is truncated or broken; the message gives the byte offset.
    """
    if path.suffix not in CODECS:
        with path.open("rb", buffering=0) as file:  # A buffer could return bytes that the file no longer has.
            yield file
        return
    import pyarrow

    with pyarrow.OSFile(str(path)) as raw, pyarrow.CompressedInputStream(raw, CODECS[path.suffix]) as content:
        try:
            yield content
        except OSError as error:
            if error.errno is not None:  # an error of the operating system, not of the decoder
                raise
            problem = f"cannot be decompressed near byte {raw.tell()} of {path.stat().st_size}: {error}"
            raise DataError(f"{path}: {problem}; copy or download it again") from error


def _rows_of_list(path: Path, content: IO[bytes]) -> list[Any]:
    data = content.read().removeprefix(BOM)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}:{line}: is not UTF-8: save the file as UTF-8", reason="not_utf8") from error
    return parse_json(text, str(path), "one list of objects: [ {...}, {...} ]")


def _csv_rows(path: Path, content: IO[bytes]) -> Iterator[dict[str, Any]]:
    """Yields the rows of a CSV file that has a header. Cells are texts; an empty cell is null."""
    csv.field_size_limit(sys.maxsize)
    text = io.TextIOWrapper(content, "utf-8-sig", newline="")
    reader = csv.reader(text, strict=True)
    try:
        columns = next(reader, [])
        if repeated := [column for column in columns if columns.count(column) > 1]:
            raise DataError(f"{path}: has two columns {excerpt(repeated[0])}; rename or remove one")
        for cells in filter(None, reader):
            location = f"{path}:{reader.line_num}"
            if len(cells) != len(columns):
                problem = f"the row that ends here has {len(cells)} cells, and the header has {len(columns)}"
                raise DataError(f"{location}: {problem}; quote cells that hold commas or line breaks")
            yield {
                name: parse_json(cell, location, "a list") if cell and name in _CSV_JSON_COLUMNS else cell or None
                for name, cell in zip(columns, cells, strict=True)
            }
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num}: is not CSV: {error}; write the file again") from error
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8 near line {reader.line_num + 1}: save the file as UTF-8"
        raise DataError(f"{path}: {problem}", reason="not_utf8") from error
    finally:
        text.close()
