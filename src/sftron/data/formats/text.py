"""The parser of documents of plain text, which are trained as in pretraining: whole, and without a template."""

from __future__ import annotations

from typing import Any

from sftron.data.formats.values import NamedRow
from sftron.data.types import ConversationKey, Document


class Continued(dict[str, Any]):
    """A row with a piece of a document whose next piece is in the row after it."""


def parse_text(row: NamedRow, key: ConversationKey) -> Document:
    """Parses the column `text`. Raises DataError, also for a text of white space alone or with a NUL character."""
    text, column = row.text("text"), row.column("text")
    if not text.strip():
        raise row.refusal("empty_text", f"`{column}` is empty; write the text, or remove the row")
    if "\0" in text:
        problem = f"`{column}` has a NUL at character {text.index(chr(0)) + 1}, as files of no text have; remove it"
        raise row.refusal("not_text", problem)
    return Document(text, key, row.location, is_last=not isinstance(row.row, Continued))
