"""The Triton kernel of cross_entropy.py; imported where there is Triton only."""

import triton
import triton.language as tl
from torch import Tensor

MAX_BLOCK, NUM_WARPS = 32768, 32
"""Columns of bf16; half as many of fp32. That is four 16-byte loads in flight a thread, and 57 of the 64 registers
that 1,024 threads may have, so that one row has a processor to itself and 132 rows of 128,256 bf16 logits (34 MB) stay
in an H100's L2 cache (50 MB) from the first pass to the second."""


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

    # For each group of 8 columns apart, as a group lies in one thread, and no thread waits in the loops: the largest
    # logit so far, the sum of exp(x - largest), and whether some column is more likely than the label, or as likely and
    # before it. Not from -inf, as the difference of two of them is NaN.
    largest = tl.full([BLOCK // 8], -3.4e38, tl.float32)
    sums = tl.zeros([BLOCK // 8], tl.float32)
    beaten = tl.zeros([BLOCK // 8], tl.int32)
    for start in range(0, row_stride, BLOCK):
        columns = start + 8 * tl.arange(0, BLOCK // 8)[:, None] + tl.arange(0, 8)[None, :]
        # Masked by the stride, of which is known that 16 divides it, so 16 bytes are read at once.
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
        # Before the store, as behind it registers would run out. A probability of 0 has a product of 0 even where x is
        # -inf, and what lies between the rows adds nothing.
        dots += tl.sum(tl.where(columns < vocab_size, exp * tl.maximum(x, -1.0e4), 0.0), 1)
        gradient = exp * (weight / total) - tl.where(columns == column_of_label, weight, 0.0)
        tl.store(logits_ptr + columns, gradient.to(logits_ptr.dtype.element_ty), mask=columns < row_stride)
    log_total = tl.log(total)
    tl.store(measures_ptr + row, log_total + (top - x_label))
    tl.store(measures_ptr + num_rows + row, log_total - tl.sum(dots, 0) / total)  # pyright: ignore[reportOperatorIssue]
    tl.store(measures_ptr + 2 * num_rows + row, tl.where(tl.max(beaten, 0) == 0, 1.0, 0.0))


def cross_entropy_gradient_(logits_CV: Tensor, labels: Tensor, loss_weights: Tensor) -> Tensor:
    """See cross_entropy.cross_entropy_gradient_."""
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
