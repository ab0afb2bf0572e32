"""Arrow and Parquet files by random access, without the datasets library, which takes a second to import."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sftron.data.arrow_rows import Batch, RowReader, Schema, first_line
from sftron.data.indexed_file import IndexedFile, ShrunkError, fingerprint_of, shrunk
from sftron.data.json_files import MAX_ROW_BYTES
from sftron.data.types import DataError, Row
from sftron.data.unpacking import TemporaryCopy

_BATCH_BYTES, _MAX_BATCH_ROWS = 2**20, 1000
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


class Batches(Protocol):
    """Rows in record batches of one schema. Picklable, and safe to use in forked workers."""

    schema: Schema
    num_rows: int

    @property
    def unpacked_bytes(self) -> int: ...

    def find(self, index: int) -> tuple[Batch, int]:
        """The batch that holds a row, and the row's number in it. Raises ValueError or ShrunkError, with the remedy."""
        ...


class ArrowSource:
    """Rows of record batches."""

    def __init__(self, name: str, batches: Batches, fingerprint: str, max_row_bytes: int = MAX_ROW_BYTES) -> None:
        self.name = name
        self.fingerprint = fingerprint
        self._batches = batches
        self._reader = RowReader(name, batches.schema, max_row_bytes)

    @property
    def unpacked_bytes(self) -> int:
        return self._batches.unpacked_bytes

    def __len__(self) -> int:
        return self._batches.num_rows

    def __getitem__(self, index: int) -> Row:
        location = self.locate(index)
        try:
            return self._reader.read(*self._batches.find(index), location)
        except ShrunkError as error:
            raise DataError(f"{location}: {error}", reason="file_changed") from error
        except _BrokenError as error:
            raise DataError(f"{location}: {error}", reason="broken_arrow") from error

    def locate(self, index: int) -> str:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name} has {len(self)} rows, no row {index}")
        return f"{self.name}, row {index}"


class _BrokenError(ValueError):
    """Some rows of a file cannot be read."""


def open_arrow(path: Path, max_row_bytes: int) -> ArrowSource:
    """An .arrow file. Raises DataError."""
    return ArrowSource(str(path), MappedArrow([path]), fingerprint_of(IndexedFile(path)), max_row_bytes)


def open_parquet(path: Path, max_row_bytes: int) -> ArrowSource:
    """Raises DataError."""
    return ArrowSource(str(path), DecodedParquet(path), fingerprint_of(IndexedFile(path)), max_row_bytes)


class MappedArrow:
    """Arrow files of one schema, mapped into memory: as the datasets library writes them, or of Arrow's file format.

    Whether a file has become shorter is looked up before each row, since a mapping of it would then kill the process.
    A batch is checked when it is first used, since wrong offsets in it would as well.
    """

    unpacked_bytes = 0

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = list(paths)
        self._maps: list[mmap.mmap] = []
        self._batches: list[Batch] = []
        self._map_of: list[int] = []
        for path in self._paths:
            schema = self._add(path)
            if path == self._paths[0]:
                self.schema = schema
            elif schema != self.schema:
                raise DataError(f"{path}: has other columns than {self._paths[0]}; make it a data set of its own")
        self._ends = np.cumsum([batch.num_rows for batch in self._batches], dtype=np.int64)
        self.num_rows = int(self._ends[-1]) if self._batches else 0
        self._is_checked = np.zeros(len(self._batches), bool)

    def _add(self, path: Path) -> Schema:
        mapped, schema, batches = map_arrow(path)
        self._batches += batches
        self._map_of += [len(self._maps)] * len(batches)
        self._maps.append(mapped)
        return schema

    def find(self, index: int) -> tuple[Batch, int]:
        place = int(np.searchsorted(self._ends, index, side="right"))
        batch, end = self._batches[place], int(self._ends[place])
        number = self._map_of[place]
        if (size := self._maps[number].size()) < len(self._maps[number]):
            raise ShrunkError(shrunk(self._paths[number], size, len(self._maps[number])))
        if not self._is_checked[place]:
            try:
                batch.validate(full=True)
            except ValueError as error:
                raise _BrokenError(_broken(end - batch.num_rows, end, error)) from error
            self._is_checked[place] = True
        return batch, index - end + batch.num_rows

    def __getstate__(self) -> dict[str, Any]:
        return {"_paths": self._paths}

    def __setstate__(self, state: dict[str, Any]) -> None:
        MappedArrow.__init__(self, state["_paths"])


def map_arrow(path: Path) -> tuple[mmap.mmap, Schema, list[Batch]]:
    """The batches of an Arrow file that hold rows, none of them copied. Raises DataError."""
    import pyarrow as pa

    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        buffer = pa.py_buffer(mapped)
        is_file = mapped[:6] == b"ARROW1"
        reader = pa.ipc.open_file(buffer) if is_file else pa.ipc.open_stream(buffer)
        batches = []
        for batch in map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader:
            if batch.num_rows:
                batches.append(batch)
                _require_mapped(batch, buffer)
        if not is_file and mapped[-len(_END_OF_STREAM) :] != _END_OF_STREAM:
            raise ValueError("it has no end mark, and may be cut off")
    except (ValueError, OSError) as error:
        problem = f"is not readable as Arrow: {first_line(error)}; copy it again, or save the data set again"
        raise DataError(f"{path}: {problem}") from error
    return mapped, reader.schema, batches


def _require_mapped(batch: Batch, file: Any) -> None:
    """That nothing of the batch is a copy: what is compressed would all be unpacked in memory. Raises ValueError."""
    parts = (part for column in batch.columns for part in column.buffers() if part is not None and part.size)
    if any(not file.address <= part.address < file.address + file.size for part in parts):
        raise ValueError("its batches are compressed; write it without compression, or as Parquet")


class DecodedParquet:
    """A Parquet file. One row of it cannot be had without decoding up to a million, so all are decoded once.

    Opening decodes the first batch. Where another row is wanted, all are decoded in one pass into an unnamed temporary
    file, which is then mapped. Workers that are forked afterwards share it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        file = open_parquet_file(path)
        self.schema, self.num_rows = _without_dictionaries(file.schema_arrow), file.metadata.num_rows
        self._first = self._decoded = None
        try:
            self._first: Batch = next(parquet_batches(file), None)
        except (ValueError, OSError) as error:
            raise DataError(f"{path}: is not readable as Parquet: {first_line(error)}; write it again") from error

    @property
    def unpacked_bytes(self) -> int:
        return self._decoded.num_bytes if self._decoded else 0

    def find(self, index: int) -> tuple[Batch, int]:
        if index < self._first.num_rows:
            return self._first, index
        if self._decoded is None:
            self._decoded = _Decoded(self._path, self.schema, self.num_rows)
        return self._decoded.find(index)

    def __getstate__(self) -> dict[str, Any]:
        return {"_path": self._path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        DecodedParquet.__init__(self, state["_path"])


class _Decoded:
    """The record batches of a Parquet file, up to the first that cannot be had, in a mapped temporary file."""

    def __init__(self, path: Path, schema: Schema, num_rows: int) -> None:
        import pyarrow as pa

        self._schema, self._num_rows, self._error = schema, num_rows, ValueError("the file has fewer rows")
        ends, offsets = [0], [0]
        with TemporaryCopy(path) as copy:
            try:
                for batch in parquet_batches(open_parquet_file(path)):
                    copy.write(batch.serialize())
                    ends.append(ends[-1] + batch.num_rows)
                    offsets.append(copy.size)
            except (ValueError, OSError) as error:
                self._error = error
            self.num_bytes = offsets[-1]
            self._buffer = pa.py_buffer(
                mmap.mmap(copy.fileno(), copy.size, access=mmap.ACCESS_READ) if copy.size else b""
            )
        self._ends, self._offsets = np.array(ends), np.array(offsets)

    def find(self, index: int) -> tuple[Batch, int]:
        import pyarrow as pa

        if index >= self._ends[-1]:
            raise _BrokenError(_broken(int(self._ends[-1]), self._num_rows, self._error)) from self._error
        place = int(np.searchsorted(self._ends, index, side="right"))
        start, end = self._offsets[place - 1 : place + 1].tolist()
        batch = pa.ipc.read_record_batch(self._buffer.slice(start, end - start), self._schema)
        return batch, index - int(self._ends[place - 1])


def open_parquet_file(path: Path) -> Any:
    """The pyarrow.parquet.ParquetFile. Raises DataError."""
    import pyarrow.parquet as pq

    try:
        # Without a buffer of its own, pyarrow reads whole columns at once.
        return pq.ParquetFile(path, buffer_size=_BATCH_BYTES, pre_buffer=False)
    except (ValueError, OSError) as error:
        raise DataError(f"{path}: is not readable as Parquet: {first_line(error)}; write it again") from error


def parquet_batches(file: Any, row_groups: Sequence[int] | None = None) -> Iterator[Batch]:
    """The rows of all or some row groups, in order, in batches of about a megabyte."""
    metadata = file.metadata
    num_bytes = sum(metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups))
    num_rows = max(1, min(_MAX_BATCH_ROWS, _BATCH_BYTES * metadata.num_rows // max(1, num_bytes)))
    schema = _without_dictionaries(file.schema_arrow)
    for batch in file.iter_batches(batch_size=num_rows, row_groups=row_groups, use_threads=False):
        yield batch if batch.schema == schema else batch.cast(schema)


def _without_dictionaries(schema: Schema) -> Schema:
    """Categories become their values: each batch would have categories of its own."""
    import pyarrow as pa

    return pa.schema([field.with_type(_without_dictionary(field.type)) for field in schema])


def _without_dictionary(arrow_type: Any) -> Any:
    import pyarrow as pa

    if isinstance(arrow_type, pa.DictionaryType):
        return arrow_type.value_type
    if isinstance(arrow_type, pa.StructType):
        return pa.struct([field.with_type(_without_dictionary(field.type)) for field in arrow_type.fields])
    if isinstance(arrow_type, pa.ListType):
        return pa.list_(arrow_type.value_field.with_type(_without_dictionary(arrow_type.value_type)))
    return arrow_type


def _broken(first: int, end: int, error: Exception) -> str:
    if isinstance(error, DataError):
        return str(error)
    return f"rows {first} to {end - 1} of the file are broken: {first_line(error)}; copy or write it again"
