"""Append-only files of lines that stay valid if the run is killed or the disk is full."""

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
    """An append-only file of lines, written without buffering.

    An incomplete last line, from a kill, is removed when the file is opened. A full disk does not end the run: lines
    are kept in memory until they can be written. If the file is deleted meanwhile, this is reported once, and the file
    is not created again: it would lack its beginning, and its path may belong to another run by now.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._absolute_path = path.absolute()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        self._waiting = b""
        self._has_failed = self._is_gone = False
        os.truncate(self._file, path.read_bytes().rfind(b"\n") + 1)

    def append(self, line: bytes) -> None:
        """Writes a line; `line` is given without the line end."""
        self._waiting += line + b"\n"
        self._flush()

    def sync(self) -> None:
        """Flushes all lines to disk (fsync)."""
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
                # A write may be partial; the next one continues in the middle of the line.
                self._waiting = self._waiting[os.write(self._file, self._waiting) :]
            if durably:
                os.fsync(self._file)
            self._has_failed = False
            self._report_if_gone()
        except OSError as error:
            had_failed, self._has_failed = self._has_failed, True  # before the warning: this may be console.log
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
        else:  # every rank has a ledger, but only the main one prints on the console
            with suppress(OSError):
                show(line, to=sys.stderr)


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the objects of a JSONL file, and skips incomplete lines, which a full disk or a kill may leave."""
    if path.is_file():
        for line in path.read_bytes().splitlines():
            with suppress(ValueError):
                yield json.loads(line)


def drop_records_after(path: Path, step: int) -> None:
    """Truncates the file after the last object whose "step" is at most `step`; a resume repeats the later steps."""
    if not path.exists():
        return
    end = position = 0
    for line in path.read_bytes().splitlines(keepends=True):
        position += len(line)
        with suppress(ValueError, TypeError, KeyError):
            if json.loads(line)["step"] <= step:
                end = position
    os.truncate(path, end)
