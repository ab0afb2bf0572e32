"""The Triton kernels of rms_norm.py.

    shape suffixes: T tokens, H normed size, R rows of a tile, P programs

A program takes several tiles of rows one after another and holds the weight, and in the backward pass its gradient, in
registers: a weight read for each row anew would be twice the traffic of a bf16 row. The gradient of the weight is
reduced in two stages, programs then their sum, without atomics. Which rows a program takes depends on T and H alone.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_MAX_PROGRAMS = 512
"""About two for each multiprocessor; their partial sums are 4 % of the backward pass's traffic at T=16384, H=4096."""

_MIN_TILE = 2048
"""Values a program holds at once, so that short rows (the norms of heads) fill its warps as well."""


@triton.jit
def forward_kernel(
    x_ptr, weight_ptr, y_ptr, rstd_ptr, num_tokens, tiles_per_program, eps,
    H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    columns_H = tl.arange(0, BLOCK_H)
    weight_H = tl.load(weight_ptr + columns_H, mask=columns_H < H, other=0.0).to(tl.float32)
    first = tl.program_id(0) * tiles_per_program
    for tile in tl.range(first, first + tiles_per_program, num_stages=2):  # pyright: ignore[reportGeneralTypeIssues]
        rows_R = tile * BLOCK_R + tl.arange(0, BLOCK_R)
        mask_RH = (rows_R < num_tokens)[:, None] & (columns_H < H)[None, :]
        offsets_RH = rows_R.to(tl.int64)[:, None] * H + columns_H[None, :]
        x_RH = tl.load(x_ptr + offsets_RH, mask=mask_RH, other=0.0).to(tl.float32)
        rstd_R = tl.rsqrt(tl.sum(x_RH * x_RH, axis=1) / H + eps)
        tl.store(y_ptr + offsets_RH, x_RH * rstd_R[:, None] * weight_H[None, :], mask=mask_RH)
        tl.store(rstd_ptr + rows_R, rstd_R, mask=rows_R < num_tokens)


@triton.jit
def backward_kernel(
    grad_ptr, x_ptr, weight_ptr, rstd_ptr, grad_x_ptr, grad_weight_ptr, output_ptr, num_tokens, tiles_per_program,
    H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr, WITH_OUTPUT: tl.constexpr,
):  # fmt: skip
    columns_H = tl.arange(0, BLOCK_H)
    weight_H = tl.load(weight_ptr + columns_H, mask=columns_H < H, other=0.0).to(tl.float32)
    grad_weight_H = tl.zeros([BLOCK_H], tl.float32)
    first = tl.program_id(0) * tiles_per_program
    for tile in tl.range(first, first + tiles_per_program, num_stages=2):  # pyright: ignore[reportGeneralTypeIssues]
        rows_R = tile * BLOCK_R + tl.arange(0, BLOCK_R)
        mask_RH = (rows_R < num_tokens)[:, None] & (columns_H < H)[None, :]
        offsets_RH = rows_R.to(tl.int64)[:, None] * H + columns_H[None, :]
        grad_RH = tl.load(grad_ptr + offsets_RH, mask=mask_RH, other=0.0).to(tl.float32)
        rstd_R = tl.load(rstd_ptr + rows_R, mask=rows_R < num_tokens, other=0.0)
        normed_RH = tl.load(x_ptr + offsets_RH, mask=mask_RH, other=0.0).to(tl.float32) * rstd_R[:, None]
        if WITH_OUTPUT:
            tl.store(output_ptr + offsets_RH, normed_RH * weight_H[None, :], mask=mask_RH)
        grad_weight_H += tl.sum(grad_RH * normed_RH, axis=0)
        grad_RH *= weight_H[None, :]
        mean_R = tl.sum(grad_RH * normed_RH, axis=1) / H
        grad_RH = (grad_RH - normed_RH * mean_R[:, None]) * rstd_R[:, None]
        tl.store(grad_x_ptr + offsets_RH, grad_RH, mask=mask_RH)
    # int32 offsets are enough for _MAX_PROGRAMS rows.
    tl.store(grad_weight_ptr + tl.program_id(0) * H + columns_H, grad_weight_H, mask=columns_H < H)


def launch_forward(x_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`rms_norm.normalize`."""
    x_TH, num_programs, sizes = x_TH.contiguous(), *_partition(x_TH)
    y_TH, rstd_T = torch.empty_like(x_TH), x_TH.new_empty(len(x_TH), dtype=torch.float32)
    if num_programs:
        forward_kernel[(num_programs,)](x_TH, weight_H, y_TH, rstd_T, len(x_TH), eps=eps, **sizes)
    return y_TH, rstd_T


def launch_backward(
    grad_TH: Tensor, x_TH: Tensor, weight_H: Tensor, rstd_T: Tensor, *, with_output: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`rms_norm.normalize_backward`."""
    grad_TH, x_TH, num_programs, sizes = grad_TH.contiguous(), x_TH.contiguous(), *_partition(x_TH)
    sizes["WITH_OUTPUT"] = with_output
    grad_x_TH = torch.empty_like(x_TH)
    output_TH = torch.empty_like(x_TH) if with_output else x_TH.new_empty(0)
    grad_weight_PH = weight_H.new_empty(num_programs, len(weight_H), dtype=torch.float32)
    if num_programs:
        backward_kernel[(num_programs,)](
            grad_TH, x_TH, weight_H, rstd_T, grad_x_TH, grad_weight_PH, output_TH, len(x_TH),
            **sizes,
        )  # fmt: skip
    return grad_x_TH, grad_weight_PH.sum(dim=0), output_TH


def _partition(x_TH: Tensor) -> tuple[int, dict[str, Any]]:
    """The number of programs, and what each of them takes."""
    num_tokens, size = x_TH.shape
    block_h = triton.next_power_of_2(size)
    block_r = max(1, _MIN_TILE // block_h)
    num_tiles = triton.cdiv(num_tokens, block_r)
    tiles_per_program = max(1, triton.cdiv(num_tiles, _MAX_PROGRAMS))
    # 16 values a thread: two 16-byte accesses in bf16, and few enough registers for four fp32 arrays of them.
    num_warps = min(16, block_r * block_h // 512)
    sizes = {"H": size, "BLOCK_R": block_r, "BLOCK_H": block_h, "num_warps": num_warps}
    return int(triton.cdiv(num_tiles, tiles_per_program)), {"tiles_per_program": tiles_per_program, **sizes}
