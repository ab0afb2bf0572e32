"""Rows come back exactly as the file holds them, or a message says where and why not."""

from __future__ import annotations

import json
import pickle
import re
from multiprocessing import get_context
from pathlib import Path

import datasets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sftron.data import json_files
from sftron.data.sources import RowSource, open_source
from sftron.data.types import DataError

ROWS = [{"n": 0, "text": 'quote " bracket ] brace } comma , \\'}, {"n": 1, "text": "é\u2028\n"}, {"n": 2, "text": ""}]


def write(path: Path, content: str | bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def lines_of(rows: list[dict]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def all_rows(source: RowSource) -> list:
    return [source[index] for index in range(len(source))]


def refusal_of(tmp_path: Path, *args, **kwargs) -> DataError:
    """What opening, and then reading every row, is refused with."""
    with pytest.raises(DataError) as caught:
        all_rows(open_source(*args, **kwargs))
    caught.value.args = (str(caught.value).replace(f"{tmp_path}/", ""),)
    return caught.value


# --- Rows and their lines ---

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
@pytest.mark.parametrize(("content", "lines"), JSONL.values(), ids=JSONL.keys())
def test_jsonl_rows_have_their_true_line_numbers(tmp_path, monkeypatch, content, lines, scan_bytes):
    monkeypatch.setattr(json_files, "_SCAN_BYTES", scan_bytes)
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
@pytest.mark.parametrize(("content", "lines"), ARRAYS.values(), ids=ARRAYS.keys())
def test_array_rows_are_located_at_the_line_they_begin_on(tmp_path, monkeypatch, content, lines, scan_bytes):
    monkeypatch.setattr(json_files, "_SCAN_BYTES", scan_bytes)
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
)
def test_any_rows_come_back_equal_from_both_kinds_of_file(tmp_path_factory, rows, indent, ascii_only, scan_bytes):
    folder = tmp_path_factory.getbasetemp()
    lines = "\n".join(json.dumps(row, ensure_ascii=ascii_only) for row in rows)
    array = json.dumps(rows, ensure_ascii=ascii_only, indent=indent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_files, "_SCAN_BYTES", scan_bytes)
        assert all_rows(open_source(write(folder / "fuzz.jsonl", lines))) == rows
        assert all_rows(open_source(write(folder / "fuzz.json", array))) == rows


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
        "is nested too deeply, or holds a number of thousands of digits",
    ),
    "absurd number": (
        '{"a": ' + "9" * 5000 + "}",
        "broken_json",
        "is nested too deeply, or holds a number of thousands of digits",
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
    "too large": ('{"a": "' + "x" * 300_000 + '"}', "too_large", "is a row of 300010 bytes, above 250000"),
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


def test_a_file_that_shrinks_after_opening_is_an_error_and_not_a_short_row(tmp_path):
    path = write(tmp_path / "a.jsonl", lines_of(ROWS))
    source = open_source(path)
    write(Path(path), "{}")
    with pytest.raises(OSError, match="has become shorter than"):
        source[2]


# --- Which files ---


def test_patterns_and_folders_give_their_files_in_sorted_order(tmp_path):
    for name in ("b", "a", "c"):
        write(tmp_path / "set" / f"{name}.jsonl", f'\n{{"name": "{name}"}}\n{{"name": "{name}2"}}\n')
    write(tmp_path / "set" / "notes.txt", "not data")
    expected = [{"name": name} for name in ("a", "a2", "b", "b2", "c", "c2")]
    for path in (tmp_path / "set", tmp_path / "set" / "*.jsonl", tmp_path / "**" / "?.jsonl"):
        source = open_source(str(path))
        assert all_rows(source) == expected
        assert source.locate(3) == f"{tmp_path}/set/b.jsonl:3"
        for outside in (-1, 6):
            with pytest.raises(IndexError):
                source[outside]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("set/*.parquet", "set/*.parquet: no file matches this pattern; set/ has chats.jsonl, notes.txt"),
        (
            "set/chat.jsonl",
            "set/chat.jsonl: no such file or folder, nor a Hub id (owner/name); set/ has chats.jsonl ...",
        ),
        ("set/notes.txt", "set/notes.txt: a file with the ending .txt; wanted .jsonl, .json, .parquet: convert"),
        ("plain", "plain: no such file or folder, nor a Hub id (owner/name); ./ has"),
        ("empty", "empty: no .jsonl, .json, .parquet file in this folder; empty/ is empty"),
        ("mixed", "mixed: files of several kinds (.json, .jsonl) in this folder; name one kind, mixed/*.json"),
        ("blank.jsonl", "blank.jsonl: holds no rows; name a file that does"),
        ("broken.parquet", "broken.parquet: is not readable as Parquet: "),
        ("owner/name", 'owner/name: no local file or folder, and split "train" could not be loaded from the Hub: '),
    ],
)
def test_a_path_without_rows_is_told_with_what_is_there(tmp_path, monkeypatch, path, message):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "set" / "chats.jsonl", lines_of(ROWS))
    write(tmp_path / "set" / "notes.txt", "x")
    write(tmp_path / "mixed" / "a.jsonl", lines_of(ROWS))
    write(tmp_path / "mixed" / "a.json", "[]")
    write(tmp_path / "blank.jsonl", "\n\n")
    write(tmp_path / "broken.parquet", "PAR1")
    (tmp_path / "empty").mkdir()
    assert str(refusal_of(tmp_path, path)).startswith(message)


def test_a_split_of_a_file_is_refused_with_the_remedy(tmp_path):
    path = write(tmp_path / "a.jsonl", lines_of(ROWS))
    expected = 'a.jsonl: split "test" is for data sets of the Hub; files hold one split each: remove split'
    assert str(refusal_of(tmp_path, path, "test")).startswith(expected)


# --- Arrow ---


def test_parquet_rows_come_back_and_absent_fields_are_none(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    path = str(tmp_path / "a.parquet")
    datasets.Dataset.from_list([{"m": [{"role": "user", "name": "x"}]}, {"m": [{"role": "user"}]}]).to_parquet(path)
    source = open_source(path)
    assert all_rows(source) == [{"m": [{"role": "user", "name": "x"}]}, {"m": [{"role": "user", "name": None}]}]
    assert source.locate(1) == f"{path}, row 1"
    with pytest.raises(DataError, match=re.escape(f"{path}, row 0: is a row of 5 characters, above 4")):
        open_source(path, max_row_bytes=4)[0]


def test_a_hub_id_is_loaded_by_its_split_and_its_fingerprint_follows_the_content(monkeypatch):
    def load(path: str, split: str) -> datasets.Dataset:
        return datasets.Dataset.from_list([{"text": f"{path} {split} {n}"} for n in range(3)])

    monkeypatch.setattr(datasets, "load_dataset", load)
    source = open_source("owner/name", "test")
    assert source[2] == {"text": "owner/name test 2"}
    assert source.locate(2) == "owner/name (test), row 2"
    assert source.fingerprint == open_source("owner/name", "test").fingerprint
    assert source.fingerprint != open_source("owner/name").fingerprint


# --- Fingerprints and processes ---


def test_a_fingerprint_follows_the_content_and_not_the_name(tmp_path):
    one = open_source(write(tmp_path / "a.jsonl", lines_of(ROWS))).fingerprint
    assert open_source(write(tmp_path / "b.jsonl", lines_of(ROWS))).fingerprint == one
    assert open_source(write(tmp_path / "b.jsonl", lines_of(ROWS[:2]))).fingerprint != one
    assert open_source(write(tmp_path / "b.jsonl", lines_of(ROWS).replace("0", "9"))).fingerprint != one


def test_a_large_files_fingerprint_follows_its_size_first_and_last_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(json_files, "_UP_TO_WHOLE", 100)
    monkeypatch.setattr(json_files, "_BLOCK_BYTES", 4)
    path = tmp_path / "large"
    content = bytearray(np.arange(1000).astype(np.uint8).tobytes())
    prints = set()
    for change in (None, 0, 999):
        changed = content.copy()
        if change is not None:
            changed[change] ^= 1
        write(path, bytes(changed))
        prints.add(json_files.fingerprint_of_file(path))
    write(path, bytes(content) + b"x")
    prints.add(json_files.fingerprint_of_file(path))
    assert len(prints) == 4


def _read_in_worker(source: RowSource) -> list:
    return all_rows(source)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "*.jsonl"])
def test_a_source_works_after_pickling_and_in_a_forked_process(tmp_path, name):
    write(tmp_path / "a.jsonl", lines_of(ROWS))
    write(tmp_path / "b.jsonl", lines_of(ROWS))
    write(tmp_path / "a.json", json.dumps(ROWS))
    source = open_source(str(tmp_path / name))
    expected = all_rows(source)  # the file is open by now
    assert all_rows(pickle.loads(pickle.dumps(source))) == expected
    with get_context("fork").Pool(2) as pool:
        assert pool.map(_read_in_worker, [source, source]) == [expected, expected]
    assert all_rows(source) == expected


def test_a_data_error_keeps_its_reason_across_processes():
    error = pickle.loads(pickle.dumps(DataError("a.jsonl:3: broken", reason="broken_json")))
    assert (str(error), error.reason) == ("a.jsonl:3: broken", "broken_json")
