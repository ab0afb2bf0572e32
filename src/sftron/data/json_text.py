"""JSON text from others: parsed strictly, and quoted in messages."""

from __future__ import annotations

import json
from typing import Any

from sftron.data.types import DataError

_MAX_DEPTH = 256
"""The largest nesting depth. Python's own limit depends on its version and on the depth of the call stack."""


def excerpt(text: str, limit: int = 60) -> str:
    """Returns the beginning of a text in double quotes, with unprintable characters escaped."""
    shown = text if len(text) <= limit else text[: limit - 3] + "..."
    return '"' + "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown) + '"'


def parse_json(text: str | bytes, location: str, wanted: str = "one JSON object") -> Any:
    """Parses a JSON value strictly: UTF-8, no NaN, no repeated key, and at most 256 levels.

    Raises DataError, which begins with `location` and describes valid text as `wanted`.
    """
    text = text if isinstance(text, str) else decode_utf8(text, location)
    try:
        value = _DECODER.decode(text)
        if text.count("[") + text.count("{") > _MAX_DEPTH and is_deeper_than(_MAX_DEPTH, value):
            raise ValueError(f"it has more than {_MAX_DEPTH} levels of nesting")
        return value
    except json.JSONDecodeError as error:
        found = f"{error.msg.removesuffix(' at')} at character {error.pos + 1}"
        near = excerpt(error.doc[max(0, error.pos - 20) :], 40)
        problem = f"is not JSON: {found}, near {near}; write {wanted}"
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits
        found = f"{str(error).partition('; use sys.')[0]}, in {excerpt(str(text))}"
        problem = f"is not plain JSON: {found}; correct it, or remove the row"
    raise DataError(f"{location}: {problem}", reason="broken_json")


def decode_utf8(data: bytes, location: str) -> str:
    """Returns the text. Raises DataError, which begins with `location` and gives the first byte that is wrong."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        found = excerpt(data[max(0, error.start - 20) : error.start + 20].decode("utf-8", "backslashreplace"))
        line = data.count(b"\n", 0, error.start) + 1
        where = f"byte {error.start + 1}" + (f" (line {line})" if line > 1 else "")
    raise DataError(f"{location}: {where} is not UTF-8, in {found}: save the file as UTF-8", reason="not_utf8")


def is_deeper_than(depth: int, value: Any) -> bool:
    """Returns whether lists and objects in a JSON value are nested in more than `depth` levels."""
    level = [value]
    for _ in range(depth + 1):
        if not (containers := [each for each in level if isinstance(each, dict | list)]):
            return False
        level = [inner for each in containers for inner in (each.values() if isinstance(each, dict) else each)]
    return bool(level)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {excerpt(repeated)} occurs twice in one object; keep one")
    return members


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON; write null or a number")


_DECODER = json.JSONDecoder(object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant)
"""Shared by all rows: `json.loads` makes a new decoder for each call with a hook, which takes a third of its time."""
