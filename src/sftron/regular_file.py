"""Reads files of unknown origin: regular files only, of bounded size, without blocking."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

_MAX_JSON_BYTES = 64 * 2**20
_MAX_LINE_BYTES = 256 * 2**20
"""A line of evaluations.jsonl has all answers of an evaluation."""


def expand_home(path: str) -> str:
    """Returns a path in which a leading `~` or `~user` is the home folder, as a shell does where it is not quoted."""
    return os.path.expanduser(path)  # noqa: PTH111  (Path.expanduser raises an exception if there is no home)


def where_missing(path: str | Path) -> str:
    """Returns what to add after "no such file": the folder of a relative path, or the target of a dead link.

    "" for an absolute path.
    """
    if (path := Path(path)).is_symlink() and not path.exists():
        return f" (it is a symbolic link to {path.readlink()}, which does not exist)"
    return "" if path.is_absolute() else f" in {Path.cwd()}"


def open_regular(path: Path) -> BinaryIO:
    """Opens a regular file for reading.

    Raises:
        OSError: The file cannot be opened.
        ValueError: It is not a regular file (reading a pipe may block forever, and a device has no end). The message
            does not include the file's name.
    """
    # Without O_NONBLOCK, opening a pipe that has no writer blocks.
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ValueError("is not a regular file but a folder, a pipe or a device; give a file")
    return file


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Returns the content of a regular file of at most `max_bytes` bytes. Raises as `open_regular` does.

    A ValueError is also raised if the file is larger.
    """
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > max_bytes:
            raise ValueError(f"has {size:,} bytes, but such a file has at most {max_bytes:,}")
        return file.read(max_bytes)


def read_json_value(path: Path, max_bytes: int = _MAX_JSON_BYTES) -> Any:
    """Returns the value in a JSON file. Raises as `read_regular` does, and ValueError if it is not JSON."""
    try:
        return json.loads(read_regular(path, max_bytes))
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def read_lines(path: Path, max_bytes: int = _MAX_LINE_BYTES) -> Iterator[bytes]:
    """Yields the lines of a regular file with their ends, one at a time. Raises as `open_regular` does.

    A ValueError is also raised at a line of more than `max_bytes` bytes.
    """
    with open_regular(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(max_bytes + 1), b""), start=1):
            if len(line) > max_bytes:
                raise ValueError(f"has more than {max_bytes:,} bytes in line {number}; shorten the line")
            yield line
