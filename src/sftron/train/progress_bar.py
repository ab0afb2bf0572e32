"""How far a run is, in one line of a terminal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from math import isfinite

_NUM_STEPS_LOOKED_BACK = 50
_NARROWEST_BAR = 10


class ProgressBar:
    """The line, and how long the rest takes at the pace of the last steps, saving and evaluation among them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._passed: deque[tuple[float, float]] = deque(maxlen=_NUM_STEPS_LOOKED_BACK + 1)

    def after(self, share: float, words: str) -> Callable[[int], str]:
        """The line after a step; share: of the whole run that is done; words: of the step. As long as it is told."""
        self._passed.append((self._clock(), min(1.0, share)))
        left = self.time_left
        text = f" {min(1.0, share):4.0%} | {words}" + ("" if left is None else f" | {left} left")

        def line(width: int) -> str:
            cells = width - len(text) - 2
            if cells < _NARROWEST_BAR:
                return text[1:].lstrip()[:width]
            cells = min(cells, 40)
            full = int(cells * min(1.0, share))
            return f"[{'=' * full}{' ' * (cells - full)}]{text}"

        return line

    @property
    def time_left(self) -> str | None:
        """As `12:05`, after the last step; None after the first one, whose pace is not known yet."""
        (start, first), (now, last) = self._passed[0], self._passed[-1]
        if last <= first:
            return None
        seconds = (1 - last) * (now - start) / (last - first)
        return _clock_time(seconds) if isfinite(seconds) else None


def _clock_time(seconds: float) -> str:
    """0:47, 12:05, 3:12:05, 2 d 3:12:05."""
    minutes, seconds_left = divmod(round(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    days, hours_left = divmod(hours, 24)
    if not hours:
        return f"{minutes}:{seconds_left:02}"
    return (f"{days} d " if days else "") + f"{hours_left}:{minutes_left:02}:{seconds_left:02}"
