"""Where rows come from: local files, several of them, or a data set of the Hub; all by random access."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sftron.data.arrow_files import ArrowSource, MappedArrow, open_arrow, open_parquet
from sftron.data.arrow_rows import first_line
from sftron.data.data_files import ENDINGS, WANTED, ending_of, find_files
from sftron.data.indexed_file import IndexedFile
from sftron.data.json_files import MAX_ROW_BYTES, excerpt
from sftron.data.json_sources import JsonArraySource, JsonlSource
from sftron.data.row_source import RowSource, unpacked_bytes
from sftron.data.splits import parse_split
from sftron.data.types import DataError, Row
from sftron.data.unpacking import CODECS, UnpackedFile
from sftron.data.views import take_rows


def open_source(
    path: str, split: str = "train", max_row_bytes: int = MAX_ROW_BYTES, *, max_samples: int | None = None
) -> RowSource:
    """Open a file, a folder of files or of the datasets library, a pattern with wildcards, or a Hub id.

    split: which one, or a part of one (see splits.py). max_samples: take only the first rows of that.

    Raises DataError for whatever can be known without reading every row.
    """
    part = parse_split(split)
    files = find_files(path, part.name)
    try:
        source = _open_hub(path, part.name, max_row_bytes) if files is None else _open_all(path, files, max_row_bytes)
    except OSError as error:
        raise DataError(f"{error.filename or path}: cannot be read: {error.strerror or error}") from error
    if len(source) == 0:
        raise DataError(f"{path}: holds no rows; name a file that does")
    rows = part.rows(len(source))
    if not rows:
        raise DataError(f"{path}: split {excerpt(split)} takes none of its {len(source)} rows; name others")
    return take_rows(source, rows[:max_samples], f"{path} ({split})" if part.is_part else source.name)


class ConcatenatedSource:
    """Several sources one after another."""

    def __init__(self, name: str, sources: Sequence[RowSource]) -> None:
        self.name = name
        self.fingerprint = hashlib.sha256("".join(source.fingerprint for source in sources).encode()).hexdigest()
        self._sources = tuple(sources)
        self._ends = np.cumsum([len(source) for source in sources])

    @property
    def unpacked_bytes(self) -> int:
        return sum(unpacked_bytes(source) for source in self._sources)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Row:
        source, row = self._find(index)
        return source[row]

    def locate(self, index: int) -> str:
        source, row = self._find(index)
        return source.locate(row)

    def _find(self, index: int) -> tuple[RowSource, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name} has {len(self)} rows, no row {index}")
        which = int(np.searchsorted(self._ends, index, side="right"))
        source = self._sources[which]
        return source, index - int(self._ends[which]) + len(source)


def _open_all(path: str, files: Sequence[Path], max_row_bytes: int) -> RowSource:
    sources = [_open_file(file, max_row_bytes) for file in files]
    return sources[0] if len(sources) == 1 else ConcatenatedSource(path, sources)


def _open_file(path: Path, max_row_bytes: int) -> RowSource:
    ending = ending_of(path)
    if ending not in ENDINGS:
        found = f"the ending {ending}" if ending else "no ending"
        raise DataError(f"{path}: a file with {found}; {WANTED}: convert, unpack or rename it")
    if ending == ".parquet":
        return open_parquet(path, max_row_bytes)
    if ending == ".arrow":
        return open_arrow(path, max_row_bytes)
    file = UnpackedFile(path) if path.suffix in CODECS else IndexedFile(path)
    is_list = not ending.startswith(".jsonl") and _begins_a_list(file)
    return (JsonArraySource if is_list else JsonlSource)(path, max_row_bytes, file)


def _begins_a_list(file: IndexedFile) -> bool:
    """Whether a .json file holds a list; many hold one object a line instead."""
    return file.read(0, min(4096, file.size)).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


def _open_hub(path: str, split: str, max_row_bytes: int) -> ArrowSource:
    import datasets  # slow to import

    try:
        table = datasets.load_dataset(path, split=split, keep_in_memory=False)
        batches = MappedArrow([Path(file["filename"]) for file in table.cache_files])
    except Exception as error:  # network, authentication, unknown names and splits: many kinds
        problem = f"no local file or folder, and split {excerpt(split)} could not be loaded from the Hub"
        raise DataError(f"{path}: {problem}: {first_line(error)}") from error
    assert batches.num_rows == len(table)
    name = path if split == "train" else f"{path} ({split})"
    return ArrowSource(name, batches, _fingerprint_of_rows(batches), max_row_bytes)


def _fingerprint_of_rows(batches: MappedArrow) -> str:
    """A hash of the number of rows, the columns, and 256 rows evenly spread from the first to the last.

    The datasets library's own fingerprint depends on the cache's files and their times.
    """
    digest = hashlib.sha256(json.dumps([batches.num_rows, batches.schema.names]).encode())
    for index in np.linspace(0, batches.num_rows - 1, min(256, batches.num_rows)).astype(int):
        batch, number = batches.find(int(index))
        digest.update(json.dumps(batch.slice(number, 1).to_pylist(), sort_keys=True, default=repr).encode())
    return digest.hexdigest()
