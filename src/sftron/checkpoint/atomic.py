"""What succeeds whole or not at all (law 12): files, folders, and calls that every rank makes."""

import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

_REPLACED = ".replaced-"


def publish(folder: Path, write: Callable[[Path], None]) -> Path:
    """Has `write` fill a new folder, syncs that to disk, and renames it to `folder`, replacing what is there.

    An error of `write` is raised, with `folder` as it was and nothing left next to it.
    """
    unfinished = begin(folder)
    try:
        write(unfinished)
        commit(unfinished, folder)
    except BaseException:
        discard(unfinished)
        raise
    return folder


def begin(folder: Path) -> Path:
    """Makes a new folder next to `folder`, to be filled, then committed or discarded."""
    unfinished = folder.with_name(f"{folder.name}.tmp-{secrets.token_hex(4)}")
    # Not tempfile.mkdtemp, which makes a folder that no other user may read.
    unfinished.mkdir(parents=True)
    return unfinished


def discard(unfinished: Path) -> None:
    shutil.rmtree(unfinished, ignore_errors=True)


def commit(unfinished: Path, folder: Path) -> None:
    """Syncs `unfinished` to disk and renames it to `folder`, replacing that."""
    for path in [*unfinished.rglob("*"), unfinished]:
        _sync(path)
    if folder.exists():
        # A rename cannot replace a folder that holds files: the old one is renamed first, and removed last.
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
    _sync(folder.parent)


def restore_replaced(parent: Path) -> list[Path]:
    """Renames back the folders that `commit` was about to replace when its process was killed: those whose successor is
    not there. Only for the owner of `parent`. Returns them."""
    restored = []
    for old in sorted(parent.glob(f"*{_REPLACED}*")):
        folder = old.with_name(old.name.partition(_REPLACED)[0])
        if folder.exists():
            remove(old)
        else:
            restored.append(old.rename(folder))
    return restored


def remove_unfinished(parent: Path) -> None:
    """Removes what `begin` made and a kill kept from being committed or discarded. Only for the owner of `parent`."""
    for unfinished in parent.glob("*.tmp-*"):
        discard(unfinished)


def remove(folder: Path) -> None:
    """Removes a folder, which loses its name first: after a kill on the way, what is left of it counts for nothing.

    What cannot be removed now stays under an unfinished folder's name, and does not end a run.
    """
    try:
        doomed = folder.rename(folder.with_name(f"{folder.name}.tmp-{secrets.token_hex(4)}"))
    except OSError:
        return
    discard(doomed)


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Writes a new file, synced to disk. Returns {"size", "sha256"} of what was to be written. Raises OSError.

    The writer syncs: on a network's file system another node cannot. Neither hashing nor writing holds Python's lock,
    so that a thread may do this during training.
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


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class ProcessGroup(Protocol):
    """The ranks of a run, as far as checkpoints depend on them (train/ranks.py's `Ranks`)."""

    @property
    def dp_rank(self) -> int: ...

    @property
    def dp_world_size(self) -> int: ...

    def gather(self, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Returns every rank's JSON, on every rank."""
        ...


class SingleProcess:
    """The process group of one process."""

    dp_rank, dp_world_size = 0, 1

    def gather(self, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [dict(facts)]


def all_or_raise(group: ProcessGroup, make: Callable[[], Any]) -> list[Any]:
    """Returns, on every rank, what `make` returns (JSON) on every rank.

    Raises OSError on all ranks where `make` raises OSError on one, so that none goes on without the others.
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
    """Returns, on every rank, what `make` returns on the main one. Raises OSError on all where it does there."""
    return all_or_raise(group, make if group.dp_rank == 0 else lambda: None)[0]
