"""Saves checkpoints: decides when and of which weights, writes in the background, and handles failed writes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import torch

from sftron.checkpoint.checkpoint import prune, shards_to_store, state_text, write_checkpoint
from sftron.checkpoint.frozen_files import FrozenWeightsError
from sftron.checkpoint.shards import HostCopy, StoredShards
from sftron.config import Checkpoints
from sftron.data.types import Batch
from sftron.models.llama import LlamaForSFT
from sftron.models.loss import loss_function
from sftron.train.evaluation import Best, Evaluator
from sftron.train.logs import console
from sftron.train.objective import TokenLoss
from sftron.train.ranks import Ranks
from sftron.train.run_directory import RunDirectory
from sftron.train.step import StepBatches, StepResult, non_finite_tensors, train_step

_MAX_MISSES_IN_A_ROW = 3
_PATIENCE_S = 5.0
"""How long a failed run waits for a checkpoint that is still being written."""
_SECONDS_BETWEEN_SAVES = 15 * 60
_LARGEST_SHARE = 1 / 20
"""The largest share of the time that saves may block training, with interval "auto"."""


class Saver:
    """Writes the checkpoints of a run directory, one at a time. All ranks call the same methods at the same step.

    A checkpoint that cannot be written (most often because of a full disk) does not end the run; the third consecutive
    failure does. With checkpoints.async, a thread writes while training continues; it has a process group of its own.

    Weights are saved and exported only if they give a finite loss and finite gradients. Finite weights are not enough:
    weights of 8e37 are finite, but their loss is not. So the saver computes both for a batch of the last finite step,
    because a bad batch proves nothing about the weights.

    Args:
        loss: The implementation of the loss; see `loss_function`.
        state: Returns the run state after the last finished step, see `resume.run_state`; a collective.
        require_unchanged: Raises DataError if the state would not describe what was trained, because data files have
            changed; a collective.

    Attributes:
        saved_step: The step of the newest complete checkpoint, else 0.
        tried_step: The step of the newest checkpoint that was started, complete or not.
        best_step: The step of the best checkpoint, which is kept regardless of its age, else None.
    """

    def __init__(
        self,
        ranks: Ranks,
        options: Checkpoints,
        directory: RunDirectory,
        model: LlamaForSFT,
        optimizer: torch.optim.Optimizer,
        *,
        loss: str,
        state: Callable[[], Mapping[str, Any]],
        require_unchanged: Callable[[], None],
        on_saved: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.saved_step = self.tried_step = 0
        self.best_step: int | None = None
        self._ranks, self._options, self._loss = ranks, options, loss
        self._directory, self._root = directory, directory.checkpoints
        self._model, self._optimizer = model, optimizer
        self._state, self._require_unchanged, self._on_saved = state, require_unchanged, on_saved
        self._saved_at: float | None = None
        self._save_seconds = 0.0
        in_background = self._options.asynchronous
        self._writers = self._ranks.with_own_group() if in_background else self._ranks
        self._host_copy = HostCopy() if in_background else None
        self._running: Future[None] | None = None
        self._num_misses = 0
        self._batch: Batch | None = None
        self._was_skipped = False
        self._judged: tuple[int, bool] | None = None

    def resume_from(self, step: int, best: Best | None) -> None:
        self.saved_step = self.tried_step = step
        if best is not None:  # the run may have been killed after the checkpoint, and before best.json
            self.best_step = best.step
            self._record_best(best)

    def is_due(self, step: int) -> bool:
        """Returns whether a checkpoint is due after `step`; only the main rank's result counts, as clocks differ."""
        interval = self._options.interval
        if isinstance(interval, str):
            now = time.monotonic()
            if self._saved_at is None:  # the first step since this start; nothing earlier can be lost
                self._saved_at = now
            return now - self._saved_at >= max(_SECONDS_BETWEEN_SAVES, self._save_seconds / _LARGEST_SHARE)
        return interval is not None and step - self.tried_step >= interval

    def save(self, step: int, *, is_last: bool = False) -> None:
        """Saves the state after `step`, the last finished one, unless its weights are broken.

        With `is_last`, blocks until saved, and does nothing if the step is already saved; other saves may continue in
        the background.

        Raises:
            DataError: The data files changed meanwhile, so the state would not describe what was trained.
            OSError: The third consecutive checkpoint could not be written; with `is_last`, this one.
        """
        self._require_unchanged()
        self._ranks.at(f"saving step {step}")
        if not self.is_healthy(step, "saved"):
            return
        state = self._state()
        if is_last:
            self.wait()
            if self.saved_step != step:
                self.tried_step = step
                self._write(step, self._shards(), state_text(step, state), self.best_step)
                self._succeeded()
            return
        began, earlier = time.monotonic(), self.tried_step
        if self._running:
            self.wait()
            waited = time.monotonic() - began
            console.write(f"waited     {waited:.1f} s until the checkpoint of step {earlier} was written")
        self.tried_step = step
        shards, text, best_step = self._shards(), state_text(step, state), self.best_step
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

    def save_best(self, step: int, evaluator: Evaluator, before: Best | None) -> None:
        """Saves the step that an evaluation found best; if it cannot, `before` stays the best."""
        self.best_step = evaluator.best_step
        if self.saved_step != step:
            self.save(step)
            self.wait()
        if self.saved_step != step:
            evaluator.best = before
            self.best_step = evaluator.best_step
        elif best := evaluator.best:
            self._record_best(best)

    def _record_best(self, best: Best) -> None:
        facts = {"metric": best.metric, "value": best.value, "step": best.step}
        self._directory.write("best.json", facts | {"checkpoint": f"checkpoints/step-{best.step}"})

    def save_before_failure(self, step: int) -> None:
        """Saves the last complete step before a bad row ends the run."""
        try:
            self.save(step, is_last=True)
            if self.saved_step == step:
                console.write(f"saved      step {step}, the last one before the failure")
        except OSError as error:
            console.warn(f"could not save step {step}: {error}")

    def poll(self) -> None:
        """Completes a background save once the threads of all ranks have ended, at the same step on all ranks.

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

    # -- broken weights ----------------------------------------------------------------------------------------------

    def note(self, fetched: StepBatches, result: StepResult) -> None:
        """Records a batch of this rank from a finite step, for later checks.

        It is the last batch with a target, because the loss of a batch without one is zero for any weights.
        """
        self._was_skipped = not result.is_finite
        if result.is_finite and result.loss is not None:
            trained = [batch for batch in fetched.batches if batch.weight_sum > 0]
            if trained or self._batch is None:
                self._batch = (trained or fetched.batches)[-1]

    def is_healthy(self, step: int, done: str = "") -> bool:
        """Returns whether the weights after `step` give a finite loss and finite gradients; computed once per step.

        If they do not, and `done` is given, prints that they are not `done`. A checkpoint's weights were checked when
        saved.
        """
        if self.saved_step == step:
            return True
        if self._judged is None or self._judged[0] != step:
            self._judged = (step, self._has_finite_loss())
        if done and not self._judged[1]:
            console.warn(
                f"the loss or gradients after step {step} are not finite, so the weights are not {done}. "
                "Lower optimizer.learning_rate if this happens again"
            )
        return self._judged[1]

    def _has_finite_loss(self) -> bool:
        if self._batch is None:  # no step has changed the weights since they were loaded
            return not self._was_skipped
        try:
            is_finite = train_step(
                self._model,
                None,
                [self._batch],
                TokenLoss(loss_function(self._loss)),
                max_grad_norm=None,
                denominator=max(1.0, self._batch.weight_sum),
                sum_over_ranks=self._ranks.sum,
            ).is_finite
        except FrozenWeightsError:
            if self._ranks.world_size > 1:  # other ranks may still be in the step
                raise
            is_finite = True  # as far as can be known without the base
        return is_finite and not non_finite_tensors(self._model, self._ranks)

    # -- the writing -------------------------------------------------------------------------------------------------

    def _shards(self) -> StoredShards:
        return shards_to_store(self._model, self._optimizer, is_main=self._ranks.is_main)

    def _write(self, step: int, shards: StoredShards, text: bytes, best_step: int | None) -> None:
        write_checkpoint(self._root / f"step-{step}", step, shards, state=text, ranks=self._writers)
        if self._ranks.is_main:
            prune(self._root, step, self._options.keep_last, best_step)

    def _succeeded(self) -> None:
        """Called on the main thread, so that `saved_step` changes at the same step on all ranks."""
        self.saved_step, self._num_misses = self.tried_step, 0
        self._on_saved(self.saved_step)

    def _missed(self, error: OSError) -> None:
        self._num_misses += 1
        if self._num_misses == _MAX_MISSES_IN_A_ROW:
            raise OSError(f"{_MAX_MISSES_IN_A_ROW} checkpoints in a row failed: {error}") from error
        newest = f"step-{self.saved_step}" if self.saved_step else "none"
        console.warn(
            f"could not save the checkpoint of step {self.tried_step}: {error}. The run goes on; its newest "
            f"checkpoint is {newest}. Free space in {self._root}: {_MAX_MISSES_IN_A_ROW} failures in a row end the run"
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
