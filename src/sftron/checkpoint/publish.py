"""A folder that is there whole, or not there (law 12)."""

import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path


def publish(folder: Path, write: Callable[[Path], None]) -> Path:
    """Have `write` fill a new folder beside `folder`, sync it to disk, and rename it to `folder`, replacing that.

    Whatever `write` raises is raised, with `folder` as it was and nothing left beside it.
    """
    aside = begin(folder)
    try:
        write(aside)
        commit(aside, folder)
    except BaseException:
        discard(aside)
        raise
    return folder


def begin(folder: Path) -> Path:
    """A new folder beside `folder`, to be filled, then committed or discarded."""
    aside = folder.with_name(f"{folder.name}.tmp-{secrets.token_hex(4)}")
    # Not tempfile.mkdtemp, which makes a folder that no other user may read.
    aside.mkdir(parents=True)
    return aside


def discard(aside: Path) -> None:
    shutil.rmtree(aside, ignore_errors=True)


def commit(aside: Path, folder: Path) -> None:
    """Sync `aside` to disk and rename it to `folder`, replacing that."""
    _sync_tree(aside)
    if folder.exists():
        # A rename cannot replace a folder that holds files: the old one steps aside first, and goes last.
        old = folder.with_name(f"{folder.name}.tmp-old-{secrets.token_hex(4)}")
        folder.rename(old)
        aside.rename(folder)
        shutil.rmtree(old)
    else:
        aside.rename(folder)
    _sync(folder.parent)


def _sync_tree(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        if path.is_file():
            # safetensors gives its files to their owner alone.
            path.chmod(0o666 & ~_umask())
        _sync(path)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
