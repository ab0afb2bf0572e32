"""Saving of checkpoints: when one is due, writing in the background or not, and handling of failed writes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from sftron.checkpoint.checkpoint import (
    prune,
    shards_to_store,
    state_text,
    write_checkpoint,
)
from sftron.checkpoint.shards import HostCopy, StoredShards
from sftron.train.logs import console
from sftron.train.ranks import Ranks

_MAX_MISSES_IN_A_ROW = 3
_PATIENCE_S = 5.0
"""How long a failed run waits for a checkpoint that is still being written."""
_SECONDS_BETWEEN_SAVES = 15 * 60
_LARGEST_SHARE = 1 / 20
"""The largest share of the time that saves may block training, with interval "auto"."""


class Saver:
    """Writes checkpoints under `root`, one at a time. All ranks call the same methods at the same step.

    A checkpoint that cannot be written (most often because of a full disk) does not end the run; the third consecutive
    failure does.

    Args:
        root: The folder of all checkpoints.
        interval: The value of checkpoints.interval.
        keep: The value of checkpoints.keep_last.
        in_background: Whether a thread writes while training continues; it uses a process group of its own.

    Attributes:
        saved_step: The step of the newest complete checkpoint; 0 if there is none.
        tried_step: The step of the newest checkpoint that was started, complete or not.
        best_step: The step of the best checkpoint, which is kept regardless of its age; None if there is none.
    """

    def __init__(
        self, root: Path, *, interval: int | Literal["auto"] | None, keep: int, ranks: Ranks, in_background: bool
    ) -> None:
        self.saved_step = self.tried_step = 0
        self.best_step: int | None = None
        self._root, self._interval, self._keep, self._ranks = root, interval, keep, ranks
        self._saved_at: float | None = None
        self._save_seconds = 0.0
        self._writers = ranks.with_own_group() if in_background else ranks
        self._host_copy = HostCopy() if in_background else None
        self._running: Future[None] | None = None
        self._num_misses = 0

    def resume_from(self, step: int, *, best_step: int | None) -> None:
        self.saved_step = self.tried_step = step
        self.best_step = best_step

    def is_due(self, step: int) -> bool:
        """Returns whether a checkpoint is due after `step`; only the main rank's result counts, as clocks differ."""
        if isinstance(self._interval, str):
            now = time.monotonic()
            if self._saved_at is None:  # the first step since this start; nothing earlier can be lost
                self._saved_at = now
            return now - self._saved_at >= max(_SECONDS_BETWEEN_SAVES, self._save_seconds / _LARGEST_SHARE)
        return self._interval is not None and step - self.tried_step >= self._interval

    def save(self, step: int, *, model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Saves the state after `step`, or starts to save it in the background.

        Raises OSError at the third consecutive failure.
        """
        began, earlier = time.monotonic(), self.tried_step
        if self._running:
            self.wait()
            waited = time.monotonic() - began
            console.write(f"waited     {waited:.1f} s until the checkpoint of step {earlier} was written")
        self.tried_step = step
        shards, text, best_step = self._shards(model, optimizer), state_text(step, state), self.best_step
        if self._host_copy is None:
            try:
                self._write(step, shards, text, best_step)
                self._succeeded()
            except OSError as error:
                self._missed(error)
        else:
            copied = self._host_copy.take(shards)
            self._running = _in_background(lambda: self._write(step, copied, text, best_step))
        self._saved_at = time.monotonic()
        self._save_seconds = self._saved_at - began

    def save_last(
        self, step: int, *, model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
    ) -> None:
        """Waits for a background save, then saves the state after `step` if it is not saved yet. Raises OSError."""
        self.wait()
        if self.saved_step != step:
            self.tried_step = step
            self._write(step, self._shards(model, optimizer), state_text(step, state), self.best_step)
            self._succeeded()

    def poll(self) -> None:
        """Completes a background save once the threads of all ranks have ended, so at the same step on all ranks.

        Raises OSError at the third consecutive failure.
        """
        if self._running and not self._ranks.any(not self._running.done()):
            self.wait()

    def wait(self) -> None:
        """Waits for a background save. Raises OSError at the third consecutive failure."""
        running, self._running = self._running, None
        if running is not None:
            try:
                running.result()
                self._succeeded()
            except OSError as error:
                self._missed(error)

    def close(self) -> None:
        """Waits briefly for a background save and ignores its errors; for a run that has already failed."""
        if self._running:
            with suppress(Exception):
                self._running.result(_PATIENCE_S)

    def _shards(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> StoredShards:
        return shards_to_store(model, optimizer, is_main=self._ranks.is_main)

    def _write(self, step: int, shards: StoredShards, text: bytes, best_step: int | None) -> None:
        write_checkpoint(self._root / f"step-{step}", step, shards, state=text, ranks=self._writers)
        if self._ranks.is_main:
            prune(self._root, step, self._keep, best_step)

    def _succeeded(self) -> None:
        """Called on the main thread, so that `saved_step` changes at the same step on all ranks."""
        self.saved_step, self._num_misses = self.tried_step, 0

    def _missed(self, error: OSError) -> None:
        self._num_misses += 1
        if self._num_misses == _MAX_MISSES_IN_A_ROW:
            raise OSError(f"{_MAX_MISSES_IN_A_ROW} checkpoints in a row could not be saved: {error}") from error
        newest = f"step-{self.saved_step}" if self.saved_step else "none"
        console.write(
            f"WARNING    the checkpoint of step {self.tried_step} could not be saved: {error}. The run goes on; its "
            f"newest one is {newest}. Make room in {self._root}: {_MAX_MISSES_IN_A_ROW} misses in a row end the run"
        )


def _in_background(work: Callable[[], None]) -> Future[None]:
    """Calls `work` in a daemon thread, which does not keep the process alive at exit, unlike an executor's threads."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # raised again by result()
            future.set_exception(error)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return future
