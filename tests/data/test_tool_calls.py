"""Tools and calls reach the template as the data has them, or are refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from sftron.data.formats.detect import RowFormat, resolve_format
from sftron.data.sources import open_source
from sftron.data.types import DataError
from tests.data.rows import CALL, assistant, parse, tool, user

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer", "default": None}}, "required": ["a"]}
FLAT = {"name": "add", "description": "adds", "parameters": PARAMETERS}
WRAPPED = {"type": "function", "function": FLAT}


def refusal(row: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        parse(row)
    assert str(caught.value).startswith("chats.jsonl:8: ")
    assert str(caught.value).isprintable()
    return caught.value


@pytest.mark.parametrize("tools", [[FLAT], [WRAPPED], [FLAT, WRAPPED, {"type": "code_interpreter"}]])
def test_tools_are_the_same_objects_in_the_same_order_given_as_a_list_or_as_its_text(tools: list[dict]):
    for given in (tools, json.dumps(tools), json.dumps(tools, indent=2)):
        conversation = parse({"messages": [user()], "tools": given})
        assert conversation.tools == tuple(tools)
        assert [json.dumps(tool) for tool in conversation.tools] == [json.dumps(tool) for tool in tools]


@pytest.mark.parametrize("tools", [None, [], {}, "", " ", "[]", " [] ", "null", "{}"])
def test_empty_tools_are_no_tools(tools: Any):
    assert parse({"messages": [user()], "tools": tools, "functions": tools}).tools == ()


@pytest.mark.parametrize(
    ("tools", "reason", "message"),
    [
        ('[{"name": "f"', "broken_json", "`tools`: is not JSON: Expecting ',' delimiter at character 14, near "),
        (
            "add",
            "broken_json",
            '`tools`: is not JSON: Expecting value at character 1, near "add"; write a JSON list of',
        ),
        ('[{"name": NaN}]', "broken_json", "`tools`: NaN is not JSON; write null or a number"),
        ('[{"name": "f", "name": "g"}]', "broken_json", '`tools`: the key "name" occurs twice in one object; keep one'),
        (FLAT, "bad_tools", "`tools`: is an object of 3; wanted a list of JSON schemas, or its JSON text"),
        ('"add"', "bad_tools", '`tools`: is the text "add"; wanted a list'),
        ([FLAT, "add"], "bad_tools", '`tools`: tool 2 is the text "add"; wanted a JSON schema, an object'),
        ([{}], "bad_tools", "`tools`: tool 1 is an object of 0; wanted a JSON schema"),
        ([{"name": "\ud800"}], "lone_surrogate", "`tools`: `tool 1` holds half a character"),
        (r'[{"name": "\ud800"}]', "lone_surrogate", "`tools`: `tool 1` holds half a character"),
        ([{"name": float("nan")}], "not_json", "`tools`: `tool 1` holds the number nan, which is no JSON"),
        (
            [FLAT | {"parameters": {"properties": {"a": {}, "recipe": None}}}],
            "filled_with_null",
            '`tools`: tool 1 has the parameter "recipe", which is null; Parquet fills up what other rows have; write',
        ),
    ],
)
def test_refused_tools_are_told_with_the_reason(tools: Any, reason: str, message: str):
    error = refusal({"messages": [user()], "tools": tools})
    assert message in str(error)
    assert error.reason == reason


@pytest.mark.parametrize(
    "call",
    [
        CALL,
        {"id": "c1", "index": 0, **CALL},
        {"id": None, "function": {"name": "f", "arguments": '{"a": "\\u00e9"}'}, "name": None, "arguments": None},
        {"name": "f", "arguments": {}},
        {"name": "f", "arguments": "{}", "function": None},
    ],
)
def test_calls_are_the_same_objects(call: dict):
    (_, message) = parse({"messages": [user(), assistant(None, tool_calls=[call, CALL])]}).messages
    assert json.dumps(message.fields["tool_calls"]) == json.dumps([call, CALL])


@pytest.mark.parametrize(
    ("calls", "reason", "message"),
    [
        ("add(1)", "bad_tool_calls", '`tool_calls` is the text "add(1)"; wanted a list of calls'),
        ({"name": "f"}, "bad_tool_calls", "`tool_calls` is an object of 1; wanted a list of calls"),
        (["f"], "bad_tool_calls", 'call 1: is the text "f"; wanted {type, function: {name, arguments}} or {name, argu'),
        ([CALL, {}], "bad_tool_calls", "call 2: `name` is null, among none; wanted {type, function"),
        ([{"function": "f"}], "bad_tool_calls", 'call 1: `function` is the text "f"; wanted'),
        ([{"function": {"nam": "f"}}], "bad_tool_calls", "call 1: `name` is null, among nam; wanted"),
        ([{"name": "", "arguments": {}}], "bad_tool_calls", 'call 1: `name` is the text ""'),
        ([CALL | {"name": "f"}], "bad_tool_calls", "call 1: has `function`, and name or arguments beside it; wanted"),
        ([CALL | {"type": "custom"}], "bad_tool_calls", 'call 1: `type` is the text "custom"; only calls of type func'),
        ([CALL | {"id": 7}], "bad_tool_calls", "call 1: `id` is the number 7; wanted text"),
        (
            [{"name": "f"}],
            "bad_tool_calls",
            "call 1: `arguments` is null; wanted an object or its JSON text, {} for no",
        ),
        ([{"name": "f", "arguments": [1]}], "bad_tool_calls", "call 1: `arguments` is a list of 1; wanted"),
        ([{"name": "f", "arguments": "[1]"}], "bad_tool_calls", "call 1: `arguments` is a list of 1; wanted"),
        ([{"name": "f", "arguments": ""}], "broken_json", "call 1: `arguments`: is not JSON: Expecting value at char"),
        ([{"name": "f", "arguments": '{"a": Infinity}'}], "broken_json", "call 1: `arguments`: Infinity is not JSON"),
        ([{"name": "f", "arguments": r'{"a": "\ud800"}'}], "lone_surrogate", "call 1: `arguments` holds half a"),
        ([{"name": "f", "arguments": {"a": float("inf")}}], "not_json", "`tool_calls` holds the number inf"),
    ],
)
def test_refused_calls_are_told_with_their_number_and_the_reason(calls: Any, reason: str, message: str):
    error = refusal({"messages": [user(), assistant(None, tool_calls=calls)]})
    assert f"message 2: {message}" in str(error)
    assert error.reason == reason


def test_an_argument_that_parquet_filled_with_null_is_refused_and_one_that_is_null_itself_is_not():
    """In Parquet, all calls of a column have the arguments of all: add(a=1) becomes add(a=1, city=None)."""

    def row(arguments: Any) -> dict:
        called = assistant(None, tool_calls=[{"function": {"name": "add", "arguments": arguments}}])
        return {"messages": [user(), called, tool()], "tools": [WRAPPED]}

    for arguments in ({"a": 1}, {"a": None}, {"b": 1}, '{"city": null}'):
        assert len(parse(row(arguments)).messages) == 3
    error = refusal(row({"a": 1, "city": None}))
    assert 'a call of "add" has the argument "city", which is null and not its own; Parquet fills' in str(error)
    assert error.reason == "filled_with_null"


def test_rows_of_parquet_are_those_of_json_with_tools_as_text_or_objects(tmp_path: Path):
    """Arrow gives every message the keys of all; null ones are absent."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    rows = [
        {"messages": [user(), assistant("a", thinking="t", weight=0.5)], "tools": None},
        {
            "messages": [user(), assistant(None, tool_calls=[call]), tool(tool_call_id="c1")],
            "tools": json.dumps([FLAT]),
        },
    ]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    source = open_source(str(tmp_path / "a.parquet"))
    assert resolve_format(source) == RowFormat("messages")
    assert [parse(source[n]) for n in range(2)] == [parse(row) for row in rows]

    several = [
        {"messages": [user()], "tools": [FLAT | {"parameters": {"properties": {n: {"type": "x"}}}}]} for n in "ab"
    ]
    datasets.Dataset.from_list(several).to_parquet(tmp_path / "b.parquet")
    source = open_source(str(tmp_path / "b.parquet"))
    assert [parse(source[n]) for n in range(2)] == [parse(row) for row in several]
