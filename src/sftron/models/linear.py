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
from sftron.kernels.device import is_gpu
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
    made_by = InputOf(eps, activation, is_gated)
    ranges = tuple((each.first_row, each.scale) for each in adapters)
    factors = [each.a for each in adapters] + [each.b for each in adapters]
    if torch.is_grad_enabled():
        return _Linear.apply(x, norm_weight_H, made_by, weight_OI, bias_O, recompute, ranges, *factors)
    input_TI, _ = made_by.forward(x, norm_weight_H)
    output_TO = _product(input_TI, from_stored(weight_OI, x.dtype), bias_O)
    Adapters.of(ranges, factors).add_to(output_TO, input_TI)
    return output_TO


class _Linear(torch.autograd.Function):
    """input @ W^T + b + the adapters, in three parts: the input, the product with the weight, and the adapters.

    The parts are one function, because what one of them saves depends on what another one needs.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, norm_weight_H: Tensor | None, made_by: "InputOf", weight_OI: Tensor,
        bias_O: Tensor | None, recompute: bool, ranges: tuple[tuple[int, float], ...], *factors: Tensor,
    ) -> Tensor:  # fmt: skip
        input_TI, rstd_T = made_by.forward(x, norm_weight_H)
        cast_OI = from_stored(weight_OI, x.dtype)
        output_TO = _product(input_TI, cast_OI, bias_O)
        hidden_TS = Adapters.of(ranges, factors).add_to(output_TO, input_TI)

        is_trained = ctx.needs_input_grad[3]
        ctx.made_by, ctx.ranges, ctx.needs_input = made_by, ranges, is_trained or bool(factors)
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
        adapters = Adapters.of(ctx.ranges, factors)
        grad_input_TI = grad_TO @ from_stored(weight_OI, grad_TO.dtype)
        grad_hidden_TS = adapters.backward(grad_TO, grad_input_TI)

        is_made_again = ctx.needs_input and input_TI is None
        grad_x, grad_norm_weight_H, made_again_TI = ctx.made_by.backward(
            grad_input_TI, x, norm_weight_H, rstd_T, with_output=is_made_again
        )
        input_TI = made_again_TI if is_made_again else input_TI

        weight_dtype, bias_dtype = ctx.dtypes
        grad_weight_OI = _weight_gradient(grad_TO, input_TI, weight_dtype) if ctx.needs_input_grad[3] else None
        grad_bias_O = grad_TO.sum(dim=0, dtype=bias_dtype) if ctx.needs_input_grad[4] else None
        grad_factors = adapters.gradients(grad_TO, input_TI, hidden_TS, grad_hidden_TS)
        return grad_x, grad_norm_weight_H, None, grad_weight_OI, grad_bias_O, None, None, *grad_factors


# --- The input ---


class InputOf(NamedTuple):
    """How the input of the product is made from x: by a norm if there is a norm's weight, else by the activation."""

    eps: float
    activation: str | None
    is_gated: bool

    def forward(self, x: Tensor, norm_weight_H: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Returns the input, [T, I], which is x itself without a norm and an activation, and the rstd of a norm."""
        if norm_weight_H is not None:
            return normalize(x, norm_weight_H, self.eps)
        return x if self.activation is None else activate(x, self.activation, is_gated=self.is_gated), None

    def backward(
        self,
        grad_input_TI: Tensor,
        x: Tensor,
        norm_weight_H: Tensor | None,
        rstd_T: Tensor,
        *,
        with_output: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Returns the gradients of x and of the norm's weight and, if `with_output`, the input again, bit for bit.

        Of an input that is x itself, x was not saved and is not read; the same holds for rstd without a norm.
        """
        if norm_weight_H is not None:
            grad_x, grad_norm_weight_H, input_TI = normalize_backward(
                grad_input_TI, x, norm_weight_H, rstd_T, with_output=with_output
            )
            return grad_x, grad_norm_weight_H.to(norm_weight_H.dtype), input_TI
        if self.activation is None:
            return grad_input_TI, None, None
        grad_x, input_TI = activate_backward(
            grad_input_TI, x, self.activation, is_gated=self.is_gated, with_output=with_output
        )
        return grad_x, None, input_TI


# --- The product ---


def _product(input_TI: Tensor, cast_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    return F.linear(input_TI, cast_OI, None if bias_O is None else bias_O.to(input_TI.dtype))


def _weight_gradient(grad_TO: Tensor, input_TI: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns grad^T @ input, [O, I] in the type of the weight."""
    assert input_TI is not None
    if is_gpu(grad_TO) and dtype == torch.float32 != grad_TO.dtype:
        # Takes the fp32 sums of the product directly, instead of rounding them to bf16 and converting them back.
        return torch.mm(grad_TO.T, input_TI, out_dtype=torch.float32)
    return (grad_TO.T @ input_TI).to(dtype)


# --- The adapters ---


class Adapters(NamedTuple):
    """The adapters of a layer, each with the first row and the scale of its range. Without any, its methods do nothing.

    The products of the input with all A are one product, [T, S].
    """

    ranges: Sequence[tuple[int, float]]
    all_a: Sequence[Tensor]
    all_b: Sequence[Tensor]

    @classmethod
    def of(cls, ranges: Sequence[tuple[int, float]], factors: Sequence[Tensor]) -> "Adapters":
        """`factors` are all A, followed by all B."""
        return cls(ranges, factors[: len(ranges)], factors[len(ranges) :])

    def add_to(self, output_TO: Tensor, input_TI: Tensor) -> Tensor | None:
        """Adds scale * (input @ A^T) @ B^T to the columns of each adapter. Returns input @ A^T for all A, [T, S]."""
        if not self.ranges:
            return None
        hidden_TS = F.linear(input_TI, self._joined_a(input_TI.dtype))
        for (row, scale), hidden_TR, b_OR in zip(self.ranges, self._split(hidden_TS, 1), self.all_b, strict=True):
            output_TO[:, row : row + len(b_OR)].addmm_(hidden_TR, b_OR.T.to(input_TI.dtype), alpha=scale)
        return hidden_TS

    def backward(self, grad_TO: Tensor, grad_input_TI: Tensor) -> Tensor | None:
        """Adds the adapters' part to the gradient of the input. Returns the gradient of input @ A^T, [T, S]."""
        if not self.ranges:
            return None
        dtype = grad_TO.dtype
        grads_TR = [
            grad_TO[:, row : row + len(b_OR)] @ (scale * b_OR).to(dtype)
            for (row, scale), b_OR in zip(self.ranges, self.all_b, strict=True)
        ]
        grad_hidden_TS = torch.cat(grads_TR, dim=1)
        grad_input_TI.addmm_(grad_hidden_TS, self._joined_a(dtype))
        return grad_hidden_TS

    def gradients(
        self, grad_TO: Tensor, input_TI: Tensor | None, hidden_TS: Tensor | None, grad_hidden_TS: Tensor | None
    ) -> list[Tensor]:
        """Returns the gradients of all A, then of all B."""
        if hidden_TS is None or grad_hidden_TS is None:
            return []
        grad_a_SI = _weight_gradient(grad_hidden_TS, input_TI, self.all_a[0].dtype)
        gradients = list(self._split(grad_a_SI, 0))
        for (row, scale), hidden_TR, b_OR in zip(self.ranges, self._split(hidden_TS, 1), self.all_b, strict=True):
            # As its transpose: the product of R rows takes 0.7 of the time of that of R columns (R = 16 in fp32 on a
            # CPU).
            gradients.append(scale * _weight_gradient(hidden_TR, grad_TO[:, row : row + len(b_OR)], b_OR.dtype).T)
        return gradients

    def _joined_a(self, dtype: torch.dtype) -> Tensor:
        return torch.cat([a_RI.to(dtype) for a_RI in self.all_a])

    def _split(self, tensor: Tensor, dim: int) -> Sequence[Tensor]:
        """Splits a dimension of size S into the ranks of the adapters."""
        return tensor.split([len(a_RI) for a_RI in self.all_a], dim)
