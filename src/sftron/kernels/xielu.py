"""xIELU, an activation with two trained numbers (arXiv 2411.13010), and its gradients.

    f(x) = p x^2 + BETA x                   for x > 0      p = softplus(alpha_p)
    f(x) = n (exp(x) - 1 - x) + BETA x      for x <= 0     n = softplus(alpha_n) + BETA

It is computed in fp32 and rounded once; only x is saved for the backward pass.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

BETA, EPS = 0.5, -1e-6
"""The exponential takes min(x, EPS) and has no gradient above EPS, as in transformers."""


def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> Tensor:
    """Returns f of each element, in the shape and the type of x.

    Args:
        x: Of any shape and float type.
        alpha_p, alpha_n: [1], of any float type.
    """
    return _Xielu.apply(x, alpha_p, alpha_n)


class _Xielu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> Tensor:
        ctx.save_for_backward(x, alpha_p, alpha_n)
        wide, p, n = _factors(x, alpha_p, alpha_n)
        positive, negative = p * wide * wide, n * (torch.expm1(wide.clamp(max=EPS)) - wide)
        return (torch.where(wide > 0, positive, negative) + BETA * wide).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, alpha_p, alpha_n = ctx.saved_tensors
        wide, p, n = _factors(x, alpha_p, alpha_n)
        is_positive, grad_wide = wide > 0, grad.to(wide.dtype)
        grad_p = grad_n = None
        if ctx.needs_input_grad[1]:
            by_p = torch.where(is_positive, wide * wide, 0.0)
            grad_p = ((grad_wide * by_p).sum() * alpha_p.to(wide.dtype).sigmoid()).to(alpha_p.dtype)
        if ctx.needs_input_grad[2]:
            by_n = torch.where(is_positive, 0.0, torch.expm1(wide.clamp(max=EPS)) - wide)
            grad_n = ((grad_wide * by_n).sum() * alpha_n.to(wide.dtype).sigmoid()).to(alpha_n.dtype)
        slope = torch.where(wide < EPS, torch.exp(wide.clamp(max=EPS)), 0.0)
        slope = torch.where(is_positive, 2 * p * wide, n * (slope - 1)) + BETA
        return (grad_wide * slope).to(x.dtype), grad_p, grad_n


def _factors(x: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns x, p and n in fp32, or in fp64 if x is."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.to(dtype), F.softplus(alpha_p.to(dtype)), F.softplus(alpha_n.to(dtype)) + BETA
