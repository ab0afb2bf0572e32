"""Rows of Parquet and Arrow are those of the JSON they were made of, wherever in the file they are."""

import csv
import json
import os
import pickle
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from sftron.data.formats.detect import RowFormat, parse_conversation
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


def saved(folder: Path, rows: list[dict[str, Any]], **options: Any) -> str:
    datasets.Dataset.from_list(rows).save_to_disk(folder, **options)
    return str(folder)


def all_kinds(folder: Path, rows: list[dict[str, Any]]) -> dict[str, RowSource]:
    paths = [write_rows(folder / f"a.{ending}", rows) for ending in ("jsonl", "json", "parquet", "arrow")]
    return {path: open_source(path) for path in [*paths, saved(folder / "saved", rows, num_shards=2)]}


def test_the_same_rows_in_any_kind_of_file_are_equal_and_the_same_conversations(tmp_path: Path) -> None:
    """Only some have tool calls, names and weights: Arrow knows no absent keys, and rows have none that are null."""
    key, row_format = ConversationKey(0, 0), RowFormat("messages")
    expected = [parse_conversation(row, row_format, key, "here") for row in CHATS]
    for path, source in all_kinds(tmp_path, CHATS).items():
        assert all_rows(source) == CHATS, path
        assert [parse_conversation(row, row_format, key, "here") for row in all_rows(source)] == expected, path


def test_tool_calls_in_json_text_of_csv_are_those_of_jsonl(tmp_path: Path) -> None:
    """Its columns `messages` and `conversations` hold lists in JSON text; `tools` may be JSON text anywhere."""
    path = tmp_path / "a.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["messages", "tools"])
        writer.writeheader()
        writer.writerows({name: json.dumps(value) for name, value in row.items()} for row in CHATS)
    source, key, row_format = open_source(str(path)), ConversationKey(0, 0), RowFormat("messages")
    assert [row["messages"] for row in all_rows(source)] == [row["messages"] for row in CHATS]
    expected = [parse_conversation(row, row_format, key, "here") for row in CHATS]
    assert [parse_conversation(row, row_format, key, "here") for row in all_rows(source)] == expected


def test_a_null_column_stays_and_null_elements_of_a_list_stay(tmp_path: Path) -> None:
    rows = [{"system": None, "tags": ["a", None], "pairs": [None, {"x": 1}]}, {"system": "s", "tags": [], "pairs": []}]
    for source in all_kinds(tmp_path, rows).values():
        assert all_rows(source) == rows


def test_what_the_datasets_library_stores_as_json_keeps_its_nulls(tmp_path: Path) -> None:
    calls = [{"arguments": {"city": None, "days": 3}}, {"arguments": {"city": "Bonn"}}, {"arguments": "text"}]
    rows = [{"messages": [{"role": "assistant", "calls": [call]}]} for call in calls]
    table = datasets.Dataset.from_list(rows, on_mixed_types="use_json")
    table.to_parquet(tmp_path / "a.parquet")
    table.save_to_disk(tmp_path / "saved")
    for name in ("a.parquet", "saved"):
        assert all_rows(open_source(str(tmp_path / name))) == rows == list(table)


def test_categories_are_read_as_their_values(tmp_path: Path) -> None:
    roles = pyarrow.array(["user", "assistant", "user"]).dictionary_encode()
    nested = pyarrow.ListArray.from_arrays([0, 1, 2, 3], pyarrow.StructArray.from_arrays([roles], ["role"]))
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"source": roles, "messages": nested}), path)
    expected = [{"source": role, "messages": [{"role": role}]} for role in roles.to_pylist()]
    assert all_rows(open_source(str(path))) == expected


@pytest.mark.parametrize("row_group_size", [1, 7, 1000])
def test_any_row_of_parquet_is_found_in_any_order(tmp_path: Path, row_group_size: int) -> None:
    rows = numbered(100)
    source = open_source(write_rows(tmp_path / "a.parquet", rows, row_group_size=row_group_size))
    assert len(source) == 100
    assert [source[index] for index in (99, 0, 50, 7, 6)] == [rows[index] for index in (99, 0, 50, 7, 6)]
    assert source.locate(50) == f"{tmp_path}/a.parquet, row 50"
    for outside in (-1, 100):
        with pytest.raises(IndexError, match="has 100 rows, no row"):
            source[outside]


def test_both_of_arrows_formats_are_read_in_batches_of_any_size(tmp_path: Path) -> None:
    rows = numbered(20)
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.ipc.new_file(tmp_path / "file.arrow", table.schema) as writer:
        for start, size in [(0, 7), (7, 0), (7, 13)]:
            writer.write_table(table.slice(start, size))
    paths = [str(tmp_path / "file.arrow"), write_rows(tmp_path / "stream.arrow", rows, max_chunksize=3)]
    for path in paths:
        assert all_rows(open_source(path)) == rows


def test_the_split_of_a_saved_dict_is_chosen_and_an_unknown_one_is_reported(tmp_path: Path) -> None:
    tables = {
        name: datasets.Dataset.from_list([{"name": name, "n": n} for n in range(10)]) for name in ("train", "dev")
    }
    datasets.DatasetDict(tables).save_to_disk(tmp_path / "saved")
    path = str(tmp_path / "saved")
    assert all_rows(open_source(path)) == list(tables["train"])
    assert all_rows(open_source(path, "dev[-2:]")) == list(tables["dev"])[-2:]
    assert str(refusal_of(tmp_path, path, "test")) == 'saved: has no split "test", only train, dev: name one of them'
    tables["dev"].save_to_disk(tmp_path / "one")
    assert len(open_source(str(tmp_path / "one"))) == 10


def test_a_saved_folder_gives_all_its_columns_in_plain_values_whatever_format_it_was_set_to(tmp_path: Path) -> None:
    datasets.Dataset.from_list(numbered(3)).with_format("torch", columns=["n"]).save_to_disk(tmp_path / "saved")
    assert all_rows(open_source(str(tmp_path / "saved"))) == numbered(3)


# --- What is broken ---


def broken_parquet(path: Path) -> str:
    """The last of three row groups does not decode."""
    write_rows(path, numbered(30), row_group_size=10, compression="snappy")
    chunk = pyarrow.parquet.ParquetFile(path).metadata.row_group(2).column(1)
    data = bytearray(path.read_bytes())
    start, size = chunk.dictionary_page_offset, chunk.total_compressed_size
    data[start : start + size] = bytes(size)
    return write(path, bytes(data))


def test_a_parquet_file_that_breaks_off_is_refused_when_opened(tmp_path: Path) -> None:
    refusal = str(refusal_of(tmp_path, broken_parquet(tmp_path / "a.parquet")))
    assert refusal.startswith("a.parquet: is not readable as ")
    assert refusal.endswith("again")


BROKEN_FILES = {
    "Parquet garbage": ("a.parquet", lambda data: b"\x07" * 5000, "a.parquet: is not readable as Parquet: "),
    "Parquet cut off": ("a.parquet", lambda data: data[:-100], "a.parquet: is not readable as Parquet: "),
    "Parquet empty": ("a.parquet", lambda data: b"", "a.parquet: is not readable as Parquet: "),
    "Arrow garbage": ("a.arrow", lambda data: b"\x07" * 5000, "a.arrow: is not readable as Arrow: "),
    "Arrow cut off in a batch": ("a.arrow", lambda data: data[:-100], "a.arrow: is not readable as Arrow: "),
    "Arrow cut off between batches": ("a.arrow", lambda data: data[:-8], "a.arrow: is not readable as Arrow: "),
    "Arrow empty": ("a.arrow", lambda data: b"", "a.arrow: is not readable as Arrow: "),
}


@pytest.mark.parametrize(("name", "damage", "message"), BROKEN_FILES.values(), ids=BROKEN_FILES.keys())
def test_a_file_that_is_broken_as_a_whole_is_refused_when_opened(tmp_path: Path, name, damage, message) -> None:
    path = Path(write_rows(tmp_path / name, numbered(30)))
    write(path, damage(path.read_bytes()))
    with pytest.raises(DataError) as caught:
        open_source(str(path))
    assert str(caught.value).replace(f"{tmp_path}/", "").startswith(message)


def _reason_of(path: str) -> str:
    with pytest.raises(DataError) as caught:
        open_source(path)[0]
    return caught.value.reason


def test_wrong_offsets_in_an_arrow_file_are_an_error_and_do_not_kill_the_process(tmp_path: Path) -> None:
    path = Path(write_rows(tmp_path / "a.arrow", [{"text": "x" * 0x1234}, {"text": "y"}]))
    offsets = b"\0\0\0\0\x34\x12\0\0\x35\x12\0\0"
    assert path.read_bytes().count(offsets) == 1
    path.write_bytes(path.read_bytes().replace(offsets[4:8], b"\xff\xff\xff\x10"))
    with get_context("spawn").Pool(1) as pool:
        assert pool.apply_async(_reason_of, [str(path)]).get(timeout=60) == "broken_arrow"


def test_text_that_is_not_utf8_is_reported_and_its_neighbours_are_read(tmp_path: Path) -> None:
    data = pyarrow.array([b"fine", b"caf\xe9", b"too"])
    text = pyarrow.Array.from_buffers(pyarrow.string(), 3, data.buffers())
    pyarrow.parquet.write_table(pyarrow.table({"text": text}), tmp_path / "a.parquet")
    source = open_source(str(tmp_path / "a.parquet"))
    with pytest.raises(DataError, match=r"a\.parquet, row 1: cannot be read: .*UTF8") as caught:
        source[1]
    assert caught.value.reason == "not_utf8"
    assert (source[0], source[2]) == ({"text": "fine"}, {"text": "too"})


def test_a_row_that_is_too_large_is_reported_and_its_neighbours_are_read(tmp_path: Path) -> None:
    rows = [{"text": "a", "ids": [1]}, {"text": "b", "ids": list(range(1000))}, {"text": "c", "ids": [2]}]
    for ending in ("parquet", "arrow"):
        source = open_source(write_rows(tmp_path / f"a.{ending}", rows), max_row_bytes=1000)
        with pytest.raises(
            DataError, match=rf"a\.{ending}, row 1: is a row of \d+ bytes, above data\.max_row_bytes 1000; split"
        ) as caught:
            source[1]
        assert caught.value.reason == "too_large"
        assert (source[0], source[2]) == (rows[0], rows[2])


def _error_after_truncation(path: str) -> str:
    source = open_source(path)
    assert source[1999] == numbered(2000)[1999]
    os.truncate(path, 100)
    with pytest.raises(DataError) as caught:
        source[1000]
    return f"{caught.value.reason}: {caught.value}"


def test_an_arrow_file_that_shrinks_is_an_error_and_does_not_kill_the_process(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.arrow", numbered(2000), max_chunksize=10)
    size = Path(path).stat().st_size
    with get_context("spawn").Pool(1) as pool:
        error = pool.apply_async(_error_after_truncation, [path]).get(timeout=60)
    assert error.startswith(f"file_changed: {path}, row 1000: {path} has 100 bytes, and had {size} when it was opened")


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pyarrow.Table.from_arrays([pyarrow.array([1]), pyarrow.array([2])], ["a", "a"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert (
        str(refusal_of(tmp_path, str(tmp_path / "a.parquet"))) == 'a.parquet: has two columns "a"; rename or remove one'
    )


def test_a_saved_folder_without_its_description_is_reported(tmp_path: Path) -> None:
    path = saved(tmp_path / "saved", numbered(3))
    write(tmp_path / "saved" / "state.json", "{}")
    assert str(refusal_of(tmp_path, path)).startswith("saved/state.json: is not what the datasets library writes")


def test_a_decoded_file_works_after_pickling_and_is_not_pickled_itself(tmp_path: Path) -> None:
    source = open_source(write_rows(tmp_path / "a.parquet", numbered(5000)))
    assert source[4999] == numbered(5000)[4999]
    data = pickle.dumps(source)
    assert len(data) < 2000
    assert pickle.loads(data)[4999] == numbered(5000)[4999]


def test_a_value_that_python_cannot_hold_is_a_bad_row_and_its_neighbours_are_read(tmp_path: Path) -> None:
    days = pyarrow.array([0, 2**31 - 1, 1], pyarrow.date32())
    deep = pyarrow.array(["1", "[" * 100_000, "2"], pyarrow.json_())
    for name, column, message in (("days", days, "cannot be read"), ("deep", deep, "cannot be read")):
        table = pyarrow.table({"n": column})
        with pyarrow.ipc.new_stream(tmp_path / f"{name}.arrow", table.schema) as writer:
            writer.write_table(table)
        source = open_source(str(tmp_path / f"{name}.arrow"))
        with pytest.raises(DataError, match=rf"{name}\.arrow, row 1: {message}") as caught:
            source[1]
        assert caught.value.reason == "broken_arrow"
        assert source[0] != source[2]
