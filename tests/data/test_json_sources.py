"""Rows of JSON files come back exactly as the file holds them, or a message says where and why not."""

import json
import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sftron.data import indexed_file, json_sources
from sftron.data.sources import open_source
from sftron.data.types import DataError
from tests.data.files import ROWS, all_rows, lines_of, refusal_of, write

FIRST, SECOND = '{"n": 1}', '{"n": 2}'
JSONL = {
    "plain": (f"{FIRST}\n{SECOND}\n", [1, 2]),
    "no final newline": (f"{FIRST}\n{SECOND}", [1, 2]),
    "CRLF": (f"{FIRST}\r\n{SECOND}\r\n", [1, 2]),
    "byte order mark": (f"\ufeff{FIRST}\n{SECOND}\n", [1, 2]),
    "blank lines": (f"\n \n{FIRST}\n\r\n\t\n\n{SECOND}\n\n  ", [3, 7]),
    "byte order mark before a blank line": (f"\ufeff\n{FIRST}\n{SECOND}", [2, 3]),
    "indented": (f"  {FIRST}\n\t{SECOND}  \n", [1, 2]),
}


@pytest.mark.parametrize("scan_bytes", [1, 2, 3, 7, 1 << 20])
@pytest.mark.parametrize("entry_bytes", [1, 5, 1 << 20])
@pytest.mark.parametrize(("content", "lines"), JSONL.values(), ids=JSONL.keys())
def test_jsonl_rows_have_their_true_line_numbers(tmp_path, monkeypatch, content, lines, scan_bytes, entry_bytes):
    monkeypatch.setattr(indexed_file, "SCAN_BYTES", scan_bytes)
    monkeypatch.setattr(json_sources, "_entry_bytes", lambda _: entry_bytes)
    source = open_source(write(tmp_path / "a.jsonl", content))
    assert all_rows(source) == [{"n": 1}, {"n": 2}]
    assert [source.locate(index) for index in range(2)] == [f"{tmp_path}/a.jsonl:{line}" for line in lines]


ARRAYS = {
    "compact": (f"[{FIRST},{SECOND}]", [1, 1]),
    "one row a line": (f"[\n{FIRST},\n{SECOND}\n]\n", [2, 3]),
    "comma first": (f"[{FIRST}\n, {SECOND}]", [1, 2]),
    "spread": (f"\n[\n\n{FIRST}\n\n,\n\n{SECOND}\n]\n\n", [4, 8]),
    "byte order mark": (f"\ufeff[{FIRST},\n{SECOND}]", [1, 2]),
}


@pytest.mark.parametrize("scan_bytes", [1, 2, 3, 7, 1 << 20])
@pytest.mark.parametrize("entry_bytes", [1, 5, 1 << 20])
@pytest.mark.parametrize(("content", "lines"), ARRAYS.values(), ids=ARRAYS.keys())
def test_array_rows_are_located_at_the_line_they_begin_on(
    tmp_path, monkeypatch, content, lines, scan_bytes, entry_bytes
):
    monkeypatch.setattr(indexed_file, "SCAN_BYTES", scan_bytes)
    monkeypatch.setattr(json_sources, "_entry_bytes", lambda _: entry_bytes)
    source = open_source(write(tmp_path / "a.json", content))
    assert all_rows(source) == [{"n": 1}, {"n": 2}]
    assert [source.locate(index) for index in range(2)] == [f"{tmp_path}/a.json:{line}" for line in lines]


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='"\\[]{},:\n\u2028aé', max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(alphabet='"\\]a', max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(deadline=None)  # it writes files
@given(
    rows=st.lists(st.dictionaries(st.text(max_size=3), JSON_VALUES, max_size=3), min_size=1, max_size=5),
    indent=st.sampled_from([None, 0, 2]),
    ascii_only=st.booleans(),
    scan_bytes=st.sampled_from([1, 2, 3, 5, 64]),
    entry_bytes=st.sampled_from([1, 7, 64, 1 << 14]),
)
def test_any_rows_come_back_equal_from_both_kinds_of_file(
    tmp_path_factory, rows, indent, ascii_only, scan_bytes, entry_bytes
):
    folder = tmp_path_factory.getbasetemp()
    lines = "\n".join(json.dumps(row, ensure_ascii=ascii_only) for row in rows)
    array = json.dumps(rows, ensure_ascii=ascii_only, indent=indent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexed_file, "SCAN_BYTES", scan_bytes)
        patch.setattr(json_sources, "_entry_bytes", lambda _: entry_bytes)
        assert all_rows(open_source(write(folder / "fuzz.jsonl", lines))) == rows
        assert all_rows(open_source(write(folder / "fuzz.json", array))) == rows


@pytest.mark.parametrize("num_rows", [100_000, 400_000])
def test_what_is_kept_of_a_file_does_not_grow_with_its_number_of_rows(tmp_path, num_rows):
    """Pickled, since that is all of it: 24 bytes a row would be 9.6 MB."""
    for name, row in [("a.jsonl", '{"n": 1}\n'), ("a.json", '{"n": 1},\n')]:
        rows = (row * num_rows).rstrip(",\n")
        source = open_source(write(tmp_path / name, f"[{rows}]" if name == "a.json" else rows))
        assert (len(source), source.locate(num_rows - 1)) == (num_rows, f"{tmp_path}/{name}:{num_rows}")
        assert len(pickle.dumps(source)) < 2**16 * 40 + 2000


def test_a_short_row_is_found_without_reading_its_long_neighbours(tmp_path, monkeypatch):
    monkeypatch.setattr(json_sources, "_entry_bytes", lambda _: 2**14)
    long = json.dumps({"text": "x" * 100_000})
    source = open_source(write(tmp_path / "a.jsonl", f"{FIRST}\n{SECOND}\n{long}\n{FIRST}\n{SECOND}\n"))
    num_read = []
    read = indexed_file.IndexedFile.read
    monkeypatch.setattr(
        indexed_file.IndexedFile,
        "read",
        lambda self, start, end: num_read.append(end - start) or read(self, start, end),
    )
    assert [source[index]["n"] for index in (1, 0, 4, 3)] == [2, 1, 2, 1]
    assert 0 < sum(num_read) < 200
    assert len(source[2]["text"]) == 100_000


def test_a_json_file_of_one_object_a_line_is_read_as_jsonl(tmp_path):
    assert all_rows(open_source(write(tmp_path / "a.json", lines_of(ROWS)))) == ROWS


def test_an_index_outside_the_rows_is_an_index_error(tmp_path):
    source = open_source(write(tmp_path / "a.jsonl", lines_of(ROWS)))
    for index in (-1, 3):
        with pytest.raises(IndexError, match="has 3 rows, no row"):
            source[index]
        with pytest.raises(IndexError, match="has 3 rows, no row"):
            source.locate(index)


# --- Broken rows ---

BROKEN_ROWS = {
    "cut off": ('{"a": 1', "broken_json", "is not JSON: Expecting ',' delimiter at character 8"),
    "single quotes": ("{'a': 1}", "broken_json", "Expecting property name enclosed in double quotes at character 2"),
    "two objects": ('{"a": 1} {"b": 2}', "broken_json", "Extra data at character 10"),
    "raw control character": ('{"a": "\t"}', "broken_json", "Invalid control character at character 8"),
    "NaN": ('{"a": NaN}', "broken_json", "NaN is not JSON; write null or a number"),
    "infinity": ('{"a": [-Infinity]}', "broken_json", "-Infinity is not JSON; write null or a number"),
    "a key twice": ('{"a": 1, "a": 2}', "broken_json", 'the key "a" occurs twice in one object; keep one'),
    "an inner key twice": ('{"m": [{"b": 1, "b": 1}]}', "broken_json", 'the key "b" occurs twice'),
    "absurd nesting": (
        '{"a": ' + "[" * 200_000,
        "broken_json",
        "is nested deeper than 256 levels, or holds a number of thousands of digits",
    ),
    "absurd number": (
        '{"a": ' + "9" * 5000 + "}",
        "broken_json",
        "is nested deeper than 256 levels, or holds a number of thousands of digits",
    ),
    "a list": (
        '[{"a": 1}]',
        "not_an_object",
        "wanted an object such as {...} (a list of rows belongs in a .json file)",
    ),
    "a text": ('"hello"', "not_an_object", 'found ""hello""; wanted an object'),
    "null": ("null", "not_an_object", 'found "null"; wanted an object'),
    "Latin-1": (
        b'{"a": "caf\xe9"}',
        "not_utf8",
        r'byte 11 is not UTF-8, in "{"a": "caf\xe9"}": save the file as UTF-8',
    ),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "not_utf8", "byte 1 is not UTF-8"),
    "half a surrogate pair in UTF-8": (b'{"a": "\xed\xa0\x80"}', "not_utf8", "is not UTF-8"),
    "too large": (
        '{"a": "' + "x" * 300_000 + '"}',
        "too_large",
        "is a row of 300009 bytes, above data.max_row_bytes 250000",
    ),
}


@pytest.mark.parametrize(("row", "reason", "message"), BROKEN_ROWS.values(), ids=BROKEN_ROWS.keys())
def test_a_broken_row_is_told_with_file_and_line_and_its_neighbours_are_read(tmp_path, row, reason, message):
    data = row if isinstance(row, bytes) else row.encode()
    path = write(tmp_path / "a.jsonl", b'{"n": 1}\n\n' + data + b'\n{"n": 2}\n')
    source = open_source(path, max_row_bytes=250_000)
    with pytest.raises(DataError) as caught:
        source[1]
    assert str(caught.value).startswith(f"{path}:3: ")
    assert message in str(caught.value)
    assert len(str(caught.value)) < len(path) + 250
    assert str(caught.value).isprintable()
    assert caught.value.reason == reason
    assert (source[0], source[2]) == ({"n": 1}, {"n": 2})


def test_a_broken_element_of_an_array_is_told_with_the_line_it_begins_on(tmp_path):
    source = open_source(write(tmp_path / "a.json", '[\n{"n": 1},\n{"a": NaN},\n5,\n{"n": 2} {"n": 3}]'))
    reasons = []
    for index, line in [(1, 3), (2, 3), (3, 5)]:
        with pytest.raises(DataError, match=rf"a\.json:{line}: ") as caught:
            source[index]
        reasons.append(caught.value.reason)
    assert reasons == ["broken_json", "not_an_object", "broken_json"]
    assert source[0] == {"n": 1}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"a": 1},\n{"b": "x', "a.json:2: the list is not closed after this line; the file may be cut off"),
        ('[{"a": 1},]', "a.json:1: a comma without a row on either side; remove the comma"),
        ('[{"a": 1},\n,{"a": 2}]', "a.json:1: a comma without a row on either side; remove the comma"),
        ('[{"a": 1}]\n[{"a": 2}]', "a.json:1: more follows the end of the list; keep one list in the file"),
        ('[{"a": 1}}', "a.json:1: the list is closed by }; wanted ]"),
        ("[]", "a.json: holds no rows; name a file that does"),
        ("[ \n ]", "a.json: holds no rows; name a file that does"),
        ("", "a.json: holds no rows; name a file that does"),
        ('{"rows": [\n{"a": 1}\n]}', "a.json:1: is not JSON: Expecting value at character 11, near"),
    ],
)
def test_a_file_that_is_no_list_is_refused(tmp_path, content, message):
    assert str(refusal_of(tmp_path, write(tmp_path / "a.json", content))).startswith(message)


def test_a_file_that_shrinks_after_opening_is_an_error_and_not_a_short_row(tmp_path, monkeypatch):
    monkeypatch.setattr(json_sources, "_entry_bytes", lambda _: 1000)
    for read_before in (False, True):
        path = write(tmp_path / "a.jsonl", lines_of(ROWS))
        source, size = open_source(path), Path(path).stat().st_size
        if read_before:
            source[1]
        write(Path(path), "{}")
        with pytest.raises(DataError, match=f"has 2 bytes, and had {size} when it was opened") as caught:
            source[2]
        assert caught.value.reason == "file_changed"
        assert str(caught.value).startswith(f"{path}:3: " if read_before else f"{path}, row 2: ")
