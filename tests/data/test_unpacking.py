"""Compressed files are read as what they hold; a broken one is told, and none fills the disk."""

import gzip
import pickle
import shutil
import tempfile
from pathlib import Path

import pytest

from sftron.data.row_source import unpacked_bytes
from sftron.data.sources import open_source
from sftron.data.types import DataError
from tests.data.files import all_rows, lines_of, numbered, packed, refusal_of, write, write_rows

TEXT = "\n" + lines_of(numbered(3000))


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_rows_of_a_compressed_file_have_the_lines_of_its_content(tmp_path: Path, ending: str) -> None:
    path = write(tmp_path / f"a.jsonl{ending}", packed(TEXT.encode() + b"{broken\n", ending))
    source = open_source(path)
    assert [source[index] for index in range(3000)] == numbered(3000)
    assert source.locate(16) == f"{path}:18"
    with pytest.raises(DataError, match=r"a\.jsonl\.\w+:3002: is not JSON"):
        source[3000]
    assert unpacked_bytes(source) == len(TEXT.encode()) + 8
    assert all_rows(open_source(write_rows(tmp_path / f"b.json{ending}", numbered(20)))) == numbered(20)


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_a_file_packed_in_several_pieces_is_read_whole(tmp_path: Path, ending: str) -> None:
    """As pigz, bgzip and `cat a.gz b.gz` write them."""
    pieces = [packed(lines_of([row]).encode(), ending) for row in numbered(5)]
    assert all_rows(open_source(write(tmp_path / f"a.jsonl{ending}", b"".join(pieces)))) == numbered(5)


def test_the_copy_has_no_name_and_takes_as_much_as_the_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, folder = write_rows(tmp_path / "a.jsonl.gz", numbered(9)), tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    source = open_source(path)
    assert list(folder.iterdir()) == []
    assert unpacked_bytes(source) == len(lines_of(numbered(9)).encode())
    assert unpacked_bytes(open_source(write_rows(tmp_path / "a.jsonl", numbered(9)))) == 0


BROKEN = {
    "cut off": (".gz", lambda data: data[:-20], "cannot be unpacked near byte {size} of {size}"),
    "another checksum": (".gz", lambda data: data[:-8] + b"\0\0\0\0" + data[-4:], "incorrect data check"),
    "a flipped bit": (
        ".gz",
        lambda data: data[:2000] + bytes([data[2000] ^ 8]) + data[2001:],
        "cannot be unpacked near",
    ),
    "garbage behind it": (".gz", lambda data: data + b"garbage", "cannot be unpacked near byte {size} of {size}"),
    "not compressed": (".gz", lambda _: TEXT.encode(), "cannot be unpacked near byte"),
    "empty": (".gz", lambda _: b"", "has 0 bytes"),
    "zstd, cut off": (".zst", lambda data: data[:-20], "cannot be unpacked near byte {size} of {size}"),
    "zstd, not compressed": (".zst", lambda _: TEXT.encode(), "cannot be unpacked near byte"),
}


@pytest.mark.parametrize(("ending", "damage", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_archive_is_refused_with_the_place(tmp_path: Path, ending, damage, message) -> None:
    data = damage(packed(TEXT.encode(), ending))
    refusal = str(refusal_of(tmp_path, write(tmp_path / f"a.jsonl{ending}", data)))
    assert refusal.startswith(f"a.jsonl{ending}: ")
    assert message.format(size=len(data)) in refusal
    assert refusal.endswith("copy or download it again")


def test_a_file_that_would_fill_the_disk_is_refused_with_both_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    path = write(tmp_path / "a.jsonl.gz", gzip.compress(bytes(40 * 2**20), 1))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10_000_000))
    refusal = str(refusal_of(tmp_path, path))
    assert "a.jsonl.gz: unpacks to 16,777,216 bytes or more" in refusal
    assert "has only 10,000,000 free; set TMPDIR to a folder with more" in refusal


def test_an_archive_that_changes_before_another_process_unpacks_it_is_refused(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl.gz", numbered(9))
    data = pickle.dumps(open_source(path))
    write_rows(tmp_path / "a.jsonl.gz", numbered(8))
    with pytest.raises(DataError, match=r"a\.jsonl\.gz: unpacks to \d+ bytes, and to \d+ when it was opened"):
        pickle.loads(data)[3]
