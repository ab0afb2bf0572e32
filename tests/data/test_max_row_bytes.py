"""Rows above data.max_row_bytes are bad rows, found without being held in memory."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftron.data import json_sources
from sftron.data.sources import open_source
from sftron.data.streaming import EndOfStream, open_stream
from sftron.data.types import DataError, Row
from tests.conftest import ROOT
from tests.data.files import packed, write

GOOD = b'{"n": 1}\n'


def outcome(read: Callable[[], Row]) -> str:
    try:
        return json.dumps(read())
    except DataError as error:
        return f"{error.reason} {error}"


def outcomes_of_stream(path: str, max_row_bytes: int) -> list[str]:
    try:
        stream, found = open_stream(path, max_row_bytes=max_row_bytes), []
        while True:
            found.append(outcome(lambda: stream.row(len(found))))
    except EndOfStream:
        return found
    except DataError as error:
        return [str(error)]


def outcomes_of_index(path: str, max_row_bytes: int) -> list[str]:
    try:
        source = open_source(path, max_row_bytes=max_row_bytes)
    except DataError as error:
        return [str(error)]
    return [outcome(lambda index=index: source[index]) for index in range(len(source))]


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_a_row_of_exactly_the_limit_is_read_and_one_of_a_byte_more_is_told_with_both_numbers(
    tmp_path: Path, ending: str, line_end: bytes
) -> None:
    longest = b'{"n": "123"}' + line_end[:-1]  # a carriage return is the row's
    longer = b'{"n": "1234"}' + line_end[:-1]
    data = GOOD + longest + b"\n" + longer + b"\n" + longest
    path = write(tmp_path / f"a.jsonl{ending}", packed(data, ending))
    for outcomes in (outcomes_of_index(path, len(longest)), outcomes_of_stream(path, len(longest))):
        assert outcomes[:2] == ['{"n": 1}', '{"n": "123"}']
        assert outcomes[2].startswith(
            f"too_large {path}:3: is a row of {len(longer)} bytes, above data.max_row_bytes {len(longest)}: "
        )
        assert outcomes[3:] == ['{"n": "123"}']


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
    for entry_bytes in (1, 4096):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(json_sources, "_entry_bytes", lambda size, b=entry_bytes: b)
            indexed = outcomes_of_index(str(path), max_row_bytes)
        assert indexed == outcomes_of_stream(str(path), max_row_bytes)


MEASURE = """
import resource, sys
from sftron.data.sources import open_source
from sftron.data.streaming import open_stream
from sftron.data.types import DataError
import pyarrow

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[1:]:
    for open_rows in [open_source] if path.endswith(".json") else [open_source, open_stream]:
        source = open_rows(path)
        assert [source[0], source[2]] == [{"n": 1}] * 2
        try:
            source[1]
        except DataError as error:
            print(error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def test_a_line_of_hundreds_of_megabytes_is_told_in_a_hundred_of_memory(tmp_path: Path) -> None:
    num_bytes = 300 * 2**20
    line, archive, array = (tmp_path / name for name in ("a.jsonl", "a.jsonl.zst", "a.json"))
    with line.open("wb") as file:
        file.write(GOOD)
        file.seek(num_bytes, 1)  # a hole, which takes no disk
        file.write(b"\n" + GOOD)
    with pyarrow.CompressedOutputStream(str(archive), "zstd") as file:
        file.write(GOOD)
        for _ in range(num_bytes // 2**20):
            file.write(bytes(2**20))
        file.write(b"\n" + GOOD)
    with array.open("wb") as file:
        file.write(b"[" + GOOD + b",")
        file.seek(num_bytes // 10, 1)  # a list is scanned at some 50 MB/s
        file.write(b"," + GOOD + b"]")
    command = [sys.executable, "-c", MEASURE, *map(str, (line, archive, array))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    *messages, peak = run.stdout.splitlines()
    for message, path in zip(messages, [line, line, archive, archive, array], strict=True):
        size = num_bytes // 10 if path is array else num_bytes
        assert f"{path}:2: is a row of {size} bytes, above data.max_row_bytes 4194304: " in message
    assert int(peak) < 100 * 2**20


def test_rows_of_a_list_that_lack_their_commas_keep_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    rows = json_sources.JsonArraySource._rows
    monkeypatch.setattr(
        json_sources.JsonArraySource, "_rows", lambda self, marks: kept.append(len(marks)) or rows(self, marks)
    )
    source = open_source(write(tmp_path / "a.json", b'[{"n": 1}, ' + b"{}" * 100_000 + b', {"n": 2}]'))
    assert max(kept) < 10
    assert (source[0], source[2]) == ({"n": 1}, {"n": 2})
