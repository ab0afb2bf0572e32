"""Rows one after another, without opening the whole set: of JSONL, Parquet and Arrow files, and of the Hub."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from sftron.data.arrow_files import open_arrow, open_parquet_file, parquet_batches
from sftron.data.arrow_rows import Batch, RowReader, first_line
from sftron.data.data_files import ending_of
from sftron.data.indexed_file import fingerprint_of_beginning
from sftron.data.json_files import excerpt
from sftron.data.json_streams import JsonlStream
from sftron.data.row_source import RowSource
from sftron.data.types import DataError, Row

_FINGERPRINT_ROWS = 8


class RawRow(Protocol):
    """A row that has been passed, and is parsed where it is wanted."""

    @property
    def location(self) -> str: ...

    def read(self) -> Row:
        """Raises DataError, which begins with the location."""
        ...


class RowStream(Protocol):
    """Rows in order, always the same. Picklable."""

    @property
    def name(self) -> str: ...

    @property
    def fingerprint(self) -> str:
        """Of what is known without reading to the end: sizes and the first megabyte of files, or the first rows."""
        ...

    @property
    def num_rows(self) -> int | None:
        """None where only reading to the end would tell."""
        ...

    def read(self, start: int) -> Iterator[RawRow]:
        """From row `start` on. Raises DataError where nothing more can be read."""
        ...


def open_file_streams(path: str, files: Sequence[Path], max_row_bytes: int) -> RowStream:
    """Raises DataError for files that cannot be read forward."""
    return ChainedStream(path, [_open_file(file, max_row_bytes) for file in files])


def _open_file(path: Path, max_row_bytes: int) -> RowStream:
    ending = ending_of(path)
    if ending == ".parquet":
        return ParquetStream(path, max_row_bytes)
    if ending == ".arrow":
        return SourceStream(open_arrow(path, max_row_bytes))
    if ending.startswith(".json"):
        return JsonlStream(path, max_row_bytes, path.stat().st_size)
    raise DataError(f"{path}: a file with the ending {ending} cannot be streamed; write .jsonl, .parquet or .arrow")


@dataclass(frozen=True, slots=True)
class ChainedStream:
    """Several streams one after another."""

    name: str
    streams: Sequence[RowStream]

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256("".join(stream.fingerprint for stream in self.streams).encode()).hexdigest()

    @property
    def num_rows(self) -> int | None:
        numbers = [stream.num_rows for stream in self.streams]
        return None if None in numbers else sum(number for number in numbers if number is not None)

    def read(self, start: int) -> Iterator[RawRow]:
        for stream in self.streams:
            if stream.num_rows is not None:
                if start < stream.num_rows:
                    yield from stream.read(start)
                start = max(0, start - stream.num_rows)
                continue
            for row in stream.read(0):
                if not start:
                    yield row
                start = max(0, start - 1)


# --- Arrow ---


@dataclass(frozen=True, slots=True)
class _ArrowRow:
    """Row `number` of a batch, which is row `index` of the stream."""

    name: str
    index: int
    batch: Batch
    number: int
    reader: RowReader

    @property
    def location(self) -> str:
        return f"{self.name}, row {self.index}"

    def read(self) -> Row:
        return self.reader.read(self.batch, self.number, self.location)


def _rows_of_batches(name: str, batches: Iterable[Batch], start: int, max_row_bytes: int) -> Iterator[RawRow]:
    """The rows of batches, the first of which is row `start`."""
    schema = reader = None
    for batch in batches:
        if reader is None or batch.schema != schema:
            schema, reader = batch.schema, RowReader(name, batch.schema, max_row_bytes)
        for number in range(batch.num_rows):
            yield _ArrowRow(name, start + number, batch, number, reader)
        start += batch.num_rows


class ParquetStream:
    """A Parquet file, a batch of rows after another; skipping leaves out row groups undecoded."""

    def __init__(self, path: Path, max_row_bytes: int) -> None:
        self.name = str(path)
        metadata = open_parquet_file(path).metadata
        self.num_rows: int | None = metadata.num_rows
        self._sizes = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        self._path, self._max_row_bytes = path, max_row_bytes

    @property
    def fingerprint(self) -> str:
        return fingerprint_of_beginning(self._path)

    def read(self, start: int) -> Iterator[RawRow]:
        first = group = 0
        while group < len(self._sizes) and first + self._sizes[group] <= start:
            first, group = first + self._sizes[group], group + 1
        batches = parquet_batches(open_parquet_file(self._path), range(group, len(self._sizes)))
        rows = _rows_of_batches(self.name, self._told(batches), first, self._max_row_bytes)
        return islice(rows, start - first, None)

    def _told(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        try:
            yield from batches
        except (ValueError, OSError) as error:
            raise DataError(f"{self._path}: cannot be read on: {first_line(error)}; write it again") from error


@dataclass(frozen=True, slots=True)
class _SourceRow:
    source: RowSource
    index: int

    @property
    def location(self) -> str:
        return self.source.locate(self.index)

    def read(self) -> Row:
        return self.source[self.index]


@dataclass(frozen=True, slots=True)
class SourceStream:
    """A source that costs nothing to open, as a stream."""

    source: RowSource

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def fingerprint(self) -> str:
        return self.source.fingerprint

    @property
    def num_rows(self) -> int | None:
        return len(self.source)

    def read(self, start: int) -> Iterator[RawRow]:
        return (_SourceRow(self.source, index) for index in range(start, len(self.source)))


class HubStream:
    """A data set of the Hub, by the datasets library's streaming; rows that are skipped are read and not converted.

    Raises DataError where it cannot be loaded, or holds no row.
    """

    num_rows = None

    def __init__(self, path: str, split: str, max_row_bytes: int) -> None:
        import datasets  # slow to import

        self.name = path if split == "train" else f"{path} ({split})"
        self._max_row_bytes = max_row_bytes
        try:
            self._table: Any = datasets.load_dataset(path, split=split, streaming=True).with_format("arrow")
            first = [row for table in self._table.take(_FINGERPRINT_ROWS).iter(1) for row in table.to_pylist()]
        except Exception as error:  # network, authentication, unknown names and splits: many kinds
            problem = f"no local file or folder, and split {excerpt(split)} could not be streamed from the Hub"
            raise DataError(f"{path}: {problem}: {first_line(error)}") from error
        beginning = json.dumps([path, split, first], sort_keys=True, default=repr)
        self.fingerprint = hashlib.sha256(beginning.encode()).hexdigest()

    def read(self, start: int) -> Iterator[RawRow]:
        tables = self._table.skip(start).iter(batch_size=1000)
        batches = (batch for table in tables for batch in table.to_batches())
        return _rows_of_batches(self.name, batches, start, self._max_row_bytes)
