"""The order of a streamed data set: its own, with each window of rows shuffled.

Its positions are dealt to lanes like those of any other data set, but rows come forward only, and lanes do not ask for
theirs at one pace: how many rows fill a pack depends on their lengths. So each row that was read waits until its lane
takes it. After R rows a lane these are some sqrt(R) a lane, whatever is set; rows of other workers' lanes are passed.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from sftron.data.sources import EndOfStream, RawRow, StreamedSource

SHUFFLE_WINDOW = 10_000


class _Waiting(NamedTuple):
    position: int
    row: int
    epoch: int
    raw: RawRow


class StreamOrder:
    """The order of a stream for some lanes of one process; see RowOrder. It reads `source` on as far as it has to.

    Of each lane the positions are asked for in ascending order. What `rows` names, and nothing else, is then to be had
    from `source`.

    lanes: those whose positions are asked for. start: no position below it is. first_epoch: the number of the epoch
    that position 0 is in.
    """

    num_rows = None
    """Not said even where it is known already: what is dealt must not depend on how far the stream was read."""

    def __init__(
        self,
        source: StreamedSource,
        *,
        seed: int,
        place: int,
        num_lanes: int,
        lanes: Iterable[int],
        start: int,
        window: int = SHUFFLE_WINDOW,
        first_epoch: int = 0,
    ) -> None:
        self._source, self._seed, self._place, self._first_epoch = source, seed, place, first_epoch
        self._num_lanes, self._window = num_lanes, window
        self._waiting: dict[int, deque[_Waiting]] = {lane: deque() for lane in lanes}
        self._begin(start)

    def rows(self, positions: Sequence[int]) -> list[tuple[int, int]]:
        """Raises DataError where the stream cannot be read on."""
        taken = [self._take(position) for position in positions]
        self._source.hand_over({each.row: each.raw for each in taken})
        return [(each.row, each.epoch) for each in taken]

    def _begin(self, position: int) -> None:
        """Read on from the beginning of the position's window."""
        num_rows = self._source.num_rows
        epoch, row = (0, position) if num_rows is None else divmod(position, num_rows)
        first = row // self._window * self._window
        self._source.skip_to(first)
        if num_rows is None and first:
            try:
                self._source.raw(first)
            except EndOfStream:
                return self._begin(position)  # in a later epoch, now that it is known how long one is
        self._epoch, self._next_row, self._next_position = self._first_epoch + epoch, first, position - row + first
        return None

    def _take(self, position: int) -> _Waiting:
        waiting = self._waiting[position % self._num_lanes]
        while True:
            while waiting:
                # Those below it had left the lane before a resume.
                if (first := waiting.popleft()).position == position:
                    return first
                assert first.position < position
            self._read_window()

    def _read_window(self) -> None:
        raws: list[RawRow] = []
        with suppress(EndOfStream):
            raws.extend(self._source.raw(row) for row in range(self._next_row, self._next_row + self._window))
        number = self._next_row // self._window
        order = window_order(number, len(raws), epoch=self._epoch, seed=self._seed, place=self._place)
        for offset, place in enumerate(order):
            position = self._next_position + offset
            waiting = self._waiting.get(position % self._num_lanes)
            if waiting is not None:
                waiting.append(_Waiting(position, self._next_row + place, self._epoch, raws[place]))
        self._next_position += len(raws)
        self._next_row += len(raws)
        if len(raws) < self._window:
            self._epoch, self._next_row = self._epoch + 1, 0


def window_order(window: int, size: int, *, epoch: int, seed: int, place: int) -> list[int]:
    """The order of the `size` rows of window number `window` of an epoch: that of as many hashes."""
    hashes = hashlib.shake_128(f"{seed} {place} {epoch} {window}".encode()).digest(8 * size)
    return np.argsort(np.frombuffer(hashes, "<u8"), kind="stable").tolist()
