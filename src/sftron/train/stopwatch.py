"""How long the step loop stood still for something else."""

from __future__ import annotations

import time


class Stopwatch:
    """Runs while it is entered: `with watch: ...`, as often as wanted."""

    def __init__(self) -> None:
        self._seconds = self._started = 0.0

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds += time.perf_counter() - self._started

    def take(self) -> float:
        """Seconds since they were last taken."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds
