"""Files of rows, and what is read of them."""

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from sftron.data.sources import RowSource, open_source
from sftron.data.types import DataError

ROWS = [{"n": 0, "text": 'quote " bracket ] brace } comma , \\'}, {"n": 1, "text": "é\u2028\n"}, {"n": 2, "text": ""}]


def write(path: Path, content: str | bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def lines_of(rows: Iterable[Any]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def numbered(num_rows: int) -> list[dict[str, Any]]:
    return [{"n": n, "text": f"row {n} " + "x" * (n * 37 % 50)} for n in range(num_rows)]


def packed(data: bytes, ending: str) -> bytes:
    """`data` as a file of this ending holds it, .gz or .zst or any other."""
    if ending == ".zst":
        return pyarrow.compress(data, codec="zstd", asbytes=True)
    return gzip.compress(data) if ending == ".gz" else data


def write_rows(path: Path, rows: list[dict[str, Any]], **options: Any) -> str:
    """Writes rows as the ending names: .jsonl, .json, these with .gz or .zst, .parquet or .arrow."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, **options)
    elif path.suffix == ".arrow":
        table = pyarrow.Table.from_pylist(rows)
        with pyarrow.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table, **options)
    else:
        text = json.dumps(rows, ensure_ascii=False) if ".json" in path.suffixes else lines_of(rows)
        path.write_bytes(packed(text.encode(), path.suffix))
    return str(path)


def all_rows(source: RowSource) -> list[Any]:
    return [source[index] for index in range(len(source))]


def refusal_of(tmp_path: Path, *args: Any, **kwargs: Any) -> DataError:
    """What opening, and then reading every row, is refused with; paths from `tmp_path` on."""
    with pytest.raises(DataError) as caught:
        all_rows(open_source(*args, **kwargs))
    caught.value.args = (str(caught.value).replace(f"{tmp_path}/", ""),)
    return caught.value
