"""SwiGLU, silu(gate) * up (arXiv 2002.05202), on the fused projection, computed in fp32 and rounded once.

On a GPU it uses two Triton kernels; elsewhere, and under torch.compile, the torch expressions below.

    shape suffixes: T tokens, F intermediate_size, 2F concatenated gate and up; B rows of a block, or columns of a
    program
"""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from sftron.kernels.device import runs_kernels
from sftron.kernels.operators import operator

_VALUES_IN_CACHE = 2**16
"""The number of elements per core; a few fp32 arrays fit into its cache (512 x 1536, both passes: 3.2 ms, not 4.9)."""


def swiglu(gate_up_T2F: Tensor) -> Tensor:
    """Returns silu(gate) * up, [T, F] in the input's type. It is not differentiable; see models/linear.py."""
    if runs_kernels(gate_up_T2F):
        return _swiglu_on_gpu(gate_up_T2F)
    output_TF = gate_up_T2F.new_empty(len(gate_up_T2F), gate_up_T2F.shape[1] // 2)
    for rows in _blocks(output_TF):
        gate_BF, up_BF = gate_up_T2F[rows].chunk(2, dim=-1)
        gate_BF = gate_BF.float()
        output_TF[rows] = gate_BF.sigmoid().mul_(gate_BF).mul_(up_BF)
    return output_TF


def swiglu_backward(grad_TF: Tensor, gate_up_T2F: Tensor, *, with_output: bool) -> tuple[Tensor, Tensor]:
    """Returns the gradient of gate_up, and the recomputed product [T, F], bit for bit.

    Without `with_output` an empty tensor is returned instead of the product.
    """
    if runs_kernels(gate_up_T2F):
        return _swiglu_backward_on_gpu(grad_TF, gate_up_T2F, with_output=with_output)
    grad_gate_up_T2F = torch.empty_like(gate_up_T2F)
    output_TF = gate_up_T2F.new_empty(grad_TF.shape if with_output else (0,))
    for rows in _blocks(grad_TF):
        gate_BF, up_BF = gate_up_T2F[rows].chunk(2, dim=-1)
        grad_gate_BF, grad_up_BF = grad_gate_up_T2F[rows].chunk(2, dim=-1)
        gate_BF, grad_BF = gate_BF.float(), grad_TF[rows].float()
        sigmoid_BF = gate_BF.sigmoid()
        silu_BF = sigmoid_BF * gate_BF
        if with_output:
            output_TF[rows] = silu_BF * up_BF
        grad_up_BF.copy_(silu_BF * grad_BF)
        # silu'(x) = s + silu(x) (1 - s), with s = sigmoid(x)
        slope_BF = sigmoid_BF.addcmul_(silu_BF, 1 - sigmoid_BF)
        grad_gate_BF.copy_(slope_BF.mul_(up_BF).mul_(grad_BF))
    return grad_gate_up_T2F, output_TF


def _blocks(x_TF: Tensor) -> list[slice]:
    """Returns slices of rows; under torch.compile a single one, because the compiler tiles by itself, and on the meta
    device the first, because memory is all that counts there."""
    if torch.compiler.is_compiling():
        return [slice(None)]
    num_rows = max(1, _VALUES_IN_CACHE * torch.get_num_threads() // x_TF.shape[1])
    starts = range(0, len(x_TF), num_rows)
    return [slice(start, start + num_rows) for start in (starts[:1] if x_TF.is_meta else starts)]


if find_spec("triton"):
    import triton
    import triton.language as tl

    _BLOCK, _NUM_WARPS = 1024, 4
    """Eight elements per thread, which is one 16-byte access to each array in bf16."""

    # Each element is read once and written once.

    @triton.jit
    def swiglu_kernel(gate_up_ptr, output_ptr, F: tl.constexpr, BLOCK: tl.constexpr):
        row, columns_B = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask_B = columns_B < F
        gate_B = tl.load(gate_up_ptr + row * 2 * F + columns_B, mask=mask_B).to(tl.float32)
        up_B = tl.load(gate_up_ptr + row * 2 * F + F + columns_B, mask=mask_B).to(tl.float32)
        tl.store(output_ptr + row * F + columns_B, gate_B * tl.sigmoid(gate_B) * up_B, mask=mask_B)

    @triton.jit
    def swiglu_backward_kernel(
        grad_ptr, gate_up_ptr, grad_gate_up_ptr, output_ptr,
        F: tl.constexpr, BLOCK: tl.constexpr, WITH_OUTPUT: tl.constexpr,
    ):  # fmt: skip
        row, columns_B = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask_B = columns_B < F
        gate_B = tl.load(gate_up_ptr + row * 2 * F + columns_B, mask=mask_B).to(tl.float32)
        up_B = tl.load(gate_up_ptr + row * 2 * F + F + columns_B, mask=mask_B).to(tl.float32)
        grad_B = tl.load(grad_ptr + row * F + columns_B, mask=mask_B).to(tl.float32)
        sigmoid_B = tl.sigmoid(gate_B)
        silu_B = gate_B * sigmoid_B
        if WITH_OUTPUT:
            tl.store(output_ptr + row * F + columns_B, silu_B * up_B, mask=mask_B)
        # silu'(x) = s + silu(x) (1 - s), with s = sigmoid(x)
        grad_gate_B = (sigmoid_B + silu_B * (1 - sigmoid_B)) * up_B * grad_B
        tl.store(grad_gate_up_ptr + row * 2 * F + columns_B, grad_gate_B, mask=mask_B)
        tl.store(grad_gate_up_ptr + row * 2 * F + F + columns_B, silu_B * grad_B, mask=mask_B)

    def launch_swiglu(gate_up_T2F: Tensor) -> Tensor:
        gate_up_T2F = gate_up_T2F.contiguous()
        output_TF = gate_up_T2F.new_empty(len(gate_up_T2F), gate_up_T2F.shape[1] // 2)
        if len(output_TF):
            grid, sizes = launch_sizes(output_TF)
            swiglu_kernel[grid](gate_up_T2F, output_TF, **sizes)
        return output_TF

    def launch_swiglu_backward(grad_TF: Tensor, gate_up_T2F: Tensor, *, with_output: bool) -> tuple[Tensor, Tensor]:
        grad_TF, gate_up_T2F = grad_TF.contiguous(), gate_up_T2F.contiguous()
        grad_gate_up_T2F = torch.empty_like(gate_up_T2F)
        output_TF = torch.empty_like(grad_TF) if with_output else grad_TF.new_empty(0)
        if len(grad_TF):
            grid, sizes = launch_sizes(grad_TF)
            sizes["WITH_OUTPUT"] = with_output
            tensors = (grad_TF, gate_up_T2F, grad_gate_up_T2F, output_TF)
            swiglu_backward_kernel[grid](*tensors, **sizes)
        return grad_gate_up_T2F, output_TF

    def launch_sizes(x_TF: Tensor) -> tuple[tuple[int, int], dict[str, Any]]:
        """Returns the launch grid and the launch parameters that define each program's share."""
        num_tokens, size = x_TF.shape
        return (num_tokens, int(triton.cdiv(size, _BLOCK))), {"F": size, "BLOCK": _BLOCK, "num_warps": _NUM_WARPS}

    _swiglu_on_gpu = operator(
        "swiglu", launch_swiglu, fake=lambda x_T2F: x_T2F.new_empty(len(x_T2F), x_T2F.shape[1] // 2)
    )
    _swiglu_backward_on_gpu = operator(
        "swiglu_backward",
        launch_swiglu_backward,
        fake=lambda grad_TF, gate_up_T2F, *, with_output: (
            gate_up_T2F.new_empty(gate_up_T2F.shape),
            gate_up_T2F.new_empty(grad_TF.shape if with_output else (0,)),
        ),
    )
