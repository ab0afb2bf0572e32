"""Cross entropy that turns logits into their gradients in the logits' own memory, and the head's gradient of them.

On a GPU the first is one Triton kernel, a custom op to torch; elsewhere torch's own operations, which are its oracle.

    shape suffixes: C rows of a chunk, V vocab_size, W the next multiple of 64 to it, H hidden_size;
    in _max_of_rows B blocks of W
"""

import math
from importlib.util import find_spec

import torch
from torch import Tensor

_ELEMENTS_AT_ONCE = 2**20
"""The size of each of the torch twin's two fp32 blocks: 8 MB stay in a CPU's cache, a chunk's 800 MB would not."""
_PRODUCTS_AT_ONCE = 2**22
"""The size of a bf16 product on a CPU: its 8 MB stay in the cache. 49152 x 576 x 1024 takes 0.07 s instead of 0.10."""


def empty_logits(num_rows: int, vocab_size: int, *, like: Tensor) -> Tensor:
    """Returns uninitialized [num_rows, V] in the type and on the device of `like`; on a GPU rows are W apart.

    So a vocabulary to which two tokens were added (32,002) still allows 16-byte accesses, which tensor cores need too.
    Not on a CPU: torch 2.13's bf16 product there multiplies what lies between the rows by zero, and NaN x 0 is NaN.
    """
    width = -(-vocab_size // 64) * 64 if like.is_cuda else vocab_size
    return like.new_empty(num_rows, width).narrow(1, 0, vocab_size)


def cross_entropy_gradient_(logits_CV: Tensor, labels: Tensor, loss_weights: Tensor) -> Tensor:
    """Returns the measures of each row, fp32 [3, C]; the logits become weight x (softmax - one at the label).

    The measures are the loss, unweighted; the entropy of the softmax, in nats; and 1.0 where the label is the argmax
    (of equal logits the first), else 0.0. All three come from the passes that the gradient takes anyway.

    Args:
        logits_CV: any float type, as `empty_logits` made it: what lies between the rows is overwritten too.
            The arithmetic is fp32, on one exponential function of x - max(x), so logits of 1e4 are as good as any.
        labels: int64 [C], each in [0, V). Others raise IndexError or RuntimeError on a CPU; on a GPU, which nothing
            waits for, their loss is NaN, and the step is skipped and reported.
        loss_weights: fp32 [C].
    """
    if logits_CV.is_cuda:
        return _cross_entropy_gradient_cuda(logits_CV, labels, loss_weights)
    measures_3C = loss_weights.new_empty(3, len(loss_weights))
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
    """Returns x_CV.max(dim=1, keepdim=True) in 0.4 of its time: torch's maximum without indices is vectorized, so it is
    taken over blocks, and an index is sought in the first block that has it."""
    width = math.gcd(x_CV.shape[1], 256)
    if width < 32:
        return x_CV.max(dim=1, keepdim=True)
    blocks_CBW = x_CV.unflatten(1, (-1, width))
    top_C1, block_C1 = blocks_CBW.amax(dim=2).max(dim=1, keepdim=True)
    best_CW = blocks_CBW.take_along_dim(block_C1[:, :, None], dim=1).squeeze(1)
    return top_C1, block_C1 * width + best_CW.max(dim=1, keepdim=True).indices


@torch.library.custom_op("sftron::cross_entropy_gradient_", mutates_args=("logits_CV",))
def _cross_entropy_gradient_cuda(logits_CV: Tensor, labels: Tensor, loss_weights: Tensor) -> Tensor:
    return launch_cross_entropy(logits_CV, labels, loss_weights)


@_cross_entropy_gradient_cuda.register_fake
def _(logits_CV: Tensor, labels: Tensor, loss_weights: Tensor) -> Tensor:
    return loss_weights.new_empty(3, len(loss_weights))


def add_product_(total_VH: Tensor, left_VC: Tensor, right_CH: Tensor, *, is_first: bool) -> None:
    """Adds left @ right to the total; with `is_first` it overwrites the total, whatever that held, NaN too.

    Args:
        total_VH: fp32.
        left_VC, right_CH: both fp32, or both bf16. Of bf16 no product is ever rounded to bf16 on a GPU. On a CPU,
            where fp32 factors take three times as long, each is, once: by 1 part in 256 at most, unbiased.
    """
    beta = 0 if is_first else 1
    if left_VC.dtype == torch.float32:
        total_VH.addmm_(left_VC, right_CH, beta=beta)
    elif total_VH.is_cuda:
        _add_product_cuda(total_VH, left_VC, right_CH, beta)
    else:
        num_rows = max(1, _PRODUCTS_AT_ONCE // right_CH.shape[1])
        for total, left in zip(total_VH.split(num_rows), left_VC.split(num_rows), strict=True):
            total.copy_(left @ right_CH) if is_first else total.add_(left @ right_CH)


@torch.library.custom_op("sftron::add_product_", mutates_args=("total_VH",))
def _add_product_cuda(total_VH: Tensor, left_VC: Tensor, right_CH: Tensor, beta: int) -> None:
    """An op of its own, because torch's fake addmm with an out_dtype is missing (2.11) or allocates the sum three times
    (2.13). On a GPU it takes an fp32 sum since torch 2.10 (pytorch#167931)."""
    torch.addmm(total_VH, left_VC, right_CH, beta=beta, out_dtype=torch.float32, out=total_VH)


@_add_product_cuda.register_fake
def _(total_VH: Tensor, left_VC: Tensor, right_CH: Tensor, beta: int) -> None:
    pass


if find_spec("triton"):
    import triton
    import triton.language as tl

    MAX_BLOCK, NUM_WARPS = 32768, 32
    """Columns of bf16; half as many of fp32. That is four 16-byte loads in flight a thread, and 57 of the 64 registers
    that 1,024 threads may have, so that one row has a processor to itself and 132 rows of 128,256 bf16 logits (34 MB)
    stay in an H100's L2 cache (50 MB) from the first pass to the second."""

    @triton.jit
    def cross_entropy_gradient_kernel(
        logits_ptr, labels_ptr, weights_ptr, measures_ptr, num_rows, row_stride, vocab_size, BLOCK: tl.constexpr
    ):
        """One program a row, two passes over it."""
        row = tl.program_id(0).to(tl.int64)
        logits_ptr += row * row_stride
        label = tl.load(labels_ptr + row)
        column_of_label = label.to(tl.int32)
        weight = tl.load(weights_ptr + row)
        # Read before the passes: between them all threads wait for each other, so none can have overwritten it.
        is_label = (label >= 0) & (label < vocab_size)
        x_label = tl.load(logits_ptr + label, mask=is_label, other=float("nan")).to(tl.float32)

        # For each group of 8 columns apart, as a group lies in one thread, and no thread waits in the loops: the
        # largest logit so far, the sum of exp(x - largest), and whether some column is more likely than the label, or
        # as likely and before it. Not from -inf, as the difference of two of them is NaN.
        largest = tl.full([BLOCK // 8], -3.4e38, tl.float32)
        sums = tl.zeros([BLOCK // 8], tl.float32)
        beaten = tl.zeros([BLOCK // 8], tl.int32)
        for start in range(0, row_stride, BLOCK):
            columns = start + 8 * tl.arange(0, BLOCK // 8)[:, None] + tl.arange(0, 8)[None, :]
            # Masked by the stride, which 16 is known to divide, so 16 bytes are read at once.
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
            # Before the store, as after it registers would run out. A probability of 0 has a product of 0 even where x
            # is -inf, and what lies between the rows adds nothing.
            dots += tl.sum(tl.where(columns < vocab_size, exp * tl.maximum(x, -1.0e4), 0.0), 1)
            gradient = exp * (weight / total) - tl.where(columns == column_of_label, weight, 0.0)
            tl.store(logits_ptr + columns, gradient.to(logits_ptr.dtype.element_ty), mask=columns < row_stride)
        log_total = tl.log(total)
        entropy = log_total - tl.sum(dots, 0) / total  # pyright: ignore[reportOperatorIssue]
        tl.store(measures_ptr + row, log_total + (top - x_label))
        tl.store(measures_ptr + num_rows + row, entropy)
        tl.store(measures_ptr + 2 * num_rows + row, tl.where(tl.max(beaten, 0) == 0, 1.0, 0.0))

    def launch_cross_entropy(logits_CV: Tensor, labels: Tensor, loss_weights: Tensor) -> Tensor:
        """`cross_entropy_gradient_`, by the kernel."""
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
