"""Rows of Parquet and Arrow are those of the JSON they were made of, wherever in the file they are."""

import csv
import json
import os
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from sftron.data.formats.table import RowFormat, parse_conversation
from sftron.data.sources import RowSource, arrow, open_source
from sftron.data.types import ConversationKey, DataError
from tests.data.files import all_rows, numbered, refusal_of, write, write_rows

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}}}
CALL = {"id": "1", "function": {"name": "weather", "arguments": {"city": "Bonn"}}}
CHATS = [
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}], "tools": []},
    {
        "messages": [
            {"role": "user", "content": "Weather?", "name": "Ada"},
            {"role": "assistant", "tool_calls": [CALL, {"id": "2", "function": {"name": "time", "arguments": {}}}]},
            {"role": "tool", "content": "rain", "tool_call_id": "1"},
        ],
        "tools": [TOOL, {"type": "function", "function": {"name": "time", "parameters": {"properties": {}}}}],
    },
    {"messages": [{"role": "user", "content": "Go"}, {"role": "assistant", "content": "", "weight": 0}], "tools": []},
]


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow, "_BATCH_ROWS", 2)


def all_kinds(folder: Path, rows: list[dict[str, Any]]) -> dict[str, RowSource]:
    paths = [write_rows(folder / f"a.{ending}", rows) for ending in ("jsonl", "json", "parquet", "arrow")]
    datasets.Dataset.from_list(rows).save_to_disk(folder / "saved", num_shards=2)
    return {path: open_source(path) for path in [*paths, str(folder / "saved")]}


def conversations(source: RowSource | list[dict[str, Any]]) -> list[Any]:
    rows = [source[index] for index in range(len(source))]
    return [parse_conversation(row, RowFormat("messages"), ConversationKey(0, 0), "here") for row in rows]


def test_the_same_rows_in_any_kind_of_file_are_equal_and_the_same_conversations(tmp_path: Path) -> None:
    """Only some have tool calls, names and weights: Arrow has no absent keys. A null column or list element stays."""
    rows = [{"system": None, "tags": ["a", None], "pairs": [None, {"x": 1}]}, {"system": "s", "tags": [], "pairs": []}]
    for path, source in all_kinds(tmp_path / "chats", CHATS).items():
        assert all_rows(source) == CHATS, path
        assert conversations(source) == conversations(CHATS), path
    for path, source in all_kinds(tmp_path / "nulls", rows).items():
        assert all_rows(source) == rows, path


def test_tool_calls_in_json_text_of_csv_are_those_of_jsonl(tmp_path: Path) -> None:
    """Its columns `messages` and `conversations` hold lists in JSON text; `tools` may be JSON text anywhere."""
    path = tmp_path / "a.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["messages", "tools"])
        writer.writeheader()
        writer.writerows({name: json.dumps(value) for name, value in row.items()} for row in CHATS)
    source = open_source(str(path))
    assert [row["messages"] for row in all_rows(source)] == [row["messages"] for row in CHATS]
    assert conversations(source) == conversations(CHATS)


@pytest.mark.skipif(not hasattr(datasets, "Json"), reason="datasets stores JSON from a later version on")
def test_what_the_datasets_library_stores_as_json_keeps_its_nulls(tmp_path: Path) -> None:
    calls = [{"arguments": {"city": None, "days": 3}}, {"arguments": {"city": "Bonn"}}, {"arguments": "text"}]
    rows = [{"messages": [{"role": "assistant", "calls": [call]}]} for call in calls]
    table = datasets.Dataset.from_list(rows, on_mixed_types="use_json")
    table.to_parquet(tmp_path / "a.parquet")
    table.save_to_disk(tmp_path / "saved")
    for name in ("a.parquet", "saved"):
        assert all_rows(open_source(str(tmp_path / name))) == rows == list(table)


@pytest.mark.parametrize("row_group_size", [1, 7, 1000])
def test_any_row_of_parquet_is_found_in_any_order(tmp_path: Path, row_group_size: int) -> None:
    rows = numbered(100)
    source = open_source(write_rows(tmp_path / "a.parquet", rows, row_group_size=row_group_size))
    assert [source[index] for index in (99, 0, 50, 7, 6)] == [rows[index] for index in (99, 0, 50, 7, 6)]
    assert (len(source), source.locate(50)) == (100, f"{tmp_path}/a.parquet, row 50")
    for outside in (-1, 100):
        with pytest.raises(IndexError, match="has 100 rows, no row"):
            source[outside]


def test_both_of_arrows_formats_are_read_in_batches_of_any_size(tmp_path: Path) -> None:
    rows = numbered(20)
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.ipc.new_file(tmp_path / "file.arrow", table.schema) as writer:
        for start, size in [(0, 7), (7, 0), (7, 13)]:
            writer.write_table(table.slice(start, size))
    for path in (str(tmp_path / "file.arrow"), write_rows(tmp_path / "stream.arrow", rows, max_chunksize=3)):
        assert all_rows(open_source(path)) == rows


def test_a_saved_folder_gives_a_split_in_plain_values_whatever_format_it_was_set_to(tmp_path: Path) -> None:
    tables = {
        name: datasets.Dataset.from_list([{"name": name, "n": n} for n in range(10)]) for name in ("train", "dev")
    }
    datasets.DatasetDict(tables).with_format("torch", columns=["n"]).save_to_disk(tmp_path / "saved")
    path = str(tmp_path / "saved")
    assert all_rows(open_source(path)) == list(tables["train"])
    assert all_rows(open_source(path, "dev[-2:]")) == list(tables["dev"])[-2:]
    assert str(refusal_of(tmp_path, path, "test")) == 'saved: has no split "test", only train, dev: name one of them'
    tables["dev"].save_to_disk(tmp_path / "one")
    assert len(open_source(str(tmp_path / "one"))) == 10


# --- What is broken ---


def without_last_group(data: bytes) -> bytes:
    """Returns a Parquet file, of which the last of three row groups does not decode."""
    chunk = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(data)).metadata.row_group(2).column(1)
    start, size = chunk.dictionary_page_offset, chunk.total_compressed_size
    return data[:start] + bytes(size) + data[start + size :]


@pytest.mark.parametrize(
    ("ending", "damage"),
    [
        pytest.param("parquet", lambda data: data[:-100], id="Parquet cut off"),
        pytest.param("parquet", lambda data: b"", id="Parquet empty"),
        pytest.param("parquet", without_last_group, id="Parquet broken within"),
        pytest.param("arrow", lambda data: data[:-100], id="Arrow cut off in a batch"),
        pytest.param("arrow", lambda data: data[:-8], id="Arrow cut off between batches"),
        pytest.param("arrow", lambda data: b"", id="Arrow empty"),
    ],
)
def test_a_file_that_is_broken_is_refused_when_opened(tmp_path: Path, ending: str, damage: Any) -> None:
    options = {"row_group_size": 10, "compression": "snappy"} if ending == "parquet" else {}
    path = Path(write_rows(tmp_path / f"a.{ending}", numbered(30), **options))
    write(path, damage(path.read_bytes()))
    assert str(refusal_of(tmp_path, str(path))).startswith(f"a.{ending}: is not readable as {ending.capitalize()}: ")


def _error_of(path: str, index: int, truncate: bool) -> tuple[str, str]:
    source = open_source(path)
    if truncate:
        assert source[index] == numbered(index + 1)[index]
        os.truncate(path, 100)
    with pytest.raises(DataError) as caught:
        source[index]
    return caught.value.reason, str(caught.value)


def test_wrong_offsets_and_a_file_that_shrinks_are_errors_and_do_not_kill_the_process(tmp_path: Path) -> None:
    wrong = Path(write_rows(tmp_path / "a.arrow", [{"text": "x" * 0x1234}, {"text": "y"}]))
    offsets = b"\0\0\0\0\x34\x12\0\0\x35\x12\0\0"
    assert wrong.read_bytes().count(offsets) == 1
    wrong.write_bytes(wrong.read_bytes().replace(offsets[4:8], b"\xff\xff\xff\x10"))
    shrinking = write_rows(tmp_path / "b.arrow", numbered(2000), max_chunksize=10)
    size = Path(shrinking).stat().st_size
    with get_context("spawn").Pool(1) as pool:
        assert pool.apply_async(_error_of, [str(wrong), 0, False]).get(timeout=60)[0] == "broken_arrow"
        reason, message = pool.apply_async(_error_of, [shrinking, 1000, True]).get(timeout=60)
    assert reason == "file_changed"
    assert message.startswith(f"{shrinking}: had {size} bytes when it was opened, but has 100 now")


BROKEN_ROWS = {
    "not UTF-8": (pyarrow.array([b"fine", b"caf\xe9", b"too"]), "not_utf8"),
    "a date of the year 5,000,000": (pyarrow.array([0, 2**31 - 1, 1], pyarrow.date32()), "broken_arrow"),
    "deep JSON": (pyarrow.array(["1", "[" * 100_000, "2"], pyarrow.json_()), "broken_arrow"),
    "too large": (pyarrow.array([[1], list(range(10_000)), [2]]), "too_large"),
}


@pytest.mark.parametrize(("column", "reason"), BROKEN_ROWS.values(), ids=BROKEN_ROWS.keys())
def test_a_broken_row_is_reported_and_its_neighbors_are_read(tmp_path: Path, column: Any, reason: str) -> None:
    if reason == "not_utf8":
        column = pyarrow.Array.from_buffers(pyarrow.string(), 3, column.buffers())
    table = pyarrow.table({"n": column})
    with pyarrow.ipc.new_stream(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    limit = 10_000 if reason == "too_large" else 10**6
    source = open_source(str(tmp_path / "a.arrow"), max_row_bytes=limit)
    with pytest.raises(DataError, match=r"a\.arrow, row 1: ") as caught:
        source[1]
    assert caught.value.reason == reason
    assert source[0] != source[2]


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pyarrow.Table.from_arrays([pyarrow.array([1]), pyarrow.array([2])], ["a", "a"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert str(refusal_of(tmp_path, str(tmp_path / "a.parquet"))).startswith('a.parquet: has two columns "a"')
