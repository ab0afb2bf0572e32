"""Cross entropy that overwrites the logits with their gradients, and the accumulation of the head's gradient.

shape suffixes: C rows of a chunk, V vocab_size, W vocab_size rounded up to a multiple of 64, H hidden_size;
in _max_of_rows B blocks of W
"""

import math
from importlib.util import find_spec

import torch
from torch import Tensor

from sftron.kernels.device import is_gpu
from sftron.kernels.operators import operator

ELEMENTS_AT_ONCE = 2**20
"""The size of the two fp32 blocks in the torch version. 8 MB fit into a CPU's cache, unlike a chunk's 800 MB."""
_PRODUCTS_AT_ONCE = 2**22
"""The size of a bf16 product on a CPU; 8 MB fit into the cache. 49152 x 576 x 1024 takes 0.07 s instead of 0.10 s."""


def empty_logits(num_rows: int, vocab_size: int, *, like: Tensor) -> Tensor:
    """Returns an uninitialized [num_rows, V] with the type and device of `like`; on a GPU, rows are W elements apart.

    The padded stride allows 16-byte accesses, which tensor cores require, even if two tokens were added to the
    vocabulary (32,002). It is not used on a CPU, because torch 2.13's bf16 product multiplies the padding by zero
    there, and NaN x 0 is NaN.
    """
    width = -(-vocab_size // 64) * 64 if is_gpu(like) else vocab_size
    return like.new_empty(num_rows, width).narrow(1, 0, vocab_size)


def cross_entropy_gradient_(logits_CV: Tensor, labels: Tensor, loss_weights: Tensor) -> Tensor:
    """Returns the measures of each row, fp32 [3, C]; overwrites the logits with weight x (softmax - one-hot label).

    The measures are the unweighted loss; the entropy of the softmax, in nats; and 1.0 if the label is the argmax (the
    first of equal logits), else 0.0. They need no pass over the logits beyond those for the gradient.

    Args:
        logits_CV: Logits of any float type, allocated by `empty_logits`; the padding between rows is overwritten as
            well. The arithmetic is fp32 with a single exponential of x - max(x), so logits of 1e4 lose no accuracy.
        labels: int64 [C], each in [0, V). Other values raise IndexError or RuntimeError on a CPU. On a GPU, without
            synchronization, their loss is NaN, and the step is skipped and reported.
        loss_weights: fp32 [C].
    """
    if is_gpu(logits_CV):
        return _cross_entropy_gradient(logits_CV, labels, loss_weights)
    measures_3C = loss_weights.new_empty(3, len(loss_weights))
    rows_at_once = max(1, ELEMENTS_AT_ONCE // logits_CV.shape[1])
    starts = range(0, len(logits_CV), rows_at_once)
    for start in starts[:1] if logits_CV.is_meta else starts:  # on the meta device, memory is all that counts
        rows = slice(start, start + rows_at_once)
        measures_3C[:, rows] = _gradient_of_rows_(logits_CV[rows], labels[rows, None], loss_weights[rows, None])
    return measures_3C


def _gradient_of_rows_(logits_CV: Tensor, label_C1: Tensor, weight_C1: Tensor) -> Tensor:
    x_CV = logits_CV.float()  # the logits themselves if they are fp32, else a copy
    top_C1, argmax_C1 = _max_of_rows(x_CV)
    x_CV.sub_(top_C1)
    x_label_C1 = x_CV.gather(1, label_C1)
    exp_CV = x_CV.exp()
    sum_C1 = exp_CV.sum(dim=1, keepdim=True)
    log_sum_C1 = sum_C1.log()
    # nansum ignores the NaN of 0 x -inf, so a logit of -inf contributes nothing; a row with NaN still has a NaN sum.
    mean_x_C1 = x_CV.mul_(exp_CV).nansum(dim=1, keepdim=True).div_(sum_C1)
    logits_CV.copy_(exp_CV.mul_(weight_C1 / sum_C1).scatter_add_(1, label_C1, -weight_C1))
    return torch.cat([log_sum_C1 - x_label_C1, log_sum_C1 - mean_x_C1, (argmax_C1 == label_C1).float()], dim=1).T


def _max_of_rows(x_CV: Tensor) -> tuple[Tensor, Tensor]:
    """Computes x_CV.max(dim=1, keepdim=True) in 0.4 of the time: torch vectorizes maxima without indices, and the index
    is searched only in the first block that contains the maximum."""
    width = math.gcd(x_CV.shape[1], 256)
    if width < 32:
        return x_CV.max(dim=1, keepdim=True)
    blocks_CBW = x_CV.unflatten(1, (-1, width))
    top_C1, block_C1 = blocks_CBW.amax(dim=2).max(dim=1, keepdim=True)
    best_CW = blocks_CBW.take_along_dim(block_C1[:, :, None], dim=1).squeeze(1)
    return top_C1, block_C1 * width + best_CW.max(dim=1, keepdim=True).indices


def add_product_(total_VH: Tensor, left_VC: Tensor, right_CH: Tensor, *, is_first: bool) -> None:
    """Adds left @ right to the total, or overwrites the total (even NaN) if `is_first`.

    Args:
        total_VH: fp32.
        left_VC, right_CH: Both fp32, or both bf16. A product of bf16 factors is never rounded to bf16 on a GPU. On a
            CPU each product is rounded once, unbiased and by 1 part in 256 at most, because fp32 factors would take
            three times as long.
    """
    beta = 0 if is_first else 1
    if left_VC.dtype == torch.float32:
        total_VH.addmm_(left_VC, right_CH, beta=beta)
    elif is_gpu(total_VH):
        _add_product(total_VH, left_VC, right_CH, beta)
    else:
        num_rows = len(total_VH) if total_VH.is_meta else max(1, _PRODUCTS_AT_ONCE // right_CH.shape[1])
        for total, left in zip(total_VH.split(num_rows), left_VC.split(num_rows), strict=True):
            total.copy_(left @ right_CH) if is_first else total.add_(left @ right_CH)


def _add_product_on_gpu(total_VH: Tensor, left_VC: Tensor, right_CH: Tensor, beta: int) -> None:
    torch.addmm(total_VH, left_VC, right_CH, beta=beta, out_dtype=torch.float32, out=total_VH)


# An operator, because torch's fake implementation of addmm with an out_dtype (pytorch#167931) is missing (2.11) or
# allocates the sum three times (2.13).
_add_product = operator("add_product_", _add_product_on_gpu, fake=lambda *_: None, mutates=["total_VH"])


if find_spec("triton"):
    import triton
    import triton.language as tl

    MAX_BLOCK, NUM_WARPS = 32768, 32
    """The number of bf16 columns per iteration; for fp32 it is half as many. Each thread then has four 16-byte loads in
    flight and uses 57 of the 64 registers available with 1,024 threads. One row occupies a whole multiprocessor, so 132
    rows of 128,256 bf16 logits (34 MB) stay in an H100's L2 cache (50 MB) from the first pass to the second."""

    @triton.jit
    def cross_entropy_gradient_kernel(
        logits_ptr, labels_ptr, weights_ptr, measures_ptr, num_rows, row_stride, vocab_size, BLOCK: tl.constexpr
    ):
        """Processes one row per program in two passes."""
        row = tl.program_id(0).to(tl.int64)
        logits_ptr += row * row_stride
        label = tl.load(labels_ptr + row)
        column_of_label = label.to(tl.int32)
        weight = tl.load(weights_ptr + row)
        # Read before the passes, between which all threads synchronize, so no thread can have overwritten it yet.
        is_label = (label >= 0) & (label < vocab_size)
        x_label = tl.load(logits_ptr + label, mask=is_label, other=float("nan")).to(tl.float32)

        # Each group of 8 columns has its own accumulators, since a group belongs to one thread and the loops then need
        # no synchronization: the largest logit so far, the sum of exp(x - largest), and whether some column is more
        # likely than the label, or equally likely and before it. The initial value is not -inf, because -inf - -inf is
        # NaN.
        largest = tl.full([BLOCK // 8], -3.4e38, tl.float32)
        sums = tl.zeros([BLOCK // 8], tl.float32)
        beaten = tl.zeros([BLOCK // 8], tl.int32)
        for start in range(0, row_stride, BLOCK):
            columns = start + 8 * tl.arange(0, BLOCK // 8)[:, None] + tl.arange(0, 8)[None, :]
            # The mask is the stride, which is known to be divisible by 16, so that 16 bytes are read at once.
            x = tl.load(logits_ptr + columns, mask=columns < row_stride, other=0.0).to(tl.float32)
            x = tl.where(columns < vocab_size, x, float("-inf"))
            new_largest = tl.maximum(largest, tl.max(x, 1))
            sums = sums * tl.exp(largest - new_largest) + tl.sum(tl.exp(x - new_largest[:, None]), 1)
            beaten |= tl.max(((x > x_label) | ((x == x_label) & (columns < column_of_label))).to(tl.int32), 1)
            largest = new_largest
        top = tl.max(largest, 0)
        total = tl.sum(sums * tl.exp(largest - top), 0)

        dots = tl.zeros([BLOCK // 8], tl.float32)
        for start in range(0, row_stride, BLOCK):
            columns = start + 8 * tl.arange(0, BLOCK // 8)[:, None] + tl.arange(0, 8)[None, :]
            x = tl.load(logits_ptr + columns, mask=columns < row_stride, other=0.0).to(tl.float32) - top
            exp = tl.exp(x)
            # Computed before the store, because computing it afterwards would exceed the registers. The maximum makes
            # the product 0 for a probability of 0, even if x is -inf; the padding between rows contributes nothing.
            dots += tl.sum(tl.where(columns < vocab_size, exp * tl.maximum(x, -1.0e4), 0.0), 1)
            gradient = exp * (weight / total) - tl.where(columns == column_of_label, weight, 0.0)
            tl.store(logits_ptr + columns, gradient.to(logits_ptr.dtype.element_ty), mask=columns < row_stride)
        log_total = tl.log(total)
        entropy = log_total - tl.sum(dots, 0) / total  # pyright: ignore[reportOperatorIssue]
        tl.store(measures_ptr + row, log_total + (top - x_label))
        tl.store(measures_ptr + num_rows + row, entropy)
        tl.store(measures_ptr + 2 * num_rows + row, tl.where(tl.max(beaten, 0) == 0, 1.0, 0.0))

    def launch_cross_entropy(logits_CV: Tensor, labels: Tensor, loss_weights: Tensor) -> Tensor:
        num_rows, vocab_size = logits_CV.shape
        row_stride = logits_CV.stride(0)
        measures_3C = loss_weights.new_empty(3, num_rows)
        assert logits_CV.stride(1) == 1
        assert vocab_size <= row_stride
        cross_entropy_gradient_kernel[(num_rows,)](
            logits_CV,
            labels.contiguous(),
            loss_weights.contiguous(),
            measures_3C,
            num_rows,
            row_stride,
            vocab_size,
            BLOCK=min(MAX_BLOCK * 2 // logits_CV.element_size(), triton.next_power_of_2(max(8, row_stride))),
            num_warps=NUM_WARPS,  # pyright: ignore[reportCallIssue]
        )
        return measures_3C

    _cross_entropy_gradient = operator(
        "cross_entropy_gradient_",
        launch_cross_entropy,
        fake=lambda _, labels, loss_weights: loss_weights.new_empty(3, len(loss_weights)),
        mutates=["logits_CV"],
    )
