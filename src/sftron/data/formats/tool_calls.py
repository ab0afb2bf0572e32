"""Checks of tools and tool calls, which otherwise stay as the row holds them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sftron.data.formats.values import check_json, describe, names_of, refusal
from sftron.data.sources.json_text import excerpt, parse_json
from sftron.data.types import DataError, Message

_WANTED_CALL = "wanted {type, function: {name, arguments}} or {name, arguments}"


def parse_tools(tools: Any, column: str, location: str) -> tuple[Mapping[str, Any], ...]:
    """Parses a list of JSON schemas, or its JSON text. An absent or empty value gives no tools. Raises DataError."""
    location = f"{location}: `{column}`"
    if isinstance(tools, str):
        # An escape in JSON text may give a lone surrogate, so the values are checked after parsing.
        tools = parse_json(tools, location, "a JSON list of tools") if tools.strip() else None
    if tools is None or tools == {}:
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


def check_tool_calls(calls: Any, location: str) -> None:
    """Checks the `tool_calls` of a message. Raises DataError for calls that templates could not write."""
    if not isinstance(calls, list):
        raise _bad_call(location, f"`tool_calls` is {describe(calls)}; wanted a list of calls")
    check_json(calls, "tool_calls", location)
    for number, call in enumerate(calls, start=1):
        _check_call(call, f"{location}: call {number}")


def calls_from_text(text: str, location: str) -> list[dict[str, Any]]:
    """Parses the JSON text of a call, {name, arguments}, or of a list of calls, into `tool_calls`. Raises DataError."""
    calls = parse_json(text, location, "a call {name, arguments}, or a list of calls")
    calls = calls if isinstance(calls, list) else [calls]
    if not calls:
        raise _bad_call(location, "is an empty list; write a call, or remove the turn")
    check_tool_calls(calls, location)
    return [{"type": "function", "function": call} if call.get("function") is None else call for call in calls]


def check_null_arguments(messages: Iterable[Message], tools: Iterable[Mapping[str, Any]], location: str) -> None:
    """Raises DataError for a null argument that the tool does not have, as Arrow adds for arguments of other calls."""
    schemas = ((_function(tool), _properties(tool)) for tool in tools)
    known = {str(f.get("name")): properties for f, properties in schemas if isinstance(f, Mapping)}
    for call in (call for message in messages for call in message.fields.get("tool_calls") or ()):
        function = _function(call)
        name, arguments = function["name"], function["arguments"]
        if name not in known or not isinstance(arguments, Mapping):
            continue
        for argument, value in arguments.items():
            if value is None and argument not in known[name]:
                found = f"a call of {excerpt(name)} has the argument {excerpt(argument)}, which is null and not its own"
                raise _arrow_null(location, found)


def _check_call(call: Any, location: str) -> None:
    if not isinstance(call, Mapping):
        raise _bad_call(location, f"is {describe(call)}; {_WANTED_CALL}")
    if call.get("type") not in (None, "function"):
        raise _bad_call(location, f"`type` is {describe(call['type'])}; only calls of type function are read")
    if not isinstance(call.get("id"), str | None):
        raise _bad_call(location, f"`id` is {describe(call['id'])}; wanted text")
    is_nested = call.get("function") is not None
    if is_nested and any(call.get(key) is not None for key in ("name", "arguments")):
        raise _bad_call(location, f"has `function`, and name or arguments beside it; {_WANTED_CALL}")
    function = _function(call)
    if not isinstance(function, Mapping):
        raise _bad_call(location, f"`function` is {describe(function)}; {_WANTED_CALL}")
    if not isinstance(name := function.get("name"), str) or not name:
        raise _bad_call(location, f"`name` is {describe(name)}, among {names_of(function)}; {_WANTED_CALL}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = parse_json(arguments, f"{location}: `arguments`", "a JSON object, {} for none")
        check_json(arguments, "arguments", location)
    if not isinstance(arguments, Mapping):
        wanted = "wanted an object or its JSON text, {} for none"
        raise _bad_call(location, f"`arguments` is {describe(arguments)}; {wanted}")


def _function(tool_or_call: Mapping[str, Any]) -> Any:
    return tool_or_call if (function := tool_or_call.get("function")) is None else function


def _properties(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the parameters in a tool's schema, or none if the schema has another structure."""
    function = _function(tool)
    parameters = function.get("parameters") if isinstance(function, Mapping) else None
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def _bad_call(location: str, problem: str) -> DataError:
    return refusal(location, "bad_tool_calls", problem)


def _arrow_null(location: str, found: str) -> DataError:
    remedy = "Parquet fills up what other rows have; write the column, or the arguments, as JSON text"
    return refusal(location, "filled_with_null", f"{found}; {remedy}")
