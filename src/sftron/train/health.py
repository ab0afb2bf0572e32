"""Whether weights are good: finite, and before they are saved, with a finite loss and finite gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sftron.data.types import Batch
from sftron.models.llama import LlamaForSFT
from sftron.models.loss import LossSum
from sftron.models.sharding import local_shard
from sftron.train.objective import TokenLoss
from sftron.train.ranks import Ranks
from sftron.train.step import StepResult, train_step


def require_finite(model: LlamaForSFT, ranks: Ranks, origin: str) -> None:
    """Raises ValueError on all ranks if a weight is not finite. The message names `origin`, the weights' source."""
    if bad := non_finite_tensors(model, ranks):
        more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
        raise ValueError(
            f"{origin} holds weights that are not finite (NaN or infinity), in {', '.join(bad[:5])}{more}; nothing can "
            "be trained from them: use another copy of the model, or an earlier checkpoint"
        )


def non_finite_tensors(model: LlamaForSFT, ranks: Ranks) -> list[str]:
    """Returns the names of the parameters with NaN or infinity on any rank; waits for the device once."""
    named = {name: local_shard(parameter.detach())[0] for name, parameter in model.named_parameters()}
    is_bad = torch.stack([~rows.isfinite().all() for rows in named.values()])
    return [name for name, number in zip(named, ranks.sum(is_bad.int()).tolist(), strict=True) if number]


class Health:
    """Checks weights by a forward and a backward pass before they are saved or exported. A collective.

    Finite weights are not enough: weights of 8e37 are finite, but their loss is not. So the loss and the gradients are
    computed for a batch of the last step that was finite, because a bad batch proves nothing about the weights.
    """

    def __init__(self, model: LlamaForSFT, ranks: Ranks, loss_function: LossSum) -> None:
        self._model, self._ranks, self._loss_function = model, ranks, loss_function
        self._batch: Batch | None = None
        self._was_skipped = False
        self._judged: tuple[int, bool] | None = None

    def note(self, result: StepResult, batches: Sequence[Batch]) -> None:
        """Records a batch of this rank from a finite step, for later checks.

        It is the last batch with a target, because the loss of a batch without one is zero for any weights.
        """
        self._was_skipped = not result.is_finite
        if result.is_finite and result.loss is not None:
            trained = [batch for batch in batches if batch.weight_sum > 0]
            if trained or self._batch is None:
                self._batch = (trained or batches)[-1]

    def is_proven(self, step: int) -> bool:
        """Returns whether the weights after `step` give a finite loss and finite gradients; computed once per step."""
        if self._judged is None or self._judged[0] != step:
            self._judged = (step, self._measure())
        return self._judged[1]

    def _measure(self) -> bool:
        if self._batch is None:  # no step has changed the weights since they were loaded
            return not self._was_skipped
        result = train_step(
            self._model,
            None,
            [self._batch],
            TokenLoss(loss_function=self._loss_function),
            max_grad_norm=None,
            denominator=max(1.0, self._batch.weight_sum),
            sum_over_ranks=self._ranks.sum,
        )
        return result.is_finite and not non_finite_tensors(self._model, self._ranks)
