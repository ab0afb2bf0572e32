"""Nulls with which Arrow fills up objects are removed on every way by which rows come in."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import datasets
import pytest

from sftron.data.sources import RowList, RowSource, open_source
from sftron.data.types import DataError
from tests.data.rows import assistant, parse, tool, user


def schema(**parameters: Any) -> dict:
    return {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": parameters}}}


SCHEMAS = [
    {"type": "string", "enum": ["A"]},
    {"type": "string", "pattern": "x"},
    {"type": "array", "items": {"type": "string", "enum": ["B"]}},
    {"type": "array", "items": {"type": "object", "properties": {"a": {"type": "string"}}}},
    {"type": "object", "additionalProperties": {"type": "string"}},
    {"type": "object", "properties": {"a": {"type": "string", "minLength": 1}}, "required": ["a"]},
    {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": {"type": "number"}},
]
CHAT = [user(), assistant()]
CALLED = [
    [user(), assistant(None, tool_calls=[{"function": {"name": "f", "arguments": arguments}}]), tool()]
    for arguments in ({"p": {"a": "x"}}, {"p": {"b": "y", "c": [{"d": 1}, {"e": 2}]}}, {"q": "z"})
]
ROWS = {
    "schemas": [{"messages": CHAT, "tools": [schema(p=each)]} for each in SCHEMAS],
    "arguments": [{"messages": messages} for messages in CALLED],
    "keys": [{"messages": [user(), assistant(**more)]} for more in ({}, {"name": "n"}, {"meta": {"x": {"y": 1}}})],
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
def test_rows_are_the_same_conversations_on_every_way(tmp_path: Path, rows: list[dict]) -> None:
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(tmp_path / "a.parquet")
    table.save_to_disk(tmp_path / "saved")
    expected = [parse(row) for row in rows]
    ways: dict[str, RowSource] = {
        "Parquet": open_source(str(tmp_path / "a.parquet")),
        "a saved folder": open_source(str(tmp_path / "saved")),
        "a Dataset": RowList(table),
        "a Dataset with a format": RowList(table.with_format("numpy")),
        "a Dataset in another order": RowList(table.select(range(len(rows))[::-1]).select(range(len(rows))[::-1])),
        "another process": pickle.loads(pickle.dumps(RowList(table))),
    }
    for way, source in ways.items():
        assert [parse(source[number]) for number in range(len(source))] == expected, way
    assert any(json.dumps(row) != json.dumps(given) for row, given in zip(table, rows, strict=True))


def test_schemas_lose_their_nulls_also_where_they_are_spelled_out(tmp_path: Path) -> None:
    """As the library writes them to JSON, or gives them as a list; a null that a schema may have stays."""
    table = datasets.Dataset.from_list(ROWS["schemas"][:3])
    table.to_json(tmp_path / "a.jsonl")
    for source in (open_source(str(tmp_path / "a.jsonl")), RowList(list(table)), RowList(table.to_list())):
        assert [parse(source[number]) for number in range(3)] == [parse(row) for row in ROWS["schemas"][:3]]
    own = schema(p={"type": ["string", "null"], "default": None, "enum": ["A", None], "examples": [None]})
    assert parse({"messages": CHAT, "tools": [own]}).tools == (own,)
    assert parse({"messages": CHAT, "tools": [schema(enum={"type": "string", "items": None})]}).tools == (
        schema(enum={"type": "string"}),
    )


@pytest.mark.parametrize("deep", [{"a": None, "b": 1}, {"b": None}, [{"b": None}]])
def test_a_null_argument_or_parameter_below_the_top_is_refused_unless_it_is_declared(deep: Any) -> None:
    inner = {"type": "object", "properties": {"a": {"type": "string"}}}
    tools = [schema(p={"type": "array", "items": inner} if isinstance(deep, list) else inner)]
    call = {"function": {"name": "f", "arguments": {"p": deep}}}
    row = {"messages": [user(), assistant(None, tool_calls=[call]), tool()], "tools": tools}
    if deep == {"a": None, "b": 1}:
        assert parse(row).messages[1].fields["tool_calls"] == [call]
        return
    with pytest.raises(DataError, match='null argument "b", which the tool does not declare'):
        parse(row)
    with pytest.raises(DataError, match='parameter "b", which is null'):
        parse({"messages": CHAT, "tools": [schema(p={"type": "object", "properties": {"b": None}})]})
