"""What training minimizes: the loss of a micro-batch, its denominator and its measures.

shape suffixes: T tokens of the packed row, H hidden_size, R labeled positions, C conversations
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from sftron.data.types import Batch
from sftron.models.adapters import is_adapter, without_adapters
from sftron.models.block import OnHost
from sftron.models.llama import LlamaForSFT
from sftron.models.loss import LossSum, RowMeasures, weighted_loss_sum
from sftron.train.metrics import TokenSums


class Objective(Protocol):
    """The loss of a step is one ratio (law 8): the sum of `loss_sum` over all its micro-batches and ranks, divided by
    the sum of `denominator` over all its micro-batches. A rank may have a part of a micro-batch. Then its `loss_sum` is
    the sum over this part, and its `denominator` still counts the whole."""

    @property
    def names(self) -> Sequence[str]:
        """The names of its own measures, which `loss_sum` adds to with `measures.add_measure`."""
        ...

    def denominator(self, batch: Batch) -> float:
        """Returns the micro-batch's part of the denominator, which needs no forward pass."""
        ...

    def loss_sum(self, model: LlamaForSFT, batch: Batch, measures: TokenSums) -> Tensor:
        """Returns the micro-batch's part of the numerator, an fp32 scalar, and adds to the measures."""
        ...


class TokenLoss:
    """The weighted cross entropy of the labels, over the sum of their weights.

    A user's objective may inherit from it: override `loss_sum`, and add a term to `token_loss`.
    """

    names: Sequence[str] = ()
    loss_function: LossSum = staticmethod(weighted_loss_sum)

    def __init__(self, loss_function: LossSum = weighted_loss_sum) -> None:
        self.loss_function = loss_function

    def denominator(self, batch: Batch) -> float:
        return batch.weight_sum

    def loss_sum(self, model: LlamaForSFT, batch: Batch, measures: TokenSums) -> Tensor:
        return self.token_loss(model, batch, measures)

    def token_loss(self, model: LlamaForSFT, batch: Batch, measures: TokenSums, hidden: Tensor | None = None) -> Tensor:
        """Returns the sum of the weighted token losses, fp32, and adds to the measures.

        Args:
            hidden: The hidden states of the batch, [T, H], if they are known.
        """
        return loss_of(model, batch, self.loss_function, measures, hidden)


def loss_of(
    model: LlamaForSFT,
    batch: Batch,
    loss_function: LossSum = weighted_loss_sum,
    sums: TokenSums | None = None,
    hidden: Tensor | None = None,
) -> Tensor:
    """Returns the sum of the weighted token losses of one micro-batch (fp32, not yet divided by the sum of weights).

    The unweighted losses of its trained tokens are added to `sums`. If `sums.with_untrained` is set, the losses of
    untrained tokens are added too, computed from the same hidden states without gradients.

    Args:
        hidden: The hidden states of the batch, [T, H], if they are known.
    """
    hidden, device = hidden_states(model, batch) if hidden is None else hidden, model.head_weight.device

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(device, non_blocking=True)

    if sums and sums.with_untrained and len(batch.untrained_rows):
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


def base_hidden_states(model: LlamaForSFT, batch: Batch) -> Tensor:
    """Returns the hidden states of the base, which has none of the model's adapters, without gradients, [T, H].

    Raises ValueError if other weights than adapters are trained, as the base is no longer in memory then.
    """
    if others := [name for name, each in model.named_parameters() if each.requires_grad and not is_adapter(name)]:
        raise ValueError(
            f"the base is not in memory: the run also trains {others[0]} and {len(others) - 1} others; set lora "
            "without modules_to_save"
        )
    with torch.no_grad(), without_adapters(model):
        return hidden_states(model, batch)


def label_log_probabilities(model: LlamaForSFT, batch: Batch, hidden: Tensor) -> Tensor:
    """Returns the log-probabilities of all tokens at the labeled positions, fp32 [R, V]; differentiable."""
    return model.head.logits(hidden[batch.label_positions.to(hidden.device)]).float().log_softmax(dim=-1)


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
