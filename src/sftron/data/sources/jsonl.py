"""Reads rows of JSON text strictly, by random access: an index of byte offsets, and one read for each row.

Compressed files, `.json` files that hold one list, and CSV files are converted to JSON lines when they are opened.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import weakref
from array import array
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy as np

from sftron.data.json_text import excerpt, parse_json
from sftron.data.sources.spreadsheet import CSV_SUFFIXES, csv_rows
from sftron.data.types import DataError, Row

MAX_ROW_BYTES = 4 * 2**20
"""The default size limit of a row. A tokenizer takes most of a minute and gigabytes of memory for a row of 32 MB."""
CODECS = {".gz": "gzip", ".zst": "zstd"}
BOM = b"\xef\xbb\xbf"
WHITESPACE = b" \t\r\n"
_SCAN_BYTES = 8 * 2**20
_INDEXED_BYTES = 2**20
"""The part of a file that is indexed at once: if it holds only newlines, its offsets take 50 times as much."""
_MOST_SHORT_ROWS, _SHORT_ROW_BYTES = 10_000_000, 8
"""Files with more lines must have this many bytes per line on average: the index takes as many per row, or 24 if there
are blank lines."""
_HASHED_WHOLE_BYTES = 256 * 2**20
_NUM_HASHED_BLOCKS, _HASHED_BLOCK_BYTES = 64, 2**20
_IS_WHITESPACE = np.isin(np.arange(256), list(WHITESPACE))
_WHOLE_LINES = "one JSON object per line (.jsonl), or the file as one list [ ... ] (.json)"
_CSV_JSON_COLUMNS = frozenset({"messages", "conversations"})
"""The columns of a CSV file whose cells hold a list as JSON text."""


class JsonlSource:
    """The rows of a file of JSON text. Blank lines are not rows, but they count in line numbers.

    The index takes 8 bytes per row, or 24 in a file with blank lines, which take none. A line longer than
    `max_row_bytes` is detected without reading it. The file is read with `pread` rather than a memory map, as
    truncating a mapped file kills the process that reads it, and forked workers can share the descriptor. A process
    that unpickles the source opens or converts the file again.
    """

    def __init__(self, path: Path, max_row_bytes: int) -> None:
        self.name, self._path, self._max_row_bytes = str(path), path, max_row_bytes
        self._has_lines = has_json_lines(path)
        self._descriptor: int | None = self._open()
        self._size = os.fstat(self._descriptor).st_size
        self.fingerprint = file_fingerprint(self._descriptor)
        self._starts, self._ends, self._lines = self._index()

    def _open(self) -> int:
        """Returns a descriptor of the file, or of a copy as JSON lines, that is closed when the source is deleted.

        The copy has no name, so no later run can find a stale one.
        """
        self._csv_lines = array("q")
        if self._has_lines and self._path.suffix not in CODECS:
            descriptor = os.open(self._path, os.O_RDONLY)
        else:
            opened = open_json_lines(self._path, has_lines=self._has_lines, csv_lines=self._csv_lines)
            with tempfile.TemporaryFile() as copy, opened as chunks:
                size = sum(map(copy.write, chunks))
                copy.flush()
                if size != getattr(self, "_size", size):  # in a process that unpickled the source
                    raise file_changed(self._path, size, self._size)
                descriptor = os.dup(copy.fileno())
        weakref.finalize(self, os.close, descriptor)
        return descriptor

    def _read(self, start: int, end: int) -> bytes:
        """Returns the bytes [start, end). Raises DataError if the file has become too short."""
        if self._descriptor is None:
            self._descriptor = self._open()
        data = os.pread(self._descriptor, end - start, start)
        if len(data) < end - start:
            raise file_changed(self._path, os.fstat(self._descriptor).st_size, self._size)
        return data

    def _index(self) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
        """Returns the offsets at which rows begin and end, and the numbers of their lines, from 0.

        Without blank lines, they are only the offsets at which rows begin, then the offset of the end of the file.
        Raises DataError.
        """
        begins, end = list[np.ndarray](), 0
        for starts, stops, is_text in self._lines_of_chunks():
            if not is_text.all():
                break
            begins, end = [*begins, starts], stops[-1] + 1
        else:
            return np.concatenate([*begins, [end]]), None, None
        columns, num_lines = list[tuple[np.ndarray, ...]](), 0
        for starts, stops, is_text in self._lines_of_chunks():
            columns.append((starts[is_text], stops[is_text], num_lines + np.flatnonzero(is_text)))
            num_lines += len(starts)
        starts, stops, numbers = map(np.concatenate, zip(*columns, strict=True))
        return starts, stops, numbers

    def _lines_of_chunks(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yields, for each part of the file, where its lines begin and end, and whether they are rows.

        Blank lines are not. Raises DataError if the lines are too short to be rows, before their index fills memory.
        """
        size, num_rows = self._size, 0
        begin = len(BOM) if self._read(0, min(len(BOM), size)) == BOM else 0
        has_text = False  # of the line that has begun
        for offset in range(begin, size, _INDEXED_BYTES):
            chunk = np.frombuffer(self._read(offset, min(offset + _INDEXED_BYTES, size)), np.uint8)
            stops = np.flatnonzero(chunk == ord("\n"))
            if offset + len(chunk) == size and chunk[-1] != ord("\n"):
                stops = np.append(stops, len(chunk))  # the last line has no newline
            if not len(stops):
                has_text = has_text or not _IS_WHITESPACE[chunk].all()
                continue
            starts = np.append(begin, offset + stops[:-1] + 1)
            is_text = np.full(len(stops), True)
            # Nearly all lines begin with "{"; only a line that begins with white space may be blank.
            if _IS_WHITESPACE[chunk[np.maximum(starts - offset, 0)]].any() or (begin < offset and not has_text):
                num_texts = np.append(0, np.cumsum(~_IS_WHITESPACE[chunk], dtype=np.int32))[stops]
                is_text = np.diff(num_texts, prepend=-int(has_text)) > 0
                is_text |= offset + stops - starts > self._max_row_bytes
            begin, has_text = offset + int(stops[-1]) + 1, not _IS_WHITESPACE[chunk[stops[-1] + 1 :]].all()
            num_rows += int(is_text.sum())
            if num_rows > max(_MOST_SHORT_ROWS, begin // _SHORT_ROW_BYTES):
                problem = f"has more than {_MOST_SHORT_ROWS:,} lines with less than {_SHORT_ROW_BYTES} bytes on average"
                raise DataError(f"{self.name}: {problem}; wanted {_WHOLE_LINES}", reason="broken_json")
            yield starts, offset + stops, is_text

    def __len__(self) -> int:
        return len(self._starts) - (self._ends is None)

    def __getitem__(self, index: int) -> Row:
        location = self.locate(index)
        start = int(self._starts[index])
        end = int(self._starts[index + 1]) - 1 if self._ends is None else int(self._ends[index])
        if (size := end - start) > self._max_row_bytes:
            refuse_size(location, size, self._max_row_bytes, self._read(start, min(end, start + 60)))
        return self._parse(self._read(start, end), location)

    def _parse(self, line: bytes, location: str) -> Row:
        return parse_row(line.strip(WHITESPACE), location)

    def locate(self, index: int) -> str:
        line = self._line(index)
        if self._csv_lines:
            return f"{self.name}:{self._csv_lines[index]}"
        return f"{self.name}:{line + 1}" if self._has_lines else f"{self.name}, row {index}"

    def _line(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name} has {len(self)} rows, no row {index}")
        return index if self._lines is None else int(self._lines[index])

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_descriptor": None}


# --- Files ---


def file_fingerprint(descriptor: int) -> str:
    """Returns a hash of an open file's content, independent of its name and time.

    A file of up to 256 MB is hashed as a whole. For a larger file, so that it opens fast, the hash covers the size and
    64 blocks of 1 MB, evenly spread from the first to the last. It misses a change between the blocks that keeps the
    size.
    """
    size = os.fstat(descriptor).st_size
    starts, block = list(range(0, size, _SCAN_BYTES)), _SCAN_BYTES
    if size > _HASHED_WHOLE_BYTES:
        block = _HASHED_BLOCK_BYTES
        starts = np.linspace(0, size - block, _NUM_HASHED_BLOCKS).astype(np.int64).tolist()
    digest = hashlib.blake2b(str(size).encode(), digest_size=32)  # three times as fast as sha256
    for start in starts:
        digest.update(os.pread(descriptor, block, start))
    return digest.hexdigest()


def file_changed(path: Path, size: int, size_before: int) -> DataError:
    problem = f"{path}: had {size_before} bytes when it was opened, but has {size} now"
    return DataError(f"{problem}; do not change data files while a run reads them", reason="file_changed")


def kind_of(path: Path) -> str:
    """Returns the extension of a file name without that of its compression: `.jsonl` for chats.jsonl.gz."""
    return Path(path.stem).suffix if path.suffix in CODECS else path.suffix


def has_json_lines(path: Path) -> bool:
    """Returns whether a file holds one JSON object per line.

    Every .jsonl file does, no .csv or .tsv file does, and a .json file does unless it begins with a list. A .txt file
    has lines as well, of which each is a document.
    """
    if kind_of(path) != ".json":
        return kind_of(path) in (".jsonl", ".txt")
    with open_decompressed(path) as content:
        return not content.read(4096).removeprefix(BOM).lstrip(WHITESPACE).startswith(b"[")


# --- Conversion to JSON lines ---


@contextmanager
def open_json_lines(
    path: Path, *, has_lines: bool, csv_lines: array[int] | deque[int], chunk_bytes: int = _SCAN_BYTES
) -> Iterator[Iterator[bytes]]:
    """Opens a file as an iterator over chunks of JSON lines; a chunk may end within a line. Raises DataError.

    Args:
        path: The file.
        has_lines: The result of `has_json_lines`.
        csv_lines: For a CSV file, the number of the line at which a row begins is appended to it before the row.
        chunk_bytes: The size of a chunk, if the file has lines; otherwise a chunk is a line.
    """
    with open_decompressed(path) as content:
        if has_lines:
            yield iter(lambda: content.read(chunk_bytes), b"")
        else:
            is_csv = kind_of(path) in CSV_SUFFIXES
            rows = (
                _rows_of_csv(path, content, csv_lines)
                if is_csv
                else parse_json(content.read().removeprefix(BOM), str(path), "one list of objects: [ {...}, {...} ]")
            )
            yield (json.dumps(row).encode() + b"\n" for row in rows)


@contextmanager
def open_decompressed(path: Path) -> Iterator[IO[bytes]]:
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


def _rows_of_csv(path: Path, content: IO[bytes], lines: array[int] | deque[int]) -> Iterator[dict[str, Any]]:
    """Yields the rows of a CSV file; the number of the line at which a row begins is appended to `lines` before it."""
    for line, row in csv_rows(path, content):
        lines.append(line)
        for name in _CSV_JSON_COLUMNS & row.keys():
            if row[name] is not None:
                row[name] = parse_json(row[name], f"{path}:{line}", "a list")
        yield row


# --- JSON ---


def parse_row(data: bytes, location: str) -> Row:
    """Parses one JSON object strictly; see `parse_json`. Raises DataError."""
    is_cut = data.endswith((b"{", b"[", b","))
    row = parse_json(data, location, _WHOLE_LINES if is_cut else "one JSON object")
    if not isinstance(row, dict):
        found = excerpt(data.decode("utf-8"))
        first = row[0] if isinstance(row, list) and row and isinstance(row[0], dict) else {}
        is_chat, column = {"role", "from"} & first.keys(), "conversations" if "from" in first else "messages"
        remedy = f'write {{"{column}": [...]}}' if is_chat else "a list of rows belongs in a .json file"
        problem = f"found {found}; wanted an object such as {{...}} ({remedy})"
        raise DataError(f"{location}: {problem}", reason="not_an_object")
    return row


def refuse_size(location: str, size: int, max_row_bytes: int, beginning: bytes = b"") -> NoReturn:
    """Raises the DataError for a row of `size` bytes, which quotes the row's beginning."""
    found = f": {excerpt(beginning.decode('utf-8', 'backslashreplace'))}" if beginning else ""
    problem = f"has {size} bytes, but data.max_row_bytes is {max_row_bytes}{found}; split the row, or raise the key"
    raise DataError(f"{location}: {problem}", reason="too_large")
