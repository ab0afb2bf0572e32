"""Operations that succeed completely or not at all (law 12), on files, folders and process groups."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

_REPLACED = ".replaced-"


def publish(folder: Path, write: Callable[[Path], None], ranks: ProcessGroup | None = None) -> Path:
    """Fills a new folder with `write`, syncs it to disk, and renames it to `folder`, replacing any old one.

    Every rank must call this, and `write` receives the same folder on each. On any error `folder` is unchanged and
    the unfinished folder is removed.

    Raises:
        OSError: The folder cannot be created or renamed; raised on all ranks. Errors of `write` are raised again.
    """
    ranks = ranks or SingleProcess()
    unfinished = Path(main_or_raise(ranks, lambda: str(_create_unfinished(folder))))
    try:
        write(unfinished)
        main_or_raise(ranks, lambda: _commit(unfinished, folder))
    except BaseException:
        if ranks.rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return folder


def _create_unfinished(folder: Path) -> Path:
    # Other users could not read a folder from tempfile.mkdtemp.
    unfinished = folder.with_name(f"{folder.name}.tmp-{secrets.token_hex(4)}")
    unfinished.mkdir(parents=True)
    return unfinished


def _commit(unfinished: Path, folder: Path) -> None:
    for path in [*unfinished.rglob("*"), unfinished]:
        sync(path)
    if folder.exists():
        # A rename cannot replace a non-empty folder, so the old one is renamed first and removed last.
        old = folder.with_name(f"{folder.name}{_REPLACED}{secrets.token_hex(4)}")
        folder.rename(old)
        try:
            unfinished.rename(folder)
        except OSError:
            old.rename(folder)
            raise
        remove(old)
    else:
        unfinished.rename(folder)
    sync(folder.parent)
    _sync_above(folder.parent)


def restore_replaced(parent: Path) -> list[Path]:
    """Restores folders that `publish` had renamed but not yet replaced when its process was killed, and returns them.

    Only the run that owns `parent` may call this.
    """
    restored = []
    for old in sorted(parent.glob(f"*{_REPLACED}*")):
        folder = old.with_name(old.name.partition(_REPLACED)[0])
        if folder.exists():
            remove(old)
        else:
            restored.append(old.rename(folder))
    return restored


def remove_unfinished(parent: Path) -> None:
    """Removes what killed calls of `publish` and `remove` left. Only the run that owns `parent` may call this."""
    for unfinished in parent.glob("*.tmp-*"):
        shutil.rmtree(unfinished, ignore_errors=True)


def remove(folder: Path) -> None:
    """Renames a folder and then removes it, so that whatever a kill or an error leaves behind counts as unfinished.

    The new name is synced, because a loss of power may undo a rename but not the removals after it.
    """
    try:
        doomed = folder.rename(folder.with_name(f"{folder.name}.tmp-{secrets.token_hex(4)}"))
        sync(folder.parent)
    except OSError:
        return
    shutil.rmtree(doomed, ignore_errors=True)


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Writes a new file, syncs it to disk, and returns {"size", "sha256"}. Raises OSError.

    The writing process must sync, because another node cannot on a network file system. Hashing and writing release
    Python's global lock, so a thread can do this during training.
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
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        os.close(file)
    return {"size": size, "sha256": digest.hexdigest()}


def sync(path: Path) -> None:
    """Flushes a file or the entries of a folder to disk (fsync). Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_above(folder: Path) -> None:
    """Syncs the folders above `folder` where possible, so that a loss of power does not undo its creation.

    POSIX keeps a folder's entries only if the folder itself was synced; syncing what is below it is not enough.
    """
    for parent in folder.absolute().parents:
        with suppress(OSError):
            sync(parent)


class ProcessGroup(Protocol):
    """The operations on ranks that checkpoints need; `Ranks` of train/ranks.py implements them."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def gather(self, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Returns, on every rank, the JSON values passed by each rank."""
        ...


class SingleProcess:
    """The process group of a single process."""

    rank, world_size = 0, 1

    def gather(self, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [dict(facts)]


ALONE = SingleProcess()


def gather_or_raise(group: ProcessGroup, make: Callable[[], Any]) -> list[Any]:
    """Calls `make` on every rank and returns the results (JSON) of all ranks, on every rank.

    Raises:
        OSError: `make` raised OSError on some rank. The error is raised on all ranks, so that all of them stop.
    """
    own: dict[str, Any]
    failure: OSError | None = None
    try:
        own = {"value": make()}
    except OSError as error:
        failure, own = error, {"error": f"{type(error).__name__}: {error}"}
    everyone = group.gather(own)
    if failure is not None:
        raise failure
    failed = [f"rank {rank}: {facts['error']}" for rank, facts in enumerate(everyone) if "error" in facts]
    if failed:
        raise OSError("; ".join(failed))
    return [facts["value"] for facts in everyone]


def main_or_raise(group: ProcessGroup, make: Callable[[], Any]) -> Any:
    """Calls `make` on the main rank and returns its result on every rank; an OSError is raised on every rank."""
    return gather_or_raise(group, make if group.rank == 0 else lambda: None)[0]
