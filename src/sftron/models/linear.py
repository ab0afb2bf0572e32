"""Linear layers with explicit control over the tensors that are saved for the backward pass.

    input        computes                  saves                         with recompute
    x            x @ W^T + b               x, W in x's type              x
    a norm       rms_norm(x) @ W^T + b     x, rstd, the norm, W          x, rstd
    gated        f(gate) * up @ W^T + b    x, the product, W             x          x = [gate, up]
    activated    f(x) @ W^T + b            x, f(x), W                    x

No matrix product is computed twice. With `recompute`, the gradients of the norm and the activation f also recompute
their outputs, bit for bit, so gradients with and without it are bitwise equal. For a frozen weight, no gradient is
computed, the input of the product is not saved, and the weight is saved as it is stored, not as a cast copy; it may be
stored in NF4 (quantization.py). Weights are master weights of any float type, cast to x's type for the products; their
gradients have the type of the master weights.

A layer may have low-rank adapters (LoRA, arXiv 2106.09685), each for a range of its rows, which is one projection of
Hugging Face: they add scale * (input @ A^T) @ B^T to these columns of the output. The products of a layer's input with
all its A are one product, [T, S], which is saved too. The gradients of A need that input, which is saved or recomputed
as for a trained weight.

    shape suffixes: T tokens, H hidden_size, I input size, O output size, F intermediate_size, R rank of an adapter,
    S sum of the ranks of a layer
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from sftron.kernels.activation import activate, activate_backward
from sftron.kernels.rms_norm import normalize, normalize_backward
from sftron.models.quantization import from_stored


class LowRank(NamedTuple):
    """The adapter of rows [first_row, first_row + O) of a weight."""

    first_row: int
    scale: float
    a: Tensor
    """[R, I]"""
    b: Tensor
    """[O, R]"""


def linear(
    x: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    *,
    recompute: bool,
    adapters: Sequence[LowRank] = (),
    norm_weight_H: Tensor | None = None,
    eps: float = 0.0,
    activation: str | None = None,
    is_gated: bool = False,
) -> Tensor:
    """Returns input @ W^T + b, [T, O] in x's type.

    The input is x; with norm_weight_H, the norm of x in kernels/rms_norm.py; with `activation`, one of ACTIVATIONS,
    f(x) or, if it is gated, f(gate) * up of x = [gate, up], of which SwiGLU is one kernel.
    """
    ranges = tuple((each.first_row, each.scale) for each in adapters)
    factors = [each.a for each in adapters] + [each.b for each in adapters]
    if torch.is_grad_enabled():
        return _Linear.apply(
            x, norm_weight_H, eps, activation, is_gated, weight_OI, bias_O, recompute, ranges, *factors
        )
    input_TI, _ = _input_of(x, norm_weight_H, eps, activation, is_gated)
    return _project(input_TI, from_stored(weight_OI, x.dtype), bias_O, ranges, factors)[0]


class _Linear(torch.autograd.Function):
    """input @ W^T + b and its adapters, where the input is x itself, its norm, or its activation."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, norm_weight_H: Tensor | None, eps: float, activation: str | None, is_gated: bool,
        weight_OI: Tensor, bias_O: Tensor | None, recompute: bool, ranges: tuple[tuple[int, float], ...],
        *factors: Tensor,
    ) -> Tensor:  # fmt: skip
        input_TI, rstd_T = _input_of(x, norm_weight_H, eps, activation, is_gated)
        cast_OI = from_stored(weight_OI, x.dtype)
        output_TO, hidden_TS = _project(input_TI, cast_OI, bias_O, ranges, factors)
        is_trained = ctx.needs_input_grad[5]
        ctx.activation, ctx.is_gated, ctx.ranges, ctx.needs_input = (
            activation,
            is_gated,
            ranges,
            is_trained or bool(factors),
        )
        ctx.dtypes = weight_OI.dtype, None if bias_O is None else bias_O.dtype
        is_x = input_TI is x
        ctx.save_for_backward(
            None if is_x else x,
            norm_weight_H,
            rstd_T,
            input_TI if ctx.needs_input and (is_x or not recompute) else None,
            weight_OI if recompute or not is_trained else cast_OI,
            hidden_TS,
            *factors,
        )
        return output_TO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, norm_weight_H, rstd_T, input_TI, weight_OI, hidden_TS, *factors = ctx.saved_tensors
        grad_input_TI = grad_TO @ from_stored(weight_OI, grad_TO.dtype)
        grad_hidden_TS = _backward_through_b(grad_TO, ctx.ranges, factors, grad_input_TI) if factors else None
        makes_again = ctx.needs_input and input_TI is None
        grad_x, grad_norm_weight_H, again_TI = grad_input_TI, None, None
        if norm_weight_H is not None:
            grad_x, grad_norm_weight_H, again_TI = normalize_backward(
                grad_input_TI, x, norm_weight_H, rstd_T, with_output=makes_again
            )
            grad_norm_weight_H = grad_norm_weight_H.to(norm_weight_H.dtype)
        elif ctx.activation is not None:
            grad_x, again_TI = activate_backward(
                grad_input_TI, x, ctx.activation, is_gated=ctx.is_gated, with_output=makes_again
            )
        input_TI = again_TI if makes_again else input_TI
        weight_dtype, bias_dtype = ctx.dtypes
        grad_weight_OI = _weight_gradient(grad_TO, input_TI, weight_dtype) if ctx.needs_input_grad[5] else None
        grad_bias_O = grad_TO.sum(dim=0, dtype=bias_dtype) if ctx.needs_input_grad[6] else None
        grad_factors = _factor_gradients(grad_TO, input_TI, hidden_TS, grad_hidden_TS, ctx.ranges, factors)
        gradients = (grad_x, grad_norm_weight_H, None, None, None, grad_weight_OI, grad_bias_O, None, None)
        return *gradients, *grad_factors


def _input_of(
    x: Tensor, norm_weight_H: Tensor | None, eps: float, activation: str | None, is_gated: bool
) -> tuple[Tensor, Tensor | None]:
    """Returns the input of the matrix product, [T, I], and the rstd of a norm."""
    if norm_weight_H is not None:
        return normalize(x, norm_weight_H, eps)
    return x if activation is None else activate(x, activation, is_gated=is_gated), None


Ranges = Sequence[tuple[int, float]]
"""The first row and the scale of each adapter. Its factors are all A, then all B."""


def _project(
    input_TI: Tensor, cast_OI: Tensor, bias_O: Tensor | None, ranges: Ranges, factors: Sequence[Tensor]
) -> tuple[Tensor, Tensor | None]:
    """Returns the output, [T, O], and the product of the input with all A, [T, S]."""
    dtype = input_TI.dtype
    output_TO = F.linear(input_TI, cast_OI, None if bias_O is None else bias_O.to(dtype))
    if not ranges:
        return output_TO, None
    all_a, all_b = factors[: len(ranges)], factors[len(ranges) :]
    hidden_TS = F.linear(input_TI, torch.cat([a_RI.to(dtype) for a_RI in all_a]))
    for (row, scale), hidden_TR, b_OR in zip(ranges, hidden_TS.split(_ranks(all_a), 1), all_b, strict=True):
        output_TO[:, row : row + len(b_OR)].addmm_(hidden_TR, b_OR.T.to(dtype), alpha=scale)
    return output_TO, hidden_TS


def _backward_through_b(grad_TO: Tensor, ranges: Ranges, factors: Sequence[Tensor], grad_input_TI: Tensor) -> Tensor:
    """Returns the gradient of the product with all A, [T, S], and adds the adapters' part to the input's gradient."""
    dtype, all_a, all_b = grad_TO.dtype, factors[: len(ranges)], factors[len(ranges) :]
    grads_TR = [
        grad_TO[:, row : row + len(b_OR)] @ (scale * b_OR).to(dtype)
        for (row, scale), b_OR in zip(ranges, all_b, strict=True)
    ]
    grad_hidden_TS = torch.cat(grads_TR, dim=1)
    grad_input_TI.addmm_(grad_hidden_TS, torch.cat([a_RI.to(dtype) for a_RI in all_a]))
    return grad_hidden_TS


def _factor_gradients(
    grad_TO: Tensor,
    input_TI: Tensor | None,
    hidden_TS: Tensor | None,
    grad_hidden_TS: Tensor | None,
    ranges: Ranges,
    factors: Sequence[Tensor],
) -> list[Tensor]:
    """Returns the gradients of all A, then of all B."""
    if not ranges:
        return []
    assert hidden_TS is not None
    assert grad_hidden_TS is not None
    all_a, all_b = factors[: len(ranges)], factors[len(ranges) :]
    gradients = list(_weight_gradient(grad_hidden_TS, input_TI, all_a[0].dtype).split(_ranks(all_a)))
    for (row, scale), hidden_TR, b_OR in zip(ranges, hidden_TS.split(_ranks(all_a), 1), all_b, strict=True):
        # As its transpose: the product of R rows takes 0.7 of the time of that of R columns (R = 16 in fp32 on a CPU).
        gradients.append(scale * _weight_gradient(hidden_TR, grad_TO[:, row : row + len(b_OR)], b_OR.dtype).T)
    return gradients


def _ranks(all_a: Sequence[Tensor]) -> list[int]:
    return [len(a_RI) for a_RI in all_a]


def _weight_gradient(grad_TO: Tensor, input_TI: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns grad^T @ input, [O, I] in the type of the weight."""
    assert input_TI is not None
    if grad_TO.is_cuda and dtype == torch.float32 != grad_TO.dtype:
        # Takes the fp32 sums of the product directly, instead of rounding them to bf16 and converting them back.
        return torch.mm(grad_TO.T, input_TI, out_dtype=torch.float32)
    return (grad_TO.T @ input_TI).to(dtype)
