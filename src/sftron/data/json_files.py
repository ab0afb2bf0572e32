"""Rows of JSONL and JSON array files by random access: an index of byte offsets, and one read a row.

Rows are read with `pread`, not through a mapping: a mapped file that another process truncates kills the reader with
SIGBUS, where a short read is an error with a message. Offsets are explicit, so forked workers may share a descriptor.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sftron.data.types import DataError, Row

MAX_ROW_BYTES = 4 * 2**20
"""Rows above this are refused: a tokenizer takes most of a minute and gigabytes for one row of 32 MB."""

_SCAN_BYTES = 8 * 2**20
_WHITESPACE = b" \t\r\n"
_BOM = b"\xef\xbb\xbf"
_IS_WHITESPACE = np.isin(np.arange(256), list(_WHITESPACE))
_UP_TO_WHOLE = 256 * 2**20
_NUM_BLOCKS, _BLOCK_BYTES = 64, 2**20


def excerpt(text: str, limit: int = 60) -> str:
    """The beginning of a text in double quotes, printable on any terminal."""
    shown = text if len(text) <= limit else text[: limit - 3] + "..."
    return '"' + "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown) + '"'


def fingerprint_of_file(path: Path) -> str:
    """A hash of the content, whatever the file's name and time.

    Files up to 256 MB are hashed whole. Of larger ones, the size and 64 blocks of 1 MB, evenly spread from the first
    to the last, so that opening stays fast: a change between the blocks that keeps the size goes unnoticed.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= _UP_TO_WHOLE:
            while block := file.read(_SCAN_BYTES):
                digest.update(block)
        else:
            for start in np.linspace(0, size - _BLOCK_BYTES, _NUM_BLOCKS).astype(np.int64):
                file.seek(start)
                digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()


def parse_row(data: bytes, location: str) -> Row:
    """One JSON object, strictly: UTF-8, no NaN, no key twice. Raises DataError."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        found = excerpt(data[max(0, error.start - 20) : error.start + 20].decode("utf-8", "backslashreplace"))
        problem = f"byte {error.start + 1} is not UTF-8, in {found}: save the file as UTF-8"
        raise DataError(f"{location}: {problem}", reason="not_utf8") from None
    row = parse_json(text, location)
    if not isinstance(row, dict):
        problem = f"found {excerpt(text)}; wanted an object such as {{...}} (a list of rows belongs in a .json file)"
        raise DataError(f"{location}: {problem}", reason="not_an_object")
    return row


def parse_json(text: str, location: str, wanted: str = "one JSON object") -> Any:
    """A JSON value, strictly: no NaN, no key twice. Raises DataError; `wanted` is what it asks for."""
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant)
    except _StrictJsonError as error:
        raise DataError(f"{location}: {error}, in {excerpt(text)}", reason="broken_json") from None
    except json.JSONDecodeError as error:
        found = f"{error.msg.removesuffix(' at')} at character {error.pos + 1}"
        near = excerpt(text[max(0, error.pos - 20) :], 40)
        problem = f"is not JSON: {found}, near {near}; write {wanted}"
        raise DataError(f"{location}: {problem}", reason="broken_json") from None
    except (ValueError, RecursionError):
        problem = f"is nested too deeply, or holds a number of thousands of digits: {excerpt(text)}; remove the row"
        raise DataError(f"{location}: {problem}", reason="broken_json") from None


class _StrictJsonError(ValueError):
    """JSON that Python reads, and others read as something else."""


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise _StrictJsonError(f"the key {excerpt(repeated)} occurs twice in one object; keep one")
    return members


def _refuse_constant(name: str) -> Any:
    raise _StrictJsonError(f"{name} is not JSON; write null or a number")


class _IndexedFile:
    """A file read by offset; picklable, and opened again by each process that needs it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = path.stat().st_size
        self._descriptor: int | None = None

    def read(self, start: int, end: int) -> bytes:
        """Bytes [start, end). Raises OSError where the file has become shorter since it was opened."""
        if self._descriptor is None:
            self._descriptor = os.open(self.path, os.O_RDONLY)
        parts = []
        while start < end:
            part = os.pread(self._descriptor, end - start, start)
            if not part:
                raise OSError(f"{self.path} has become shorter than the {self.size} bytes it was opened with")
            parts.append(part)
            start += len(part)
        return b"".join(parts)

    def chunks(self, start: int = 0) -> Iterator[tuple[int, np.ndarray]]:
        """Offset and uint8 bytes of one chunk after another."""
        for offset in range(start, self.size, _SCAN_BYTES):
            yield offset, np.frombuffer(self.read(offset, min(offset + _SCAN_BYTES, self.size)), np.uint8)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_descriptor": None}

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # `close` is bound early: at the interpreter's end, the module os may be gone before this object.
        if (descriptor := getattr(self, "_descriptor", None)) is not None:
            close(descriptor)


class _JsonSource:
    """Rows that are byte ranges [start, end) of one file. Subclasses find the ranges, and a row's line."""

    def __init__(self, path: Path, max_row_bytes: int = MAX_ROW_BYTES) -> None:
        self.name = str(path)
        self.fingerprint = fingerprint_of_file(path)
        self._file = _IndexedFile(path)
        self._max_row_bytes = max_row_bytes
        has_bom = self._file.read(0, min(len(_BOM), self._file.size)) == _BOM
        self._starts, self._ends, self._lines = self._index(len(_BOM) if has_bom else 0)

    def _index(self, first: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Start, end (int64) and line (int64, from 1, where the range starts) of every row, from byte `first` on."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Row:
        start, end = self._range(index)
        if end - start > self._max_row_bytes:
            found = excerpt(self._file.read(start, start + 60).decode("utf-8", "backslashreplace"))
            problem = f"is a row of {end - start} bytes, above {self._max_row_bytes}: {found}; split or remove it"
            raise DataError(f"{self.locate(index)}: {problem}", reason="too_large")
        return parse_row(self._file.read(start, end).strip(_WHITESPACE), self.locate(index))

    def locate(self, index: int) -> str:
        self._range(index)
        return f"{self.name}:{self._lines[index]}"

    def _is_blank(self, start: int, end: int) -> bool:
        return end - start <= self._max_row_bytes and not self._file.read(start, end).strip(_WHITESPACE)

    def _range(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name} has {len(self)} rows, no row {index}")
        return int(self._starts[index]), int(self._ends[index])


class JsonlSource(_JsonSource):
    """One JSON object a line. Blank lines are no rows, and still count as lines."""

    def _index(self, first: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        starts, suspects = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        at_line_start = True
        for offset, chunk in self._file.chunks(first):
            after = np.flatnonzero(chunk == ord("\n")) + 1
            begins = np.concatenate([[0], after]) if at_line_start else after
            at_line_start = begins.size > 0 and begins[-1] == len(chunk)
            begins = begins[begins < len(chunk)]
            starts.append(offset + begins)
            suspects.append(offset + begins[_IS_WHITESPACE[chunk[begins]]])
        lines = np.concatenate(starts)
        ends = np.append(lines[1:], self._file.size)
        # Nearly every line begins with "{"; only one that begins with white space may be blank.
        doubtful = np.searchsorted(lines, np.concatenate(suspects))
        blank = [k for k in doubtful if self._is_blank(int(lines[k]), int(ends[k]))]
        numbers = np.delete(np.arange(1, len(lines) + 1), np.array(blank, np.int64))
        return lines[numbers - 1], ends[: len(lines)][numbers - 1], numbers


class JsonArraySource(_JsonSource):
    """A file that holds one JSON list of objects. They are found in one pass that parses nothing."""

    def _index(self, first: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        marks = np.concatenate([np.empty(0, _MARK), *self._marks(first)])
        self._check_list(first, marks)
        # A row lies between two bounds: the list's brackets and the commas directly in it.
        bounds = marks[(marks["depth"] == 1) & (marks["step"] >= 0) | (marks["depth"] == 0)]
        starts, ends, lines = bounds["position"][:-1] + 1, bounds["position"][1:], bounds["line"][:-1].copy()
        # Its line is that of its opening brace, which may be lines below the comma.
        openings = marks[(marks["depth"] == 2) & (marks["step"] == 1)]
        opening = np.searchsorted(openings["position"], starts)
        has_opening = np.searchsorted(openings["position"], ends) > opening
        lines[has_opening] = openings["line"][opening[has_opening]]
        for k in np.flatnonzero(~has_opening):
            if not self._is_blank(int(starts[k]), int(ends[k])):
                continue  # no object either, which is told when the row is read
            if len(starts) == 1:
                return starts[:0], ends[:0], lines[:0]
            raise self._broken(f":{lines[k]}", "a comma without a row on either side; remove the comma")
        return starts, ends, lines

    def _marks(self, first: int) -> Iterator[np.ndarray]:
        """Every bracket, brace and comma outside strings, where the depth after it is at most 2."""
        depth, line, in_string, is_escaped = 0, 1, np.uint8(0), False
        for offset, chunk in self._file.chunks(first):
            toggles, is_escaped = _string_ends(chunk, is_escaped)
            toggles[0] ^= in_string
            inside = np.bitwise_xor.accumulate(toggles)
            in_string = inside[-1]
            positions = np.flatnonzero(_IS_MARK[chunk] & (inside == 0))
            steps = _STEPS[chunk[positions]]
            depths = depth + np.cumsum(steps, dtype=np.int64)
            depth = int(depths[-1]) if len(depths) else depth
            kept = np.flatnonzero(depths <= 2)
            newlines = np.flatnonzero(chunk == ord("\n"))
            marks = np.empty(len(kept), _MARK)
            marks["position"] = offset + positions[kept]
            marks["line"] = line + np.searchsorted(newlines, positions[kept])
            marks["step"] = steps[kept]
            marks["depth"] = depths[kept]
            line += len(newlines)
            yield marks

    def _check_list(self, first: int, marks: np.ndarray) -> None:
        if not len(marks) or self._file.read(first, int(marks["position"][0]) + 1).strip(_WHITESPACE) != b"[":
            raise self._broken("", "found no list; wanted [ {...}, {...} ]")
        closings = np.flatnonzero(marks["depth"] == 0)
        if not len(closings):
            last = marks["line"][-1]
            raise self._broken(f":{last}", "the list is not closed after this line; the file may be cut off")
        end = marks[closings[0]]
        if self._file.read(int(end["position"]), int(end["position"]) + 1) != b"]":
            raise self._broken(f":{end['line']}", "the list is closed by }; wanted ]")
        rest = self._file.chunks(int(end["position"]) + 1)
        if not all(_IS_WHITESPACE[chunk].all() for _, chunk in rest):
            raise self._broken(f":{end['line']}", "more follows the end of the list; keep one list in the file")

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
