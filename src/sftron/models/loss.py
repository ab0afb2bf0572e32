"""Cross entropy at the labeled positions; its gradients are computed in the forward pass.

Only labeled positions are projected. The full logits are never stored: each chunk is replaced by its gradient, used and
discarded, so nothing is computed twice (as in Liger-Kernel's fused cross entropy).

    shape suffixes: T tokens of the packed row, R labeled positions, C rows of a chunk, H hidden_size, V vocab_size,
        M measures of a row
"""

import importlib.util
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sftron.kernels.cross_entropy import add_product_, cross_entropy_gradient_, empty_logits
from sftron.kernels.device import is_gpu
from sftron.models.head import Head, bound_


class RowMeasures(NamedTuple):
    """Measures of each labeled position, in the order of the positions; fp32 [R], detached and unweighted.

    The last two are None for implementations that do not expose their logits.
    """

    losses: Tensor
    """The cross entropy, in nats."""
    entropies: Tensor | None = None
    """The entropy of the predicted distribution, in nats."""
    hits: Tensor | None = None
    """1 if the label is the argmax (the first of equal logits), else 0."""


LossSum = Callable[[Tensor, Head, Tensor, Tensor, Tensor], tuple[Tensor, RowMeasures]]
"""(hidden_TH, head, label_positions, labels, loss_weights) -> (sum, measures); see `weighted_loss_sum`."""

Gradients = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""The measures (fp32 [3, R], or [1, R] with the losses only) and the gradients of the hidden states and of the weight
and bias of the head (fp32)."""

MAX_ROWS_PER_CHUNK, MAX_LOGITS_BYTES, MAX_PART_OF_GRADIENT = 4096, 400 * 10**6, 0.4
"""The limits of a chunk of logits: 400 MB, or 0.4 of the head's fp32 gradient if that is more.

In bf16, the first is 1,536 rows for a vocabulary of 128,256. With the head in bf16 (525 MB) and the labeled rows
(67 MB), this takes 0.99 GB at T = R = 16384 and H = 2048; the budget is 1 GB.

Each chunk reads and writes the entire gradient of the head, which for C rows takes 4/3 x (FLOP/s / bytes per second)
/ C of the time of its three products, for any H and V: on an H100 (200 FLOPs per byte) 0.42 with 640 rows and 0.13 with
2,048. With a vocabulary of 262,144, 400 MB hold 640 rows. The second limit is 2,048 rows at H = 2560 and takes 1.07 GB,
where the head's fp32 weight, bf16 copy and gradient take 6.7 GB. None of this has been timed on a GPU."""


def weighted_loss_sum(
    hidden_TH: Tensor, head: Head, label_positions: Tensor, labels: Tensor, loss_weights: Tensor
) -> tuple[Tensor, RowMeasures]:
    """Returns the numerator of the step's loss (law 8), the sum of loss_weights x cross entropy, and the measures.

    The sum is an fp32 scalar without any normalization; `backward` can run only once.

    Args:
        hidden_TH: The hidden states after the final norm. Matrix products and logits have their type; everything else
            is fp32. In bf16 the gradients have an error of 0.27 %, of which rounding the inputs alone causes 0.18 %.
        head: The master weights of the head, of any float type. The chunks of a bounded head take twice the memory.
        label_positions: int64 [R], unique. With R = 0 the sum is 0 and the gradients are zeros, so ranks remain in
            step.
        labels: int64 [R] in [0, V), already shifted; see `cross_entropy_gradient_`.
        loss_weights: float32 [R].
    """
    if torch.is_grad_enabled() and (hidden_TH.requires_grad or head.weight.requires_grad):
        total, measures_3R = _LossSum.apply(hidden_TH, *head, label_positions, labels, loss_weights, _native_gradients)
        return total, RowMeasures(*measures_3R.unbind())
    with torch.no_grad():
        hidden_RH, head = hidden_TH[label_positions], head.to(hidden_TH.dtype)
        measures_3R = loss_weights.new_empty(3, len(loss_weights))
        for _ in _logit_gradients(hidden_RH, head, labels, loss_weights, measures_3R, needs_head=False):
            pass
        return (measures_3R[0] * loss_weights).sum(), RowMeasures(*measures_3R.unbind())


class _LossSum(torch.autograd.Function):
    """The loss sum, whose gradients `make_gradients`(hidden_RH, head, labels, loss_weights, needs_head) computes in
    the forward pass. hidden_RH is a copy that may be overwritten by its gradient; see _native_gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        softcap: float | None,
        label_positions: Tensor,
        labels: Tensor,
        loss_weights: Tensor,
        make_gradients: Callable[..., Gradients],
    ) -> tuple[Tensor, Tensor]:
        hidden_RH, head = hidden_TH[label_positions], Head(weight_VH, bias_V, softcap).to(hidden_TH.dtype)
        measures_MR, *gradients = make_gradients(hidden_RH, head, labels, loss_weights, ctx.needs_input_grad[1])
        # Not save_for_backward, because the backward pass scales these tensors in place and returns them.
        ctx.gradients, ctx.num_tokens, ctx.head_dtype = gradients, len(hidden_TH), weight_VH.dtype
        ctx.save_for_backward(label_positions)
        ctx.mark_non_differentiable(measures_MR)
        return (measures_MR[0] * loss_weights).sum(), measures_MR

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_sum: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.gradients is None:
            raise RuntimeError("weighted_loss_sum: backward ran already and its gradients are gone; run forward again.")
        (grad_hidden_RH, *grads_head), ctx.gradients = ctx.gradients, None
        (label_positions,) = ctx.saved_tensors
        grads_head = [None if each is None else each.mul_(grad_sum).to(ctx.head_dtype) for each in grads_head]
        # As a matrix, grad_sum makes this product fp32. A scalar on a GPU would be rounded to bf16 first, which would
        # scale the gradient of all hidden states wrongly relative to the head's, by up to 1 part in 256.
        scaled_RH = (grad_hidden_RH * grad_sum.view(1, 1)).to(grad_hidden_RH.dtype)
        grad_hidden_TH = scaled_RH.new_zeros(ctx.num_tokens, scaled_RH.shape[1])
        return grad_hidden_TH.index_copy_(0, label_positions, scaled_RH), *grads_head, None, None, None, None, None


def _native_gradients(
    hidden_RH: Tensor, head: Head, labels: Tensor, loss_weights: Tensor, needs_head: bool
) -> Gradients:
    """Returns the measures and the gradients; the gradient of the hidden states overwrites hidden_RH."""
    measures_3R = loss_weights.new_empty(3, len(loss_weights))
    weight_VH = head.weight
    make = torch.empty if len(hidden_RH) else torch.zeros
    grad_head_VH = make(weight_VH.shape, dtype=torch.float32, device=weight_VH.device) if needs_head else None
    grad_bias_V = None if head.bias is None else torch.zeros_like(head.bias, dtype=torch.float32)
    is_first = True
    for hidden_CH, grad_CV in _logit_gradients(hidden_RH, head, labels, loss_weights, measures_3R, needs_head):
        if grad_head_VH is not None:
            add_product_(grad_head_VH, grad_CV.T, hidden_CH, is_first=is_first)
        if grad_bias_V is not None:
            grad_bias_V += grad_CV.sum(dim=0, dtype=torch.float32)
        torch.mm(grad_CV, weight_VH, out=hidden_CH)
        is_first = False
    return measures_3R, hidden_RH, grad_head_VH, grad_bias_V


def _logit_gradients(
    hidden_RH: Tensor, head: Head, labels: Tensor, loss_weights: Tensor, measures_3R: Tensor, needs_head: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields chunks of hidden states and gradients of their logits, valid until the next chunk; fills measures_3R."""
    weight_VH, bias_V, softcap = head
    num_rows = min(rows_per_chunk(weight_VH, needs_head=needs_head), max(1, len(hidden_RH)))
    buffer_CV = empty_logits(num_rows, len(weight_VH), like=hidden_RH)
    for start in range(0, len(hidden_RH), num_rows):
        chunk = slice(start, start + num_rows)
        hidden_CH = hidden_RH[chunk]
        logits_CV = torch.mm(hidden_CH, weight_VH.T, out=buffer_CV[: len(hidden_CH)])
        if bias_V is not None:
            logits_CV += bias_V
        slopes_CV = None if softcap is None else bound_(logits_CV, softcap)
        measures_3R[:, chunk] = cross_entropy_gradient_(logits_CV, labels[chunk], loss_weights[chunk])
        if slopes_CV is not None:
            logits_CV *= slopes_CV
        yield hidden_CH, logits_CV


def rows_per_chunk(weight_VH: Tensor, *, needs_head: bool) -> int:
    """Returns the number of rows per chunk, a multiple of 128, which is the tile size of a matrix product."""
    gradient_bytes = 4 * weight_VH.numel() if needs_head else 0
    most_bytes = max(MAX_LOGITS_BYTES, int(MAX_PART_OF_GRADIENT * gradient_bytes))
    fitting = most_bytes // (len(weight_VH) * weight_VH.element_size())
    return min(MAX_ROWS_PER_CHUNK, max(128, fitting // 128 * 128))


# --- Liger's implementation ---


def liger_loss_sum(
    hidden_TH: Tensor, head: Head, label_positions: Tensor, labels: Tensor, loss_weights: Tensor
) -> tuple[Tensor, RowMeasures]:
    """Computes `weighted_loss_sum` with liger_kernel, whose bf16 gradients use loss weights rounded to bf16."""
    total, losses_1R = _LossSum.apply(hidden_TH, *head, label_positions, labels, loss_weights, _liger_gradients)
    return total, RowMeasures(losses_1R[0])


def _liger_gradients(
    hidden_RH: Tensor, head: Head, labels: Tensor, loss_weights: Tensor, needs_head: bool
) -> Gradients:
    """Calls the inner function of Liger's autograd function, which would project twice for weighted tokens."""
    from liger_kernel.ops.fused_linear_cross_entropy import fused_linear_cross_entropy_forward

    head_VH = head.weight
    if not len(hidden_RH):  # Liger divides by the number of rows
        grad_head_VH = torch.zeros_like(head_VH, dtype=torch.float32) if needs_head else None
        return loss_weights.new_empty(1, 0), hidden_RH, grad_head_VH, None
    losses_R, _, _, _, grad_hidden_RH, grad_head_VH, _ = fused_linear_cross_entropy_forward(
        hidden_RH,
        head_VH,
        labels,
        reduction="none",
        accum_dtype=torch.float32,
        token_grad_output=loss_weights,
        compute_gradients=True,
        weight_requires_grad=needs_head,
    )
    # Liger accumulates in fp32 and then rounds to the head's type.
    return losses_R[None], grad_hidden_RH, None if grad_head_VH is None else grad_head_VH.float(), None


LOSSES: dict[str, LossSum] = {"native": weighted_loss_sum, "liger": liger_loss_sum}


def loss_function(name: str) -> LossSum:
    """Returns the implementation for a name that `resolve_loss` returned."""
    return LOSSES[name]


def resolve_loss(name: str, device: torch.device, *, head_has: str | None = None) -> str:
    """Returns the entry of LOSSES for `name`; "auto" is native, which needs no package and never synchronizes.

    Args:
        head_has: What the head of the model computes besides a product, which only "native" implements.

    Raises:
        ValueError: The option cannot run on `device`; the message has the reason and the remedy. There is no
            fallback.
    """
    if name == "auto":
        return "native"
    if name not in LOSSES:
        raise ValueError(f"loss: {name!r} is not one of auto, {', '.join(LOSSES)}.")
    reason = None if name == "native" else _reason_against_liger(device)
    if name != "native" and head_has:
        reason = f"the head of this model has {head_has}, which only 'native' implements"
    if reason:
        raise ValueError(f"loss: {name!r} cannot run here: {reason}. Choose 'auto', or 'native', which runs anywhere.")
    return name


def _reason_against_liger(device: torch.device) -> str | None:
    if not is_gpu(device):
        return f"it needs a CUDA device, but the device is {device.type!r}"
    if importlib.util.find_spec("liger_kernel") is None:
        return "the package is not installed (pip install liger-kernel)"
    return None if _liger_takes_weights() else "liger_kernel takes no weights per token before 0.8.5; install it"


def _liger_takes_weights() -> bool:
    from liger_kernel.ops.fused_linear_cross_entropy import fused_linear_cross_entropy_forward

    return "token_grad_output" in inspect.signature(fused_linear_cross_entropy_forward).parameters
