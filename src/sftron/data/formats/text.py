"""The parser of documents of plain text, which are trained as in pretraining: whole, and without a template."""

from __future__ import annotations

from typing import Any

from sftron.data.formats.values import NamedRow
from sftron.data.types import ConversationKey, Document, Row


class Piece(dict[str, Any]):
    """A row with a piece of a document. The document was checked before it was cut, and a piece may be white space."""

    def __init__(self, row: Row, *, is_last: bool) -> None:
        super().__init__(row)
        self.is_last = is_last


def problem_of(text: str) -> tuple[str, str] | None:
    """Returns why a text is no document, as a reason and in words after the column's name; None if it is one."""
    if not text.strip():
        return "empty_text", "is empty; write the text, or remove the row"
    if "\0" in text:
        at = text.index("\0") + 1
        return "not_text", f"has a NUL at character {at}, which plain text must not contain; remove it"
    return None


def parse_text(row: NamedRow, key: ConversationKey) -> Document:
    """Parses the column `text`. Raises DataError, also for a text of white space alone or with a NUL character."""
    text, piece = row.text("text"), row.row if isinstance(row.row, Piece) else None
    if piece is None and (found := problem_of(text)):
        reason, problem = found
        raise row.refusal(reason, f"`{row.column('text')}` {problem}")
    return Document(text, key, row.location, is_last=piece is None or piece.is_last)
