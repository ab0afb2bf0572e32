"""Kernels whose machine code is known, for test_machine_code.py."""

import triton
import triton.language as tl


@triton.jit
def copy_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offsets, tl.load(x_ptr + offsets))


@triton.jit
def center_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    """Holds the whole block between reading and writing it."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets)
    tl.store(y_ptr + offsets, x - tl.sum(x) / BLOCK)
