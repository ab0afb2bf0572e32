"""Reads CSV files as spreadsheets write them: with any usual separator, in UTF-8 or UTF-16."""

from __future__ import annotations

import codecs
import csv
import io
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import IO, Any

from sftron.data.types import DataError

CSV_SUFFIXES = (".csv", ".tsv")
_SEPARATORS = (",", ";", "\t", "|")
_NO_TEXT = " \r\n\ufeff" + "".join(_SEPARATORS)


def csv_rows(path: Path, content: IO[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the number of the line at which a row begins, and the row. The first line with a text has the names.

    Cells are texts; an empty cell is null. Lines without a text are no rows. The separator is the one by which the
    header has the most cells. One row is in memory at a time.

    Raises:
        DataError: The file is not CSV in UTF-8, or in UTF-16 with a byte order mark, or the number of cells in a row
            is not that of the names. The message has the line.
    """
    csv.field_size_limit(sys.maxsize)
    buffered = io.BufferedReader(content)  # pyright: ignore[reportArgumentType]  pyarrow has no types
    is_utf16 = buffered.peek().startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    text = io.TextIOWrapper(buffered, "utf-16" if is_utf16 else "utf-8-sig", newline="")
    names, line = list[str](), 0
    try:
        header = next(text, "")
        while header and not header.strip(_NO_TEXT):
            header, line = next(text, ""), line + 1
        separator = max(_SEPARATORS, key=lambda each: len(next(csv.reader([header], delimiter=each))))
        num_before, reader = line, csv.reader(chain([header], text), delimiter=separator, strict=True)
        for cells in reader:
            begin, line = line + 1, num_before + reader.line_num
            if not any(map(str.strip, cells)):
                continue
            if not names:
                names = cells
                if repeated := [name for name, count in Counter(names).items() if count > 1]:
                    raise DataError(f"{path}: has two columns {repeated[0][:60]!r}; rename or remove one")
                continue
            if len(cells) != len(names):
                problem = f"the row that ends here has {len(cells)} cells, and the header has {len(names)}"
                raise DataError(f"{path}:{line}: {problem}; quote cells that hold {separator!r} or line breaks")
            yield begin, {name: cell or None for name, cell in zip(names, cells, strict=True)}
    except csv.Error as error:
        raise DataError(f"{path}:{line + 1}: is not CSV: {error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not {text.encoding} near line {line + 1}", reason="not_utf8") from error
    finally:
        with suppress(ValueError):  # The caller closes `content`, and may have done so.
            text.detach().detach()
