"""The reader of machine code sees what kernels do whose machine code is known."""

import pytest
import triton
import triton.language as tl

from tests.kernels.machine_code import Kernel, compile_for

# They compile for seconds, as the tests do that use the reader.
pytestmark = pytest.mark.nightly


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


COPY, CENTER = (f"tests.kernels.test_machine_code:{name}_kernel" for name in ("copy", "center"))


def test_accesses_are_as_wide_as_alignment_allows() -> None:
    aligned, unaligned = compile_for(
        90,
        Kernel(COPY, {"x_ptr": "*bf16:16", "y_ptr": "*bf16:16"}, {"BLOCK": 1024}),
        Kernel(COPY, {"x_ptr": "*bf16", "y_ptr": "*bf16:16"}, {"BLOCK": 1024}),
    )
    assert aligned.global_loads == aligned.global_stores == {128: 1}
    assert (unaligned.global_loads, unaligned.global_stores) == ({16: 8}, {128: 1})
    assert aligned.local_bytes == 0
    assert not aligned.spills
    assert "st.global.v4" in aligned.ptx


def test_local_memory_is_seen() -> None:
    """A thread has 255 registers: a warp that holds 2048 fp32 values needs 64 of them each, for 16384 values 512."""
    few, many = (Kernel(CENTER, {"x_ptr": "*fp32:16", "y_ptr": "*fp32:16"}, {"BLOCK": n}, 1) for n in (2048, 16384))
    few, many = compile_for(90, few, many)
    assert (few.local_bytes, few.spills) == (0, [])
    assert many.local_bytes > 0
    assert many.spills
