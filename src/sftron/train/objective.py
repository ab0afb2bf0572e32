"""What training minimizes: the loss of a micro-batch, its denominator and its measures.

shape suffixes: T tokens of the packed row, H hidden_size, R labeled positions, C conversations
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sftron.data.types import Batch
from sftron.models.block import OnHost
from sftron.models.llama import LlamaForSFT
from sftron.models.loss import LossSum, RowMeasures, weighted_loss_sum
from sftron.train.metrics import TokenSums


class Objective(Protocol):
    """The loss of a step is one ratio (law 8): the sum of `loss_sum` over all its micro-batches and ranks, divided by
    the sum of `denominator` over all its micro-batches. A rank may have a part of a micro-batch; then its `loss_sum` is
    that of this part, and its `denominator` still that of the whole."""

    def denominator(self, batch: Batch) -> float:
        """Returns the micro-batch's part of the denominator, which needs no forward pass."""
        ...

    def new_measures(self, device: torch.device) -> TokenSums:
        """Returns the sums to which `loss_sum` adds the measures of a micro-batch."""
        ...

    def loss_sum(self, model: LlamaForSFT, batch: Batch, measures: TokenSums) -> Tensor:
        """Returns the micro-batch's part of the numerator, an fp32 scalar, and adds to the measures."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """The weighted cross entropy of the labels, over the sum of their weights."""

    loss_function: LossSum = weighted_loss_sum
    num_datasets: int = 1
    """The number of data sets whose losses are measured."""
    with_untrained: bool = False
    """Whether the losses of untrained tokens are measured too."""

    def denominator(self, batch: Batch) -> float:
        return batch.weight_sum

    def new_measures(self, device: torch.device) -> TokenSums:
        return TokenSums(self.num_datasets, device)

    def loss_sum(self, model: LlamaForSFT, batch: Batch, measures: TokenSums) -> Tensor:
        return loss_of(model, batch, self.loss_function, measures, self.with_untrained)


def loss_of(
    model: LlamaForSFT,
    batch: Batch,
    loss_function: LossSum = weighted_loss_sum,
    sums: TokenSums | None = None,
    with_untrained: bool = False,
) -> Tensor:
    """Returns the sum of the weighted token losses of one micro-batch (fp32, not yet divided by the sum of weights).

    The unweighted losses of its trained tokens are added to `sums`. If `with_untrained` is set, those of untrained
    tokens are added too, computed from the same hidden states without gradients.
    """
    hidden, device = hidden_states(model, batch), model.head_weight.device

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(device, non_blocking=True)

    if sums and with_untrained and len(batch.untrained_rows):
        # This comes first, before the head's gradient exists, so it does not raise the peak memory.
        with torch.no_grad():
            labels = move(batch.untrained_labels)
            weights = torch.ones_like(labels, dtype=torch.float32)
            _, measures = weighted_loss_sum(hidden, model.head, move(batch.untrained_rows), labels, weights)
            sums.add(measures, move(batch.untrained_roles))
    loss_sum, measures = loss_function(
        hidden, model.head, move(batch.label_positions), move(batch.labels), move(batch.loss_weights)
    )
    if sums:
        sums.add(measures, move(batch.label_roles), move(batch.label_sources))
    return loss_sum


def hidden_states(model: LlamaForSFT, batch: Batch) -> Tensor:
    """Returns the hidden states of this rank's part of a micro-batch, [T, H]."""
    device = model.head_weight.device
    input_ids, position_ids = (each.to(device, non_blocking=True) for each in (batch.input_ids, batch.position_ids))
    return model(input_ids, position_ids, OnHost(batch.cu_seqlens), batch.max_seqlen, batch.part.counts)


def conversation_log_probabilities(measures: RowMeasures, batch: Batch) -> Tensor:
    """Returns the sum of the log-probabilities of each conversation's labels, fp32 [C]; 0 for one without labels. Of a
    part of a row it is a part of the sum.

        conversations    [0, 3)      [3, 5)
        losses           -  1  2     -  4        at the labeled positions 1, 2 and 4
        sums             -3          -4

    Args:
        measures: The measures of `batch`, from its loss function.
    """
    losses_R = measures.losses
    bounds = torch.from_numpy(batch.pack.conversation_bounds).to(losses_R.device)
    positions_R = batch.label_positions.to(losses_R.device) + batch.part.begin
    conversation_R = torch.bucketize(positions_R, bounds, right=True) - 1
    return losses_R.new_zeros(len(bounds) - 1).index_add_(0, conversation_R, -losses_R)
