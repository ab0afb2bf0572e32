"""Checks of tools and tool calls, which otherwise stay as the row holds them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from sftron.data.formats.values import check_json, describe, is_none, refusal
from sftron.data.json_text import excerpt, parse_json
from sftron.data.types import DataError, Message

_WANTED_CALL = "wanted {type: function, function: {name, arguments}} or {name, arguments}, with texts and an object"
_NULLABLE = ("default", "const")
_VALUES = (*_NULLABLE, "enum", "examples")
"""Keywords of JSON schemas whose values are not schemas."""
_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords of JSON schemas whose values hold schemas by name."""


def parse_tools(tools: Any, column: str, location: str) -> tuple[Mapping[str, Any], ...]:
    """Parses a list of JSON schemas, or its JSON text. An absent or empty value gives no tools. Raises DataError.

    Keywords that are null are removed: JSON schemas have none but `default` and `const`, and Arrow fills up what other
    rows have.
    """
    location = f"{location}: `{column}`"
    if isinstance(tools, str):
        # An escape in JSON text may give a lone surrogate, so the values are checked after parsing.
        tools = parse_json(tools, location, "a JSON list of tools") if tools.strip() else None
    if is_none(tools):
        return ()
    if not isinstance(tools, list):
        raise refusal(location, "bad_tools", f"is {describe(tools)}; wanted a list of JSON schemas, or its JSON text")
    for number, tool in enumerate(tools, start=1):
        if not isinstance(tool, Mapping) or not tool:
            raise refusal(location, "bad_tools", f"tool {number} is {describe(tool)}; wanted a JSON schema, an object")
        check_json(tool, f"tool {number}", location)
    return tuple(_without_nulls(tool, f"tool {number}", location) for number, tool in enumerate(tools, start=1))


def _without_nulls(schema: Any, name: str, location: str, *, is_properties: bool = False) -> Any:
    """Returns the schema without keywords that are null. Raises DataError for a parameter that is null."""
    if isinstance(schema, list):
        return [_without_nulls(item, name, location) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    restored: dict[str, Any] = {}
    for key, value in schema.items():
        if value is None and is_properties:
            raise _arrow_null(location, f"{name} has the parameter {excerpt(key)}, which is null")
        if key in _VALUES and not is_properties:
            restored[key] = value
        elif value is not None:
            named = key in _NAMED_SCHEMAS and not is_properties
            restored[key] = _without_nulls(value, name, location, is_properties=named)
    return {key: value for key, value in restored.items() if value is not None or key in _NULLABLE}


def check_null_arguments(messages: Iterable[Message], tools: Iterable[Mapping[str, Any]], location: str) -> None:
    """Raises DataError for a null argument that its tool does not declare; Arrow adds those of other calls as nulls."""
    known = {str(_function(tool).get("name")): _properties(tool) for tool in tools}
    for call in (call for message in messages for call in message.fields.get("tool_calls") or ()):
        name, arguments = _function(call)["name"], _function(call)["arguments"]
        if name not in known or not isinstance(arguments, Mapping):
            continue
        if (argument := _undeclared_null(arguments, known[name])) is not None:
            found = (
                f"a call of {excerpt(name)} has the null argument {excerpt(argument)}, which the tool does not declare"
            )
            raise _arrow_null(location, found)


def _undeclared_null(arguments: Mapping[str, Any], properties: Mapping[str, Any]) -> str | None:
    """Returns the name of an argument that is null and not declared, at any depth that the schema describes."""
    for name, value in arguments.items():
        if value is None and name not in properties:
            return name
        schema, values = properties.get(name), [value]
        if isinstance(value, list) and isinstance(schema, Mapping):
            schema, values = schema.get("items"), value
        if isinstance(schema, Mapping) and isinstance(inner := schema.get("properties"), Mapping):
            for each in values:
                if isinstance(each, Mapping) and (found := _undeclared_null(each, inner)) is not None:
                    return found
    return None


def check_tool_calls(calls: Any, location: str) -> None:
    """Raises DataError for calls that templates could not write."""
    if not isinstance(calls, list):
        raise refusal(location, "bad_tool_calls", f"`tool_calls` is {describe(calls)}; wanted a list of calls")
    check_json(calls, "tool_calls", location)
    for number, call in enumerate(calls, start=1):
        where = f"{location}: call {number}"
        function = _function(call) if isinstance(call, Mapping) else {}
        name, arguments = function.get("name"), function.get("arguments")
        if isinstance(arguments, str):
            arguments = parse_json(arguments, f"{where}: `arguments`", "a JSON object, {} for none")
            check_json(arguments, "arguments", where)
            if isinstance(arguments, str):
                problem = f"`arguments` was encoded as JSON twice: its JSON text holds the text {excerpt(arguments)}"
                raise refusal(where, "bad_tool_calls", f"{problem}; decode it once")
        is_call = isinstance(name, str) and name != "" and isinstance(arguments, Mapping)
        if is_call and function is not call:
            is_call = call.get("name") is None and call.get("arguments") is None
        if not is_call or call.get("type") not in (None, "function") or not isinstance(call.get("id"), str | None):
            found = excerpt(json.dumps(call, ensure_ascii=False), 120)
            raise refusal(where, "bad_tool_calls", f"is {found}; {_WANTED_CALL}")


def calls_from_text(text: str, location: str) -> list[dict[str, Any]]:
    """Parses the JSON text of a call, {name, arguments}, or of a list of calls, into `tool_calls`. Raises DataError."""
    calls = parse_json(text, location, "a call {name, arguments}, or a list of calls")
    calls = calls if isinstance(calls, list) else [calls]
    if not calls:
        raise refusal(location, "bad_tool_calls", "is an empty list; write a call, or remove the turn")
    check_tool_calls(calls, location)
    return [{"type": "function", "function": call} if call.get("function") is None else call for call in calls]


def _function(tool_or_call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the object that holds the name; an empty one if it is not an object."""
    function = tool_or_call.get("function")
    return tool_or_call if function is None else function if isinstance(function, Mapping) else {}


def _properties(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the parameters in a tool's schema, or none if the schema has another structure."""
    parameters = _function(tool).get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def _arrow_null(location: str, found: str) -> DataError:
    remedy = "Parquet gives each row the keys of all others; write the column, or the arguments, as JSON text"
    return refusal(location, "filled_with_null", f"{found}; {remedy}")
