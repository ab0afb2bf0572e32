"""Reads files of unknown origin: regular files only, of bounded size, without blocking."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Returns the content of a regular file of at most `max_bytes` bytes.

    Raises:
        OSError: The file cannot be opened or read.
        ValueError: The file is larger, or is not a regular file (reading a pipe may block forever, and a device has no
            end). The message does not include the file's name.
    """
    # Without O_NONBLOCK, opening a pipe that has no writer blocks.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("is no regular file, but a pipe or a device; give a file")
        if status.st_size > max_bytes:
            raise ValueError(f"has {status.st_size:,} bytes, and no such file has more than {max_bytes:,}")
        return file.read(max_bytes)
