"""Cross entropy that turns logits into their gradients in the logits' own memory.

    shape suffixes: C rows of a chunk, V vocab_size, W the next multiple of 64 to it; in _max_of_rows B blocks of W

On a GPU this is one Triton kernel, a custom op to torch; elsewhere torch's own operations, which are its oracle.
"""

import math

import torch
from torch import Tensor

_ELEMENTS_AT_ONCE = 2**20
"""Of the torch twin's two fp32 blocks: their 8 MB stay in a CPU's cache, a chunk's 800 MB would not."""


def empty_logits(num_rows: int, vocab_size: int, *, like: Tensor) -> Tensor:
    """Uninitialized [num_rows, V] in the type and on the device of `like`; on a GPU rows are W apart.

    So a vocabulary to which two tokens were added (32,002) still allows 16-byte accesses, which tensor cores need too.
    Not on a CPU: torch 2.13's bf16 product there multiplies what lies between the rows by zero, and NaN x 0 is NaN.
    """
    width = -(-vocab_size // 64) * 64 if like.is_cuda else vocab_size
    return like.new_empty(num_rows, width).narrow(1, 0, vocab_size)


def cross_entropy_gradient_(logits_CV: Tensor, labels: Tensor, loss_weights: Tensor) -> Tensor:
    """Measures of each row, fp32 [3, C]; the logits become weight x (softmax - one at the label).

    The measures: the loss, unweighted; the entropy of the softmax, in nats; and 1.0 where the label is the argmax, of
    equal logits the first, else 0.0. All three come from the passes that the gradient takes anyway.

    logits_CV: any float type, as `empty_logits` made it: what lies between the rows is overwritten too.
        The arithmetic is fp32, on one exponential function of x - max(x), so logits of 1e4 are as good as any.
    labels: int64 [C], each in [0, V). Others: IndexError or RuntimeError on a CPU; on a GPU, which nothing waits for,
        their loss is NaN, and the step is skipped and said to be.
    loss_weights: fp32 [C].
    """
    if logits_CV.is_cuda:
        return _cross_entropy_gradient_cuda(logits_CV, labels, loss_weights)
    measures_3C = _empty_measures(loss_weights)
    rows_at_once = max(1, _ELEMENTS_AT_ONCE // logits_CV.shape[1])
    for start in range(0, len(logits_CV), rows_at_once):
        rows = slice(start, start + rows_at_once)
        measures_3C[:, rows] = _gradient_of_rows_(logits_CV[rows], labels[rows, None], loss_weights[rows, None])
    return measures_3C


def _gradient_of_rows_(logits_CV: Tensor, label_C1: Tensor, weight_C1: Tensor) -> Tensor:
    x_CV = logits_CV.float()  # fp32 logits themselves, or a copy
    top_C1, argmax_C1 = _max_of_rows(x_CV)
    x_CV.sub_(top_C1)
    x_label_C1 = x_CV.gather(1, label_C1)
    exp_CV = x_CV.exp()
    sum_C1 = exp_CV.sum(dim=1, keepdim=True)
    log_sum_C1 = sum_C1.log()
    # A logit of -inf adds nothing, though 0 x -inf is NaN; a row of NaN has a sum of NaN.
    mean_x_C1 = x_CV.mul_(exp_CV).nansum(dim=1, keepdim=True).div_(sum_C1)
    logits_CV.copy_(exp_CV.mul_(weight_C1 / sum_C1).scatter_add_(1, label_C1, -weight_C1))
    return torch.cat([log_sum_C1 - x_label_C1, log_sum_C1 - mean_x_C1, (argmax_C1 == label_C1).float()], dim=1).T


def _max_of_rows(x_CV: Tensor) -> tuple[Tensor, Tensor]:
    """What x_CV.max(dim=1, keepdim=True) gives, in 0.4 of its time: torch's maximum without indices is vectorized, so
    it is taken of blocks, and an index is sought in the first block that has it."""
    width = math.gcd(x_CV.shape[1], 256)
    if width < 32:
        return x_CV.max(dim=1, keepdim=True)
    blocks_CBW = x_CV.unflatten(1, (-1, width))
    top_C1, block_C1 = blocks_CBW.amax(dim=2).max(dim=1, keepdim=True)
    best_CW = blocks_CBW.take_along_dim(block_C1[:, :, None], dim=1).squeeze(1)
    return top_C1, block_C1 * width + best_CW.max(dim=1, keepdim=True).indices


def _empty_measures(loss_weights: Tensor) -> Tensor:
    return loss_weights.new_empty(3, len(loss_weights))


@torch.library.custom_op("sftron::cross_entropy_gradient_", mutates_args=("logits_CV",))
def _cross_entropy_gradient_cuda(logits_CV: Tensor, labels: Tensor, loss_weights: Tensor) -> Tensor:
    from sftron.kernels.cross_entropy_triton import cross_entropy_gradient_

    return cross_entropy_gradient_(logits_CV, labels, loss_weights)


@_cross_entropy_gradient_cuda.register_fake
def _(logits_CV: Tensor, labels: Tensor, loss_weights: Tensor) -> Tensor:
    return _empty_measures(loss_weights)
