"""Files of one JSON object a line, read forward: no index, and nothing unpacked to the disk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from sftron.data.data_files import ending_of
from sftron.data.indexed_file import fingerprint_of_beginning, shrunk
from sftron.data.json_files import WHITESPACE, parse_row, too_large
from sftron.data.types import DataError, Row
from sftron.data.unpacking import CODECS, unpacked_chunks

_CHUNK_BYTES = 2**20
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class JsonLine:
    """data: the line, or its beginning where it is longer than max_row_bytes. size: of the whole line."""

    path: Path
    line: int
    data: bytes
    size: int
    max_row_bytes: int

    @property
    def location(self) -> str:
        return f"{self.path}:{self.line}"

    def read(self) -> Row:
        if self.size > self.max_row_bytes:
            raise too_large(self.location, self.size, self.max_row_bytes, self.data)
        return parse_row(self.data.strip(WHITESPACE), self.location)


@dataclass(frozen=True, slots=True)
class JsonlStream:
    """A file of one JSON object a line, which may be compressed; nothing is unpacked to the disk.

    size: of the file, in bytes.
    """

    path: Path
    max_row_bytes: int
    size: int
    num_rows = None

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def fingerprint(self) -> str:
        return fingerprint_of_beginning(self.path)

    def read(self, start: int) -> Iterator[JsonLine]:
        return islice(self._rows(), start, None)

    def _rows(self) -> Iterator[JsonLine]:
        for number, (data, size) in enumerate(_lines(self._chunks(), max(60, self.max_row_bytes)), start=1):
            if size > self.max_row_bytes:
                yield JsonLine(self.path, number, data[:60], size, self.max_row_bytes)
            elif data.strip(WHITESPACE):
                yield JsonLine(self.path, number, data, size, self.max_row_bytes)

    def _chunks(self) -> Iterator[bytes]:
        is_packed = self.path.suffix in CODECS
        chunks = unpacked_chunks(self.path, _CHUNK_BYTES) if is_packed else self._plain_chunks()
        beginning = next(chunks, b"").removeprefix(_BOM)
        if not ending_of(self.path).startswith(".jsonl") and beginning.lstrip(WHITESPACE).startswith(b"["):
            remedy = "write one object a line (.jsonl), or remove streaming"
            raise DataError(f"{self.path}: holds a JSON list, which has to be read to its end; {remedy}")
        yield beginning
        yield from chunks

    def _plain_chunks(self) -> Iterator[bytes]:
        num_read = 0
        with self.path.open("rb", buffering=0) as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk
                num_read += len(chunk)
        if num_read < self.size:
            raise DataError(shrunk(self.path, num_read, self.size), reason="file_changed")


def _lines(chunks: Iterable[bytes], max_bytes: int) -> Iterator[tuple[bytes, int]]:
    """The lines, each cut off after max_bytes or so, and their sizes."""
    begun, size = b"", 0
    for chunk in chunks:
        *pieces, rest = chunk.split(b"\n")
        for piece in pieces:
            yield begun + piece[: max_bytes - len(begun)], size + len(piece)
            begun, size = b"", 0
        begun, size = begun + rest[: max_bytes - len(begun)], size + len(rest)
    if size:
        yield begun, size
