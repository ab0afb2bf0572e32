"""Files of lines that a run appends to, whatever becomes of the run or of the disk."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from sftron.config.errors import show
from sftron.train import console


class LineFile:
    """A file of whole lines, each of which is in the file as soon as it is written.

    A line that a kill cut off is removed when the file is opened. A full disk does not end the run: lines wait in
    memory until they can be written. A file that is deleted meanwhile is reported once and not made again: it would
    lack its beginning, and another run's file may stand there by now.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._absolute_path = path.absolute()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        self._waiting = b""
        self._has_failed = self._is_gone = False
        os.truncate(self._file, path.read_bytes().rfind(b"\n") + 1)

    def append(self, line: bytes) -> None:
        """Writes a line, given without its end."""
        self._waiting += line + b"\n"
        self._flush()

    def sync(self) -> None:
        """Writes everything to the disk."""
        self._flush(durably=True)

    def close(self) -> None:
        self._flush(durably=True)
        os.close(self._file)
        if self._waiting:
            num_lines = len(self._waiting.splitlines())
            self._warn(f"lacks the last {num_lines} lines, which could not be written")

    def _flush(self, *, durably: bool = False) -> None:
        try:
            while self._waiting:
                # The part of a line that was written counts: the next attempt continues in the middle of it.
                self._waiting = self._waiting[os.write(self._file, self._waiting) :]
            if durably:
                os.fsync(self._file)
            self._has_failed = False
            self._report_if_gone()
        except OSError as error:
            had_failed, self._has_failed = self._has_failed, True  # set before the warning: this may be console.log
            if not had_failed:
                self._warn(f"cannot be written ({error.strerror}); its lines wait in memory")

    def _report_if_gone(self) -> None:
        if self._is_gone:
            return
        try:
            self._is_gone = not os.path.samestat(os.fstat(self._file), self._absolute_path.stat())
        except FileNotFoundError:
            self._is_gone = True
        if self._is_gone:
            self._warn("was deleted or moved while the run writes it; stop the run, and start it again for a new one")

    def _warn(self, words: str) -> None:
        line = f"WARNING    {self.path} {words}"
        if console.speaks():
            console.say(line)
        else:  # every rank has a ledger, and only the main one prints on the console
            with suppress(OSError):
                show(line, to=sys.stderr)


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the objects of a file of JSON lines, but for a line that a full disk or a kill has cut off."""
    if path.is_file():
        for line in path.read_bytes().splitlines():
            with suppress(ValueError):
                yield json.loads(line)


def drop_records_after(path: Path, step: int) -> None:
    """Cuts the file off after the last object whose "step" is at most `step`: a resume makes later steps again."""
    if not path.exists():
        return
    end = position = 0
    for line in path.read_bytes().splitlines(keepends=True):
        position += len(line)
        with suppress(ValueError, TypeError, KeyError):
            if json.loads(line)["step"] <= step:
                end = position
    os.truncate(path, end)
