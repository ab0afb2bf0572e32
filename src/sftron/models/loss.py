"""Cross entropy on the labelled rows only, with its gradients made in the forward pass.

    shape suffixes: T tokens of the flat row, R labelled rows, C rows of a chunk, H hidden_size, V vocab_size

Projecting only labelled rows takes a quarter of the time at 25 % labelled. Full logits never exist: a chunk's are
turned into its gradients and forgotten, so nothing is computed twice (after Liger-Kernel's fused cross entropy).
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
    labeled_rows: int64 [R], unique; labels: int64 [R], already shifted; loss_weights: float32 [R].
        R may be 0: the sum is then 0 and its gradients are zeros, so that ranks stay in step.

    Returns: the sum (fp32 scalar; `backward` may run once) and the unweighted loss of each row (fp32 [R], detached).
    """
    if torch.is_grad_enabled() and (hidden_TH.requires_grad or head_weight_VH.requires_grad):
        return _WeightedLossSum.apply(hidden_TH, head_weight_VH, labeled_rows, labels, loss_weights)
    losses_R = torch.empty_like(loss_weights)
    with torch.no_grad():
        head_VH = head_weight_VH.to(hidden_TH.dtype)
        for chunk in _chunks(labeled_rows):
            losses_R[chunk], _, _ = _project(hidden_TH[labeled_rows[chunk]], head_VH, labels[chunk])
        return (losses_R * loss_weights).sum(), losses_R


class _WeightedLossSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TH: Tensor, head_weight_VH: Tensor, labeled_rows: Tensor, labels: Tensor, loss_weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        losses_R = torch.empty_like(loss_weights)
        grad_hidden_TH = torch.zeros_like(hidden_TH)
        grad_head_VH = None
        head_VH = head_weight_VH.to(hidden_TH.dtype)
        for chunk in _chunks(labeled_rows):
            hidden_CH = hidden_TH[labeled_rows[chunk]]
            losses_R[chunk], logits_CV, logsumexp_C1 = _project(hidden_CH, head_VH, labels[chunk])
            grad_CV = _grad_logits(logits_CV, logsumexp_C1, labels[chunk], loss_weights[chunk]).to(hidden_CH.dtype)
            grad_hidden_TH[labeled_rows[chunk]] = grad_CV @ head_VH
            if ctx.needs_input_grad[1]:
                grad_head_VH = _accumulate(grad_head_VH, grad_CV.T, hidden_CH)
        if grad_head_VH is None and ctx.needs_input_grad[1]:
            grad_head_VH = torch.zeros_like(head_weight_VH, dtype=torch.float32)
        # Attributes instead of save_for_backward: the backward pass scales them in place and hands them over.
        ctx.gradients, ctx.head_dtype = (grad_hidden_TH, grad_head_VH), head_weight_VH.dtype
        ctx.mark_non_differentiable(losses_R)
        return (losses_R * loss_weights).sum(), losses_R

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_sum: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.gradients is None:
            raise RuntimeError("weighted_loss_sum: backward ran already and its gradients are gone; run forward again.")
        (grad_hidden_TH, grad_head_VH), ctx.gradients = ctx.gradients, None
        if grad_head_VH is not None:
            grad_head_VH = grad_head_VH.mul_(grad_sum).to(ctx.head_dtype)
        return grad_hidden_TH.mul_(grad_sum), grad_head_VH, None, None, None


def _chunks(rows: Tensor) -> list[slice]:
    return [slice(start, start + ROWS_PER_CHUNK) for start in range(0, len(rows), ROWS_PER_CHUNK)]


def _project(hidden_CH: Tensor, head_VH: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Loss of each row, fp32 logits, and their logsumexp [C, 1]."""
    logits_CV = (hidden_CH @ head_VH.T).float()
    logsumexp_C1 = logits_CV.logsumexp(dim=-1, keepdim=True)
    return (logsumexp_C1 - logits_CV.gather(1, labels[:, None])).squeeze(1), logits_CV, logsumexp_C1


def _grad_logits(logits_CV: Tensor, logsumexp_C1: Tensor, labels: Tensor, loss_weights: Tensor) -> Tensor:
    """weight x (softmax - one at the label), made in the logits' own memory."""
    weight_C1 = loss_weights[:, None]
    return logits_CV.sub_(logsumexp_C1).exp_().mul_(weight_C1).scatter_add_(1, labels[:, None], -weight_C1)


def _accumulate(total_VH: Tensor | None, left_VC: Tensor, right_CH: Tensor) -> Tensor:
    """total + left @ right, in fp32 across chunks; in place, and without zeros for the first one."""
    if total_VH is None:
        return (left_VC @ right_CH).float()
    if left_VC.dtype == torch.float32:
        return total_VH.addmm_(left_VC, right_CH)
    return total_VH.add_(left_VC @ right_CH)
