"""Checks of tools and tool calls, which otherwise stay as the row holds them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from sftron.data.formats.values import check_json, describe, is_none, refusal
from sftron.data.sources.jsonl import excerpt, parse_json
from sftron.data.types import DataError, Message

_WANTED_CALL = "wanted {type: function, function: {name, arguments}} or {name, arguments}, with texts and an object"


def parse_tools(tools: Any, column: str, location: str) -> tuple[Mapping[str, Any], ...]:
    """Parses a list of JSON schemas, or its JSON text. An absent or empty value gives no tools. Raises DataError."""
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
        nulls = [name for name, value in _properties(tool).items() if value is None]
        if nulls:
            raise _arrow_null(location, f"tool {number} has the parameter {excerpt(nulls[0])}, which is null")
    return tuple(tools)


def check_null_arguments(messages: Iterable[Message], tools: Iterable[Mapping[str, Any]], location: str) -> None:
    """Raises DataError for a null argument that its tool does not declare; Arrow adds those of other calls as nulls."""
    known = {str(_function(tool).get("name")): _properties(tool) for tool in tools}
    for call in (call for message in messages for call in message.fields.get("tool_calls") or ()):
        name, arguments = _function(call)["name"], _function(call)["arguments"]
        if name not in known or not isinstance(arguments, Mapping):
            continue
        for argument, value in arguments.items():
            if value is None and argument not in known[name]:
                found = f"a call of {excerpt(name)} has the argument {excerpt(argument)}, which is null and not its own"
                raise _arrow_null(location, found)


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
    remedy = "Parquet fills up what other rows have; write the column, or the arguments, as JSON text"
    return refusal(location, "filled_with_null", f"{found}; {remedy}")
