"""Access to a row by the column names of its format, with checks of the values and errors for bad rows."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sftron.data.sources.json_text import excerpt
from sftron.data.types import DataError, Row

_MAX_DEPTH = 64


@dataclass(frozen=True, slots=True)
class NamedRow:
    """A row whose columns are read by their names in the format.

    Every method that checks a value raises DataError, with the column's name in the data.

    Attributes:
        row: The row as read from its source.
        format: The name of the format, for error messages.
        columns: A mapping of the format's column names to the data's, where they differ.
        location: The location of the row (file:line).
    """

    row: Row
    format: str
    columns: Mapping[str, str]
    location: str

    def column(self, name: str) -> str:
        return self.columns.get(name, name)

    def get(self, name: str) -> Any:
        """Returns the value, or None if there is no such column; Arrow also stores absent values as null."""
        return self.row.get(self.column(name))

    def filled_list(self, name: str) -> list[Any]:
        """Returns the value, a list that is not empty."""
        value = self.get(name)
        if value is None:
            raise self._missing(name)
        if not isinstance(value, list):
            raise self.refusal("not_a_list", f"`{self.column(name)}` is {describe(value)}; wanted a list")
        if not value:
            raise self.refusal("empty_conversation", f"`{self.column(name)}` is empty; remove the row")
        return value

    def text(self, name: str) -> str:
        if (value := self.get(name)) is None:
            if self.column(name) not in self.row:
                raise self._missing(name)
            raise self.refusal("null_content", f"`{self.column(name)}` is null; write the text, or remove the row")
        return checked_text(value, self.column(name), self.location)

    def optional_text(self, name: str) -> str:
        """Returns the text, or "" if the column is absent, null, or only white space."""
        value = self.get(name)
        text = "" if value is None else checked_text(value, self.column(name), self.location)
        return text if text.strip() else ""

    def refusal(self, reason: str, problem: str) -> DataError:
        return refusal(self.location, reason, problem)

    def _missing(self, name: str) -> DataError:
        problem = f"has no column `{self.column(name)}`, which format {self.format} needs"
        remedy = "set `format`, or name the column in `columns`"
        return self.refusal("missing_column", f"{problem}; its columns: {names_of(self.row)}; {remedy}")


def refusal(location: str, reason: str, problem: str) -> DataError:
    return DataError(f"{location}: {problem}", reason=reason)


def checked_text(value: Any, name: str, location: str) -> str:
    """Returns the value. Raises DataError unless it is a string without lone surrogates."""
    if not isinstance(value, str):
        raise refusal(location, "not_text", f"`{name}` is {describe(value)}; wanted text")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            found = f"`{name}` holds half a character ({value[error.start]!r}) at {error.start}"
            problem = f"{found}, a surrogate without its pair; write the whole character, or remove it"
            raise refusal(location, "lone_surrogate", problem) from None
    return value


def check_json(value: Any, name: str, location: str) -> None:
    """Raises DataError unless the value is JSON without lone surrogates and is not nested too deeply to be written."""
    # Not recursive, as json.loads accepts deeper nesting than Python's recursion limit allows.
    waiting = [(value, 0)]
    while waiting:
        item, depth = waiting.pop()
        if depth > _MAX_DEPTH:
            raise refusal(location, "not_json", f"`{name}` is nested deeper than {_MAX_DEPTH} levels; flatten it")
        if isinstance(item, str):
            checked_text(item, name, location)
        elif isinstance(item, Mapping):
            for key, inner in item.items():
                checked_text(key, f"a key of {name}", location)
                waiting.append((inner, depth + 1))
        elif isinstance(item, list):
            waiting += [(inner, depth + 1) for inner in item]
        elif not (item is None or isinstance(item, bool | int) or (isinstance(item, float) and math.isfinite(item))):
            found = f"`{name}` holds {describe(item)}, which is no JSON"
            raise refusal(location, "not_json", f"{found}; write null, a number, a text, a list or an object")


def names_of(row: Mapping[str, Any]) -> str:
    """Returns the names of a row's columns or of a message's keys, with unprintable characters escaped."""
    return ", ".join(excerpt(str(name))[1:-1] for name in list(row)[:20]) or "none"


def describe(value: Any) -> str:
    if isinstance(value, str):
        return f"the text {excerpt(value)}"
    if isinstance(value, list | Mapping):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return f"the number {repr(value)[:60]}" if isinstance(value, int | float) else f"a {type(value).__name__}"
