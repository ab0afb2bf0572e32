"""The Triton kernels of swiglu.py: each value read once, each written once.

shape suffixes: T tokens, F intermediate_size, 2F gate and up side by side, B columns of a program
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _NUM_WARPS = 1024, 4
"""Eight values a thread: one 16-byte access to each array in bf16."""


@triton.jit
def forward_kernel(gate_up_ptr, output_ptr, F: tl.constexpr, BLOCK: tl.constexpr):
    row, columns_B = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask_B = columns_B < F
    gate_B = tl.load(gate_up_ptr + row * 2 * F + columns_B, mask=mask_B).to(tl.float32)
    up_B = tl.load(gate_up_ptr + row * 2 * F + F + columns_B, mask=mask_B).to(tl.float32)
    tl.store(output_ptr + row * F + columns_B, gate_B * tl.sigmoid(gate_B) * up_B, mask=mask_B)


@triton.jit
def backward_kernel(
    grad_ptr, gate_up_ptr, grad_gate_up_ptr, output_ptr, F: tl.constexpr, BLOCK: tl.constexpr, WITH_OUTPUT: tl.constexpr
):
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


def launch_forward(gate_up_T2F: Tensor) -> Tensor:
    """`swiglu.swiglu`."""
    gate_up_T2F = gate_up_T2F.contiguous()
    output_TF = gate_up_T2F.new_empty(len(gate_up_T2F), gate_up_T2F.shape[1] // 2)
    if len(output_TF):
        grid, constants = _partition(output_TF)
        forward_kernel[grid](gate_up_T2F, output_TF, **constants)
    return output_TF


def launch_backward(grad_TF: Tensor, gate_up_T2F: Tensor, *, with_output: bool) -> tuple[Tensor, Tensor]:
    """`swiglu.swiglu_backward`."""
    grad_TF, gate_up_T2F = grad_TF.contiguous(), gate_up_T2F.contiguous()
    grad_gate_up_T2F = torch.empty_like(gate_up_T2F)
    output_TF = torch.empty_like(grad_TF) if with_output else grad_TF.new_empty(0)
    if len(grad_TF):
        grid, constants = _partition(grad_TF)
        constants["WITH_OUTPUT"] = with_output
        backward_kernel[grid](grad_TF, gate_up_T2F, grad_gate_up_T2F, output_TF, **constants)
    return grad_gate_up_T2F, output_TF


def _partition(x_TF: Tensor) -> tuple[tuple[int, int], dict[str, Any]]:
    num_tokens, size = x_TF.shape
    return (num_tokens, int(triton.cdiv(size, _BLOCK))), {"F": size, "BLOCK": _BLOCK, "num_warps": _NUM_WARPS}
