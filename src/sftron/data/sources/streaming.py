"""Streaming: reads a data set forward only, for data that is remote or larger than the disk.

Every loader worker reads the whole stream, but parses only the rows of its own lanes (see lanes/order.py).
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from sftron.data.sources.arrow import Batch, RowReader, open_arrow, open_parquet, unreadable
from sftron.data.sources.jsonl import (
    BOM,
    WHITESPACE,
    file_changed,
    has_json_lines,
    kind_of,
    open_json_lines,
    parse_row,
    refuse_size,
)
from sftron.data.sources.views import RawRow, RowSource, SourceView
from sftron.data.types import DataError, Row

_HEAD_ROWS = 1000
"""The number of first rows that stay in memory, for checks that need rows before the stream is consumed."""
_CHUNK_BYTES = 2**20
_BATCH_ROWS = 100


class EndOfStream(Exception):  # noqa: N818  no error, as StopIteration is none
    """The stream has `num_rows` rows, and the requested row is after the last one."""

    def __init__(self, num_rows: int) -> None:
        super().__init__(num_rows)
        self.num_rows = num_rows


@dataclass(frozen=True, slots=True)
class RowStream:
    """A sequence of rows that can be read forward any number of times, with the same result. Picklable."""

    name: str
    fingerprint: str
    """A hash of the size and the first megabyte of each file, or of the first rows."""
    num_rows: int | None
    """The number of rows, or None if it is known only after reading to the end."""
    read: Callable[[int], Iterator[RawRow]]
    """Yields the rows from a number on. Raises DataError if the stream cannot be read further."""


class StreamedSource:
    """The rows [first, stop) of a stream, indexed from 0.

    Moving forward from the last row read is cheap; an earlier row restarts the stream. The first thousand rows, the
    last row read, and the rows given to `hold` stay in memory. The source is picklable, and each forked worker reads
    the stream by itself.
    """

    def __init__(self, stream: RowStream, first: int = 0, stop: int | None = None) -> None:
        self._stream, self._first, self._stop = stream, first, stop
        self.name = stream.name
        self.fingerprint = hashlib.sha256(f"{first}:{stop} of {stream.fingerprint}".encode()).hexdigest()
        """A hash of what is known without reading to the end (see RowStream); it may miss a change of later rows."""
        known = stream.num_rows
        self.declared_num_rows = None if known is None else max(0, min(known, known if stop is None else stop) - first)
        """The number of rows that the stream declares, or None if it is known only after reading to the end."""
        self.num_rows = self.declared_num_rows
        """The number of rows, or None until it is declared or a pass has reached the end."""
        self._head: list[RawRow] = []
        self._held: Mapping[int, RawRow] = {}
        self.seek(0)

    def seek(self, index: int) -> None:
        """Moves to a row: when the next row is requested, the rows before `index` are skipped without parsing."""
        self._start = self._next = index
        self._last: tuple[int, RawRow] | None = None
        self._rows: Iterator[RawRow] | None = None

    def __getitem__(self, index: int) -> Row:
        """Returns the row.

        Raises:
            DataError: The row is broken; the message gives its location. Other rows can still be read.
            EndOfStream: There is no such row.
        """
        return self.raw(index).read()

    def locate(self, index: int) -> str:
        """Returns the file and line of a row that is in memory, or only the number of another row."""
        row = self._at_hand(index)
        return row.location if row else f"{self.name}, row {index}"

    def hold(self, rows: Mapping[int, RawRow]) -> None:
        """Keeps these rows in memory, by index, and releases the previous call's."""
        self._held = rows

    def head(self, num_rows: int) -> RowSource:
        """Returns the first rows, at most a thousand, as an indexed source. This does not consume the stream."""
        num_rows = min(num_rows, _HEAD_ROWS)
        try:
            self.raw(num_rows - 1)
        except EndOfStream as end:
            num_rows = end.num_rows
        return SourceView(self, self.name, "head", num_rows, int)  # pyright: ignore[reportArgumentType]  it has no length

    def split_rows(self, split: Callable[[RawRow], Iterable[RawRow]]) -> StreamedSource:
        """Returns the source with the rows that `split` makes of each row; how many there are is not declared."""
        read = partial(_read_split, self._stream, self._first, self._stop, split)
        return StreamedSource(RowStream(self.name, self.fingerprint, None, read))

    def raw(self, index: int) -> RawRow:
        """Returns a row without parsing it. Raises DataError and EndOfStream."""
        if (row := self._at_hand(index)) is not None:
            return row
        if self.num_rows is not None and index >= self.num_rows:
            raise EndOfStream(self.num_rows)
        if index < self._next:
            self.seek(index)
        while True:
            row = self._read()
            self._last = self._next, row
            if self._next == len(self._head) < _HEAD_ROWS:
                self._head.append(row)
            self._next += 1
            if self._next > index:
                return row

    def _at_hand(self, index: int) -> RawRow | None:
        if index < len(self._head):
            return self._head[index]
        return self._last[1] if self._last and self._last[0] == index else self._held.get(index)

    def _read(self) -> RawRow:
        number = self._first + self._next
        # A forked process shares the file offset with its parent, so it opens the stream again.
        if self._rows is None or self._process != os.getpid():
            self._rows, self._process = self._stream.read(number), os.getpid()
        try:
            row = None if self._stop is not None and number >= self._stop else next(self._rows, None)
            if row is not None:
                return row
            num_rows = self._next
            if self._start and self._next == self._start:  # `_start` may be after the last row.
                num_rows = sum(1 for _ in islice(self._stream.read(self._first), self._start))
        except BaseException as error:
            self._rows = None  # A generator that has raised would look like one at its end.
            if not isinstance(error, OSError):
                raise
            problem = f"can no longer be read: {error.strerror or error}"
            remedy = "make it readable, and restart the run"
            raise DataError(f"{error.filename or self.name}: {problem}; {remedy}", reason="file_changed") from error
        if self.num_rows not in (None, num_rows):
            self._rows = None
            problem = f"ends after {num_rows} rows of {self.num_rows}; do not change data files while a run reads them"
            raise DataError(f"{self.name}: {problem}", reason="file_changed")
        self.num_rows = num_rows
        raise EndOfStream(num_rows)

    def __reduce__(self) -> tuple[Any, ...]:
        return StreamedSource, (self._stream, self._first, self._stop)


def _read_split(
    stream: RowStream, first: int, stop: int | None, split: Callable[[RawRow], Iterable[RawRow]], start: int
) -> Iterator[RawRow]:
    rows = islice(stream.read(first), None if stop is None else max(0, stop - first))
    return islice(chain.from_iterable(map(split, rows)), start, None)


# --- Streams of files, and of tables of the datasets library ---


def open_file_streams(path: str, files: Sequence[Path], max_row_bytes: int) -> RowStream:
    """Returns one stream of all rows of the files. Raises DataError for a file that cannot be read forward."""
    openers = {".parquet": _parquet_stream, ".arrow": _arrow_stream}
    streams = [openers.get(file.suffix, _jsonl_stream)(file, max_row_bytes) for file in files]
    fingerprint = hashlib.sha256("".join(stream.fingerprint for stream in streams).encode()).hexdigest()
    numbers = [stream.num_rows for stream in streams if stream.num_rows is not None]
    num_rows = sum(numbers) if len(numbers) == len(streams) else None
    return RowStream(path, fingerprint, num_rows, partial(_read_in_turn, streams))


def _read_in_turn(streams: Sequence[RowStream], start: int) -> Iterator[RawRow]:
    for stream in streams:
        if stream.num_rows is not None:
            yield from stream.read(start) if start < stream.num_rows else ()
            start = max(0, start - stream.num_rows)
            continue
        for row in stream.read(0):
            if not start:
                yield row
            start = max(0, start - 1)


def _arrow_stream(path: Path, max_row_bytes: int) -> RowStream:
    source = open_arrow(path, max_row_bytes)
    return RowStream(source.name, source.fingerprint, len(source), partial(_read_indexed, source))


def _read_indexed(source: RowSource, start: int) -> Iterator[RawRow]:
    return (RawRow(source.locate(index), partial(source.__getitem__, index)) for index in range(start, len(source)))


def _jsonl_stream(path: Path, max_row_bytes: int) -> RowStream:
    """Returns the rows of a JSON Lines or CSV file, which may be compressed. Raises DataError for a JSON list."""
    has_lines = has_json_lines(path)
    if not has_lines and kind_of(path) == ".json":
        remedy = "write one object per line (.jsonl), or remove streaming"
        raise DataError(f"{path}: holds a JSON list, which cannot be streamed; {remedy}")
    read = partial(_read_lines, path, has_lines, path.stat().st_size, max_row_bytes)
    return RowStream(str(path), _fingerprint_of_beginning(path), None, read)


def _read_lines(path: Path, has_lines: bool, file_bytes: int, limit: int, start: int) -> Iterator[RawRow]:
    csv_lines: deque[int] = deque(maxlen=1)  # A chunk of CSV is one row, so this is the line of the row at hand.
    with open_json_lines(path, has_lines=has_lines, csv_lines=csv_lines, chunk_bytes=_CHUNK_BYTES) as chunks:
        rows = 0
        for number, (data, size) in enumerate(_lines(chunks, max(60, limit))):
            stripped = data.strip(WHITESPACE)
            if size <= limit and not stripped:
                continue
            if rows >= start:
                location = f"{path}:{csv_lines[0] if csv_lines else number + 1}"
                refused = partial(refuse_size, location, size, limit, data[:60])
                yield RawRow(location, partial(parse_row, stripped, location) if size <= limit else refused)
            rows += 1
    if (size := path.stat().st_size) < file_bytes:
        raise file_changed(path, size, file_bytes)


def _lines(chunks: Iterable[bytes], max_bytes: int) -> Iterator[tuple[bytes, int]]:
    """Yields the lines and their sizes in bytes; a line longer than about `max_bytes` is cut."""
    begun, size, mark = b"", 0, BOM
    for chunk in chunks:
        *ended, rest = chunk.removeprefix(mark).split(b"\n")
        mark = b""
        for text in ended:
            yield begun + text[: max_bytes - len(begun)], size + len(text)
            begun, size = b"", 0
        begun, size = begun + rest[: max_bytes - len(begun)], size + len(rest)
    if size:
        yield begun, size


def _parquet_stream(path: Path, max_row_bytes: int) -> RowStream:
    with unreadable(path), open_parquet(path) as file:
        sizes = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
    read = partial(_read_parquet, path, sizes, max_row_bytes)
    return RowStream(str(path), _fingerprint_of_beginning(path), sum(sizes), read)


def _read_parquet(path: Path, sizes: Sequence[int], max_row_bytes: int, start: int) -> Iterator[RawRow]:
    """Yields the rows from `start` on. Row groups before it, whose numbers of rows are `sizes`, are not decoded."""
    first = group = 0
    while group < len(sizes) and first + sizes[group] <= start:
        first, group = first + sizes[group], group + 1
    with unreadable(path), open_parquet(path) as file:
        batches = file.iter_batches(_BATCH_ROWS, range(group, len(sizes)), use_threads=False)
        yield from islice(_rows_of_batches(str(path), batches, first, max_row_bytes), start - first, None)


def read_table(table: Any, name: str, max_row_bytes: int, start: int) -> Iterator[RawRow]:
    """Yields the rows of an IterableDataset in the format arrow. Rows before `start` are read but not converted."""
    tables = table.skip(start).iter(batch_size=1000)
    return _rows_of_batches(name, (batch for part in tables for batch in part.to_batches()), start, max_row_bytes)


def _rows_of_batches(name: str, batches: Iterable[Batch], start: int, max_row_bytes: int) -> Iterator[RawRow]:
    """Yields the rows of the batches; the first row has the number `start`."""
    schema = reader = None
    for batch in batches:
        if reader is None or batch.schema != schema:
            schema, reader = batch.schema, RowReader(name, batch.schema, max_row_bytes)
        for number in range(batch.num_rows):
            location = f"{name}, row {start + number}"
            yield RawRow(location, partial(reader.read, batch, number, location))
        start += batch.num_rows


def _fingerprint_of_beginning(path: Path) -> str:
    """Returns a hash of a file's size and first megabyte."""
    with path.open("rb") as file:
        return hashlib.sha256(f"{path.stat().st_size} ".encode() + file.read(2**20)).hexdigest()
