"""Files and folders that are there whole, or not there (law 12)."""

import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


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


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write a new file, synced to disk: {"size", "sha256"} of what was to be written. Raises OSError.

    The one who writes syncs: on a network's file system another node cannot. Neither hashing nor writing holds Python's
    lock, so that a thread may do this beside the training.
    """
    digest, size = hashlib.sha256(), 0
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        for chunk in chunks:
            digest.update(chunk)
            size += len(chunk)
            rest = memoryview(chunk)
            while rest:
                rest = rest[os.write(file, rest) :]
        os.fsync(file)
    finally:
        os.close(file)
    return {"size": size, "sha256": digest.hexdigest()}


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
    for path in [*aside.rglob("*"), aside]:
        _sync(path)
    if folder.exists():
        # A rename cannot replace a folder that holds files: the old one steps aside first, and goes last.
        old = folder.with_name(f"{folder.name}{_REPLACED}{secrets.token_hex(4)}")
        folder.rename(old)
        try:
            aside.rename(folder)
        except OSError:
            old.rename(folder)
            raise
        remove(old)
    else:
        aside.rename(folder)
    _sync(folder.parent)


_REPLACED = ".replaced-"


def restore_replaced(parent: Path) -> list[Path]:
    """Give folders their names back that `commit` was about to replace when its process was killed: those whose
    successor is not there. Only for who owns `parent`. Returns them."""
    restored = []
    for old in sorted(parent.glob(f"*{_REPLACED}*")):
        folder = old.with_name(old.name.partition(_REPLACED)[0])
        if folder.exists():
            remove(old)
        else:
            restored.append(old.rename(folder))
    return restored


def remove_unfinished(parent: Path) -> None:
    """Remove what `begin` made and a kill kept from being committed or discarded. Only for who owns `parent`."""
    for aside in parent.glob("*.tmp-*"):
        discard(aside)


def remove(folder: Path) -> None:
    """Remove a folder, which loses its name first: killed on the way, what is left of it is taken for nothing.

    What cannot be removed now stays under a name of `begin`'s, and is no reason to end a run.
    """
    try:
        doomed = folder.rename(folder.with_name(f"{folder.name}.tmp-{secrets.token_hex(4)}"))
    except OSError:
        return
    discard(doomed)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
