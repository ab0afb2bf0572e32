"""Rows to conversations. Strict: what is not understood is refused by name, never skipped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sftron.data.json_files import excerpt
from sftron.data.sources import RowSource
from sftron.data.types import Conversation, ConversationKey, DataError, Message, Role, Row

Format = Literal["messages", "sharegpt"]


@dataclass(frozen=True, slots=True)
class RowFormat:
    """How the rows of one data set hold conversations. name: the format's."""

    name: Format

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class _Layout:
    """How a format's rows hold a conversation."""

    column: str
    role_key: str
    content_key: str
    roles: Mapping[str, Role]
    refused_roles: tuple[str, ...]
    """Known, and not implemented yet."""


_LAYOUTS: Mapping[Format, _Layout] = {
    "messages": _Layout(
        column="messages",
        role_key="role",
        content_key="content",
        roles={"system": Role.SYSTEM, "user": Role.USER, "assistant": Role.ASSISTANT},
        refused_roles=("tool", "function"),
    ),
    "sharegpt": _Layout(
        column="conversations",
        role_key="from",
        content_key="value",
        roles={
            "system": Role.SYSTEM,
            "human": Role.USER,
            "user": Role.USER,
            "gpt": Role.ASSISTANT,
            "assistant": Role.ASSISTANT,
        },
        refused_roles=("tool", "function_call", "observation"),
    ),
}

_KNOWN_FORMATS = "; ".join(
    f"{name}: column `{layout.column}`, a list of {{{layout.role_key}, {layout.content_key}}}"
    for name, layout in _LAYOUTS.items()
)


def detect_format(source: RowSource, sample: int = 100) -> Format:
    """The format that the first `sample` rows share; rows that cannot be read have no say.

    Raises DataError where the rows disagree, or a row fits no format, or several.
    """
    found: Format | None = None
    unreadable: DataError | None = None
    for index in range(min(sample, len(source))):
        try:
            row = source[index]
        except DataError as error:
            unreadable = unreadable or error
            continue
        location = source.locate(index)
        fitting: list[Format] = [name for name, layout in _LAYOUTS.items() if row.get(layout.column) is not None]
        if len(fitting) != 1:
            problem = "fits several formats" if fitting else "fits no format"
            remedy = "set `format`" if fitting else "rename the column or convert the rows"
            raise _refusal(
                location, "no_format", f"{problem}; columns: {_names(row)}; known formats: {_KNOWN_FORMATS}; {remedy}"
            )
        if found not in (None, fitting[0]):
            problem = f"is in format {fitting[0]}, but rows before it are in format {found}"
            raise _refusal(location, "mixed_formats", f"{problem}; make each format a data set of its own")
        found = fitting[0]
    if found is None:
        raise unreadable or DataError(f"{source.name}: no rows to detect a format from; set `format`")
    return found


def parse_conversation(row: Row, row_format: RowFormat, key: ConversationKey, location: str) -> Conversation:
    """The row's messages, checked. A conversation may end in a user turn, or have no assistant turn at all.

    Raises DataError with the location, what was found, and the remedy.
    """
    format = row_format.name
    layout = _LAYOUTS[format]
    if not isinstance(row, Mapping):
        raise _refusal(location, "not_an_object", f"found {_describe(row)}; wanted an object with named columns")
    for column in ("tools", "functions"):
        if _holds_something(row.get(column)):
            raise _refusal(location, "unsupported_column", f"`{column}` is not supported yet; remove the row")
    turns = row.get(layout.column)
    if turns is None:
        problem = f"has no column `{layout.column}`, which format {format} needs; its columns: {_names(row)}"
        raise _refusal(location, "missing_column", f"{problem}; set `format`, or rename the column")
    if not isinstance(turns, list):
        problem = f"`{layout.column}` is {_describe(turns)}; wanted a list of messages"
        raise _refusal(location, "not_a_list", problem)
    if not turns:
        raise _refusal(location, "empty_conversation", f"`{layout.column}` is empty; remove the row")
    messages = tuple(_parse_message(turn, layout, f"{location}: message {n}") for n, turn in enumerate(turns, start=1))
    _check_order(messages, location)
    return Conversation(messages, key, location)


def _parse_message(turn: Any, layout: _Layout, location: str) -> Message:
    wanted = f"{{{layout.role_key}, {layout.content_key}}}"
    if not isinstance(turn, Mapping):
        raise _refusal(location, "not_a_message", f"found {_describe(turn)}; wanted an object {wanted}")
    for name in (layout.role_key, layout.content_key):
        if name not in turn:
            problem = f"has no `{name}`, only {_names(turn)}; wanted {wanted}"
            raise _refusal(location, "missing_key", problem)
    for name, value in turn.items():
        if name not in (layout.role_key, layout.content_key) and value is not None:
            problem = f"has the key {excerpt(str(name))}, which is not read; remove it, or set it to null"
            raise _refusal(location, "unknown_key", problem)
    role = _parse_role(turn[layout.role_key], layout, location)
    return Message(role, _parse_content(turn[layout.content_key], layout.content_key, location))


def _parse_role(name: Any, layout: _Layout, location: str) -> Role:
    if isinstance(name, str) and name in layout.roles:
        return layout.roles[name]
    if isinstance(name, str) and name in layout.refused_roles:
        raise _refusal(location, "unsupported_role", f"role {excerpt(name)} is not supported yet; remove the row")
    accepted = ", ".join(layout.roles)
    raise _refusal(location, "unknown_role", f"`{layout.role_key}` is {_describe(name)}; wanted one of {accepted}")


def _parse_content(content: Any, name: str, location: str) -> str:
    if content is None:
        raise _refusal(location, "null_content", f"`{name}` is null; write the text, or remove the row")
    if isinstance(content, list):
        problem = f"`{name}` is a list of parts, which may hold images; only text is read: join the parts to one text"
        raise _refusal(location, "content_parts", problem)
    if not isinstance(content, str):
        raise _refusal(location, "not_text", f"`{name}` is {_describe(content)}; wanted text")
    try:
        content.encode("utf-8")
    except UnicodeEncodeError as error:
        found = f"`{name}` holds half a character ({content[error.start]!r}) at {error.start}"
        problem = f"{found}, a surrogate without its pair; write the whole character, or remove it"
        raise _refusal(location, "lone_surrogate", problem) from None
    return content


def _check_order(messages: tuple[Message, ...], location: str) -> None:
    """An optional system message first, then user and assistant by turns."""
    turns = list(enumerate(messages, start=1))
    if messages[0].role is Role.SYSTEM:
        turns = turns[1:]
    expected = Role.USER
    for number, message in turns:
        if message.role is not expected:
            role = message.role.name.lower()
            if message.role is Role.SYSTEM:
                problem = f"message {number} (system) is not the first; move it there, or into a user message"
            elif number == 1 or messages[number - 2].role is Role.SYSTEM:
                problem = f"message {number} ({role}) comes before any user message; add the question, or remove it"
            else:
                problem = (
                    f"message {number} ({role}) follows message {number - 1} ({role}); join the two, or remove one"
                )
            raise _refusal(location, "wrong_role_order", problem)
        expected = Role.ASSISTANT if expected is Role.USER else Role.USER


def _holds_something(value: Any) -> bool:
    """Tools may be given as JSON in a text, so an empty list may be the text "[]"."""
    if isinstance(value, str):
        return value.strip() not in ("", "[]", "{}", "null")
    return value not in (None, [], {})


def _refusal(location: str, reason: str, problem: str) -> DataError:
    return DataError(f"{location}: {problem}", reason=reason)


def _names(row: Mapping[str, Any]) -> str:
    return ", ".join(excerpt(str(name))[1:-1] for name in list(row)[:20]) or "none"


def _describe(value: Any) -> str:
    if isinstance(value, str):
        return f"the text {excerpt(value)}"
    if isinstance(value, list | Mapping):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return f"the number {repr(value)[:60]}" if isinstance(value, int | float) else f"a {type(value).__name__}"
