"""Root mean square norm (arXiv 1910.07467), computed in fp32 and rounded once.

On a GPU two Triton kernels, elsewhere the torch expressions below, which are the tests' oracle as well. torch.compile
is given the expressions on every device: its own kernels join them to their neighbours, which it cannot do to ours.

    shape suffixes: T tokens, H normed size (hidden_size, or head_dim for norms of heads)
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def rms_norm(x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in x's type. Keeps x and 4 bytes a row for backward.

    x: any float type up to fp32, any leading dimensions. weight_H: any float type; its gradient is summed in fp32, in
        an order that depends on the shape alone, so that it is the same on every run.
    """
    if not torch.is_grad_enabled():
        return normalize(x.reshape(-1, x.shape[-1]), weight_H, eps)[0].view(x.shape)
    return _RMSNorm.apply(x.reshape(-1, x.shape[-1]), weight_H, eps).view(x.shape)


def normalize(x_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm, and 1 / root mean square of each row (fp32 [T]), from which `normalize_backward` starts."""
    if x_TH.is_cuda and not torch.compiler.is_compiling():
        return _normalize_on_gpu(x_TH, weight_H, eps)
    x32_TH = x_TH.float()
    rstd_T1 = (x32_TH.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
    return (x32_TH * rstd_T1).mul_(weight_H).to(x_TH.dtype), rstd_T1.squeeze(1)


def normalize_backward(
    grad_TH: Tensor, x_TH: Tensor, weight_H: Tensor, rstd_T: Tensor, *, with_output: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x (in its type) and of the weight (fp32), and the norm's output once more, bit for bit.

    with_output: False gives an empty tensor in the output's place.
    """
    if x_TH.is_cuda and not torch.compiler.is_compiling():
        return _normalize_backward_on_gpu(grad_TH, x_TH, weight_H, rstd_T, with_output)
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


@torch.library.custom_op("sftron::normalize", mutates_args=(), device_types="cuda")
def _normalize_on_gpu(x_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    from sftron.kernels.rms_norm_triton import launch_forward

    return launch_forward(x_TH, weight_H, eps)


@_normalize_on_gpu.register_fake
def _(x_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x_TH.new_empty(x_TH.shape), x_TH.new_empty(len(x_TH), dtype=torch.float32)


@torch.library.custom_op("sftron::normalize_backward", mutates_args=(), device_types="cuda")
def _normalize_backward_on_gpu(
    grad_TH: Tensor, x_TH: Tensor, weight_H: Tensor, rstd_T: Tensor, with_output: bool
) -> tuple[Tensor, Tensor, Tensor]:
    from sftron.kernels.rms_norm_triton import launch_backward

    return launch_backward(grad_TH, x_TH, weight_H, rstd_T, with_output=with_output)


@_normalize_backward_on_gpu.register_fake
def _(
    grad_TH: Tensor, x_TH: Tensor, weight_H: Tensor, rstd_T: Tensor, with_output: bool
) -> tuple[Tensor, Tensor, Tensor]:
    output_shape = x_TH.shape if with_output else (0,)
    return (
        x_TH.new_empty(x_TH.shape),
        weight_H.new_empty(len(weight_H), dtype=torch.float32),
        x_TH.new_empty(output_shape),
    )
