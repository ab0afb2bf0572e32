"""A stream gives the rows of its source in order, again and again, from anywhere on, and never loses one silently."""

import gzip
import os
import pickle
import tempfile
from collections.abc import Iterator
from functools import partial
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftron.data.sources import EndOfStream, RawRow, StreamedSource, hub, open_source, open_stream, streaming
from sftron.data.types import DataError
from tests.data.files import all_rows, lines_of, numbered, write, write_rows

ROWS = numbered(100)


def saved(folder: Path) -> str:
    datasets.Dataset.from_list(ROWS).save_to_disk(folder / "saved", num_shards=3)
    return str(folder / "saved")


def folder_of_files(folder: Path) -> str:
    for number, rows in enumerate((ROWS[:30], ROWS[30:60], ROWS[60:])):
        write_rows(folder / "set" / f"{number}.jsonl", rows)
    return str(folder / "set")


KINDS = {
    "jsonl": lambda folder: write(folder / "a.json", "\ufeff" + lines_of(ROWS)),
    "jsonl.gz": lambda folder: write_rows(folder / "a.jsonl.gz", ROWS),
    "parquet": lambda folder: write_rows(folder / "a.parquet", ROWS, row_group_size=13),
    "saved folder": saved,
    "several files": folder_of_files,
    "Hub": lambda folder: "owner/name",
}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "_CHUNK_BYTES", 64)
    monkeypatch.setattr(streaming, "_BATCH_ROWS", 7)
    monkeypatch.setattr(streaming, "_HEAD_ROWS", 20)
    table = datasets.Dataset.from_list(ROWS)
    builder = SimpleNamespace(
        hash="0" * 40,
        config=SimpleNamespace(name="default"),
        as_streaming_dataset=lambda split: table.to_iterable_dataset(num_shards=3),
    )
    monkeypatch.setattr(hub, "commit_of", lambda *_: builder.hash)
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_, **__: builder)


@pytest.fixture(params=KINDS.values(), ids=KINDS.keys())
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return request.param(tmp_path)


def read_from(source: StreamedSource, start: int) -> list[Any]:
    rows: list[Any] = []
    with pytest.raises(EndOfStream) as end:
        rows.extend(source[index] for index in count(start))
    assert end.value.num_rows == source.num_rows
    return rows


@pytest.mark.parametrize("index", [0, 29, 30, 99, 100, 5000])
def test_every_pass_gives_all_rows_in_their_order_from_any_on(path: str, index: int) -> None:
    source = open_stream(path)
    assert read_from(source, 0) == ROWS
    for stream in (source, open_stream(path)):
        stream.seek(index)
        assert read_from(stream, index) == ROWS[index:]
        assert stream.num_rows == 100
        assert (stream[0], stream[99]) == (ROWS[0], ROWS[99])


def test_a_part_of_a_stream_is_that_part_in_every_pass(path: str) -> None:
    for split, max_samples, rows in [
        ("train[20:35]", None, ROWS[20:35]),
        ("train[95:]", None, ROWS[95:]),
        ("train[90:200]", 20, ROWS[90:]),
    ]:
        source = open_stream(path, split, max_samples=max_samples)
        assert [read_from(source, 0) for _ in range(2)] == [rows] * 2
        source.seek(4)
        assert read_from(source, 4) == rows[4:]


def test_rows_have_the_locations_that_the_whole_source_gives_them(path: str) -> None:
    source = open_stream(path)
    whole = None if path == "owner/name" else open_source(path)
    for index, row in enumerate(ROWS):
        assert source[index] == row
        assert source.locate(index) == (whole.locate(index) if whole else f"owner/name, row {index}")
    assert source.locate(1000) == f"{path}, row 1000"


@given(requested=st.lists(st.integers(0, 110), max_size=12))
def test_rows_may_be_requested_in_any_order(tmp_path_factory, requested: list[int]) -> None:
    source = open_stream(write_rows(tmp_path_factory.getbasetemp() / "a.jsonl", ROWS))
    for index in requested:
        if index < 100:
            assert source[index] == ROWS[index]
            continue
        with pytest.raises(EndOfStream) as end:
            source[index]
        assert end.value.num_rows == 100


def test_nothing_is_decompressed_or_indexed_to_read_the_first_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_rows(tmp_path / "a.jsonl.gz", numbered(20_000))
    lines, read = streaming._lines, []
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda *_, **__: pytest.fail("decompressed"))
    monkeypatch.setattr(streaming, "_lines", lambda *given: (read.append(each) or each for each in lines(*given)))
    assert open_stream(path)[0] == numbered(1)[0]
    assert len(read) == 1


def test_the_first_rows_can_be_looked_at_before_the_stream_is_read(tmp_path: Path) -> None:
    source = open_stream(write_rows(tmp_path / "a.jsonl", ROWS[:15]))
    assert (len(source.head(5)), len(source.head(50)), all_rows(source.head(50))) == (5, 15, ROWS[:15])
    assert read_from(source, 0) == ROWS[:15]


def test_a_fingerprint_follows_the_beginning_and_the_part_and_not_the_name(tmp_path: Path) -> None:
    one = open_stream(write_rows(tmp_path / "a.jsonl", ROWS)).fingerprint
    assert open_stream(write_rows(tmp_path / "b.jsonl", ROWS)).fingerprint == one
    others = [
        open_stream(write_rows(tmp_path / "b.jsonl", ROWS[:99])),
        open_stream(str(tmp_path / "a.jsonl"), "train[:50]"),
        open_stream(write_rows(tmp_path / "b.jsonl", [{"n": 5, "text": "row 0 "}, *ROWS[1:]])),
        open_stream("owner/name"),
    ]
    assert len({one, *(source.fingerprint for source in others)}) == 5


# --- Processes ---


def _read_on(source: StreamedSource) -> list[Any]:
    return [source[index] for index in range(40, 100)]


def test_a_stream_that_is_being_read_works_after_pickling_and_in_forked_workers(path: str) -> None:
    """Forked workers share the offset in an open file with the process they came from."""
    source = open_stream(path)
    source[39]
    context = get_context("fork")
    pipes = []
    for _ in range(2):
        receiver, sender = context.Pipe()
        process = context.Process(target=lambda pipe: pipe.send(_read_on(source)), args=[sender])
        process.start()
        pipes.append((receiver, process))
    for receiver, process in pipes:
        assert receiver.poll(60)
        assert receiver.recv() == ROWS[40:]
        process.join()
    assert _read_on(source) == ROWS[40:]
    assert read_from(pickle.loads(pickle.dumps(source)), 0) == ROWS


# --- What is broken ---


def test_an_archive_that_is_cut_off_is_an_error_at_every_row_after_it_and_not_the_end(tmp_path: Path) -> None:
    data = gzip.compress(lines_of(numbered(5000)).encode())
    source = open_stream(write(tmp_path / "a.jsonl.gz", data[:-50]))
    assert [source[index] for index in range(4000)] == numbered(4000)
    for index in (4999, 4998, 5000, 10**6):
        with pytest.raises(DataError, match=r"a\.jsonl\.gz: cannot be decompressed near byte \d+ of \d+"):
            source[index]
    assert source.num_rows is None


@pytest.mark.parametrize(
    ("content", "split", "message"),
    [
        (lines_of(ROWS), "train[:5%]", 'split "train[:5%]" needs the number of rows'),
        (lines_of(ROWS), "train[-5:]", 'split "train[-5:]" needs the number of rows'),
        (lines_of(ROWS), "train[200:]", 'split "train[200:]" has no rows; name another split'),
        (lines_of(ROWS), "test", 'has no split "test", only train'),
        (" [" + lines_of(ROWS[:1]) + "]", "train", "holds a JSON list, which cannot be streamed; write one"),
    ],
)
def test_what_cannot_be_streamed_is_refused_when_opened(tmp_path: Path, content: str, split: str, message: str) -> None:
    path = write(tmp_path / "a.json", content)
    with pytest.raises(DataError) as caught:
        open_stream(path, split)
    assert str(caught.value).startswith(f"{path}: {message}")


def test_a_hub_id_that_cannot_be_streamed_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(hub, "commit_of", fail)
    with pytest.raises(
        DataError, match=r'owner/name: .* split "train" cannot be loaded from the Hub: no route to host'
    ):
        open_stream("owner/name")


def test_a_file_that_shrinks_is_an_error_and_not_the_end(tmp_path: Path) -> None:
    path = Path(write_rows(tmp_path / "a.jsonl", ROWS))
    size = path.stat().st_size
    begun, passed = open_stream(str(path)), open_stream(str(path))
    read_from(passed, 0)
    write(path, lines_of(ROWS[:50]))
    for source, index in [(begun, 60), (begun, 100), (passed, 50), (passed, 50)]:
        with pytest.raises(DataError, match=f"had {size} bytes when it was opened") as caught:
            source[index]
        assert caught.value.reason == "file_changed"


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet"])
def test_a_file_that_is_gone_is_an_error_by_name(tmp_path: Path, kind: str) -> None:
    path = KINDS[kind](tmp_path)
    source = open_stream(path)
    Path(path).unlink()
    source.seek(50)  # else the open file is read on
    with pytest.raises(DataError, match=rf"^{path}: can no longer be read: .*No such file") as caught:
        source[99]
    assert caught.value.reason == "file_changed"


def numbers(size: list[int], *, fail_at: list[int]) -> StreamedSource:
    """A stream of as many numbered rows as `size` holds at the time, which fails once at each row of `fail_at`."""

    def read(start: int) -> Iterator[RawRow]:
        for index in range(start, *size):
            if index in fail_at:
                fail_at.remove(index)
                raise ConnectionError("the network is gone")
            yield RawRow(f"numbers:{index}", partial(dict, n=index))

    return StreamedSource(streaming.RowStream("numbers", "0", None, read))


def test_a_failure_on_the_way_is_raised_and_is_not_the_end() -> None:
    source = numbers([20], fail_at=[7])
    assert source[6] == {"n": 6}
    with pytest.raises(DataError, match=r"^numbers: can no longer be read: the network is gone; make it readable"):
        source[12]
    assert read_from(source, 0) == [{"n": n} for n in range(20)]


def test_a_pass_that_ends_before_the_one_before_it_is_an_error() -> None:
    size = [40]
    source = numbers(size, fail_at=[])
    read_from(source, 0)
    size[0] = 35
    with pytest.raises(DataError, match="numbers: ends after 35 rows of 40; do not change data files"):
        [source[index] for index in range(40)]


def test_a_parquet_file_that_breaks_off_is_an_error_and_not_the_end(tmp_path: Path) -> None:
    path = Path(write_rows(tmp_path / "a.parquet", ROWS, row_group_size=10))
    source = open_stream(str(path))
    assert source[15] == ROWS[15]
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(DataError, match=r"a\.parquet: is not readable as Parquet: "):
        source[99]
