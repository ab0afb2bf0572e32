"""Reading a file that somebody else may have put there: a regular one, of bounded size, without waiting."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def read_regular(path: Path, max_bytes: int) -> bytes:
    """The file's content. Raises OSError; and ValueError, without naming it, for a larger file or one that is no
    regular file: a pipe would be waited for without end, a device has none."""
    # Without O_NONBLOCK a pipe that nobody writes is waited for here already.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("is no regular file, but a pipe or a device; give a file")
        if status.st_size > max_bytes:
            raise ValueError(f"has {status.st_size:,} bytes, and no such file has more than {max_bytes:,}")
        return file.read(max_bytes)
