"""Rows of JSON text come back exactly as the file holds them, or a message gives the place and the reason."""

import json
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sftron.data.sources import EndOfStream, jsonl, open_source, open_stream
from sftron.data.types import DataError
from tests.conftest import ROOT
from tests.data.files import ROWS, all_rows, lines_of, numbered, packed, refusal_of, write, write_rows

FIRST, SECOND = '{"n": 1}', '{"n": 2}'
JSONL = {
    "no final newline": (f"{FIRST}\n{SECOND}", [1, 2]),
    "CRLF": (f"{FIRST}\r\n{SECOND}\r\n", [1, 2]),
    "blank lines": (f"\n \n{FIRST}\n\r\n\t\n\n{SECOND}\n\n  ", [3, 7]),
    "byte order mark before a blank line": (f"\ufeff\n{FIRST}\n{SECOND}", [2, 3]),
    "indented": (f"\ufeff  {FIRST}\n\t{SECOND}  \n", [1, 2]),
}


@pytest.mark.parametrize("scan_bytes", [1, 3, 1 << 20])
@pytest.mark.parametrize(("content", "lines"), JSONL.values(), ids=JSONL.keys())
def test_rows_have_their_true_line_numbers(tmp_path, monkeypatch, content, lines, scan_bytes):
    monkeypatch.setattr(jsonl, "_SCAN_BYTES", scan_bytes)
    for name in ("a.jsonl", "a.json", "a.jsonl.zst"):
        path = write(tmp_path / name, packed(content.encode(), Path(name).suffix))
        source = open_source(path)
        assert all_rows(source) == [{"n": 1}, {"n": 2}]
        assert [source.locate(index) for index in range(2)] == [f"{path}:{line}" for line in lines]
        for outside in (-1, 2):
            with pytest.raises(IndexError, match="has 2 rows, no row"):
                source[outside]


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
def test_any_rows_come_back_equal_from_lines_and_from_a_list(tmp_path_factory, rows, indent, ascii_only, scan_bytes):
    folder = tmp_path_factory.getbasetemp()
    lines = "\n".join(json.dumps(row, ensure_ascii=ascii_only) for row in rows)
    array = json.dumps(rows, ensure_ascii=ascii_only, indent=indent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonl, "_SCAN_BYTES", scan_bytes)
        assert all_rows(open_source(write(folder / "fuzz.jsonl", lines))) == rows
        assert all_rows(open_source(write(folder / "fuzz.json", "\ufeff \n" + array))) == rows


def test_what_is_kept_of_a_file_is_eight_bytes_a_line(tmp_path):
    source = open_source(write(tmp_path / "a.jsonl", '{"n": 1}\n' * 100_000))
    assert (len(source), source.locate(99_999)) == (100_000, f"{tmp_path}/a.jsonl:100000")
    assert len(pickle.dumps(source)) < 8 * 100_000 + 2000


def test_a_file_that_shrinks_after_opening_is_an_error_and_not_a_short_row(tmp_path):
    path = write(tmp_path / "a.jsonl", lines_of(ROWS))
    source, size = open_source(path), Path(path).stat().st_size
    write(Path(path), "{}")
    with pytest.raises(DataError, match=rf"a\.jsonl: had {size} bytes when it was opened, but has 2 now") as caught:
        source[2]
    assert caught.value.reason == "file_changed"


# --- Long rows ---


@given(
    lines=st.lists(st.text('{}"1 \t', max_size=12), max_size=8),
    ends_in_newline=st.booleans(),
    max_row_bytes=st.integers(1, 12),
)
def test_the_same_lines_are_rows_and_too_large_whether_indexed_or_streamed(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], ends_in_newline: bool, max_row_bytes: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_text("{}\n" + "\n".join(lines) + "\n" * ends_in_newline)
    found: list[list[str]] = []
    for open_rows in (open_source, open_stream):
        read, outcomes = open_rows(str(path), max_row_bytes=max_row_bytes), []
        try:
            while True:
                try:
                    outcomes.append(json.dumps(read[len(outcomes)]))
                except DataError as error:
                    outcomes.append(f"{error.reason} {error}")
        except (EndOfStream, IndexError):
            found.append(outcomes)
    assert found[0] == found[1]
    sizes = [len(line) for line in lines]
    assert sum("too_large" in each for each in found[0]) == sum(size > max_row_bytes for size in [2, *sizes])


MEASURE = """
import resource, sys
from sftron.data.sources import open_source, open_stream
from sftron.data.types import DataError
import pyarrow

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[1:]:
    for open_rows in open_source, open_stream:
        source = open_rows(path)
        assert [source[0], source[2]] == [{"n": 1}] * 2
        try:
            source[1]
        except DataError as error:
            print(error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def test_a_line_of_hundreds_of_megabytes_is_reported_in_a_hundred_of_memory(tmp_path: Path) -> None:
    num_bytes, good = 300 * 2**20, b'{"n": 1}\n'
    line, archive = tmp_path / "a.jsonl", tmp_path / "a.jsonl.zst"
    with line.open("wb") as file:
        file.write(good)
        file.seek(num_bytes, 1)  # a hole, which takes no disk
        file.write(b"\n" + good)
    with pyarrow.CompressedOutputStream(str(archive), "zstd") as file:
        file.write(good)
        for _ in range(num_bytes // 2**20):
            file.write(bytes(2**20))
        file.write(b"\n" + good)
    command = [sys.executable, "-c", MEASURE, str(line), str(archive)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    *messages, peak = run.stdout.splitlines()
    for message, path in zip(messages, [line, line, archive, archive], strict=True):
        assert f"{path}:2: has {num_bytes} bytes, but data.max_row_bytes is 4194304: " in message
    assert int(peak) < 100 * 2**20


MANY = {
    "newlines": (b"\n", [{"n": 1}, {"n": 1}]),
    "spaces and newlines": (b" \r\n\t\n", [{"n": 1}, {"n": 1}]),
    "lines of a character": (b"x\n", "more than 10,000,000 lines with less than 8 bytes on average; wanted one JSON"),
}
MEASURE_MANY = """
import resource, sys
from sftron.data.sources.files import open_source
from sftron.data.types import DataError
open_source(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    rows = open_source(sys.argv[2])
    print([rows[n] for n in range(len(rows))], rows.locate(len(rows) - 1))
except DataError as error:
    print(error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.parametrize("kind", MANY)
def test_a_small_archive_of_lines_without_rows_takes_little_memory(kind: str, tmp_path: Path) -> None:
    text, wanted = MANY[kind]
    first, archive, num_bytes = tmp_path / "a.jsonl.gz", tmp_path / "many.jsonl.gz", 96 * 2**20
    row, block = b'{"n": 1}\n', text * (2**20 // len(text))
    first.write_bytes(packed(row, ".gz"))
    with pyarrow.CompressedOutputStream(str(archive), "gzip") as file:
        file.write(row)
        for _ in range(num_bytes // 2**20):
            file.write(block)
        file.write(row)
    assert archive.stat().st_size < 2**20
    command = [sys.executable, "-c", MEASURE_MANY, str(first), str(archive)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=300)
    message, peak = run.stdout.splitlines()
    if isinstance(wanted, str):
        assert wanted in message
    else:
        number = 2 + len(block) // len(text) * text.count(b"\n") * (num_bytes // 2**20)
        assert message == f"{wanted} {archive}:{number}"
    assert int(peak) < (100 if isinstance(wanted, list) else 300) * 2**20


@pytest.mark.parametrize("scan_bytes", [1, 2, 3, 5, 7, 64])
def test_rows_are_the_same_wherever_a_file_is_cut_for_its_index(
    scan_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = b'\n \n {"n": 1}\n{"n": 2}\r\n\t\r\n\n   {"n": 3}  \n\n\n{"n": 4}\n' + b" " * 40 + b'\n{"n": 5}\n  '
    path = tmp_path / "a.jsonl"
    monkeypatch.setattr("sftron.data.sources.jsonl._INDEXED_BYTES", scan_bytes)
    for end in range(content.index(b"1}") + 2, len(content)):
        path.write_bytes(content[:end])
        lines = content[:end].split(b"\n")
        wanted = [(n, line.strip()) for n, line in enumerate(lines, 1) if line.strip() or len(line) > 30]
        source = open_source(str(path), max_row_bytes=30)
        assert [source.locate(n) for n in range(len(source))] == [f"{path}:{n}" for n, _ in wanted]
        for index, (_, line) in enumerate(wanted):
            try:
                assert source[index] == json.loads(line)
            except DataError as error:
                assert "is a row of 40 bytes" in str(error) or not line.endswith(b"}")  # noqa: PT017


# --- Lists and CSV ---


@pytest.mark.parametrize("ending", [".csv", ".csv.gz"])
def test_cells_of_csv_are_the_texts_they_are_and_an_empty_one_is_null(tmp_path, ending):
    """The datasets library would make 7.0 and null of the first two."""
    text = '\ufeffquestion,answer,note\r\n007,NA,"two\r\nlines, ""quoted"""\r\n\r\n1e5,é,\r\n'
    path = write(tmp_path / f"a{ending}", packed(text.encode(), Path(ending).suffix))
    rows = [
        {"question": "007", "answer": "NA", "note": 'two\r\nlines, "quoted"'},
        {},
        {"question": "1e5", "answer": "é", "note": None},
    ]
    source, stream = open_source(path), open_stream(path)
    assert all_rows(source) == all_rows(stream.head(9)) == rows
    for index, line in enumerate((2, 4, 5)):
        assert source.locate(index) == stream.locate(index) == f"{path}:{line}"
    unpickled = pickle.loads(pickle.dumps(source))
    assert (unpickled[2], unpickled.locate(2)) == (rows[2], f"{path}:5")


WHOLE_LINES = "one JSON object per line (.jsonl), or the file as one list [ ... ] (.json)"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", '[{"a": 1},\n{"b": "x', ": is not JSON: Unterminated string starting at character 18, near "),
        ("a.json", b'[{"a": 1},\n{"a": "caf\xe9"}]', ": byte 22 (line 2) is not UTF-8"),
        ("a.json", '[{"a": 1},\n5]', ', row 1: found "5"; wanted an object'),
        ("a.json", "[ \n ]", ": has no rows"),
        ("a.json", '{"rows": [\n{"a": 1}\n]}', ":1: is not JSON: Expecting value at character 11, near"),
        ("a.jsonl", "[\n{}\n]", f':1: is not JSON: Expecting value at character 2, near "["; write {WHOLE_LINES}'),
        (
            "a.json",
            '{\n  "a": 1\n}\n',
            ":1: is not JSON: Expecting property name enclosed in double quotes at character 2, "
            f'near "{{"; write {WHOLE_LINES}',
        ),
        ("a.csv", "a,b\n1,2\n3\n", ":3: the row that ends here has 1 cells, but the header has 2"),
        (
            "a.csv",
            "a;b\n1;2\n3;4;5\n",
            ":3: the row that ends here has 3 cells, but the header has 2; quote cells that",
        ),
        (
            "a.tsv",
            "a\tb\n1\t2, 3\n4\n",
            ":3: the row that ends here has 1 cells, but the header has 2; quote cells that",
        ),
        ("a.csv", 'a;b\n"1"2;3\n', ":2: is not CSV: ';' expected after '\"'; separate cells with semicolons, and"),
        ("a.csv", 'sep=|\na|b\n"1"2|3\n', ":3: is not CSV: '|' expected after '\"'; separate cells with vertical bars"),
        ("a.csv", "a,a\n1,2\n", ": has two columns 'a'"),
        ("a.csv", "a,b\n1,2\n".encode("utf-16-le"), ": holds zero bytes, as UTF-16 without a byte order mark does"),
        ("a.csv", "a,b\n1,2\n".encode("utf-16")[:-1], ": is not UTF-16 near line"),
        ("a.csv", 'a,b\n1,"2"3\n', ":2: is not CSV: ',' expected after '\"'"),
        ("a.csv", 'a,b\n1,"2\n', ":2: is not CSV: unexpected end of data"),
        ("a.csv", b"a,b\n1,caf\xe9\n", ": is not UTF-8 near line"),
        ("a.csv", "messages\n[{]\n", ":2: is not JSON: "),
        ("a.csv", "a,b\n", ": has no rows"),
    ],
)
def test_a_list_or_csv_that_is_broken_is_refused_with_the_place(tmp_path, name, content, message):
    assert str(refusal_of(tmp_path, write(tmp_path / name, content))).startswith(f"{name}{message}")


# --- Compressed files ---

TEXT = "\n" + lines_of(numbered(3000))


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_a_compressed_file_is_read_as_its_content_whatever_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """Files of several parts are written by pigz, bgzip and `cat a.gz b.gz`. The copy has no name."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    parts = [packed(data, ending) for data in (TEXT.encode(), b"{broken\n")]
    path = write(tmp_path / f"a.jsonl{ending}", b"".join(parts))
    source = open_source(path)
    assert list((tmp_path / "temporary").iterdir()) == []
    assert [source[index] for index in range(3000)] == numbered(3000)
    assert source.locate(16) == f"{path}:18"
    with pytest.raises(DataError, match=r"a\.jsonl\.\w+:3002: is not JSON"):
        source[3000]
    assert all_rows(open_source(write_rows(tmp_path / f"b.json{ending}", numbered(20)))) == numbered(20)


BROKEN = {
    "cut off": (".gz", lambda data: data[:-20], "cannot be decompressed near byte {size} of {size}"),
    "garbage after it": (".gz", lambda data: data + b"garbage", "cannot be decompressed near byte {size} of {size}"),
    "zstd, cut off": (".zst", lambda data: data[:-20], "cannot be decompressed near byte {size} of {size}"),
    "not compressed": (".zst", lambda _: TEXT.encode(), "cannot be decompressed near byte"),
}


@pytest.mark.parametrize(("ending", "damage", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_archive_is_refused_with_the_position(tmp_path: Path, ending, damage, message) -> None:
    data = damage(packed(TEXT.encode(), ending))
    refusal = str(refusal_of(tmp_path, write(tmp_path / f"a.jsonl{ending}", data)))
    assert refusal.startswith(f"a.jsonl{ending}: ")
    assert message.format(size=len(data)) in refusal


def test_an_archive_that_changes_before_another_process_decompresses_it_is_refused(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl.gz", numbered(9))
    data = pickle.dumps(open_source(path))
    write_rows(tmp_path / "a.jsonl.gz", numbered(8))
    with pytest.raises(DataError, match=r"a\.jsonl\.gz: had \d+ bytes when it was opened, but has \d+ now"):
        pickle.loads(data)[3]
