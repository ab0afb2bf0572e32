"""Rows of JSONL and JSON array files by random access: an index of byte offsets, and one or two reads a row.

The index has some 65,536 entries at most, of 40 bytes each, for files up to 2 GiB, and one for every 32 KiB of larger
ones, however many rows they hold. A row that has none is found by scanning on from the entry before it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sftron.data.indexed_file import IndexedFile, ShrunkError, fingerprint_of
from sftron.data.json_files import WHITESPACE, parse_row, too_large
from sftron.data.types import DataError, Row
from sftron.data.unpacking import UnpackedFile

_NUM_ENTRIES, _MAX_ENTRY_BYTES = 2**16, 2**15
_BOM = b"\xef\xbb\xbf"
_IS_WHITESPACE = np.isin(np.arange(256), list(WHITESPACE))
_ROW = np.dtype([("start", np.int64), ("end", np.int64), ("start_line", np.int64), ("line", np.int64)])
"""A row is the bytes [start, end), white space around it included; lines, from 1: of `start`, and of the row itself."""


class _JsonSource(ABC):
    """Rows that are byte ranges of one file. Subclasses find them, scanning from any row on."""

    def __init__(self, path: Path, max_row_bytes: int, file: IndexedFile) -> None:
        """path: for people. file: what is read."""
        self.name = str(path)
        self._file = file
        self.unpacked_bytes = file.size if isinstance(file, UnpackedFile) else 0
        self.fingerprint = fingerprint_of(self._file)
        self._max_row_bytes = max_row_bytes
        self._index(len(_BOM) if self._file.read(0, min(len(_BOM), self._file.size)) == _BOM else 0)

    @abstractmethod
    def _index(self, first: int) -> None:
        """Keep the entries of all rows from byte `first` on."""

    @abstractmethod
    def _scan(self, start: int, end: int, line: int) -> Iterator[np.ndarray]:
        """The rows (_ROW) in bytes [start, end), some at a time; one begins at `start`, on `line`."""

    def _keep_entries(self, start: int, line: int) -> None:
        """Scan the whole file. A long row has an entry of its own, so that no short one is found by reading it."""
        entry_bytes = _entry_bytes(self._file.size)
        entries, numbers = [np.empty(0, _ROW)], [np.empty(0, np.int64)]
        num_rows, end, stretch_before = 0, start, -1
        for rows in self._scan(start, self._file.size, line):
            if not len(rows):
                continue
            stretch = rows["start"] // entry_bytes
            is_long = rows["end"] - rows["start"] > entry_bytes
            is_new = is_long | (np.diff(stretch, prepend=stretch_before) > 0)
            entries.append(rows[is_new])
            numbers.append(num_rows + np.flatnonzero(is_new))
            num_rows, end, stretch_before = num_rows + len(rows), int(rows["end"][-1]), stretch[-1]
        # One byte more than the last row, for the bracket that closes a list.
        end_of_rows = np.array([(min(end + 1, self._file.size), 0, 0, 0)], _ROW)
        self._entries = np.concatenate([*entries, end_of_rows])
        self._numbers, self._num_rows = np.concatenate(numbers), num_rows
        self._last_scan: tuple[int, list[tuple[int, int, int, int]]] = (-1, [])

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_last_scan": (-1, [])}

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> Row:
        try:
            start, end, line = self._find(index)
            location = f"{self.name}:{line}"
            if (size := self._row_size(start, end)) > self._max_row_bytes:
                raise too_large(location, size, self._max_row_bytes, self._file.read(start, start + min(size, 60)))
            return parse_row(self._file.read(start, end).strip(WHITESPACE), location)
        except ShrunkError as error:
            raise DataError(f"{self.locate(index)}: {error}", reason="file_changed") from error

    def locate(self, index: int) -> str:
        try:
            return f"{self.name}:{self._find(index)[2]}"
        except ShrunkError:
            return f"{self.name}, row {index}"

    def _find(self, index: int) -> tuple[int, int, int]:
        """Start, end and line of a row."""
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name} has {len(self)} rows, no row {index}")
        entry = int(np.searchsorted(self._numbers, index, side="right")) - 1
        start, end, start_line, line = self._entries[entry].item()
        if place := index - int(self._numbers[entry]):
            if self._last_scan[0] != entry:  # kept because a row is located after it was read
                rows = self._rows_between(start, int(self._entries["start"][entry + 1]), start_line)
                self._last_scan = entry, rows
            start, end, _, line = self._last_scan[1][place]
        return start, end, line

    def _rows_between(self, start: int, end: int, line: int) -> list[tuple[int, int, int, int]]:
        """The rows (as _ROW) of one entry."""
        return np.concatenate(list(self._scan(start, end, line))).tolist()

    def _is_blank(self, start: int, end: int) -> bool:
        return self._row_size(start, end) <= self._max_row_bytes and not self._file.read(start, end).strip(WHITESPACE)

    def _row_size(self, start: int, end: int) -> int:
        """What max_row_bytes bounds, known without reading the row: its bytes without the end of the line."""
        is_long = end - start > self._max_row_bytes
        return end - start - (is_long and self._file.read(end - 1, end) == b"\n")


def _entry_bytes(size: int) -> int:
    return max(1, min(_MAX_ENTRY_BYTES, -(-size // _NUM_ENTRIES)))


class JsonlSource(_JsonSource):
    """One JSON object a line. Blank lines are no rows, and still count as lines."""

    def _index(self, first: int) -> None:
        self._keep_entries(first, 1)

    def _scan(self, start: int, end: int, line: int) -> Iterator[np.ndarray]:
        for offset, chunk in self._file.chunks(start, end):
            bounds = np.append(start, offset + np.flatnonzero(chunk == ord("\n")) + 1)
            # Nearly every line begins with "{"; only one that begins with white space may be blank, and the first,
            # which may have begun in the chunk before.
            yield self._rows(bounds, line, np.append(True, _IS_WHITESPACE[chunk[bounds[1:-1] - offset]]))
            start, line = int(bounds[-1]), line + len(bounds) - 1
        if start < end:
            yield self._rows(np.array([start, end]), line, np.array([True]))

    def _rows_between(self, start: int, end: int, line: int) -> list[tuple[int, int, int, int]]:
        if end - start > 2 * _MAX_ENTRY_BYTES:  # with very many blank lines
            return super()._rows_between(start, end, line)
        rows = []
        for text in self._file.read(start, end).split(b"\n"):
            after = start + len(text) + 1
            if len(text) > self._max_row_bytes or text.strip(WHITESPACE):
                rows.append((start, min(after, end), line, line))
            start, line = after, line + 1
        return rows

    def _rows(self, bounds: np.ndarray, line: int, may_be_blank: np.ndarray) -> np.ndarray:
        """The lines between `bounds`, numbered from `line`, without the blank ones."""
        rows = np.empty(len(bounds) - 1, _ROW)
        rows["start"], rows["end"] = bounds[:-1], bounds[1:]
        rows["start_line"] = rows["line"] = np.arange(line, line + len(rows))
        doubtful = np.flatnonzero(may_be_blank[: len(rows)])
        return np.delete(rows, [k for k in doubtful if self._is_blank(int(bounds[k]), int(bounds[k + 1]))])


class JsonArraySource(_JsonSource):
    """A file that holds one JSON list of objects. They are found in one pass that parses nothing."""

    def _index(self, first: int) -> None:
        line = 1
        for offset, chunk in self._file.chunks(first, self._file.size):
            is_visible = ~_IS_WHITESPACE[chunk]
            at = int(is_visible.argmax()) if is_visible.any() else len(chunk)
            line += int((chunk[:at] == ord("\n")).sum())
            if at < len(chunk):
                if chunk[at] != ord("["):
                    break
                self._first = offset + at + 1
                return self._keep_entries(self._first, line)
        raise self._broken("", "found no list; wanted [ {...}, {...} ]")

    def _scan(self, start: int, end: int, line: int) -> Iterator[np.ndarray]:
        """A row lies between two bounds: the list's brackets and the commas directly in it."""
        is_whole = start == self._first and end == self._file.size
        depth, in_string, is_escaped = 1, np.uint8(0), False
        marks = np.array([(start - 1, line, 1, 0)], _MARK)
        for offset, chunk in self._file.chunks(start, end):
            toggles, is_escaped = _string_ends(chunk, is_escaped)
            toggles[0] ^= in_string
            inside = np.bitwise_xor.accumulate(toggles)
            in_string = inside[-1]
            positions = np.flatnonzero(_IS_MARK[chunk] & (inside == 0))
            steps = _STEPS[chunk[positions]]
            depths = depth + np.cumsum(steps, dtype=np.int64)
            depth = int(depths[-1]) if len(depths) else depth
            kept = np.flatnonzero((depths <= 0) | (depths == 1) & (steps == 0) | (depths == 2) & (steps == 1))
            newlines = np.flatnonzero(chunk == ord("\n"))
            found = np.empty(len(kept), _MARK)
            found["position"], found["depth"], found["step"] = offset + positions[kept], depths[kept], steps[kept]
            found["line"] = line + np.searchsorted(newlines, positions[kept])
            # Of openings without a comma between them, only the first tells a row's line: `{}{}{}...` keeps no memory.
            is_opening = found["depth"] == 2
            found = found[~(is_opening & np.append(marks["depth"][-1] == 2, is_opening[:-1])[: len(found)])]
            marks, line = np.concatenate([marks, found]), line + len(newlines)
            closings = np.flatnonzero(marks["depth"] == 0)
            last = int(closings[0] if len(closings) else np.flatnonzero(marks["depth"] == 1)[-1])
            yield self._rows(marks[: last + 1])
            marks = marks[last:]
            if len(closings):
                return self._check_end(marks[0]) if is_whole else None
        if is_whole:
            problem = "the list is not closed after this line; the file may be cut off"
            raise self._broken(f":{marks['line'][-1]}", problem)

    def _rows(self, marks: np.ndarray) -> np.ndarray:
        bounds = marks[marks["depth"] <= 1]
        rows = np.empty(len(bounds) - 1, _ROW)
        rows["start"], rows["end"] = bounds["position"][:-1] + 1, bounds["position"][1:]
        rows["start_line"] = rows["line"] = bounds["line"][:-1]
        # Its line is that of its opening brace, which may be lines below the comma.
        openings = marks[marks["depth"] == 2]
        opening = np.searchsorted(openings["position"], rows["start"])
        has_opening = np.searchsorted(openings["position"], rows["end"]) > opening
        rows["line"][has_opening] = openings["line"][opening[has_opening]]
        for start, end, line, _ in rows[~has_opening].tolist():
            if not self._is_blank(start, end):
                continue  # no object either, which is told when the row is read
            if start == self._first and bounds["depth"][1] == 0:
                return rows[:0]
            raise self._broken(f":{line}", "a comma without a row on either side; remove the comma")
        return rows

    def _check_end(self, closing: np.void) -> None:
        position, line = int(closing["position"]), closing["line"]
        if self._file.read(position, position + 1) != b"]":
            raise self._broken(f":{line}", "the list is closed by }; wanted ]")
        rest = self._file.chunks(position + 1, self._file.size)
        if not all(_IS_WHITESPACE[chunk].all() for _, chunk in rest):
            raise self._broken(f":{line}", "more follows the end of the list; keep one list in the file")

    def _broken(self, line: str, problem: str) -> DataError:
        return DataError(f"{self.name}{line}: {problem}", reason="broken_json")


_MARK = np.dtype([("position", np.int64), ("line", np.int64), ("depth", np.int64), ("step", np.int8)])
_STEPS = np.zeros(256, np.int8)
_STEPS[list(b"[{")] = 1
_STEPS[list(b"]}")] = -1
_IS_MARK = np.isin(np.arange(256), list(b"[]{},"))


def _string_ends(chunk: np.ndarray, first_is_escaped: bool) -> tuple[np.ndarray, bool]:
    """1 at the quotes that open or close a string, else 0 (uint8); and whether the byte after the chunk is escaped.

    A byte is escaped where a run of backslashes of odd length ends before it.
    """
    backslashes = np.flatnonzero(chunk == ord("\\"))
    breaks = np.flatnonzero(np.diff(backslashes) > 1)
    run_starts = backslashes[np.concatenate([[0], breaks + 1])] if len(backslashes) else backslashes
    run_ends = backslashes[np.concatenate([breaks, [-1]])] if len(backslashes) else backslashes
    lengths = run_ends - run_starts + 1
    toggles = (chunk == ord('"')).astype(np.uint8)
    if first_is_escaped:
        toggles[0] = 0
        lengths[:1] += run_starts[:1] == 0
    escaped = run_ends[lengths % 2 == 1] + 1
    reaches_past = len(escaped) > 0 and bool(escaped[-1] == len(chunk))
    toggles[escaped[:-1] if reaches_past else escaped] = 0
    return toggles, reaches_past
