"""Parts of a source: a range of its rows, and what is held out of training. No row is copied or listed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from sftron.data.row_source import RowSource, unpacked_bytes
from sftron.data.types import DataError, Row


@dataclass(frozen=True, slots=True)
class SourceView:
    """Some rows of a source.

    part: which, as the fingerprint has it. row_of: the source's row (0-based) that is row `index` of the view.
    """

    source: RowSource
    name: str
    part: str
    num_rows: int
    row_of: Callable[[int], int]

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.part} of {self.source.fingerprint}".encode()).hexdigest()

    @property
    def unpacked_bytes(self) -> int:
        return unpacked_bytes(self.source)

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
    """Those rows of a source, in order; `rows` are consecutive."""
    if rows == range(len(source)) and name == source.name:
        return source
    return SourceView(source, name, f"rows {rows.start} to {rows.stop}", len(rows), rows.__getitem__)


def hold_out(source: RowSource, share: float) -> tuple[RowSource, RowSource | None]:
    """The rows to train on, and the share of them (0 <= share < 1, at least one row of several) to evaluate on.

    Each is a pure function of the number of rows, the share and nothing else, so runs with other seeds or other data
    sets beside it hold out the same ones. They are spread evenly: of k held-out rows, each is one of its k-th part of
    the source, chosen by a hash. Both parts keep the source's order.

    Raises DataError where nothing is left to train on.
    """
    num_rows = len(source)
    num_held = max(1, round(share * num_rows)) if share and num_rows > 1 else 0
    if not num_held:
        return source, None
    if num_held == num_rows:
        problem = f"evaluation.share {share} of {num_rows} rows leaves none to train on"
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
