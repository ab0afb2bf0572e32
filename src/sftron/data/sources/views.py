"""The protocol of indexed sources of rows, and sources made of others: concatenations, ranges and held-out rows."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from sftron.data.json_text import excerpt
from sftron.data.sources.arrow import RowReader
from sftron.data.types import DataError, Row


class RowSource(Protocol):
    """Rows by index. A source is picklable, safe to use in forked workers, and holds no Python object per row."""

    @property
    def name(self) -> str:
        """The path or Hub id, for reports and error messages."""
        ...

    @property
    def fingerprint(self) -> str:
        """A hash that changes with the content and does not depend on names, times or the machine."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row:
        """Returns the row as its file holds it. Raises DataError, with the location, if the row is broken."""
        ...

    def locate(self, index: int) -> str:
        """Returns the location of the row, such as `chats.jsonl:17`."""
        ...


class RawRow(NamedTuple):
    """A row of a stream that is not parsed yet."""

    location: str
    read: Callable[[], Row]
    """Returns the parsed row. Raises DataError, whose message begins with the location."""


class RowList:
    """Rows that are in memory: a list, or a data set of the datasets library, whose rows are read as from its files.

    The fingerprint covers at most 20,000 rows, evenly spread. A data set's own transform, if any, applies to its rows.
    """

    def __init__(self, rows: Sequence[Row], name: str = "rows") -> None:
        self.name = name
        self._rows = rows
        dataset: Any = rows
        is_dataset = hasattr(dataset, "with_format") and dataset.format["type"] != "custom"
        self._table: Any = dataset.with_format("arrow") if is_dataset else None
        self._fingerprint = ""
        self._reader = None if self._table is None else RowReader(name, self._table[:0].schema, sys.maxsize)

    @property
    def fingerprint(self) -> str:
        if not self._fingerprint:
            digest = hashlib.sha256(str(len(self)).encode())
            for index in np.linspace(0, len(self) - 1, min(20_000, len(self))).astype(int).tolist():
                digest.update(json.dumps(self[index], sort_keys=True, default=repr).encode())
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        if self._reader is None:
            return self._rows[index]
        (batch,) = self._table[index : index + 1].to_batches()
        return self._reader.read(batch, 0, self.locate(index))

    def __reduce__(self) -> tuple[Any, ...]:
        return RowList, (self._rows, self.name)

    def locate(self, index: int) -> str:
        return f"{self.name}[{index}]"


class ConcatenatedSource:
    """Several sources one after another."""

    def __init__(self, name: str, sources: Sequence[RowSource]) -> None:
        self.name = name
        self.fingerprint = hashlib.sha256("".join(source.fingerprint for source in sources).encode()).hexdigest()
        self._sources = tuple(sources)
        self._ends = np.cumsum([len(source) for source in sources])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Row:
        source, row = self._find(index)
        return source[row]

    def locate(self, index: int) -> str:
        source, row = self._find(index)
        return source.locate(row)

    def _find(self, index: int) -> tuple[RowSource, int]:
        position = int(np.searchsorted(self._ends, index, side="right"))
        source = self._sources[position]
        return source, index - int(self._ends[position]) + len(source)


_SPLIT = re.compile(r"(\w+(?:\.\w+)*)(?:\[(-?\d[\d_]*%?)?:(-?\d[\d_]*%?)?\])?", re.ASCII)


class Split(NamedTuple):
    """A split, or a part of one, in the syntax of the datasets library.

        train              all rows
        train[100:200]     rows 100 to 199, from 0
        train[-10%:]       the last tenth
        train[:5%]         the first twentieth; 5 % of 199 rows is 9.95, so 10 rows

    `start` and `stop` are bounds as in Python's slices, in rows or in percent. A percentage is rounded to the nearest
    row, and a half to the even row.
    """

    name: str
    start: str | None
    stop: str | None

    def rows(self, num_rows: int) -> range:
        """Returns the selected rows of a split of `num_rows` rows; bounds outside of it are clipped."""

        def row(bound: str | None) -> int | None:
            if bound and bound.endswith("%"):
                return round(int(bound[:-1]) * num_rows / 100)
            return int(bound) if bound else None

        return range(num_rows)[row(self.start) : row(self.stop)]


def parse_split(text: str) -> Split:
    """Parses the text of a split. Raises DataError for invalid syntax."""
    if (found := _SPLIT.fullmatch(text)) is None:
        remedy = "write train, train[:100], train[100:200], train[:5%] or train[-10%:]"
        if "+" in text:
            remedy = "make each part a data set of its own"
        raise DataError(f"split {excerpt(text)} is not valid; {remedy}")
    return Split(*found.groups())


@dataclass(frozen=True, slots=True)
class SourceView:
    """A selection of the rows of a source."""

    source: RowSource
    name: str
    part: str
    """A description of the selection, which enters the fingerprint."""
    num_rows: int
    row_of: Callable[[int], int]
    """Maps the index of a row in the view to its index in the source."""

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.part} of {self.source.fingerprint}".encode()).hexdigest()

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> Row:
        return self.source[self._row(index)]

    def locate(self, index: int) -> str:
        return self.source.locate(self._row(index))

    def _row(self, index: int) -> int:
        if not 0 <= index < self.num_rows:
            raise IndexError(f"{self.name} has {self.num_rows} rows, no row {index}")
        return self.row_of(index)


def take_rows(source: RowSource, rows: range, name: str) -> RowSource:
    """Returns the given consecutive rows of a source, in order."""
    if rows == range(len(source)) and name == source.name:
        return source
    return SourceView(source, name, f"rows {rows.start} to {rows.stop}", len(rows), rows.__getitem__)


def split_source(source: RowSource, share: float) -> tuple[RowSource, RowSource | None]:
    """Returns the training rows and the held-out rows of a source, each in the source's order.

    The selection is a pure function of the number of rows and the share, so runs with other seeds or other data sets
    hold out the same rows. To hold out k rows, the source is divided into k ranges of nearly equal length, and a hash
    selects one row of each. Unless the share is 0 or there is a single row, at least one row is held out.

    Raises DataError if no row is left to train on.
    """
    num_rows = len(source)
    num_held = max(1, round(share * num_rows)) if share and num_rows > 1 else 0
    if not num_held:
        return source, None
    if num_held == num_rows:
        problem = f"evaluation.share {share} of {num_rows} rows leaves no row to train on"
        raise DataError(f"{source.name}: {problem}; lower it, or add rows")
    part = f"evaluation.share {share}"
    training = partial(_training_row, num_rows=num_rows, num_held=num_held)
    held = partial(_held_row, num_rows=num_rows, num_held=num_held)
    return (
        SourceView(source, source.name, f"{part}, training", num_rows - num_held, training),
        SourceView(source, f"{source.name} (held out)", f"{part}, held out", num_held, held),
    )


def _held_row(part: int, *, num_rows: int, num_held: int) -> int:
    first, end = part * num_rows // num_held, (part + 1) * num_rows // num_held
    digest = hashlib.blake2b(part.to_bytes(8, "little"), digest_size=8, key=b"held out").digest()
    return first + int.from_bytes(digest, "little") % (end - first)


def _training_row(index: int, *, num_rows: int, num_held: int) -> int:
    # Before part p there are p * num_rows // num_held - p training rows; p is the last part where that is <= index.
    part = ((index + 1) * num_held - 1) // (num_rows - num_held)
    row = index + part
    return row + (row >= _held_row(part, num_rows=num_rows, num_held=num_held))
