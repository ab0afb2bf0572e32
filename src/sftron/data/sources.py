"""Where rows come from: local files, several of them, or a data set of the Hub; all by random access."""

from __future__ import annotations

import difflib
import glob
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sftron.data.json_files import (
    MAX_ROW_BYTES,
    JsonArraySource,
    JsonlSource,
    excerpt,
    fingerprint_of_file,
)
from sftron.data.types import DataError, Row


class RowSource(Protocol):
    """Rows by index. Picklable, and safe to use in forked workers; holds no Python object per row."""

    @property
    def name(self) -> str:
        """For people: the path or Hub id."""
        ...

    @property
    def fingerprint(self) -> str:
        """Changes when the content does; does not depend on names, times or the machine."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row:
        """The row as its file holds it. Raises DataError, with its location, where the row is broken."""
        ...

    def locate(self, index: int) -> str:
        """Where to look for the row, `chats.jsonl:17`."""
        ...


def open_source(path: str, split: str = "train", max_row_bytes: int = MAX_ROW_BYTES) -> RowSource:
    """Open a file (.jsonl, .json, .parquet), a folder of such files, a pattern with wildcards, or a Hub id.

    Raises DataError for whatever can be known without reading every row.
    """
    files = _find_files(path)
    if files is None:
        return _open_hub(path, split, max_row_bytes)
    if split != "train":
        problem = f"split {excerpt(split)} is for data sets of the Hub; files hold one split each"
        raise DataError(f"{path}: {problem}: remove split, and name the file that holds the rows you want")
    try:
        sources = [_open_file(file, max_row_bytes) for file in files]
    except OSError as error:
        raise DataError(f"{error.filename or path}: cannot be read: {error.strerror or error}") from error
    source = sources[0] if len(sources) == 1 else ConcatenatedSource(path, sources)
    if len(source) == 0:
        raise DataError(f"{path}: holds no rows; name a file that does")
    return source


class ConcatenatedSource:
    """Several sources one after another."""

    def __init__(self, name: str, sources: Sequence[RowSource]) -> None:
        self.name = name
        self.fingerprint = hashlib.sha256("".join(source.fingerprint for source in sources).encode()).hexdigest()
        self._sources = tuple(sources)
        self._ends = np.cumsum([len(source) for source in sources])

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


class ArrowSource:
    """A `datasets.Dataset`: Arrow files mapped into memory. Absent fields of a row are None, as Arrow has them."""

    def __init__(self, name: str, table: Any, fingerprint: str, max_row_bytes: int = MAX_ROW_BYTES) -> None:
        self.name = name
        self.fingerprint = fingerprint
        self._table = table
        self._max_row_bytes = max_row_bytes

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> Row:
        location = self.locate(index)
        row = self._table[index]
        if (size := _text_size(row)) > self._max_row_bytes:
            problem = f"is a row of {size} characters, above {self._max_row_bytes}; split or remove it"
            raise DataError(f"{location}: {problem}", reason="too_large")
        return row

    def locate(self, index: int) -> str:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name} has {len(self)} rows, no row {index}")
        return f"{self.name}, row {index}"


def _text_size(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_text_size(item) for item in value.values())
    return sum(_text_size(item) for item in value) if isinstance(value, list) else 0


# --- Files ---

_ENDINGS = (".jsonl", ".json", ".parquet")


def _find_files(path: str) -> list[Path] | None:
    """The files that a path or pattern names, sorted; None where it can only be a Hub id."""
    here = Path(path)
    if here.is_file():
        return [here]
    if here.is_dir():
        return _files_in(here)
    if glob.has_magic(path):
        names = sorted(glob.glob(path, recursive=True))  # noqa: PTH207  Path.glob takes no absolute patterns
        if files := [Path(name) for name in names if Path(name).is_file()]:
            return files
        raise DataError(f"{path}: no file matches this pattern; {_near(here)}")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", path, re.ASCII) and here.suffix not in _ENDINGS and path[0] not in ".~":
        return None
    raise DataError(f"{path}: no such file or folder, nor a Hub id (owner/name); {_near(here)}")


def _files_in(folder: Path) -> list[Path]:
    files = sorted(file for file in folder.iterdir() if file.suffix in _ENDINGS and file.is_file())
    endings = {file.suffix for file in files}
    if not files:
        raise DataError(f"{folder}: no {', '.join(_ENDINGS)} file in this folder; {_near(folder / '*')}")
    if len(endings) > 1:
        problem = f"files of several kinds ({', '.join(sorted(endings))}) in this folder"
        raise DataError(f"{folder}: {problem}; name one kind, {folder}/*{min(endings)}")
    return files


def _near(path: Path) -> str:
    """What there is in the nearest folder that exists, likely names first."""
    folder = next((parent for parent in path.parents if parent.is_dir()), Path())
    names = sorted(item.name for item in folder.iterdir())
    if not names:
        return f"{folder}/ is empty"
    likely = difflib.get_close_matches(path.name, names, n=3) or names[:3]
    return f"{folder}/ has {', '.join(likely)}" + (" ..." if len(names) > len(likely) else "")


def _open_file(path: Path, max_row_bytes: int) -> RowSource:
    if path.suffix == ".parquet":
        return _open_parquet(path, max_row_bytes)
    if path.suffix == ".jsonl" or (path.suffix == ".json" and not _begins_a_list(path)):
        return JsonlSource(path, max_row_bytes)
    if path.suffix == ".json":
        return JsonArraySource(path, max_row_bytes)
    ending = f"the ending {path.suffix}" if path.suffix else "no ending"
    raise DataError(f"{path}: a file with {ending}; wanted {', '.join(_ENDINGS)}: convert, unpack or rename it")


def _begins_a_list(path: Path) -> bool:
    """Whether a .json file holds a list; many hold one object a line instead."""
    with path.open("rb") as file:
        return file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


# --- Arrow, through the datasets library; imported here only, since it is slow to import ---


def _open_parquet(path: Path, max_row_bytes: int) -> ArrowSource:
    import datasets

    try:
        table = datasets.Dataset.from_parquet(str(path))
    except Exception as error:  # pyarrow's and datasets' own, of many kinds
        raise DataError(f"{path}: is not readable as Parquet: {_first_line(error)}") from error
    return ArrowSource(str(path), table, fingerprint_of_file(path), max_row_bytes)


def _open_hub(path: str, split: str, max_row_bytes: int) -> ArrowSource:
    import datasets

    try:
        table = datasets.load_dataset(path, split=split)
    except Exception as error:  # network, authentication, unknown names and splits: many kinds
        problem = f"no local file or folder, and split {excerpt(split)} could not be loaded from the Hub"
        raise DataError(f"{path}: {problem}: {_first_line(error)}") from error
    name = path if split == "train" else f"{path} ({split})"
    return ArrowSource(name, table, _fingerprint_of_rows(table), max_row_bytes)


def _fingerprint_of_rows(table: Any) -> str:
    """A hash of the number of rows, the columns, and 256 rows evenly spread from the first to the last.

    The library's own fingerprint depends on the cache's files and their times.
    """
    digest = hashlib.sha256(json.dumps([len(table), table.column_names]).encode())
    for index in np.linspace(0, len(table) - 1, min(256, len(table))).astype(int):
        digest.update(json.dumps(table[int(index)], sort_keys=True, default=repr).encode())
    return digest.hexdigest()


def _first_line(error: Exception) -> str:
    return excerpt(next(iter(str(error).splitlines()), type(error).__name__), 200)
