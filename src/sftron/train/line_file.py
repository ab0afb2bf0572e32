"""A file of lines that a run appends to, whatever becomes of the run or of the disk."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path

from sftron.config.errors import show
from sftron.train import console


class LineFile:
    """Each line is in the file as soon as it is written. A line cut off by a kill is removed; a disk that is full does
    not end the run: lines wait in memory until they can be written. That the file is deleted meanwhile is said."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        self._place, self._is_gone = path.absolute(), False
        self._waiting = b""
        self._has_failed = False
        os.truncate(self._file, _end_of_whole_lines(self._file))

    def append(self, line: bytes) -> None:
        """line: without its end."""
        self._waiting += line + b"\n"
        self._flush()

    def sync(self) -> None:
        """To the disk."""
        self._flush(durably=True)

    def close(self) -> None:
        self._flush(durably=True)
        os.close(self._file)
        if self._waiting:
            num_lines = len(self._waiting.splitlines())
            self._warn(f"lacks the last {num_lines} lines, which could not be written")

    def _say_if_gone(self) -> None:
        """Once. It is not made anew: a ledger would lack its beginning, and there may be another run's file by now."""
        if self._is_gone:
            return
        try:
            self._is_gone = not os.path.samestat(os.fstat(self._file), self._place.stat())
        except FileNotFoundError:
            self._is_gone = True
        if self._is_gone:
            self._warn("was deleted or moved while the run writes it; stop the run, and start it again for a new one")

    def _warn(self, words: str) -> None:
        """A ledger is of every rank, and all but the main one do not speak."""
        line = f"WARNING    {self.path} {words}"
        if console.speaks():
            console.say(line)
        else:
            with suppress(OSError):
                show(line, to=sys.stderr)

    def _flush(self, *, durably: bool = False) -> None:
        try:
            while self._waiting:
                # What was written of a line counts, so that the next attempt goes on in its midst.
                self._waiting = self._waiting[os.write(self._file, self._waiting) :]
            if durably:
                os.fsync(self._file)
            self._has_failed = False
            self._say_if_gone()
        except OSError as error:
            had_failed, self._has_failed = self._has_failed, True  # known before it is said, as this may be console.log
            if not had_failed:
                self._warn(f"cannot be written ({error.strerror}); its lines wait in memory")


def _end_of_whole_lines(file: int) -> int:
    """The byte behind the last newline."""
    end = os.fstat(file).st_size
    while end:
        start = max(0, end - 65_536)
        found = os.pread(file, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def drop_lines_after(path: Path, step: int) -> None:
    """Steps that a resume makes again are logged again. The file, whose lines have a "step", is cut off, which needs no
    room on the disk."""
    if not path.exists():
        return
    end = position = 0
    for line in path.read_bytes().splitlines(keepends=True):
        position += len(line)
        with suppress(ValueError, TypeError, KeyError):
            if json.loads(line)["step"] <= step:
                end = position
    os.truncate(path, end)
