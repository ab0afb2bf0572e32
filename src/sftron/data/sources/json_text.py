"""Parses JSON rows strictly: each row is one object."""

from __future__ import annotations

import json
from typing import Any

from sftron.data.types import DataError, Row

MAX_ROW_BYTES = 4 * 2**20
"""The default size limit of a row. A tokenizer takes most of a minute and gigabytes of memory for a row of 32 MB."""

_MAX_DEPTH = 256
"""The largest nesting depth. Python's own limit depends on its version and on the depth of the call stack."""

WHITESPACE = b" \t\r\n"


def excerpt(text: str, limit: int = 60) -> str:
    """Returns the beginning of a text in double quotes, with unprintable characters escaped."""
    shown = text if len(text) <= limit else text[: limit - 3] + "..."
    return '"' + "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown) + '"'


def parse_row(data: bytes, location: str) -> Row:
    """Parses one JSON object strictly: UTF-8, no NaN, no repeated key. Raises DataError."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        found = excerpt(data[max(0, error.start - 20) : error.start + 20].decode("utf-8", "backslashreplace"))
        problem = f"byte {error.start + 1} is not UTF-8, in {found}: save the file as UTF-8"
        raise DataError(f"{location}: {problem}", reason="not_utf8") from None
    row = parse_json(text, location)
    if not isinstance(row, dict):
        problem = f"found {excerpt(text)}; wanted an object such as {{...}} (a list of rows belongs in a .json file)"
        raise DataError(f"{location}: {problem}", reason="not_an_object")
    return row


def parse_json(text: str, location: str, wanted: str = "one JSON object") -> Any:
    """Parses a JSON value strictly: no NaN, no repeated key.

    Args:
        text: The JSON text.
        location: The location for error messages.
        wanted: A description of valid text, for the remedy in error messages.

    Raises:
        DataError: The text is not strict JSON, or is nested too deeply.
    """
    try:
        value = _DECODER.decode(text)
        if text.count("[") + text.count("{") > _MAX_DEPTH and _is_deep(value):
            raise RecursionError
        return value
    except _StrictJsonError as error:
        raise DataError(f"{location}: {error}, in {excerpt(text)}", reason="broken_json") from None
    except json.JSONDecodeError as error:
        found = f"{error.msg.removesuffix(' at')} at character {error.pos + 1}"
        near = excerpt(text[max(0, error.pos - 20) :], 40)
        problem = f"is not JSON: {found}, near {near}; write {wanted}"
        raise DataError(f"{location}: {problem}", reason="broken_json") from None
    except (ValueError, RecursionError):
        found = f"is nested deeper than {_MAX_DEPTH} levels, or holds a number of thousands of digits"
        raise DataError(f"{location}: {found}: {excerpt(text)}; remove the row", reason="broken_json") from None


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_MAX_DEPTH + 1):
        containers = [each for each in level if isinstance(each, dict | list)]
        level = [inner for each in containers for inner in (each.values() if isinstance(each, dict) else each)]
    return bool(level)


class _StrictJsonError(ValueError):
    """The text is accepted by Python's json module, but other parsers reject it or read it differently."""


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise _StrictJsonError(f"the key {excerpt(repeated)} occurs twice in one object; keep one")
    return members


def _refuse_constant(name: str) -> Any:
    raise _StrictJsonError(f"{name} is not JSON; write null or a number")


_DECODER = json.JSONDecoder(object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant)
"""One for all rows: `json.loads` makes a new one for each call that has a hook, which takes a third of its time."""


def too_large(location: str, size: int, max_row_bytes: int, beginning: bytes = b"") -> DataError:
    """Returns the error for a row of `size` bytes, which quotes the row's beginning."""
    found = f": {excerpt(beginning.decode('utf-8', 'backslashreplace'))}" if beginning else ""
    problem = f"is a row of {size} bytes, above data.max_row_bytes {max_row_bytes}{found}; split it, or raise the key"
    return DataError(f"{location}: {problem}", reason="too_large")
