"""A data set that is read forward only, and begins again at its end: one that is larger than the disk, or remote.

Rows come in the order they have, and the last ones stay at hand. Every loader worker reads the whole stream and takes
the rows of its own lanes (see stream_order.py), so what is read grows with the number of workers; only the rows taken
are parsed.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sftron.data.data_files import find_files
from sftron.data.json_files import MAX_ROW_BYTES, excerpt
from sftron.data.row_source import RowSource
from sftron.data.row_streams import HubStream, RawRow, RowStream, open_file_streams
from sftron.data.splits import parse_split
from sftron.data.types import DataError, Row

KEPT_ROWS = 1000
"""Enough for those who look at the first rows before the stream is read."""


class EndOfStream(Exception):  # noqa: N818  no error, as StopIteration is none
    """The stream has num_rows rows, and the one asked for is not among them."""

    def __init__(self, num_rows: int) -> None:
        super().__init__(num_rows)
        self.num_rows = num_rows


def open_stream(
    path: str,
    split: str = "train",
    max_row_bytes: int = MAX_ROW_BYTES,
    *,
    max_samples: int | None = None,
    num_kept: int = KEPT_ROWS,
) -> StreamedSource:
    """As `open_source`, read forward. A part of a split is borders in rows from its beginning, `train[1000:2000]`.

    Raises DataError where not even the first row is there.
    """
    part = parse_split(split)
    if part.in_percent or min(part.start or 0, part.stop or 0) < 0:
        remedy = "write borders in rows, train[1000:2000], or remove streaming"
        raise DataError(
            f"{path}: split {excerpt(split)} needs the number of rows, which a stream does not tell; {remedy}"
        )
    try:
        files = find_files(path, part.name)
        stream = (
            HubStream(path, part.name, max_row_bytes)
            if files is None
            else open_file_streams(path, files, max_row_bytes)
        )
        first = part.start or 0
        stops = [stop for stop in (part.stop, None if max_samples is None else first + max_samples) if stop is not None]
        source = StreamedSource(stream, first=first, stop=min(stops, default=None), num_kept=num_kept)
        if not len(source.head(1)):
            raise DataError(f"{path}: split {excerpt(split)} holds no rows; name one that does")
    except OSError as error:
        raise DataError(f"{error.filename or path}: cannot be read: {error.strerror or error}") from error
    return source


class StreamedSource:
    """Rows [first, stop) of a stream, by index from 0, asked for nearly in order.

    num_kept: rows that stay at hand, as they are in the file, behind the furthest one read; in memory. The last ones
    of a pass stay until the next one has as many.

    Picklable; forked workers read on for themselves.
    """

    def __init__(
        self, stream: RowStream, *, first: int = 0, stop: int | None = None, num_kept: int = KEPT_ROWS
    ) -> None:
        self._stream, self._first, self._stop, self._num_kept = stream, first, stop, num_kept
        self.name = stream.name
        self.fingerprint = hashlib.sha256(f"{first}:{stop} of {stream.fingerprint}".encode()).hexdigest()
        """Of what is known without reading to the end (see RowStream): a later change goes unnoticed."""
        known = stream.num_rows
        self.told_num_rows = None if known is None else max(0, min(known, known if stop is None else stop) - first)
        """None where only reading to the end tells it."""
        self.num_rows = self.told_num_rows
        """None where it is not known yet: a pass that comes to the end tells it."""
        self._handed_over: Mapping[int, RawRow] = {}
        self.skip_to(0)

    def skip_to(self, index: int) -> None:
        """Go on from there: rows before it are passed, not parsed, when the next one is asked for."""
        self._last_pass = _Kept(0)
        self._begin(index)

    def _begin(self, index: int) -> None:
        self._pass = _Kept(self._num_kept, index)
        self._rows: Iterator[RawRow] | None = None
        self._failure: DataError | None = None

    def row(self, index: int) -> Row:
        """Raises DataError, with the location, for a broken row, and EndOfStream. Other rows are not affected."""
        return (self._handed_over.get(index) or self.raw(index)).read()

    def __getitem__(self, index: int) -> Row:
        return self.row(index)

    def locate(self, index: int) -> str:
        """The file and line of a row that is at hand; else only its number."""
        kept = self._handed_over.get(index) or self._pass.find(index) or self._last_pass.find(index)
        return kept.location if kept else f"{self.name}, row {index}"

    def hand_over(self, rows: Mapping[int, RawRow]) -> None:
        """By index, rows of this stream that were kept elsewhere; they are at hand until others are handed over."""
        self._handed_over = rows

    def head(self, num_rows: int) -> RowSource:
        """The first rows, for as long as they are at hand: to look at, before the stream is read."""
        return _Head(self, self._num_rows_up_to(num_rows))

    def _num_rows_up_to(self, end: int) -> int:
        """`end`, or the number of rows where there are fewer."""
        if self.num_rows is not None:
            return min(end, self.num_rows)
        try:
            self.raw(end - 1)
        except EndOfStream as stream_end:
            return stream_end.num_rows
        return end

    def raw(self, index: int) -> RawRow:
        """As `row`, not parsed."""
        if self.num_rows is not None and index >= self.num_rows:
            raise EndOfStream(self.num_rows)
        kept = self._pass.find(index) or self._last_pass.find(index)
        if kept is not None:
            return kept
        if index < self._pass.end:
            is_at_end = self.num_rows is not None and self._pass.end >= self.num_rows
            assert is_at_end, f"{self.name}: row {index} is no longer at hand"
            self._last_pass = self._pass
            self._begin(0)
        while True:
            row = self._next()
            self._pass.add(row)
            if self._pass.end == self._num_kept:
                self._last_pass = _Kept(0)
            if self._pass.end > index:
                return row

    def _next(self) -> RawRow:
        if self._failure is not None:
            raise self._failure
        start = self._first + self._pass.end
        # The place in an open file is shared with the process that it was forked from.
        if self._rows is None or self._process != os.getpid():
            self._rows, self._process = self._stream.read(start), os.getpid()
        try:
            row = None if self._stop is not None and start >= self._stop else next(self._rows, None)
            if row is not None:
                return row
            self.num_rows = self._count()
        except DataError as error:
            self._failure = error
            raise
        except Exception:
            self._rows = None  # asked again, it would seem to be at its end
            raise
        raise EndOfStream(self.num_rows)

    def _count(self) -> int:
        """The number of rows, at the end of a pass."""
        num_rows = self._pass.end
        if self._pass.is_empty:  # it was begun behind the last one
            num_rows = sum(1 for _ in self._stream.read(self._first))
            num_rows = num_rows if self._stop is None else min(num_rows, self._stop - self._first)
        if self.num_rows not in (None, num_rows):
            problem = f"ends after {num_rows} rows of {self.num_rows}; leave data alone while it is in use"
            raise DataError(f"{self.name}: {problem}", reason="file_changed")
        return num_rows

    def __getstate__(self) -> dict[str, Any]:
        return {"stream": self._stream, "first": self._first, "stop": self._stop, "num_kept": self._num_kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        StreamedSource.__init__(self, **state)


class _Kept:
    """The last rows of a pass through the stream; `end` is the index of the next one."""

    def __init__(self, num_kept: int, start: int = 0) -> None:
        self.end = start
        self._rows: deque[RawRow] = deque(maxlen=num_kept)

    @property
    def is_empty(self) -> bool:
        return not self._rows

    def add(self, row: RawRow) -> None:
        self._rows.append(row)
        self.end += 1

    def find(self, index: int) -> RawRow | None:
        place = index - self.end + len(self._rows)
        return self._rows[place] if 0 <= place < len(self._rows) else None


@dataclass(frozen=True, slots=True)
class _Head:
    source: StreamedSource
    num_rows: int

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def fingerprint(self) -> str:
        return self.source.fingerprint

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> Row:
        return self.source.row(index)

    def locate(self, index: int) -> str:
        return self.source.locate(index)
