"""The training step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from sftron.data.types import Batch
from sftron.models.llama import LlamaForSFT
from sftron.models.loss import LossSum, weighted_loss_sum


@dataclass(frozen=True, slots=True)
class StepResult:
    """loss: the step's one ratio, None without a target. grad_norm: before clipping. skipped: why no update."""

    loss: float | None
    grad_norm: float | None
    skipped: str | None
    is_finite: bool = True


def train_step(
    model: LlamaForSFT,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    *,
    max_grad_norm: float | None,
    loss_function: LossSum = weighted_loss_sum,
) -> StepResult:
    """Forward and backward over the step's micro-batches, then one update.

    The loss is one ratio (law 8): the sum of weighted token losses over the whole step, divided once by the sum of
    weights over the whole step. A mean of the micro-batches' means would weigh a token by how few others share its
    batch. A loss or gradient that is not finite leaves weights and optimizer state as they were.
    """
    denominator = sum(batch.weight_sum for batch in batches)
    if denominator == 0:
        return StepResult(None, None, "no token to train on")
    device = model.head_weight.device
    loss = torch.zeros((), device=device)
    for batch in batches:
        if batch.weight_sum == 0:
            continue
        loss_sum = loss_of(model, batch, loss_function)
        (loss_sum / denominator).backward()
        loss += loss_sum.detach() / denominator
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    grad_norm = nn.utils.clip_grad_norm_(parameters, math.inf if max_grad_norm is None else max_grad_norm)
    loss_value, norm_value = loss.item(), grad_norm.item()
    is_finite = math.isfinite(loss_value) and math.isfinite(norm_value)
    if is_finite:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    skipped = None if is_finite else "the loss or a gradient is not finite"
    return StepResult(loss_value, norm_value, skipped, is_finite)


def loss_of(model: LlamaForSFT, batch: Batch, loss_function: LossSum = weighted_loss_sum) -> torch.Tensor:
    """Sum of weighted token losses of one micro-batch, fp32, divided by nothing yet."""
    device = model.head_weight.device

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, non_blocking=True)

    # The bounds of documents stay on the CPU for the attention that loops over them there.
    cu_seqlens = batch.cu_seqlens if model.attention == "sdpa" else move(batch.cu_seqlens)
    hidden = model(move(batch.input_ids), move(batch.position_ids), cu_seqlens, batch.max_seqlen)
    loss_sum, _ = loss_function(
        hidden, model.head_weight, move(batch.labeled_rows), move(batch.labels), move(batch.loss_weights)
    )
    return loss_sum
