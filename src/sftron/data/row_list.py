"""Rows that a program already has: a list, or a data set of the datasets library."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import numpy as np

from sftron.data.types import Row

_NUM_HASHED_ROWS = 256


class RowList:
    """A RowSource over what has a length and rows by index. The fingerprint is of 256 rows at most, evenly spread."""

    def __init__(self, rows: Sequence[Row], name: str = "rows") -> None:
        self.name = name
        self._rows = rows

    @property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(str(len(self)).encode())
        for index in np.linspace(0, len(self) - 1, min(_NUM_HASHED_ROWS, len(self))).astype(int).tolist():
            digest.update(json.dumps(self._rows[index], sort_keys=True, default=repr).encode())
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return self._rows[index]

    def locate(self, index: int) -> str:
        return f"{self.name}[{index}]"
