"""The Triton kernel of cross_entropy.py; imported where there is Triton only."""

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_BLOCK, NUM_WARPS = 32768, 32
"""32 values a thread: four 16-byte loads of bf16 in flight, and 47 registers, so that one row has a processor to itself
and 132 rows of 128,256 bf16 logits (34 MB) stay in an H100's L2 cache (50 MB) from the first pass to the second."""


@triton.jit
def cross_entropy_gradient_kernel(
    logits_ptr, labels_ptr, weights_ptr, losses_ptr, row_stride, vocab_size, BLOCK: tl.constexpr
):
    """One program a row, two passes over it."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    label = tl.load(labels_ptr + row)
    weight = tl.load(weights_ptr + row)
    # Read before the passes: between them all threads wait for each other, so none can have overwritten it.
    is_label = (label >= 0) & (label < vocab_size)
    x_label = tl.load(logits_ptr + label, mask=is_label, other=float("nan")).to(tl.float32)

    # The largest logit so far and the sum of exp(x - largest), for each group of 8 columns apart: a group lies in one
    # thread, so no thread waits in the loop. Not from -inf, as the difference of two of them is NaN.
    largest = tl.full([BLOCK // 8], -3.4e38, tl.float32)
    sums = tl.zeros([BLOCK // 8], tl.float32)
    for start in range(0, row_stride, BLOCK):
        columns = start + 8 * tl.arange(0, BLOCK // 8)[:, None] + tl.arange(0, 8)[None, :]
        # Masked by the stride, of which is known that 16 divides it, so 16 bytes are read at once.
        x = tl.load(logits_ptr + columns, mask=columns < row_stride, other=0.0).to(tl.float32)
        x = tl.where(columns < vocab_size, x, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(x, 1))
        sums = sums * tl.exp(largest - new_largest) + tl.sum(tl.exp(x - new_largest[:, None]), 1)
        largest = new_largest
    top = tl.max(largest, 0)
    total = tl.sum(sums * tl.exp(largest - top), 0)
    tl.store(losses_ptr + row, tl.log(total) + (top - x_label))

    for start in range(0, row_stride, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + columns, mask=columns < row_stride, other=0.0).to(tl.float32)
        gradient = tl.exp(x - top) * (weight / total) - tl.where(columns == label, weight, 0.0)
        tl.store(logits_ptr + columns, gradient.to(logits_ptr.dtype.element_ty), mask=columns < row_stride)


def cross_entropy_gradient_(logits_CV: Tensor, labels: Tensor, loss_weights: Tensor) -> Tensor:
    """See cross_entropy.cross_entropy_gradient_."""
    losses_C = torch.empty_like(loss_weights)
    num_rows, vocab_size = logits_CV.shape
    row_stride = logits_CV.stride(0)
    assert logits_CV.stride(1) == 1
    assert vocab_size <= row_stride
    cross_entropy_gradient_kernel[(num_rows,)](
        logits_CV,
        labels.contiguous(),
        loss_weights.contiguous(),
        losses_C,
        row_stride,
        vocab_size,
        BLOCK=min(MAX_BLOCK, triton.next_power_of_2(max(8, row_stride))),
        num_warps=NUM_WARPS,  # pyright: ignore[reportCallIssue]
    )
    return losses_C
