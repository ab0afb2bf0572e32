"""Access to a row by the column names of its format, with checks of the values and errors for bad rows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sftron.data.json_text import excerpt, is_deeper_than, parse_json
from sftron.data.types import DataError, Row

_MAX_DEPTH = 64


@dataclass(frozen=True, slots=True)
class NamedRow:
    """A row whose columns are read by their names in the format.

    Every method that checks a value raises DataError, with the column's name in the data.
    """

    row: Row
    format: str
    """The name of the format, for error messages."""
    columns: Mapping[str, str]
    """A mapping of the format's column names to the data's, where they differ."""
    location: str

    def column(self, name: str) -> str:
        return self.columns.get(name, name)

    def get(self, name: str) -> Any:
        """Returns the value, or None if there is no such column; Arrow also stores absent values as null."""
        return self.row.get(self.column(name))

    def filled_list(self, name: str) -> list[Any]:
        """Returns the value, a list that is not empty."""
        if (value := self.get(name)) is None:
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


def empty_row(location: str) -> DataError:
    """Returns the error for a row without a column, such as an empty line of a spreadsheet."""
    remedy = "remove it, or let bad rows be dropped and counted (data.on_bad_row: skip)"
    return refusal(location, "empty_row", f"is an empty row; {remedy}")


def checked_text(value: Any, name: str, location: str) -> str:
    """Returns the value. Raises DataError unless it is a string without lone surrogates."""
    if not isinstance(value, str):
        raise refusal(location, "not_text", f"`{name}` is {describe(value)}; wanted text")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise _lone_surrogate(error, name, location) from None
    return value


def check_json(value: Any, name: str, location: str) -> None:
    """Raises DataError unless the value is JSON without lone surrogates and is not nested too deeply to be written."""
    try:
        if is_deeper_than(_MAX_DEPTH, value):
            raise ValueError(f"it is nested deeper than {_MAX_DEPTH} levels")
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise _lone_surrogate(error, name, location) from None
    except (ValueError, TypeError) as error:
        raise refusal(location, "not_json", f"`{name}` ({describe(value)}) is not JSON: {error}") from None


def _lone_surrogate(error: UnicodeEncodeError, name: str, location: str) -> DataError:
    found = f"`{name}` holds half a character ({error.object[error.start]!r}), a surrogate without its pair"
    return refusal(location, "lone_surrogate", f"{found}; write the whole character, or remove it")


def parse_template_kwargs(value: Any, column: str, location: str) -> dict[str, Any]:
    """Parses a row's values of the chat template's variables, an object or its JSON text; null is no value.

    Raises DataError.
    """
    location = f"{location}: `{column}`"
    if isinstance(value, str) and value.strip():
        value = parse_json(value, location, "a JSON object")
    if is_none(value) or (isinstance(value, str) and not value.strip()):
        return {}
    if not isinstance(value, Mapping):
        raise refusal(location, "bad_template_kwargs", f"is {describe(value)}; wanted an object of names and values")
    check_json(value, column, location)
    return {name: each for name, each in value.items() if each is not None}


def names_of(row: Iterable[str]) -> str:
    """Returns the names of a row's columns or of a message's keys, with unprintable characters escaped.

    A name that is empty, or begins or ends with white space, is in quotes.
    """
    shown = [(str(name), excerpt(str(name))) for name in list(row)[:20]]
    return ", ".join(quoted[1:-1] if name and name == name.strip() else quoted for name, quoted in shown) or "none"


def is_none(value: Any) -> bool:
    """Returns whether a value spells that there is none: null, or an empty text, list or object."""
    return value is None or (isinstance(value, str | list | tuple | Mapping) and not value)


def describe(value: Any) -> str:
    if isinstance(value, str):
        return f"the text {excerpt(value)}"
    if isinstance(value, list | Mapping):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return f"the number {repr(value)[:60]}" if isinstance(value, int | float) else f"a {type(value).__name__}"
