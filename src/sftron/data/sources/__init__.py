"""Sources of rows: local files, data sets of the Hugging Face Hub, and rows in memory, indexed or streamed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sftron.data.sources import arrow, streaming
from sftron.data.sources.files import ENDINGS, WANTED, find_files
from sftron.data.sources.json_text import MAX_ROW_BYTES, excerpt
from sftron.data.sources.jsonl import JsonlSource, ending_of
from sftron.data.sources.streaming import EndOfStream, StreamedSource
from sftron.data.sources.views import (
    ConcatenatedSource,
    RawRow,
    RowList,
    RowSource,
    parse_split,
    split_source,
    take_rows,
)
from sftron.data.types import DataError

__all__ = [
    "EndOfStream",
    "RawRow",
    "RowList",
    "RowSource",
    "StreamedSource",
    "find_files",
    "open_source",
    "open_stream",
    "split_source",
]


def open_source(
    path: str, split: str = "train", max_row_bytes: int = MAX_ROW_BYTES, *, max_samples: int | None = None
) -> RowSource:
    """Opens a file, a folder of files or of the datasets library, a pattern with wildcards, or a Hub id.

    Args:
        path: The path, pattern or Hub id.
        split: The split, or a part of one; see `Split`.
        max_row_bytes: The largest size of a row in bytes; reading a larger row raises DataError.
        max_samples: The number of first rows of the split to use; None uses all of them.

    Raises:
        DataError: The data cannot be opened. Broken rows raise only when they are read.
    """
    part = parse_split(split)
    with _readable(path):
        files = find_files(path, split)
        sources = (
            [arrow.open_hub(path, part.name, max_row_bytes)]
            if files is None
            else [_open_file(file, max_row_bytes) for file in files]
        )
    source = sources[0] if len(sources) == 1 else ConcatenatedSource(path, sources)
    if len(source) == 0:
        raise DataError(f"{path}: holds no rows; name a file that does")
    rows = part.rows(len(source))
    if not rows:
        raise DataError(f"{path}: split {excerpt(split)} takes none of its {len(source)} rows; name others")
    return take_rows(source, rows[:max_samples], f"{path} ({split})" if part.is_part else source.name)


def open_stream(
    path: str, split: str = "train", max_row_bytes: int = MAX_ROW_BYTES, *, max_samples: int | None = None
) -> StreamedSource:
    """Opens the same data as `open_source`, to be read forward.

    The bounds of a part of a split must be row numbers from the beginning, as in `train[1000:2000]`.

    Raises:
        DataError: The data cannot be opened, the bounds are of another kind, or there is no row.
    """
    part = parse_split(split)
    if any(border and border.strip("0123456789_") for border in (part.start, part.stop)):
        remedy = "write borders in rows, train[1000:2000], or remove streaming"
        raise DataError(f"{path}: split {excerpt(split)} needs the number of rows, which a stream has not; {remedy}")
    first = int(part.start or 0)
    ends = [int(part.stop)] if part.stop is not None else []
    ends += [first + max_samples] if max_samples is not None else []
    with _readable(path):
        files = find_files(path, split)
        for file in files or ():
            _require_known(file)
        stream = (
            streaming.HubStream(path, part.name, max_row_bytes)
            if files is None
            else streaming.open_file_streams(path, files, max_row_bytes)
        )
        source = StreamedSource(stream, first=first, stop=min(ends, default=None))
        if not len(source.head(1)):
            raise DataError(f"{path}: split {excerpt(split)} holds no rows; name one that does")
    return source


def _open_file(path: Path, max_row_bytes: int) -> RowSource:
    _require_known(path)
    if path.suffix in (".parquet", ".arrow"):
        return arrow.open_arrow(path, max_row_bytes)
    return JsonlSource(path, max_row_bytes)


def _require_known(path: Path) -> None:
    if (ending := ending_of(path)) not in ENDINGS:
        found = f"the ending {ending}" if ending else "no ending"
        raise DataError(f"{path}: a file with {found}; {WANTED}: convert, decompress or rename it")


@contextmanager
def _readable(path: str) -> Iterator[None]:
    """Raises DataError in place of OSError."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{error.filename or path}: cannot be read: {error.strerror or error}") from error
