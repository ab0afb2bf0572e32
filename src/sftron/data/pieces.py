"""Cuts documents of plain text that are longer than a conversation may be into pieces, each of which is a row.

    rows      0: short   1: a long document        2: short
    pieces    0: short   1: a long   2:  document  3: short

So one row is one document of attention in a pack, and everything after this (order, mixing, packing, resume) is as for
conversations, whose rows are never cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np

from sftron.data.formats.text import Piece, problem_of
from sftron.data.sources import RawRow, RowSource, StreamedSource
from sftron.data.types import DataError, Row

_MOST_CHARACTERS = 2**25
"""The characters of the documents that are held, at one to four bytes each."""

Cut = Callable[[str], list[str]]
"""Returns the pieces of a text, one after another."""


class Pieces:
    """The rows of a source of documents, with a row for each piece of those that are cut.

    It holds three numbers per row, and the documents that were cut and read last: reading a document of 4 MB again for
    each of its 425 pieces took four times as long as tokenizing them. A row that cannot be read is one row, and reading
    it raises.
    """

    def __init__(self, source: RowSource, column: str, cut: Cut) -> None:
        self._source, self._column, self.name = source, column, source.name
        self._recent, self._num_characters = dict[int, Row](), 0
        rows, starts, ends = list[int](), list[int](), list[int]()
        for row in range(len(source)):
            text = None
            with suppress(DataError):
                text = source[row].get(column)
            lengths = [len(piece) for piece in _pieces(text, cut)] or [0]
            bounds = np.cumsum([0, *lengths]).tolist()
            rows += [row] * len(lengths)
            starts += bounds[:-1]
            ends += [*bounds[1:-1], -1]
        # -1 is the end of the document.
        self._rows, self._starts, self._ends = (np.array(each, np.int64) for each in (rows, starts, ends))
        self.num_documents, self.num_cut = len(source), len(np.unique(self._rows[self._ends >= 0]))

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the documents; where they are cut follows from the tokenizer and the longest length."""
        return self._source.fingerprint

    @property
    def num_pieces(self) -> int:
        """The number of pieces of the documents that are cut."""
        return len(self) - self.num_documents + self.num_cut

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        number, start, end = int(self._rows[index]), int(self._starts[index]), int(self._ends[index])
        if start == 0 and end < 0:
            return self._source[number]
        row = self._recent.pop(number, None)
        if row is None:
            row = self._source[number]
            self._num_characters += len(row[self._column])
        self._recent[number] = row
        while self._num_characters > _MOST_CHARACTERS and len(self._recent) > 1:
            oldest = self._recent.pop(next(iter(self._recent)))
            self._num_characters -= len(oldest[self._column])
        text = row[self._column][start : None if end < 0 else end]
        return Piece({**row, self._column: text}, is_last=end < 0)

    def locate(self, index: int) -> str:
        number, count = self._place(index)
        location = self._source.locate(int(self._rows[index]))
        return location if count == 1 else _location(location, number, count)

    def _place(self, index: int) -> tuple[int, int]:
        """Returns the number of a piece in its document, from 1, and the number of pieces of that."""
        first, end = np.searchsorted(self._rows, [self._rows[index], self._rows[index] + 1]).tolist()
        return index - first + 1, end - first


def streamed_pieces(source: StreamedSource, column: str, cut: Cut) -> StreamedSource:
    """Returns the pieces of a stream of documents, which are cut while they are read."""

    def split(raw: RawRow) -> Iterator[RawRow]:
        try:
            row = raw.read()
            pieces = _pieces(row.get(column), cut)
        except DataError:
            pieces = []
        if len(pieces) < 2:
            yield raw
            return
        for number, text in enumerate(pieces, start=1):
            piece = Piece({**row, column: text}, is_last=number == len(pieces))
            yield RawRow(_location(raw.location, number, len(pieces)), lambda piece=piece: piece)

    return source.split_rows(split)


def _pieces(text: Any, cut: Cut) -> list[str]:
    """Returns the pieces of a document; none if a row does not hold one, so that it stays whole and is refused once."""
    return cut(text) if isinstance(text, str) and not problem_of(text) else []


def _location(location: str, number: int, count: int) -> str:
    return f"{location}, piece {number} of {count}"
