"""Cross entropy on the labelled rows only, with its gradients made in the forward pass.

    shape suffixes: T tokens of the flat row, R labelled rows, C rows of a chunk, H hidden_size, V vocab_size

Projecting only labelled rows takes a quarter of the time at 25 % labelled. Full logits never exist: a chunk's are turned
into its gradients and forgotten, so nothing is computed twice (Liger-Kernel's fused linear cross entropy is the model).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

ROWS_PER_CHUNK = 2048
"""Fp32 logits of a chunk take 1 GB at a vocabulary of 128 k."""


def weighted_loss_sum(
    hidden_TH: Tensor, head_weight_VH: Tensor, labeled_rows: Tensor, labels: Tensor, loss_weights: Tensor
) -> tuple[Tensor, Tensor]:
    """The step's numerator (law 8): sum of loss_weights x cross entropy, divided by nothing.

    hidden_TH: final-normed hidden states; its type is the type of the matrix products, fp32 that of all the rest.
    head_weight_VH: the master weight, any float type.
    labeled_rows: int64 [R], unique; labels: int64 [R], already shifted; loss_weights: float32 [R]. R may be 0: the sum is
        then 0 and its gradients are zeros, so that ranks stay in step.

    Returns: the sum (fp32 scalar; `backward` may run once) and the unweighted loss of each row (fp32 [R], detached).
    """
    arguments = (hidden_TH, head_weight_VH, labeled_rows, labels, loss_weights)
    if torch.is_grad_enabled() and (hidden_TH.requires_grad or head_weight_VH.requires_grad):
        return _WeightedLossSum.apply(*arguments)
    with torch.no_grad():
        return _forward(*arguments, None, None)


class _WeightedLossSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TH: Tensor, head_VH: Tensor, labeled_rows: Tensor, labels: Tensor, loss_weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        needs_hidden, needs_head = ctx.needs_input_grad[:2]
        grad_hidden_TH = torch.zeros_like(hidden_TH) if needs_hidden else None
        grad_head_VH = torch.zeros_like(head_VH, dtype=torch.float32) if needs_head else None
        outputs = _forward(hidden_TH, head_VH, labeled_rows, labels, loss_weights, grad_hidden_TH, grad_head_VH)
        # Attributes instead of save_for_backward: the backward pass scales them in place and hands them over.
        ctx.gradients = (grad_hidden_TH, grad_head_VH)
        ctx.head_dtype = head_VH.dtype
        ctx.mark_non_differentiable(outputs[1])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_sum: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.gradients is None:
            raise RuntimeError("weighted_loss_sum: backward ran already and its gradients are gone; run forward again.")
        (grad_hidden_TH, grad_head_VH), ctx.gradients = ctx.gradients, None
        if grad_hidden_TH is not None:
            grad_hidden_TH.mul_(grad_sum)
        if grad_head_VH is not None:
            grad_head_VH = grad_head_VH.mul_(grad_sum).to(ctx.head_dtype)
        return grad_hidden_TH, grad_head_VH, None, None, None


def _forward(
    hidden_TH: Tensor,
    head_VH: Tensor,
    labeled_rows: Tensor,
    labels: Tensor,
    loss_weights: Tensor,
    grad_hidden_TH: Tensor | None,
    grad_head_VH: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The losses; gradients are added to the two buffers, where given."""
    head_VH = head_VH.to(hidden_TH.dtype)
    losses_R = torch.empty_like(loss_weights)
    for start in range(0, len(labeled_rows), ROWS_PER_CHUNK):
        chunk = slice(start, start + ROWS_PER_CHUNK)
        hidden_CH = hidden_TH[labeled_rows[chunk]]
        logits_CV = (hidden_CH @ head_VH.T).float()
        label_C1 = labels[chunk, None]
        logsumexp_C1 = logits_CV.logsumexp(dim=-1, keepdim=True)
        losses_R[chunk] = (logsumexp_C1 - logits_CV.gather(1, label_C1)).squeeze(1)
        if grad_hidden_TH is None and grad_head_VH is None:
            continue
        # d loss / d logits = weight x (softmax - one at the label), made in the logits' own memory.
        weight_C1 = loss_weights[chunk, None]
        grad_CV = logits_CV.sub_(logsumexp_C1).exp_().mul_(weight_C1).scatter_add_(1, label_C1, -weight_C1)
        grad_CV = grad_CV.to(hidden_CH.dtype)
        if grad_hidden_TH is not None:
            grad_hidden_TH[labeled_rows[chunk]] = grad_CV @ head_VH
        if grad_head_VH is not None:
            _accumulate(grad_head_VH, grad_CV.T, hidden_CH)
    return (losses_R * loss_weights).sum(), losses_R


def _accumulate(total_VH: Tensor, left_VC: Tensor, right_CH: Tensor) -> None:
    """total += left @ right, in fp32 across chunks."""
    if total_VH.dtype == left_VC.dtype:
        total_VH.addmm_(left_VC, right_CH)
    else:
        total_VH.add_(left_VC @ right_CH)
