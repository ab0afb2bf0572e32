"""Reads CSV files as spreadsheets write them, with any common separator, in UTF-8 or UTF-16."""

from __future__ import annotations

import codecs
import csv
import io
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from sftron.data.types import DataError

CSV_SUFFIXES = (".csv", ".tsv")
_SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
_HEAD_BYTES = 2**16
"""The size of the beginning of a file from which its encoding and its separator are determined."""
_MOST_EMPTY_LINES = 1_000_000
_DECLARED_SEPARATOR = re.compile(r'\ufeff?"?sep=([^\w\s"]|\t)"?[\r\n]')
"""The first line of a file that declares its separator, as Excel reads it."""


def csv_rows(path: Path, content: IO[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the number of the line at which a row begins, and the row. The first line that is not empty has the names.

    Cells are texts; an empty cell is null. A line without a text is a row without columns, except at the end of the
    file. One row is in memory at a time.

    Raises:
        DataError: The file is not CSV in UTF-8, or in UTF-16 with a byte order mark, or a row's number of cells differs
            from the header's. The message has the line.
    """
    csv.field_size_limit(sys.maxsize)
    buffered = io.BufferedReader(content, _HEAD_BYTES)  # pyright: ignore[reportArgumentType]  pyarrow has no types
    head = buffered.peek()
    encoding = "UTF-16" if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "UTF-8"
    sample = head.decode(encoding, "replace")
    declared = _DECLARED_SEPARATOR.match(sample)
    separator = declared[1] if declared else _separator(sample)
    words = _SEPARATORS.get(separator, f"'{separator}'")
    text = io.TextIOWrapper(buffered, encoding.replace("UTF-8", "utf-8-sig"), newline="")
    reader = csv.reader(text, delimiter=separator, strict=True)
    num_before = 1 if declared else 0
    names: list[str] = []
    empty: list[int] = []
    try:
        for _ in range(num_before):
            next(text)
        end = num_before
        for cells in reader:
            begin, end = end + 1, reader.line_num + num_before
            if not any(map(str.strip, cells)):
                empty.append(begin)
                if len(empty) > _MOST_EMPTY_LINES:
                    problem = f"{path}:{end}: more than {_MOST_EMPTY_LINES:,} consecutive lines have no text"
                    raise DataError(f"{problem}; remove them")
                continue
            if not names:
                names, empty = _names(path, cells), []
                continue
            for line in empty:
                yield line, {}
            empty.clear()
            if len(cells) != len(names):
                problem = f"the row that ends here has {len(cells)} cells, but the header has {len(names)}"
                raise DataError(f"{path}:{end}: {problem}; quote cells that hold {words} or line breaks")
            yield begin, {name: cell or None for name, cell in zip(names, cells, strict=True)}
    except csv.Error as error:
        remedy = f'separate cells with {words}, and write a quote in a quoted cell as ""'
        raise DataError(f"{path}:{reader.line_num + num_before}: is not CSV: {error}; {remedy}") from error
    except UnicodeDecodeError as error:
        problem = f"is not {encoding} near line {reader.line_num + num_before + 1}: save the file as UTF-8"
        raise DataError(f"{path}: {problem}", reason="not_utf8") from error
    finally:
        with suppress(ValueError):  # The caller closes `content`, and may have done so.
            text.detach().detach()


def _names(path: Path, cells: list[str]) -> list[str]:
    """Returns the cells of the header. Raises DataError if they cannot name columns."""
    if repeated := [name for name, count in Counter(cells).items() if count > 1]:
        raise DataError(f"{path}: has two columns {repeated[0][:60]!r}; rename or remove one")
    if "\0" in "".join(cells):
        problem = "holds zero bytes, as UTF-16 without a byte order mark does: save the file as UTF-8"
        raise DataError(f"{path}: {problem}", reason="not_utf8")
    return cells


def _separator(sample: str) -> str:
    """Returns the separator with which the header has the most cells, and every row of the sample as many.

    If no separator fits, returns the one with which the header has the most cells. csv.Sniffer finds a letter in some
    files of one column, and the comma of numbers such as 3,14.

    Args:
        sample: The beginning of a file. An incomplete last line is left out, unless it is the only one.
    """
    sample = sample[: max(sample.rfind("\n"), sample.rfind("\r")) + 1] or sample

    def fit(separator: str) -> tuple[bool, int]:
        sizes = []
        with suppress(csv.Error):
            for cells in csv.reader(io.StringIO(sample, newline=""), delimiter=separator, strict=True):
                sizes += [len(cells)] if any(map(str.strip, cells)) else []
        num_columns = sizes[0] if sizes else 0
        return num_columns > 1 and {*sizes} == {num_columns}, num_columns

    return max(_SEPARATORS, key=fit)
