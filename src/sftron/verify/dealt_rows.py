"""Which rows the state of the data says have been dealt, computed from the order alone (laws 5 and 6).

A row of an epoch is a number, its code: (epoch - first_epoch) x rows an epoch + row; the rows of several data sets that
are dealt as one stream are numbered through.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from sftron.data.draws import low_cursors
from sftron.data.order import rows_at
from sftron.data.stream_order import SHUFFLE_WINDOW, window_order

_CHUNK = 1_000_000


@dataclass(frozen=True, slots=True)
class DealtStream:
    """A stream of positions of the run: without weights one of all data sets, with weights one of each.

    place: its number among them. sizes: rows of its data sets, the first of which has the number first_source.
    is_exact: the states of its lanes tell each row that was dealt, and not only some.
    """

    place: int
    first_source: int
    sizes: tuple[int, ...]
    is_streamed: bool
    is_exact: bool
    num_lanes: int
    seed: int
    first_epoch: int

    @property
    def num_rows(self) -> int:
        return sum(self.sizes)

    def codes(self, sources: np.ndarray, rows: np.ndarray, epochs: np.ndarray) -> np.ndarray:
        """Of rows of its data sets; int64 [n] all."""
        offsets = np.array([0, *accumulate(self.sizes)], dtype=np.int64)
        return (epochs - self.first_epoch) * self.num_rows + offsets[sources - self.first_source] + rows

    def row(self, code: int) -> tuple[int, int, int]:
        """Data set, row and epoch."""
        epoch, row = divmod(code, self.num_rows)
        source = 0
        while row >= self.sizes[source]:
            row -= self.sizes[source]
            source += 1
        return self.first_source + source, row, self.first_epoch + epoch

    def codes_at(self, num_positions: int) -> np.ndarray:
        """int64 [num_positions], what is dealt at each position from the first on."""
        parts = self._in_windows(num_positions) if self.is_streamed else self._in_chunks(num_positions)
        return np.concatenate([np.empty(0, dtype=np.int64), *parts])[:num_positions]

    def _in_chunks(self, num_positions: int) -> Iterator[np.ndarray]:
        for start in range(0, num_positions, _CHUNK):
            positions = np.arange(start, min(start + _CHUNK, num_positions))
            order = {"seed": self.seed, "place": self.place, "first_epoch": self.first_epoch}
            rows, epochs = rows_at(positions, self.num_rows, **order)
            yield (epochs - self.first_epoch) * self.num_rows + rows

    def _in_windows(self, num_positions: int) -> Iterator[np.ndarray]:
        for position in range(0, num_positions, self.num_rows):
            epoch = self.first_epoch + position // self.num_rows
            for start in range(0, self.num_rows, SHUFFLE_WINDOW):
                size = min(SHUFFLE_WINDOW, self.num_rows - start)
                order = window_order(start // SHUFFLE_WINDOW, size, epoch=epoch, seed=self.seed, place=self.place)
                yield position + start + np.array(order, dtype=np.int64)

    def positions_left(self, state: Mapping[str, Any]) -> np.ndarray:
        """Those that have left their lanes: all, or, where the state does not tell more, those below the marks."""
        found = [np.empty(0, dtype=np.int64)]
        for lane, text in state["lanes"].items():
            low = low_cursors(text)[self.place]
            above = int(text.split(":")[1], 16) if self.is_exact else 0
            numbers = [np.arange(low), [low + bit for bit in range(above.bit_length()) if above >> bit & 1]]
            found.append(int(lane) + self.num_lanes * np.concatenate(numbers).astype(np.int64))
        return np.concatenate(found)

    def num_epochs_left(self, state: Mapping[str, Any]) -> int:
        """Epochs of which every row has left its lane."""
        lanes = {int(lane): text for lane, text in state["lanes"].items()}
        lows = [low_cursors(lanes[lane])[self.place] if lane in lanes else 0 for lane in range(self.num_lanes)]
        return min(lane + self.num_lanes * low for lane, low in enumerate(lows)) // self.num_rows


def dealt_streams(data: Mapping[str, Any], sizes: Sequence[int], first_epoch: int) -> list[DealtStream]:
    """Of a run with `data` (see train.ledger.data_facts). sizes: rows of each data set."""
    order = {"num_lanes": data["num_lanes"], "seed": data["seed"], "first_epoch": first_epoch}
    streamed = [bool(each["streamed"]) for each in data["datasets"]]
    if not data["is_mixture"]:
        return [DealtStream(0, 0, tuple(sizes), streamed[0], True, **order)]
    return [
        DealtStream(place, place, (size,), is_streamed, False, **order)
        for place, (size, is_streamed) in enumerate(zip(sizes, streamed, strict=True))
    ]
