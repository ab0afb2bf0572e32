"""Tools and calls reach the template as the data has them, or are refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from sftron.data.formats.detect import resolve_format
from sftron.data.formats.table import RowFormat
from sftron.data.sources import open_source
from sftron.data.types import DataError
from tests.data.rows import CALL, assistant, parse, tool, user

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer", "default": None}}, "required": ["a"]}
FLAT = {"name": "add", "description": "adds", "parameters": PARAMETERS}
WRAPPED = {"type": "function", "function": FLAT}


@pytest.mark.parametrize("tools", [[FLAT], [WRAPPED], [FLAT, WRAPPED, {"type": "code_interpreter"}]])
def test_tools_are_the_same_objects_in_the_same_order_given_as_a_list_or_as_its_text(tools: list[dict]):
    for given in (tools, json.dumps(tools), json.dumps(tools, indent=2)):
        conversation = parse({"messages": [user()], "tools": given})
        assert conversation.tools == tuple(tools)
        assert [json.dumps(tool) for tool in conversation.tools] == [json.dumps(tool) for tool in tools]


@pytest.mark.parametrize("tools", [None, [], {}, "", " ", "[]", " [] ", "null", "{}", '""'])
def test_empty_tools_are_no_tools(tools: Any):
    assert parse({"messages": [user()], "tools": tools, "functions": tools}).tools == ()


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


def test_an_argument_that_parquet_filled_with_null_is_refused_and_one_that_is_null_itself_is_not():
    """In Parquet, all calls of a column have the arguments of all: add(a=1) becomes add(a=1, city=None)."""

    def row(arguments: Any) -> dict:
        called = assistant(None, tool_calls=[{"function": {"name": "add", "arguments": arguments}}])
        return {"messages": [user(), called, tool()], "tools": [WRAPPED]}

    for arguments in ({"a": 1}, {"a": None}, {"b": 1}, '{"city": null}'):
        assert len(parse(row(arguments)).messages) == 3
    with pytest.raises(
        DataError, match='a call of "add" has the null argument "city", which the tool does not declare'
    ) as caught:
        parse(row({"a": 1, "city": None}))
    assert caught.value.reason == "filled_with_null"


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
