"""Cross entropy that turns logits into their gradients in the logits' own memory.

    shape suffixes: C rows of a chunk, V vocab_size, W the next multiple of 64 to it

On a GPU this is one Triton kernel, a custom op to torch; elsewhere torch's own operations, which are its oracle.
"""

import torch
from torch import Tensor

_ELEMENTS_AT_ONCE = 2**21
"""The torch twin's fp32 block: 8 MB stay in a CPU's cache, a chunk's 800 MB would not."""


def empty_logits(num_rows: int, vocab_size: int, *, like: Tensor) -> Tensor:
    """Uninitialized [num_rows, V] in the type and on the device of `like`; on a GPU rows are W apart.

    So a vocabulary to which two tokens were added (32,002) still allows 16-byte accesses, which tensor cores need too.
    Not on a CPU: torch 2.13's bf16 product there multiplies what lies between the rows by zero, and NaN x 0 is NaN.
    """
    width = -(-vocab_size // 64) * 64 if like.is_cuda else vocab_size
    return like.new_empty(num_rows, width).narrow(1, 0, vocab_size)


def cross_entropy_gradient_(logits_CV: Tensor, labels: Tensor, loss_weights: Tensor) -> Tensor:
    """Loss of each row, fp32 [C], unweighted; the logits become weight x (softmax - one at the label).

    logits_CV: any float type, as `empty_logits` made it: what lies between the rows is overwritten too.
        The arithmetic is fp32, on one exponential function of x - max(x), so logits of 1e4 are as good as any.
    labels: int64 [C], each in [0, V). Others: IndexError or RuntimeError on a CPU; on a GPU, which nothing waits for,
        their loss is NaN, and the step is skipped and said to be.
    loss_weights: fp32 [C].
    """
    if logits_CV.is_cuda:
        return _cross_entropy_gradient_cuda(logits_CV, labels, loss_weights)
    losses_C = torch.empty_like(loss_weights)
    rows_at_once = max(1, _ELEMENTS_AT_ONCE // logits_CV.shape[1])
    for start in range(0, len(logits_CV), rows_at_once):
        rows = slice(start, start + rows_at_once)
        losses_C[rows] = _gradient_of_rows_(logits_CV[rows], labels[rows, None], loss_weights[rows, None])
    return losses_C


def _gradient_of_rows_(logits_CV: Tensor, label_C1: Tensor, weight_C1: Tensor) -> Tensor:
    x_CV = logits_CV.float()  # fp32 logits themselves, or a copy
    x_CV.sub_(x_CV.amax(dim=1, keepdim=True))
    x_label_C1 = x_CV.gather(1, label_C1)
    sum_C1 = x_CV.exp_().sum(dim=1, keepdim=True)
    x_CV.mul_(weight_C1 / sum_C1).scatter_add_(1, label_C1, -weight_C1)
    if logits_CV.dtype != torch.float32:
        logits_CV.copy_(x_CV)
    return (sum_C1.log() - x_label_C1).squeeze(1)


@torch.library.custom_op("sftron::cross_entropy_gradient_", mutates_args=("logits_CV",))
def _cross_entropy_gradient_cuda(logits_CV: Tensor, labels: Tensor, loss_weights: Tensor) -> Tensor:
    from sftron.kernels.cross_entropy_triton import cross_entropy_gradient_

    return cross_entropy_gradient_(logits_CV, labels, loss_weights)


@_cross_entropy_gradient_cuda.register_fake
def _(logits_CV: Tensor, labels: Tensor, loss_weights: Tensor) -> Tensor:
    return torch.empty_like(loss_weights)
