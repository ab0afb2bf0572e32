"""Reads rows of Arrow and Parquet files by random access, as the JSON before conversion."""

from __future__ import annotations

import hashlib
import json
import mmap
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from sftron.data.json_text import excerpt
from sftron.data.sources.jsonl import file_changed, file_fingerprint, refuse_size
from sftron.data.types import DataError, Row

# pyarrow has no type annotations: Batch stands for pyarrow.RecordBatch, Schema for pyarrow.Schema.
Batch = Any
Schema = Any
_BATCH_ROWS = 1000
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


class ArrowSource:
    """The rows of memory-mapped Arrow or Parquet files of one schema. Picklable, and safe to use in forked workers.

    Reading one row of Parquet may require decoding a million. So a Parquet file is decoded once, when it is opened,
    into a temporary file without a name, which forked workers share.

    The default fingerprint is a hash of the number of rows, the columns, and up to 256 rows, evenly spread.
    """

    def __init__(self, name: str, paths: Sequence[Path], max_row_bytes: int, fingerprint: str = "") -> None:
        self.name, self._paths, self._max_row_bytes = name, paths, max_row_bytes
        self._maps: list[mmap.mmap] = []
        self._batches: list[Batch] = []
        for path in paths:
            mapped, self._schema, batches = _map(path)
            self._maps.append(mapped)
            self._batches += batches
        self._ends = np.cumsum([batch.num_rows for batch in self._batches], dtype=np.int64)
        self._reader = RowReader(name, self._schema, max_row_bytes)
        self.fingerprint = fingerprint or self._fingerprint_of_rows()

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._batches else 0

    def __getitem__(self, index: int) -> Row:
        location = self.locate(index)
        for path, mapped in zip(self._paths, self._maps, strict=True):
            if (size := mapped.size()) < len(mapped):  # Reading past the end of a truncated map kills the process.
                raise file_changed(path, size, len(mapped))
        return self._reader.read(*self._find(index), location)

    def locate(self, index: int) -> str:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name} has {len(self)} rows, no row {index}")
        return f"{self.name}, row {index}"

    def _find(self, index: int) -> tuple[Batch, int]:
        position = int(np.searchsorted(self._ends, index, side="right"))
        batch = self._batches[position]
        return batch, index - int(self._ends[position]) + batch.num_rows

    def _fingerprint_of_rows(self) -> str:
        digest = hashlib.sha256(json.dumps([len(self), self._schema.names]).encode())
        for index in np.linspace(0, len(self) - 1, min(256, len(self))).astype(int).tolist():
            batch, number = self._find(index)
            digest.update(json.dumps(batch.slice(number, 1).to_pylist(), sort_keys=True, default=repr).encode())
        return digest.hexdigest()

    def __reduce__(self) -> tuple[Any, ...]:
        return ArrowSource, (self.name, self._paths, self._max_row_bytes, self.fingerprint)


def open_arrow(path: Path, max_row_bytes: int) -> ArrowSource:
    """Opens an .arrow or .parquet file. Raises DataError."""
    with path.open("rb") as file:
        return ArrowSource(str(path), [path], max_row_bytes, file_fingerprint(file.fileno()))


def _map(path: Path) -> tuple[mmap.mmap, Schema, list[Batch]]:
    """Maps an Arrow file, or the decoded copy of a Parquet file, into memory. Raises DataError."""
    import pyarrow as pa

    with unreadable(path), tempfile.TemporaryFile() if path.suffix == ".parquet" else path.open("rb") as file:
        if path.suffix == ".parquet":
            with open_parquet(path) as parquet, pa.ipc.new_stream(file, parquet.schema_arrow) as writer:
                for batch in parquet.iter_batches(_BATCH_ROWS, use_threads=False):
                    writer.write_batch(batch)
            file.flush()
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        is_file = mapped[:6] == b"ARROW1"
        reader = (pa.ipc.open_file if is_file else pa.ipc.open_stream)(pa.py_buffer(mapped))
        batches = list(map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader)
        if not is_file and mapped[-len(_END_OF_STREAM) :] != _END_OF_STREAM:
            raise ValueError("it has no end mark, so it may be cut off")
        return mapped, reader.schema, [batch for batch in batches if batch.num_rows]


def open_parquet(path: Path) -> Any:
    """Opens a pyarrow.parquet.ParquetFile, which does not read whole columns at once."""
    import pyarrow.parquet as pq

    return pq.ParquetFile(path, buffer_size=2**20, pre_buffer=False)


@contextmanager
def unreadable(path: Path) -> Iterator[None]:
    """Turns pyarrow's errors (ValueError, and OSError without a number) into DataError."""
    try:
        yield
    except (ValueError, OSError) as error:
        if isinstance(error, DataError) or getattr(error, "errno", None) is not None:
            raise
        kind = "Parquet" if path.suffix == ".parquet" else "Arrow"
        problem = f"is not readable as {kind}: {first_line(error)}; copy or write it again"
        raise DataError(f"{path}: {problem}") from error


class RowReader:
    """Reads rows from record batches of one schema, in which no two columns may have the same name (DataError).

    Arrow gives every object in a column the keys of all of them, and fills missing values with nulls. So null values
    inside a column's objects are removed, and a row of Parquet equals the same row of JSONL. Arrow does not record
    whether such a key was null or absent originally. A column that is null as a whole is kept.
    """

    def __init__(self, name: str, schema: Schema, max_row_bytes: int) -> None:
        for column in schema.names:
            if schema.names.count(column) > 1:
                raise DataError(f"{name}: has two columns {excerpt(column)}; rename or remove one")
        self._columns = [(field.name, restore) for field in schema if (restore := _restorer(field.type))]
        self._max_row_bytes = max_row_bytes

    def read(self, batch: Batch, number: int, location: str) -> Row:
        """Returns row `number` of the batch. Raises DataError, whose message begins with `location`."""
        cells = batch.slice(number, 1)
        try:
            cells.validate(full=True)  # Reading through wrong offsets would kill the process.
            if (size := cells.nbytes) > self._max_row_bytes:
                refuse_size(location, size, self._max_row_bytes)
            (row,) = cells.to_pylist(maps_as_pydicts="strict")
            for column, restore in self._columns:
                if row[column] is not None:
                    row[column] = restore(row[column])
        except DataError:
            raise
        # For example, a date in the year 300,000 raises OverflowError.
        except (ValueError, KeyError, OverflowError, RecursionError) as error:
            reason = "not_utf8" if isinstance(error, UnicodeDecodeError) or "UTF8" in str(error) else "broken_arrow"
            raise DataError(f"{location}: cannot be read: {first_line(error)}", reason=reason) from error
        return row


def _restorer(kind: Any) -> Callable[[Any], Any] | None:
    """Returns a function that converts a non-null value of an Arrow type back to the original JSON value.

    It is None if values of the type need no conversion.
    """
    import pyarrow as pa

    if isinstance(kind, pa.JsonType):
        return json.loads
    if isinstance(kind, pa.StructType):
        members = {field.name: _restorer(field.type) or _unchanged for field in kind.fields}
        return lambda value: {
            name: restore(item) for name, restore in members.items() if (item := value[name]) is not None
        }
    if isinstance(kind, pa.MapType):
        restore_item = _restorer(kind.item_type) or _unchanged
        return lambda value: {key: restore_item(item) for key, item in value.items() if item is not None}
    if pa.types.is_nested(kind) and hasattr(kind, "value_type") and (restore := _restorer(kind.value_type)):
        return lambda value: [None if item is None else restore(item) for item in value]
    return None


def _unchanged(value: Any) -> Any:
    return value


def first_line(error: Exception) -> str:
    """Returns the first line of an error's message, in double quotes."""
    return excerpt(next(iter(str(error).splitlines()), type(error).__name__), 200)
