"""The training step: what the ranks' batches hold, and one optimizer step on them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from sftron.data.types import Batch, DataError
from sftron.models.llama import LlamaForSFT
from sftron.models.loss import LossSum, weighted_loss_sum
from sftron.models.sharding import sum_over_copies, whole
from sftron.train.flops import StepFlops
from sftron.train.progress import StepCounts
from sftron.train.ranks import Ranks, peak_memory_bytes
from sftron.train.token_losses import TokenLosses, TokenSums


@dataclass(frozen=True, slots=True)
class Deal:
    """batches: this rank's micro-batches. counts: of all ranks' together. flops: of one rank, on average.

    sum_squared_lengths_spread: of the rank with the most / the mean of ranks - 1; the others wait for it.
    data_seconds: how long the slowest rank waited for its batches. peak_memory_bytes: of the rank that has held the
    most before this step.
    """

    batches: list[Batch]
    counts: StepCounts
    flops: StepFlops
    sum_squared_lengths_spread: float
    data_seconds: float
    peak_memory_bytes: int


def deal_step(
    batches: Iterator[Batch],
    num_batches: int,
    *,
    ranks: Ranks,
    num_datasets: int,
    flops_of: Callable[[Sequence[Batch]], StepFlops],
) -> Deal:
    """This rank's next `num_batches`, and the numbers of all. Raises DataError on all ranks for a bad row of one."""
    started, problem = time.perf_counter(), None
    own: list[Batch] = []
    try:
        own += (next(batches) for _ in range(num_batches))
    except DataError as error:
        problem = error
    data_seconds, flops = time.perf_counter() - started, flops_of(own)
    everyone = ranks.gather(
        {
            "problem": problem and str(problem),
            "counts": StepCounts.of(own, num_datasets).state(),
            "flops": [flops.model, flops.hardware],
            "data_seconds": data_seconds,
            "peak_memory_bytes": peak_memory_bytes(ranks.device),
        }
    )
    if problem is not None:
        raise problem
    for rank, facts in enumerate(everyone):
        if facts["problem"] is not None:
            raise DataError(f"rank {rank}: {facts['problem']}")
    model, hardware = (
        sum(column) // len(everyone) for column in zip(*(facts["flops"] for facts in everyone), strict=True)
    )
    return Deal(
        own,
        StepCounts.sum_of([facts["counts"] for facts in everyone]),
        StepFlops(model=model, hardware=hardware),
        _spread([facts["counts"]["sum_squared_lengths"] for facts in everyone]),
        max(facts["data_seconds"] for facts in everyone),
        max(facts["peak_memory_bytes"] for facts in everyone),
    )


def _spread(numbers: Sequence[int]) -> float:
    total = sum(numbers)
    return max(numbers) * len(numbers) / total - 1 if total else 0.0


@dataclass(frozen=True, slots=True)
class StepResult:
    """loss: the step's one ratio, None without a target. grad_norm: before clipping. skipped: why no update.

    token_losses: of all ranks; None without a target.
    """

    loss: float | None
    grad_norm: float | None
    skipped: str | None
    is_finite: bool = True
    token_losses: TokenLosses | None = None


def train_step(
    model: LlamaForSFT,
    optimizer: torch.optim.Optimizer | None,
    batches: Sequence[Batch],
    *,
    max_grad_norm: float | None,
    loss_function: LossSum = weighted_loss_sum,
    weight_sum: float | None = None,
    num_datasets: int = 1,
    with_untrained: bool = False,
    sum_over_ranks: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
) -> StepResult:
    """Forward and backward over this rank's micro-batches of the step, then one update.

    The loss is one ratio (law 8): the sum of weighted token losses over the whole step, divided once by the sum of
    weights over the whole step. A mean of the micro-batches' means would weigh a token by how few others share its
    batch. A loss or gradient that is not finite, on any rank, leaves weights and optimizer state as they were.

    with_untrained: also measure the losses of the rows that are not trained. num_datasets: how many there are.
    optimizer: None measures alone, and changes no weight.
    weight_sum: of all ranks' batches, by default of these. Gradients of a sharded model are summed over ranks in the
    backward pass, so a rank whose own batches have no target takes part all the same.
    """
    if weight_sum is None:
        weight_sum = sum(batch.weight_sum for batch in batches)
    if weight_sum == 0:
        return StepResult(None, None, "no token to train on")
    loss = torch.zeros((), device=model.head_weight.device)
    sums = TokenSums(num_datasets, loss.device)
    for number, batch in enumerate(batches, start=1):
        sum_over_copies(model, wanted=number == len(batches))
        share = loss_of(model, batch, loss_function, sums, with_untrained) / weight_sum
        share.backward()
        loss += share.detach()
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    norm = whole(nn.utils.get_total_norm(parameter.grad for parameter in parameters if parameter.grad is not None))
    if max_grad_norm is not None:
        nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, norm)
    # All that the step tells comes to the host at once, and with it the answer whether to update.
    numbers = sum_over_ranks(torch.cat([loss.double().view(1), sums.table_G4.flatten()]))
    norm_value, loss_value, *token_sums = torch.cat([norm.double().view(1), numbers]).tolist()
    is_finite = math.isfinite(loss_value) and math.isfinite(norm_value)
    if is_finite and optimizer is not None:
        optimizer.step()
    model.zero_grad(set_to_none=True)
    skipped = None if is_finite else "the loss or a gradient is not finite"
    return StepResult(loss_value, norm_value, skipped, is_finite, TokenLosses.of(token_sums))


def loss_of(
    model: LlamaForSFT,
    batch: Batch,
    loss_function: LossSum = weighted_loss_sum,
    sums: TokenSums | None = None,
    with_untrained: bool = False,
) -> torch.Tensor:
    """Sum of weighted token losses of one micro-batch, fp32, divided by nothing yet; its tokens go to `sums` as well.

    with_untrained: so do those without a label to train on, by the same hidden states and without gradients.
    """
    device = model.head_weight.device

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, non_blocking=True)

    # The bounds of documents stay on the CPU for the attention that loops over them there.
    cu_seqlens = batch.cu_seqlens if model.attention == "sdpa" else move(batch.cu_seqlens)
    hidden = model(move(batch.input_ids), move(batch.position_ids), cu_seqlens, batch.max_seqlen)
    if sums and with_untrained and len(batch.untrained_rows):
        # First, while the head's gradient does not exist yet: so it takes no memory that the trained rows do not.
        with torch.no_grad():
            labels = move(batch.untrained_labels)
            weights = torch.ones_like(labels, dtype=torch.float32)
            _, measures = weighted_loss_sum(hidden, model.head_weight, move(batch.untrained_rows), labels, weights)
            sums.add(measures, move(batch.untrained_roles))
    loss_sum, measures = loss_function(
        hidden, model.head_weight, move(batch.label_positions), move(batch.labels), move(batch.loss_weights)
    )
    if sums:
        sums.add(measures, move(batch.label_roles), move(batch.label_sources))
    return loss_sum
