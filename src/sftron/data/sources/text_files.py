"""Reads documents from `.txt` files, of which each file or each line is one. A row is {"text": document}."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from sftron.data.json_text import decode_utf8
from sftron.data.sources.jsonl import BOM, JsonlSource, file_changed, file_fingerprint, open_decompressed, refuse_size
from sftron.data.types import Row


class TextLines(JsonlSource):
    """The lines of a file, each a document; blank lines are none."""

    def _parse(self, line: bytes, location: str) -> Row:
        return {"text": decode_utf8(line.removesuffix(b"\r"), location)}


class TextFiles:
    """Files, each a document. A file is opened when its document is read, as there may be many thousands."""

    def __init__(self, name: str, files: Sequence[Path], max_row_bytes: int) -> None:
        self.name, self._files, self._max_row_bytes = name, tuple(map(str, files)), max_row_bytes
        self._sizes, digest = list[int](), hashlib.sha256()
        for file in files:
            with file.open("rb") as content:
                digest.update(file_fingerprint(content.fileno()).encode())
                self._sizes.append(file.stat().st_size)
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> Row:
        name, file = self._files[index], Path(self._files[index])
        if (size := file.stat().st_size) != self._sizes[index]:
            raise file_changed(file, size, self._sizes[index])
        with open_decompressed(file) as content:
            data = content.read(self._max_row_bytes + 1)
        if len(data) > self._max_row_bytes:
            refuse_size(name, max(size, len(data)), self._max_row_bytes, data[:60])
        return {"text": decode_utf8(data.removeprefix(BOM), name)}

    def locate(self, index: int) -> str:
        return self._files[index]
