"""Reads a file from elsewhere: only a regular one, of bounded size, without waiting."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Returns the file's content.

    Raises OSError; and ValueError, without the file's name, for a larger file, and for one that is no regular file: the
    read of a pipe may never return, a device has no end.
    """
    # Without O_NONBLOCK, opening a pipe without a writer would not return.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("is no regular file, but a pipe or a device; give a file")
        if status.st_size > max_bytes:
            raise ValueError(f"has {status.st_size:,} bytes, and no such file has more than {max_bytes:,}")
        return file.read(max_bytes)
