"""The products of experts, which a router (routing.py) selects for each token.

    expert e     (f(x @ G_e^T) * (x @ U_e^T)) @ D_e^T, where gate_up_proj[e] = cat([G_e, U_e]) and f is often SiLU
    output       the sum of the outputs of the token's experts times their scores

Experts may have biases, and another product of gate and up (gpt-oss, arXiv 2508.10925).

Slots, the pairs of a token and one of its experts, are sorted by expert, so that the rows of an expert are adjacent.
Per token the experts keep x and the K * 2F outputs of their first products for the backward pass. The rest is computed
again from these: the gathered rows, the gated products, and nothing that needs a matrix product. The score multiplies
the gated product, not the output, so the outputs need not be kept for the gradient of the scores.

How many other tokens select its experts changes no bit of a token's results where there is a kernel (law 7), and no
more than their rounding elsewhere: see `grouped_linear`. Without a kernel, the host reads the numbers of rows once in
each forward pass of a layer (law 11).

    shape suffixes: T tokens, H hidden_size, E experts, K experts per token, S = T * K slots, F intermediate size of an
    expert, I input size, O output size
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sftron.kernels.activation import activate, activate_backward
from sftron.kernels.clamped_swiglu import clamped_swiglu, clamped_swiglu_backward
from sftron.kernels.device import compute_capability, is_gpu


class Gating(NamedTuple):
    """The product of gate and up, f(gate_up), and its backward pass."""

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    """(gradient, gate_up) -> gradient of gate_up, and the product"""


@dataclass(frozen=True)
class Ranges:
    """The adjacent rows of each expert."""

    ends_E: Tensor
    """The end of each range, int32."""

    @cached_property
    def slices(self) -> list[slice]:
        """The ranges, read once, for which the host waits for the device."""
        return [slice(*each) for each in pairwise([0, *self.ends_E.tolist()])]


class Experts(nn.Module):
    """The weights of all experts of a layer, whose `activation` is a key of ACTIVATIONS in kernels/activation.py."""

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        intermediate_size: int,
        *,
        initializer_range: float,
        activation: str = "silu",
    ) -> None:
        super().__init__()
        gate_up_EOH = torch.empty(num_experts, 2 * intermediate_size, hidden_size)
        down_EHF = torch.empty(num_experts, hidden_size, intermediate_size)
        self.gate_up_proj = nn.Parameter(gate_up_EOH.normal_(std=initializer_range))
        self.down_proj = nn.Parameter(down_EHF.normal_(std=initializer_range))
        named: dict[str, Any] = {"name": activation, "is_gated": True}
        self.gating = Gating(partial(activate, **named), partial(activate_backward, **named, with_output=True))

    def forward(self, x_TH: Tensor, scores_TK: Tensor, experts_TK: Tensor) -> Tensor:
        """Returns the weighted sum of the outputs of each token's experts, [T, H] in the type of x."""
        return _Experts.apply(  # pyright: ignore[reportReturnType]
            x_TH, scores_TK, experts_TK, self.gate_up_proj, self.down_proj, None, None, self.gating
        )


class BiasedExperts(nn.Module):
    """The weights of experts that have biases and a clamped SwiGLU, whose constants are `alpha` and `limit`.

    They are as in Hugging Face's files: transposed, and with the columns of gate and up in turn.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        intermediate_size: int,
        *,
        alpha: float,
        limit: float,
        initializer_range: float,
    ) -> None:
        super().__init__()
        gate_up_EHO = torch.empty(num_experts, hidden_size, 2 * intermediate_size)
        down_EFH = torch.empty(num_experts, intermediate_size, hidden_size)
        self.gate_up_proj = nn.Parameter(gate_up_EHO.normal_(std=initializer_range))
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(num_experts, 2 * intermediate_size))
        self.down_proj = nn.Parameter(down_EFH.normal_(std=initializer_range))
        self.down_proj_bias = nn.Parameter(torch.zeros(num_experts, hidden_size))
        constants = {"alpha": alpha, "limit": limit}
        self.gating = Gating(partial(clamped_swiglu, **constants), partial(clamped_swiglu_backward, **constants))

    def forward(self, x_TH: Tensor, scores_TK: Tensor, experts_TK: Tensor) -> Tensor:
        """Returns the weighted sum of the outputs of each token's experts, [T, H] in the type of x."""
        weights = (self.gate_up_proj.transpose(1, 2), self.down_proj.transpose(1, 2))
        biases = (self.gate_up_proj_bias, self.down_proj_bias)
        return _Experts.apply(x_TH, scores_TK, experts_TK, *weights, *biases, self.gating)  # pyright: ignore[reportReturnType]


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TH: Tensor, scores_TK: Tensor, experts_TK: Tensor, gate_up_EOH: Tensor, down_EHF: Tensor,
        gate_up_bias_EO: Tensor | None, down_bias_EH: Tensor | None, gating: Gating,
    ) -> Tensor:  # fmt: skip
        order_S, ranges = sort_by_expert(experts_TK, len(gate_up_EOH))
        num_selected = experts_TK.shape[1]
        expert_S = None if down_bias_EH is None else experts_TK.flatten()[order_S]
        gate_up_S2F = grouped_linear(x_TH.index_select(0, order_S // num_selected), gate_up_EOH, ranges)
        if gate_up_bias_EO is not None:
            gate_up_S2F += gate_up_bias_EO.to(x_TH.dtype)[expert_S]
        weighted_SF = _scale_(gating.forward(gate_up_S2F), scores_TK, order_S)
        ctx.save_for_backward(x_TH, scores_TK, order_S, expert_S, gate_up_S2F, gate_up_EOH, down_EHF, down_bias_EH)
        ctx.gating, ctx.ranges = gating, ranges
        output_SH = grouped_linear(weighted_SF, down_EHF, ranges)
        if down_bias_EH is not None:
            output_SH += _scale_(down_bias_EH.to(x_TH.dtype)[expert_S], scores_TK, order_S)
        return _sum_of_slots(output_SH, order_S, num_selected)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_TH, scores_TK, order_S, expert_S, gate_up_S2F, *weights = ctx.saved_tensors
        gate_up_EOH, down_EHF, down_bias_EH = weights
        num_selected, ranges = scores_TK.shape[1], ctx.ranges
        token_S = order_S // num_selected
        grad_SH = grad_TH.index_select(0, token_S)
        grad_weighted_SF = grouped_linear(grad_SH, down_EHF.transpose(1, 2), ranges)
        grad_product_SF = _scale_(grad_weighted_SF.clone(), scores_TK, order_S)
        grad_gate_up_S2F, product_SF = ctx.gating.backward(grad_product_SF, gate_up_S2F)
        del grad_product_SF
        grad_scores = None
        if ctx.needs_input_grad[1]:
            grad_scores = torch.empty_like(scores_TK.view(-1))
            grad_scores[order_S] = (grad_weighted_SF.float() * product_SF).sum(dim=-1)
            if down_bias_EH is not None:
                grad_scores[order_S] += (grad_SH.float() * down_bias_EH[expert_S]).sum(dim=-1)
            grad_scores = grad_scores.view_as(scores_TK)
        del grad_weighted_SF
        grad_gate_up = grad_down = grad_gate_up_bias = grad_down_bias = None
        # The gradient of a bias is a product with ones, in columns of whole 16 bytes for the kernel.
        ones_S8 = grad_SH.new_ones(len(grad_SH), 8)
        if ctx.needs_input_grad[4]:
            grad_down = _weight_gradient(grad_SH, _scale_(product_SF, scores_TK, order_S), ranges, down_EHF)
        if down_bias_EH is not None and ctx.needs_input_grad[6]:
            scores_S8 = _scale_(ones_S8.clone(), scores_TK, order_S)
            grad_down_bias = grouped_gradient(grad_SH, scores_S8, ranges, down_bias_EH.dtype)[..., 0]
        del grad_SH, product_SF
        if ctx.needs_input_grad[3]:
            grad_gate_up = _weight_gradient(grad_gate_up_S2F, x_TH.index_select(0, token_S), ranges, gate_up_EOH)
        if down_bias_EH is not None and ctx.needs_input_grad[5]:
            grad_gate_up_bias = grouped_gradient(grad_gate_up_S2F, ones_S8, ranges, down_bias_EH.dtype)[..., 0]
        grad_x_TH = None
        if ctx.needs_input_grad[0]:
            grad_x_SH = grouped_linear(grad_gate_up_S2F, gate_up_EOH.transpose(1, 2), ranges)
            grad_x_TH = _sum_of_slots(grad_x_SH, order_S, num_selected)
        return grad_x_TH, grad_scores, None, grad_gate_up, grad_down, grad_gate_up_bias, grad_down_bias, None


def _weight_gradient(grad_SO: Tensor, x_SI: Tensor, ranges: Ranges, weight_EOI: Tensor) -> Tensor:
    """Returns the gradient of the weight, with the same order of its dimensions in memory."""
    if weight_EOI.is_contiguous():
        return grouped_gradient(grad_SO, x_SI, ranges, weight_EOI.dtype)
    return grouped_gradient(x_SI, grad_SO, ranges, weight_EOI.dtype).transpose(1, 2)


def sort_by_expert(experts_TK: Tensor, num_experts: int) -> tuple[Tensor, Ranges]:
    """Returns the slots in the order of their experts, int64 [S], and the range of each expert."""
    sorted_S, order_S = experts_TK.flatten().sort(stable=True)
    each_E = torch.arange(num_experts, device=sorted_S.device)
    return order_S, Ranges(torch.searchsorted(sorted_S, each_E, right=True, out_int32=True))


def _scale_(x_SF: Tensor, scores_TK: Tensor, order_S: Tensor) -> Tensor:
    """Multiplies the rows by the scores of their slots, in place, computed in fp32 and rounded once."""
    return x_SF.mul_(scores_TK.flatten()[order_S, None])


def _sum_of_slots(x_SH: Tensor, order_S: Tensor, num_selected: int) -> Tensor:
    """Returns the sum of each token's slots, [T, H]. Each token sums in the order of its own experts (law 7)."""
    position_S = torch.empty_like(order_S)
    position_S[order_S] = torch.arange(len(order_S), device=order_S.device)
    return x_SH.index_select(0, position_S).view(-1, num_selected, x_SH.shape[1]).sum(dim=1)


# --- Grouped products ---

_MAJORS_WITH_KERNEL = (9, 10)
"""The major compute capabilities for which torch 2.11 to 2.13 build their kernel; all others get a loop (pytorch issue
186620, closed as not planned)."""


def grouped_linear(x_SI: Tensor, weight_EOI: Tensor, ranges: Ranges) -> Tensor:
    """Returns x @ W_e^T for the rows of each expert e, [S, O] in the type of x.

    Where `has_kernel` is true, one kernel computes a row the same way wherever it is. Elsewhere a loop over experts may
    round a row differently if another document gives the expert more rows.
    """
    if has_kernel(x_SI, weight_EOI):
        return F.grouped_mm(x_SI, weight_EOI.to(x_SI.dtype).transpose(1, 2), offs=ranges.ends_E)
    output_SO = x_SI.new_empty(len(x_SI), weight_EOI.shape[1])
    if output_SO.is_meta:
        return output_SO
    for weight_OI, rows in zip(weight_EOI, ranges.slices, strict=True):
        if rows.start < rows.stop:
            torch.mm(x_SI[rows], weight_OI.to(x_SI.dtype).T, out=output_SO[rows])
    return output_SO


def grouped_gradient(grad_SO: Tensor, x_SI: Tensor, ranges: Ranges, dtype: torch.dtype) -> Tensor:
    """Returns grad^T @ x over the rows of each expert, [E, O, I] in `dtype`; zero for an expert without rows."""
    if has_kernel(grad_SO, x_SI):
        ends_E = ranges.ends_E
        gradient_EOI = F.grouped_mm(grad_SO.T, x_SI, offs=ends_E)
        has_rows_E = ends_E.diff(prepend=ends_E.new_zeros(1)) > 0
        # The kernel need not write the products of an expert without rows.
        return torch.where(has_rows_E[:, None, None], gradient_EOI, 0).to(dtype)
    gradient_EOI = x_SI.new_empty(len(ranges.ends_E), grad_SO.shape[1], x_SI.shape[1], dtype=dtype)
    if gradient_EOI.is_meta:
        return gradient_EOI
    for gradient_OI, rows in zip(gradient_EOI, ranges.slices, strict=True):
        if dtype == x_SI.dtype:
            torch.mm(grad_SO[rows].T, x_SI[rows], out=gradient_OI)
        else:
            gradient_OI.copy_(grad_SO[rows].T @ x_SI[rows])
    return gradient_EOI


def rounds_with_neighbors(model: nn.Module, dtype: torch.dtype) -> bool:
    """Returns whether a model, computed in `dtype`, has experts whose products are a loop; see `grouped_linear`."""
    experts = (module for module in model.modules() if isinstance(module, Experts | BiasedExperts))
    return any(
        not has_kernel(each.down_proj.new_empty((0, *each.down_proj.shape[1:]), dtype=dtype)) for each in experts
    )


def has_kernel(*tensors: Tensor) -> bool:
    """Returns whether torch's grouped product has a kernel: on a GPU of compute capability 9.x or 10.x, with bf16 rows,
    all of whole 16 bytes. On other GPUs torch loops over the experts too, and reads the ranges in each product."""
    rows = tensors[0]
    return (
        is_gpu(rows)
        and rows.dtype == torch.bfloat16
        and all(size % 8 == 0 for each in tensors for size in each.shape[1:])
        and compute_capability(rows.device)[0] in _MAJORS_WITH_KERNEL
    )
