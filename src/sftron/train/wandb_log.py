"""Weights & Biases beside the run: nothing that it does or fails to do can slow a step, end a run or lose a number."""

from __future__ import annotations

import queue
import threading
from typing import Any

from sftron.train import console

_MAX_WAITING = 10_000
"""Points: 30 MB. Of steps, hours."""
_TIME_TO_FINISH_S = 60.0
THREAD_NAME = "wandb"


class WandbLog:
    """A thread of its own makes every call, as `init` may block for minutes and `log` while the disk or wandb's own
    process does. What went wrong is said once; metrics.jsonl has every step all the same."""

    def __init__(self, **options: Any) -> None:
        """options: of wandb.init."""
        self._options = options
        self._waiting: queue.Queue[tuple[dict[str, Any], int] | int] = queue.Queue(_MAX_WAITING)
        self._failed = False
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def log(self, numbers: dict[str, Any], step: int) -> None:
        if self._failed:
            return
        try:
            self._waiting.put_nowait((numbers, step))
        except queue.Full:
            self._fail(f"it has not taken the last {_MAX_WAITING:,} steps")

    def finish(self, exit_code: int) -> None:
        """Wait until wandb has everything, a minute at most."""
        if not self._failed:
            try:
                self._waiting.put_nowait(exit_code)
                self._thread.join(_TIME_TO_FINISH_S)
            except queue.Full:
                pass
            if self._thread.is_alive():
                self._fail(f"it has not finished in {_TIME_TO_FINISH_S:.0f} s")

    def _run(self) -> None:
        try:
            import wandb

            run = wandb.init(**self._options)
            while not isinstance(point := self._waiting.get(), int):
                run.log(*point)
            run.finish(exit_code=point)
        except BaseException as error:  # wandb has ended its own thread by SystemExit
            self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, reason: str) -> None:
        if not self._failed:
            self._failed = True
            console.say(f"wandb      gets nothing more: {reason}. metrics.jsonl has every step")
