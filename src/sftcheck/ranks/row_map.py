"""Which token of the whole rows each token of a batch is.

a whole row         t0 t1 t2 t3 t4 t5 t6
a batch             t0 t1 t4 t5 pad
its places          0,0  0,1  0,4  0,5  none      the row and the column of each
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class RowMap:
    """The places of the tokens of a batch [B, T] in whole rows."""

    places: np.ndarray
    """int64 [B, T, 2]: a row and a column; -1 for a token that is in none of the rows."""

    @classmethod
    def of_whole(cls, shape: Sequence[int]) -> RowMap:
        """Returns the map of a batch that is the whole rows."""
        return cls(np.moveaxis(np.indices(tuple(shape)), 0, -1))

    @classmethod
    def of_numbers(cls, numbers: np.ndarray, layout: np.ndarray) -> RowMap:
        """Returns the map of a batch whose tokens are numbered.

        Args:
            numbers: int64 [B, T], of each token; -1 for none.
            layout: int64 [n, 2]: the row and the column of each number.
        """
        return cls(np.where((numbers >= 0)[..., None], layout[np.maximum(numbers, 0)], -1))

    @property
    def shape(self) -> tuple[int, ...]:
        """[B, T]."""
        return self.places.shape[:2]

    @property
    def has_place(self) -> np.ndarray:
        """bool [B, T]."""
        return self.places[..., 0] >= 0

    def read(self, rows: np.ndarray, outside: Any = 0) -> np.ndarray:
        """Returns what the whole rows [B, T, ...] have at each token of the batch, and `outside` at the others."""
        at = np.maximum(self.places, 0)
        found = rows[at[..., 0], at[..., 1]]
        return np.where(self.has_place.reshape(*self.shape, *[1] * (found.ndim - 2)), found, outside)

    def write(self, rows: np.ndarray, values: np.ndarray) -> int:
        """Puts the values [B, T] of the batch into whole rows [B, T]. Returns how many have a place there."""
        at = self.places[self.has_place]
        rows[at[:, 0], at[:, 1]] = values[self.has_place]
        return len(at)
