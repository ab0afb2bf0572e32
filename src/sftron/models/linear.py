"""Linear layers with explicit control over the tensors that are saved for the backward pass.

    function         computes                  saves                         with recompute
    linear           x @ W^T + b               x, W in x's type              x
    normed_linear    rms_norm(x) @ W^T + b     x, rstd, the norm, W          x, rstd
    gated_linear     swiglu(x) @ W^T + b       x, the product, W             x

These are autograd functions rather than activation checkpoints. They save the same tensors on every device, need
neither tracing nor hooks, and never compute a matrix product twice. With `recompute`, the kernels that compute the
gradients of the norm and of SwiGLU also recompute their outputs, bit for bit, in the same pass over memory. Gradients
with and without `recompute` are therefore bitwise equal.

For a frozen weight, no gradient is computed and the input of the matrix product is not saved.

A linear layer may have low-rank adapters (LoRA, arXiv 2106.09685), one for each Hugging Face projection that is a range
of its rows: they add scale * (input @ A^T) @ B^T to these columns of the output. All A of a layer are one matrix
product, and the input, which their gradients need, is saved once or recomputed with the rest.

Weights are master weights of any float type, cast to x's type for the products; their gradients have the type of the
master weights. All arguments are tensors, so a module's parameters are accessed only during the call of that module or
of the block that contains it.

    shape suffixes: T tokens, H hidden_size, I input size, O output size, F intermediate_size, R rank, N all ranks of the
    adapters of one layer
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from sftron.kernels.rms_norm import normalize, normalize_backward
from sftron.kernels.swiglu import swiglu, swiglu_backward


class LowRank(NamedTuple):
    """The adapter of some rows of a linear layer."""

    first_row: int
    scale: float
    a: Tensor
    """[R, I]"""
    b: Tensor
    """[O, R], where O is the number of adapted rows."""


def linear(
    x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, *, recompute: bool, adapters: Sequence[LowRank] = ()
) -> Tensor:
    """Returns x @ W^T + b, [T, O] in x's type."""
    return _apply(x_TI, None, 0.0, False, weight_OI, bias_O, recompute, adapters)


def normed_linear(
    x_TH: Tensor,
    norm_weight_H: Tensor,
    eps: float,
    weight_OH: Tensor,
    bias_O: Tensor | None,
    *,
    recompute: bool,
    adapters: Sequence[LowRank] = (),
) -> Tensor:
    """Returns rms_norm(x) @ W^T + b, [T, O] in x's type; the norm is the one in kernels/rms_norm.py."""
    return _apply(x_TH, norm_weight_H, eps, False, weight_OH, bias_O, recompute, adapters)


def gated_linear(
    gate_up_T2F: Tensor,
    weight_OF: Tensor,
    bias_O: Tensor | None,
    *,
    recompute: bool,
    adapters: Sequence[LowRank] = (),
) -> Tensor:
    """Returns swiglu(gate_up) @ W^T + b, [T, O] in gate_up's type."""
    return _apply(gate_up_T2F, None, 0.0, True, weight_OF, bias_O, recompute, adapters)


def _apply(
    x_TH: Tensor,
    norm_weight_H: Tensor | None,
    eps: float,
    is_gated: bool,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    recompute: bool,
    adapters: Sequence[LowRank],
) -> Tensor:
    places = tuple((each.first_row, each.scale) for each in adapters)
    factors = [each.a for each in adapters] + [each.b for each in adapters]
    if torch.is_grad_enabled():
        return _Linear.apply(x_TH, norm_weight_H, eps, is_gated, weight_OI, bias_O, recompute, places, *factors)
    input_TI, _ = _input(x_TH, norm_weight_H, eps, is_gated)
    return _project(input_TI, weight_OI.to(x_TH.dtype), bias_O, places, factors)[0]


class _Linear(torch.autograd.Function):
    """input(x) @ W^T + b and its adapters, where the input is x itself, its norm, or its SwiGLU."""

    @staticmethod
    def forward(
        ctx: Any, x_TH: Tensor, norm_weight_H: Tensor | None, eps: float, is_gated: bool, weight_OI: Tensor,
        bias_O: Tensor | None, recompute: bool, places: tuple[tuple[int, float], ...], *factors: Tensor,
    ) -> Tensor:  # fmt: skip
        input_TI, rstd_T = _input(x_TH, norm_weight_H, eps, is_gated)
        cast_OI = weight_OI.to(x_TH.dtype)
        output_TO, hidden_TN = _project(input_TI, cast_OI, bias_O, places, factors)
        ctx.is_gated, ctx.places, ctx.needs_input = is_gated, places, ctx.needs_input_grad[4] or bool(factors)
        ctx.dtypes = weight_OI.dtype, None if bias_O is None else bias_O.dtype
        is_x = input_TI is x_TH
        ctx.save_for_backward(
            None if is_x else x_TH,
            norm_weight_H,
            rstd_T,
            input_TI if ctx.needs_input and (is_x or not recompute) else None,
            weight_OI if recompute else cast_OI,
            hidden_TN,
            *factors,
        )
        return output_TO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_TH, norm_weight_H, rstd_T, input_TI, weight_OI, hidden_TN, *factors = ctx.saved_tensors
        grad_input_TI = grad_TO @ weight_OI.to(grad_TO.dtype)
        a_RI, b_OR = factors[: len(ctx.places)], factors[len(ctx.places) :]
        grad_hidden_TN = None
        if factors:
            slices = [grad_TO[:, row : row + len(b)] for (row, _), b in zip(ctx.places, b_OR, strict=True)]
            grad_hidden_TN = torch.cat(
                [
                    grad @ (scale * b.to(grad.dtype))
                    for grad, (_, scale), b in zip(slices, ctx.places, b_OR, strict=True)
                ],
                dim=1,
            )
            grad_input_TI.addmm_(grad_hidden_TN, torch.cat(a_RI).to(grad_TO.dtype))
        makes_again = ctx.needs_input and input_TI is None
        grad_x_TH, grad_norm_weight_H = grad_input_TI, None
        if norm_weight_H is not None:
            grad_x_TH, grad_norm_weight_H, again_TI = normalize_backward(
                grad_input_TI, x_TH, norm_weight_H, rstd_T, with_output=makes_again
            )
            grad_norm_weight_H = grad_norm_weight_H.to(norm_weight_H.dtype)
        elif ctx.is_gated:
            grad_x_TH, again_TI = swiglu_backward(grad_input_TI, x_TH, with_output=makes_again)
        input_TI = again_TI if makes_again else input_TI
        weight_dtype, bias_dtype = ctx.dtypes
        grad_weight_OI = _weight_gradient(grad_TO, input_TI, weight_dtype) if ctx.needs_input_grad[4] else None
        grad_bias_O = grad_TO.sum(dim=0, dtype=bias_dtype) if ctx.needs_input_grad[5] else None
        grad_factors: list[Tensor] = []
        if factors:
            ranks = [len(a) for a in a_RI]
            grad_a_NI = _weight_gradient(grad_hidden_TN, input_TI, a_RI[0].dtype)
            grad_factors = [*grad_a_NI.split(ranks)]
            for grad_TO, (_, scale), hidden_TR, b in zip(
                slices, ctx.places, hidden_TN.split(ranks, 1), b_OR, strict=True
            ):
                grad_factors.append(_weight_gradient(grad_TO, scale * hidden_TR, b.dtype))
        return (
            grad_x_TH, grad_norm_weight_H, None, None, grad_weight_OI, grad_bias_O, None, None, *grad_factors
        )  # fmt: skip


def _input(x_TH: Tensor, norm_weight_H: Tensor | None, eps: float, is_gated: bool) -> tuple[Tensor, Tensor | None]:
    """Returns the input of the matrix product, [T, I], and rstd of a norm."""
    if norm_weight_H is not None:
        return normalize(x_TH, norm_weight_H, eps)
    return swiglu(x_TH) if is_gated else x_TH, None


def _project(
    input_TI: Tensor,
    cast_OI: Tensor,
    bias_O: Tensor | None,
    places: Sequence[tuple[int, float]],
    factors: Sequence[Tensor],
) -> tuple[Tensor, Tensor | None]:
    """Returns the output, [T, O], and the input times all A of the adapters, [T, N]."""
    dtype = input_TI.dtype
    output_TO = F.linear(input_TI, cast_OI, None if bias_O is None else bias_O.to(dtype))
    if not places:
        return output_TO, None
    a_RI, b_OR = factors[: len(places)], factors[len(places) :]
    hidden_TN = F.linear(input_TI, torch.cat(list(a_RI)).to(dtype))
    for (row, scale), hidden_TR, b in zip(places, hidden_TN.split([len(a) for a in a_RI], 1), b_OR, strict=True):
        output_TO[:, row : row + len(b)].addmm_(hidden_TR, b.T.to(dtype), alpha=scale)
    return output_TO, hidden_TN


def _weight_gradient(grad_TO: Tensor, input_TI: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns grad^T @ input, [O, I] in the type of the weight."""
    if grad_TO.is_cuda and dtype == torch.float32 != grad_TO.dtype:
        # Takes the fp32 sums of the product directly, instead of rounding them to bf16 and converting them back.
        return torch.mm(grad_TO.T, input_TI, out_dtype=torch.float32)
    return (grad_TO.T @ input_TI).to(dtype)
