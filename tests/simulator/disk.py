"""A disk that can lose power, fill up and fail: what is written reaches a real folder, and a record of what is durable.

Calls of `os` and `open` by simulated tasks go through a Disk; those of anything else, and all reads, go to the system.
The folder shows what running programs see. Beside it the Disk keeps, for each file, the content of its last fsync and
the writes since, and, for each folder, the entries that were synced and the changes since. `lose_power` rewrites the
folder to one of the states that the file system may leave:

    ordered     metadata is a journal, of which some first part survives; any fsync commits all of it (ext4, XFS)
    unordered   only what fsync names is sure; of other changes any survive, each with those that it builds on (POSIX)

In both, of the writes to a file since its fsync any may be missing, the rest of a torn one is zeros or absent, and a
rename may survive without the data of its file.
"""

from __future__ import annotations

import errno
import io
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Ordering = Literal["ordered", "unordered"]
REAL = {name: getattr(os, name) for name in (
    *("open", "close", "write", "fsync", "rename", "replace", "unlink", "remove", "rmdir", "mkdir", "symlink"),
    *("truncate", "fdopen"),
)}  # fmt: skip
REAL_OPEN = io.open


@dataclass(eq=False)
class Node:
    """A file (content), a link (target) or a folder (entries); `pending` are writes to it since its last fsync."""

    kind: Literal["file", "folder", "link"]
    durable: bytes = b""
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)
    """(offset, data) of each write; (size, None) of each truncation."""
    entries: dict[str, Node] = field(default_factory=dict)
    durable_entries: dict[str, Node] = field(default_factory=dict)


@dataclass(eq=False)
class Change:
    """One atomic change of entries: (folder, name, the node that the name has now or None)."""

    entries: list[tuple[Node, str, Node | None]]
    moved: Node

    def builds_on(self, earlier: Change) -> bool:
        places = {(id(folder), name) for folder, name, _ in earlier.entries}
        return self.moved is earlier.moved or any((id(folder), name) in places for folder, name, _ in self.entries)


class Disk:
    """See the module.

    Args:
        root: An empty folder.
        before: Called with the name and the path of each change before it is made, which may not return.
        spoil: Called with the name of a change, and the number of bytes of a write; returns an error to raise instead,
            or None, and how many bytes are written. After a part of them, the error comes with the next write.
        ordering: Which changes of folders survive a loss of power, see above.
    """

    def __init__(
        self,
        root: Path,
        before: Callable[[str, str], None],
        spoil: Callable[[str, int], tuple[OSError | None, int]],
        ordering: Ordering,
    ) -> None:
        self.root, self._before, self._spoil, self.ordering = str(root), before, spoil, ordering
        self._top = Node("folder")
        self._journal: list[Change] = []
        self._descriptors: dict[int, tuple[Node, str, int]] = {}

    # -- nodes --------------------------------------------------------------------------------------------------------

    def owns(self, path: Any) -> bool:
        """Returns whether a path, or an open descriptor, is of this disk."""
        if isinstance(path, int):
            return path in self._descriptors
        return isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(self.root)

    def forget(self, descriptor: int) -> None:
        """Leaves a descriptor to Python, which reads it and closes it."""
        del self._descriptors[descriptor]

    def _parts(self, path: Any) -> tuple[Node, str]:
        """Returns the folder that holds `path`, and its name in it."""
        *parents, name = os.fspath(path)[len(self.root) + 1 :].split("/")
        folder = self._top
        for each in parents:
            folder = folder.entries[each]
        return folder, name

    def _find(self, path: Any) -> Node | None:
        if os.fspath(path) == self.root:
            return self._top
        try:
            folder, name = self._parts(path)
        except KeyError:
            return None
        return folder.entries.get(name)

    def _change(self, moved: Node, *entries: tuple[Node, str, Node | None]) -> None:
        for folder, name, node in entries:
            if node is None:
                folder.entries.pop(name, None)
            else:
                folder.entries[name] = node
        self._journal.append(Change(list(entries), moved))

    # -- calls --------------------------------------------------------------------------------------------------------

    def _begin(self, what: str, path: Any) -> None:
        """Lets the world act before a change, and raises the error that it wants."""
        self._before(what, os.fspath(path)[len(self.root) + 1 :])
        error, _ = self._spoil(what, 0)
        if error is not None:
            error.filename = os.fspath(path)
            raise error

    def open(self, path: Any, flags: int, mode: int = 0o777) -> int:
        makes = flags & os.O_CREAT and not os.path.lexists(path)
        if makes:
            self._begin("create", path)
        descriptor = REAL["open"](path, flags, mode)
        if makes:
            folder, name = self._parts(path)
            self._change(node := Node("file"), (folder, name, node))
        elif flags & os.O_TRUNC:
            self._truncate(path, 0)
        if (node := self._find(path)) is not None:
            self._descriptors[descriptor] = node, os.fspath(path), flags
        return descriptor

    def write(self, descriptor: int, data: Any) -> int:
        node, path, flags = self._descriptors[descriptor]
        self._before("write", path[len(self.root) + 1 :])
        error, length = self._spoil("write", len(data))
        content = bytes(data)[:length]
        offset = os.fstat(descriptor).st_size if flags & os.O_APPEND else os.lseek(descriptor, 0, os.SEEK_CUR)
        if content:
            REAL["write"](descriptor, content)
            node.pending.append((offset, content))
        elif error is not None:
            raise error
        return len(content)

    def fsync(self, descriptor: int) -> None:
        node, path, _ = self._descriptors[descriptor]
        self._before("fsync", path[len(self.root) + 1 :])
        error, _ = self._spoil("fsync", 0)
        if error is not None:
            # Linux reports a failed write of pages once, and counts them as clean afterwards.
            node.pending = [each for each in node.pending if each[1] is None]
            raise error
        if node.kind == "file":
            node.durable, node.pending = _applied(node.durable, node.pending), []
        if self.ordering == "ordered":
            self._commit(self._journal)
        elif node.kind == "folder":
            self._commit([each for each in self._journal if any(folder is node for folder, _, _ in each.entries)])

    def close(self, descriptor: int) -> None:
        self._descriptors.pop(descriptor, None)
        REAL["close"](descriptor)

    def truncate(self, path: Any, length: int) -> None:
        if isinstance(path, int):
            path = self._descriptors[path][1]
        self._begin("truncate", path)
        self._truncate(path, length)

    def _truncate(self, path: Any, length: int) -> None:
        REAL["truncate"](path, length)
        node = self._find(path)
        assert node is not None
        node.pending.append((length, None))

    def rename(self, source: Any, target: Any) -> None:
        self._begin("rename", target)
        REAL["rename"](source, target)
        (folder, name), (other, new_name) = self._parts(source), self._parts(target)
        self._change(node := folder.entries[name], (folder, name, None), (other, new_name, node))

    def unlink(self, path: Any) -> None:
        self._begin("unlink", path)
        REAL["unlink"](path)
        folder, name = self._parts(path)
        self._change(folder.entries[name], (folder, name, None))

    def rmdir(self, path: Any) -> None:
        self._begin("rmdir", path)
        REAL["rmdir"](path)
        folder, name = self._parts(path)
        self._change(folder.entries[name], (folder, name, None))

    def mkdir(self, path: Any, mode: int = 0o777) -> None:
        if not os.path.lexists(path):
            self._begin("mkdir", path)
        REAL["mkdir"](path, mode)
        folder, name = self._parts(path)
        self._change(node := Node("folder"), (folder, name, node))

    def symlink(self, target: Any, path: Any, *_: Any) -> None:
        self._begin("symlink", path)
        REAL["symlink"](target, path)
        folder, name = self._parts(path)
        self._change(node := Node("link", os.fspath(target).encode()), (folder, name, node))

    # -- loss of power ------------------------------------------------------------------------------------------------

    def _commit(self, changes: list[Change]) -> None:
        """Makes changes durable, each with all earlier ones that it builds on."""
        wanted, chosen = set(map(id, changes)), list[Change]()
        for number in reversed(range(len(self._journal))):
            each = self._journal[number]
            if id(each) in wanted or any(later.builds_on(each) for later in chosen):
                chosen.append(each)
        for each in reversed(chosen):
            for folder, name, node in each.entries:
                if node is None:
                    folder.durable_entries.pop(name, None)
                else:
                    folder.durable_entries[name] = node
        done = set(map(id, chosen))
        self._journal = [each for each in self._journal if id(each) not in done]

    def lose_power(self, chance: random.Random) -> list[str]:
        """Leaves one of the states that the file system may have after a loss of power; returns what was lost."""
        lost: list[str] = []
        number = len(self._journal)
        if self.ordering == "ordered":
            self._commit(self._journal[: chance.randint(0, number)])
        else:
            share = chance.choice((0.0, 0.5, 0.9))
            self._commit([each for each in self._journal if chance.random() < share])
        if self._journal:
            lost.append(f"{len(self._journal)} of {number} changes of folders")
        self._journal = []
        shutil.rmtree(self.root)
        self._restore(self._top, self.root, chance, lost)
        return lost

    def _restore(self, node: Node, path: str, chance: random.Random, lost: list[str]) -> None:
        if node.kind == "link":
            Path(path).symlink_to(node.durable.decode())
        elif node.kind == "file":
            before = _applied(node.durable, node.pending)
            node.durable, node.pending = _after_power_loss(node, chance), []
            if node.durable != before:
                lost.append(f"{path[len(self.root) + 1 :]}: {len(node.durable)} of {len(before)} bytes, or torn")
            Path(path).write_bytes(node.durable)
        else:
            Path(path).mkdir()
            node.entries = dict(node.durable_entries)
            for name, each in node.entries.items():
                self._restore(each, f"{path}/{name}", chance, lost)

    def rot(self, path: Path, content: bytes) -> None:
        """Gives a file other content, as after the rot of a medium."""
        path.write_bytes(content)
        node = self._find(path)
        assert node is not None
        node.durable, node.pending = content, []

    def close_all(self) -> None:
        """Closes what killed programs had open."""
        for descriptor in list(self._descriptors):
            try:
                self.close(descriptor)
            except OSError:  # a reader closed it itself
                continue


def _applied(content: bytes, writes: list[tuple[int, bytes | None]]) -> bytes:
    for offset, data in writes:
        if data is None:
            content = content[:offset].ljust(offset, b"\0")
        else:
            content = content[:offset].ljust(offset, b"\0") + data + content[offset + len(data) :]
    return content


def _after_power_loss(node: Node, chance: random.Random) -> bytes:
    """Returns what a file may have: none of the writes since the fsync, all, some first ones, or any of them."""
    writes = node.pending
    kind = chance.choice(("none", "all", "first", "any", "zeros")) if writes else "all"
    if kind == "none":
        return node.durable
    if kind == "all":
        return _applied(node.durable, writes)
    if kind == "any":
        return _applied(node.durable, [each for each in writes if chance.random() < 0.5])
    if kind == "zeros":  # the new size reached the disk, but not the data
        return node.durable[: len(whole := _applied(node.durable, writes))].ljust(len(whole), b"\0")
    kept = writes[: chance.randint(1, len(writes))]
    offset, data = kept[-1]
    if data:
        kept[-1] = offset, data[: chance.randint(0, len(data))]
    return _applied(node.durable, kept)


class Raw(io.RawIOBase):
    """The unbuffered file of a descriptor that a Disk owns, for Python's writers.

    When its program has been killed, what Python still wants to write or close, whenever it collects the garbage, is
    left out: the descriptor may be another file's by then.
    """

    def __init__(self, descriptor: int, *, closefd: bool, is_killed: Callable[[], bool]) -> None:
        self._descriptor, self._closes, self._is_killed = descriptor, closefd, is_killed

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def write(self, data: Any) -> int:
        return len(data) if self._is_killed() else os.write(self._descriptor, data)

    def close(self) -> None:
        if self._closes and not self.closed and not self._is_killed():
            os.close(self._descriptor)
        super().close()


def no_space() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def broken_medium() -> OSError:
    return OSError(errno.EIO, os.strerror(errno.EIO))
