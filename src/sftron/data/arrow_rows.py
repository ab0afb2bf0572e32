"""Rows of Arrow's record batches as the JSON that they were made of.

Arrow gives every object of a column the keys of all of them, and fills up with nulls. So keys that are null are left
out of the objects inside a column, and a row of Parquet equals that of JSONL. Whether such a key was null or absent at
first, Arrow cannot tell. A column itself stays where it is null, and what has Arrow's type JSON is read as written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sftron.data.json_files import excerpt, too_large
from sftron.data.types import DataError, Row

# pyarrow has no types; a Batch is a pyarrow.RecordBatch, a Schema its pyarrow.Schema.
Batch = Any
Schema = Any
_Restore = Callable[[Any], Any] | None


class RowReader:
    """Reads rows of record batches of one schema. Picklable.

    Raises DataError, which begins with `name`, where two columns have one name.
    """

    def __init__(self, name: str, schema: Schema, max_row_bytes: int) -> None:
        for column in schema.names:
            if schema.names.count(column) > 1:
                raise DataError(f"{name}: has two columns {excerpt(column)}; rename or remove one")
        self._columns = [(field.name, restore) for field in schema if (restore := _restorer(field.type))]
        self._max_row_bytes = max_row_bytes

    def read(self, batch: Batch, number: int, location: str) -> Row:
        """Row `number` of the batch. Raises DataError, which begins with `location`."""
        cells = batch.slice(number, 1)
        if (size := cells.nbytes) > self._max_row_bytes:
            raise too_large(location, size, self._max_row_bytes)
        try:
            (row,) = cells.to_pylist(maps_as_pydicts="strict")
            for column, restore in self._columns:
                if row[column] is not None:
                    row[column] = restore(row[column])
        except UnicodeDecodeError as error:
            found = excerpt(error.object[:40].decode("utf-8", "backslashreplace"))
            problem = f"holds text that is not UTF-8, {found}: write it as UTF-8"
            raise DataError(f"{location}: {problem}", reason="not_utf8") from error
        # A date of the year 300,000 is an OverflowError.
        except (ValueError, KeyError, OverflowError, RecursionError) as error:
            raise DataError(f"{location}: cannot be read: {first_line(error)}", reason="broken_arrow") from error
        return row


def _restorer(arrow_type: Any) -> _Restore:
    """What makes a value, not null, of an Arrow type what it was in JSON; None where it is that already."""
    import pyarrow as pa

    if isinstance(arrow_type, pa.JsonType):
        return json.loads
    if isinstance(arrow_type, pa.StructType):
        return _Object({field.name: _restorer(field.type) for field in arrow_type.fields})
    if isinstance(arrow_type, pa.MapType):
        return _Mapping(_restorer(arrow_type.item_type))
    if pa.types.is_nested(arrow_type) and hasattr(arrow_type, "value_type"):
        restore = _restorer(arrow_type.value_type)
        return restore and _List(restore)
    return None


@dataclass(frozen=True, slots=True)
class _Object:
    members: Mapping[str, _Restore]

    def __call__(self, value: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: item if restore is None else restore(item)
            for name, restore in self.members.items()
            if (item := value[name]) is not None
        }


@dataclass(frozen=True, slots=True)
class _Mapping:
    restore: _Restore

    def __call__(self, value: Mapping[str, Any]) -> dict[str, Any]:
        restore = self.restore or (lambda item: item)
        return {key: restore(item) for key, item in value.items() if item is not None}


@dataclass(frozen=True, slots=True)
class _List:
    restore: Callable[[Any], Any]

    def __call__(self, value: list[Any]) -> list[Any]:
        return [None if item is None else self.restore(item) for item in value]


def first_line(error: Exception) -> str:
    return excerpt(next(iter(str(error).splitlines()), type(error).__name__), 200)
