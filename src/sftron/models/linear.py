"""Linear layers with explicit control over the tensors that are saved for the backward pass.

    function         computes                  saves                         with recompute
    linear           x @ W^T + b               x, W in x's type              x
    normed_linear    rms_norm(x) @ W^T + b     x, rstd, the norm, W          x, rstd
    gated_linear     swiglu(x) @ W^T + b       x, the product, W             x

No matrix product is computed twice. With `recompute`, the kernels of the norm's and SwiGLU's gradients also recompute
their outputs, bit for bit, so gradients with and without it are bitwise equal. For a frozen weight, no gradient is
computed and the input of the product is not saved. Weights are master weights of any float type, cast to x's type for
the products; their gradients have the type of the master weights.

    shape suffixes: T tokens, H hidden_size, I input size, O output size, F intermediate_size
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from sftron.kernels.rms_norm import normalize, normalize_backward
from sftron.kernels.swiglu import swiglu, swiglu_backward


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, *, recompute: bool) -> Tensor:
    """Returns x @ W^T + b, [T, O] in x's type."""
    if not torch.is_grad_enabled():
        return _project(x_TI, weight_OI.to(x_TI.dtype), bias_O)
    return _Linear.apply(x_TI, weight_OI, bias_O, recompute)


def normed_linear(
    x_TH: Tensor, norm_weight_H: Tensor, eps: float, weight_OH: Tensor, bias_O: Tensor | None, *, recompute: bool
) -> Tensor:
    """Returns rms_norm(x) @ W^T + b, [T, O] in x's type; the norm is the one in kernels/rms_norm.py."""
    if not torch.is_grad_enabled():
        return _project(normalize(x_TH, norm_weight_H, eps)[0], weight_OH.to(x_TH.dtype), bias_O)
    return _NormedLinear.apply(x_TH, norm_weight_H, eps, weight_OH, bias_O, recompute)


def gated_linear(gate_up_T2F: Tensor, weight_OF: Tensor, bias_O: Tensor | None, *, recompute: bool) -> Tensor:
    """Returns swiglu(gate_up) @ W^T + b, [T, O] in gate_up's type."""
    if not torch.is_grad_enabled():
        return _project(swiglu(gate_up_T2F), weight_OF.to(gate_up_T2F.dtype), bias_O)
    return _GatedLinear.apply(gate_up_T2F, weight_OF, bias_O, recompute)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, recompute: bool) -> Tensor:
        cast_OI = weight_OI.to(x_TI.dtype)
        ctx.save_for_backward(x_TI if ctx.needs_input_grad[1] else None, weight_OI if recompute else cast_OI)
        ctx.dtypes = _dtypes(weight_OI, bias_O)
        return _project(x_TI, cast_OI, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_TI, weight_OI = ctx.saved_tensors
        grad_x_TI = grad_TO @ weight_OI.to(grad_TO.dtype)
        return grad_x_TI, *_parameter_gradients(grad_TO, x_TI, ctx.dtypes, ctx.needs_input_grad[1:3]), None


class _NormedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TH: Tensor, norm_weight_H: Tensor, eps: float, weight_OH: Tensor, bias_O: Tensor | None,
        recompute: bool,
    ) -> Tensor:  # fmt: skip
        normed_TH, rstd_T = normalize(x_TH, norm_weight_H, eps)
        cast_OH = weight_OH.to(x_TH.dtype)
        kept_TH = normed_TH if ctx.needs_input_grad[3] and not recompute else None
        ctx.save_for_backward(x_TH, norm_weight_H, rstd_T, kept_TH, weight_OH if recompute else cast_OH)
        ctx.dtypes = _dtypes(weight_OH, bias_O)
        return _project(normed_TH, cast_OH, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_TH, norm_weight_H, rstd_T, normed_TH, weight_OH = ctx.saved_tensors
        grad_normed_TH = grad_TO @ weight_OH.to(grad_TO.dtype)
        makes_again = ctx.needs_input_grad[3] and normed_TH is None
        grad_x_TH, grad_norm_weight_H, again_TH = normalize_backward(
            grad_normed_TH, x_TH, norm_weight_H, rstd_T, with_output=makes_again
        )
        input_TH = again_TH if makes_again else normed_TH
        gradients = _parameter_gradients(grad_TO, input_TH, ctx.dtypes, ctx.needs_input_grad[3:5])
        return grad_x_TH, grad_norm_weight_H.to(norm_weight_H.dtype), None, *gradients, None


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up_T2F: Tensor, weight_OF: Tensor, bias_O: Tensor | None, recompute: bool) -> Tensor:
        product_TF = swiglu(gate_up_T2F)
        cast_OF = weight_OF.to(gate_up_T2F.dtype)
        kept_TF = product_TF if ctx.needs_input_grad[1] and not recompute else None
        ctx.save_for_backward(gate_up_T2F, kept_TF, weight_OF if recompute else cast_OF)
        ctx.dtypes = _dtypes(weight_OF, bias_O)
        return _project(product_TF, cast_OF, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gate_up_T2F, product_TF, weight_OF = ctx.saved_tensors
        grad_product_TF = grad_TO @ weight_OF.to(grad_TO.dtype)
        makes_again = ctx.needs_input_grad[1] and product_TF is None
        grad_gate_up_T2F, again_TF = swiglu_backward(grad_product_TF, gate_up_T2F, with_output=makes_again)
        input_TF = again_TF if makes_again else product_TF
        return grad_gate_up_T2F, *_parameter_gradients(grad_TO, input_TF, ctx.dtypes, ctx.needs_input_grad[1:3]), None


def _project(x_TI: Tensor, cast_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    return F.linear(x_TI, cast_OI, None if bias_O is None else bias_O.to(x_TI.dtype))


def _dtypes(weight_OI: Tensor, bias_O: Tensor | None) -> tuple[torch.dtype, torch.dtype | None]:
    return weight_OI.dtype, None if bias_O is None else bias_O.dtype


def _parameter_gradients(
    grad_TO: Tensor,
    input_TI: Tensor | None,
    dtypes: tuple[torch.dtype, torch.dtype | None],
    is_needed: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Returns the gradients of the weight and of the bias; None for a frozen or absent one."""
    weight_dtype, bias_dtype = dtypes
    grad_bias_O = grad_TO.sum(dim=0, dtype=bias_dtype) if is_needed[1] else None
    if not is_needed[0]:
        return None, grad_bias_O
    assert input_TI is not None
    if grad_TO.is_cuda and weight_dtype == torch.float32 != grad_TO.dtype:
        # Takes the fp32 sums of the product directly, instead of rounding them to bf16 and converting them back.
        return torch.mm(grad_TO.T, input_TI, out_dtype=torch.float32), grad_bias_O
    return (grad_TO.T @ input_TI).to(weight_dtype), grad_bias_O
