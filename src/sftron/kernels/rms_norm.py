"""Root mean square normalization (arXiv 1910.07467), computed in fp32 and rounded once.

On a GPU it uses two Triton kernels; elsewhere, and under torch.compile, the torch expressions below.

    shape suffixes: T tokens, H normalized size (hidden_size, or head_dim for norms of heads), R rows of a tile,
    P programs
"""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sftron.kernels.device import runs_kernels
from sftron.kernels.operators import operator


def rms_norm(x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """Returns x / sqrt(mean(x^2) + eps) * weight over the last dimension, in x's type.

    It saves x and 4 bytes per row for the backward pass.

    Args:
        x: Any float type up to fp32, with any leading dimensions.
        weight_H: Any float type. Its gradient is summed in fp32 in an order that depends only on the shape, so the
            result is deterministic.
    """
    rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    normed = _RMSNorm.apply(rows, weight_H, eps) if torch.is_grad_enabled() else normalize(rows, weight_H, eps)[0]
    return normed if x.ndim == 2 else normed.view(x.shape)  # FSDP warns of a module that returns a view


def normalize(x_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns the normalized x, and 1 / root mean square of each row (fp32 [T]), which `normalize_backward` needs."""
    if runs_kernels(x_TH):
        return _normalize_on_gpu(x_TH, weight_H, eps)
    x32_TH = x_TH.float()
    rstd_T1 = (x32_TH.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
    return (x32_TH * rstd_T1).mul_(weight_H).to(x_TH.dtype), rstd_T1.squeeze(1)


def normalize_backward(
    grad_TH: Tensor, x_TH: Tensor, weight_H: Tensor, rstd_T: Tensor, *, with_output: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of x (in its type) and of the weight (fp32), and the recomputed output (bitwise equal).

    Without `with_output` an empty tensor is returned instead of the output.
    """
    if runs_kernels(x_TH):
        return _normalize_backward_on_gpu(grad_TH, x_TH, weight_H, rstd_T, with_output=with_output)
    rstd_T1, weight32_H = rstd_T[:, None], weight_H.float()
    normed_TH = x_TH.float() * rstd_T1
    output_TH = (normed_TH * weight32_H).to(x_TH.dtype) if with_output else x_TH.new_empty(0)
    product_TH = grad_TH.float() * normed_TH
    grad_weight_H = product_TH.sum(dim=0)
    # d(x * rstd) = rstd * (dy * weight - normed * mean(dy * weight * normed))
    mean_T1 = product_TH.mul_(weight32_H).mean(dim=-1, keepdim=True)
    grad_x_TH = (grad_TH * weight32_H).sub_(normed_TH.mul_(mean_T1)).mul_(rstd_T1)
    return grad_x_TH.to(x_TH.dtype), grad_weight_H, output_TH


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        y_TH, rstd_T = normalize(x_TH, weight_H, eps)
        ctx.save_for_backward(x_TH, weight_H, rstd_T)
        return y_TH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_TH, weight_H, rstd_T = ctx.saved_tensors
        grad_x_TH, grad_weight_H, _ = normalize_backward(grad_TH, x_TH, weight_H, rstd_T, with_output=False)
        return grad_x_TH, grad_weight_H.to(weight_H.dtype), None


if find_spec("triton"):
    import triton
    import triton.language as tl

    # Each program processes several tiles of rows in sequence. It keeps the weight in registers, and in the backward
    # pass also the weight's gradient; loading the weight for each row would double the traffic of a bf16 row. The
    # gradient of the weight is reduced in two stages without atomics, first within each program and then over the
    # programs. The assignment of rows to programs depends only on T and H.

    _MAX_PROGRAMS = 512
    """About two programs per multiprocessor; their sums are 4 % of the backward pass's traffic at T=16384, H=4096."""
    _MIN_TILE = 2048
    """The minimum number of elements per tile, so that short rows (norms of heads) occupy all warps as well."""

    @triton.jit
    def normalize_kernel(
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
    def normalize_backward_kernel(
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
        # int32 offsets suffice for _MAX_PROGRAMS rows.
        tl.store(grad_weight_ptr + tl.program_id(0) * H + columns_H, grad_weight_H, mask=columns_H < H)

    def launch_normalize(x_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x_TH, weight_H, num_programs, sizes = x_TH.contiguous(), weight_H.contiguous(), *launch_sizes(x_TH)
        y_TH, rstd_T = torch.empty_like(x_TH), x_TH.new_empty(len(x_TH), dtype=torch.float32)
        if num_programs:
            normalize_kernel[(num_programs,)](x_TH, weight_H, y_TH, rstd_T, len(x_TH), eps=eps, **sizes)
        return y_TH, rstd_T

    def launch_normalize_backward(
        grad_TH: Tensor, x_TH: Tensor, weight_H: Tensor, rstd_T: Tensor, *, with_output: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad_TH, x_TH, weight_H, rstd_T = (each.contiguous() for each in (grad_TH, x_TH, weight_H, rstd_T))
        num_programs, sizes = launch_sizes(x_TH)
        sizes["WITH_OUTPUT"] = with_output
        grad_x_TH = torch.empty_like(x_TH)
        output_TH = torch.empty_like(x_TH) if with_output else x_TH.new_empty(0)
        grad_weight_PH = weight_H.new_empty(num_programs, len(weight_H), dtype=torch.float32)
        if num_programs:
            tensors = (grad_TH, x_TH, weight_H, rstd_T, grad_x_TH, grad_weight_PH, output_TH)
            normalize_backward_kernel[(num_programs,)](*tensors, len(x_TH), **sizes)
        return grad_x_TH, grad_weight_PH.sum(dim=0), output_TH

    def launch_sizes(x_TH: Tensor) -> tuple[int, dict[str, Any]]:
        """Returns the number of programs and the launch parameters that define their share of the rows."""
        num_tokens, size = x_TH.shape
        block_h = triton.next_power_of_2(size)
        block_r = max(1, _MIN_TILE // block_h)
        num_tiles = triton.cdiv(num_tokens, block_r)
        tiles_per_program = max(1, triton.cdiv(num_tiles, _MAX_PROGRAMS))
        # 16 elements per thread: two 16-byte accesses in bf16, and few enough registers for four fp32 arrays.
        num_warps = min(16, block_r * block_h // 512)
        sizes = {"H": size, "BLOCK_R": block_r, "BLOCK_H": block_h, "num_warps": num_warps}
        return int(triton.cdiv(num_tiles, tiles_per_program)), {"tiles_per_program": tiles_per_program, **sizes}

    _normalize_on_gpu = operator(
        "normalize",
        launch_normalize,
        fake=lambda x_TH, *_: (x_TH.new_empty(x_TH.shape), x_TH.new_empty(len(x_TH), dtype=torch.float32)),
    )
    _normalize_backward_on_gpu = operator(
        "normalize_backward",
        launch_normalize_backward,
        fake=lambda _, x_TH, weight_H, rstd_T, *, with_output: (
            x_TH.new_empty(x_TH.shape),
            weight_H.new_empty(len(weight_H), dtype=torch.float32),
            x_TH.new_empty(x_TH.shape if with_output else (0,)),
        ),
    )
