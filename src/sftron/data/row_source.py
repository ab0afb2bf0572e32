"""What a source of rows is."""

from __future__ import annotations

from typing import Protocol

from sftron.data.types import Row


class RowSource(Protocol):
    """Rows by index. Picklable, and safe to use in forked workers; holds no Python object per row."""

    @property
    def name(self) -> str:
        """For people: the path or Hub id."""
        ...

    @property
    def fingerprint(self) -> str:
        """Changes when the content does; does not depend on names, times or the machine."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row:
        """The row as its file holds it. Raises DataError, with its location, where the row is broken."""
        ...

    def locate(self, index: int) -> str:
        """Where to look for the row, `chats.jsonl:17`."""
        ...


def unpacked_bytes(source: object) -> int:
    """What a source takes of the temporary folder's disk; those that unpack nothing lack the attribute."""
    return getattr(source, "unpacked_bytes", 0)
