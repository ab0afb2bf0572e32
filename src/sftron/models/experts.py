"""Mixtures of experts: a router that selects experts for each token, the products of the experts, and their balance.

    router       p = softmax(x @ R^T) over all experts; the K largest are the token's scores, with or without a division
                 by their sum (arXiv 2401.04088, 2409.02060); divided, they are the softmax of the K logits alone
    expert e     (silu(x @ G_e^T) * (x @ U_e^T)) @ D_e^T, where gate_up_proj[e] = cat([G_e, U_e])
    output       the sum of the outputs of the token's experts times their scores

Router and experts may have biases, and another product of gate and up (gpt-oss, arXiv 2508.10925).

Slots, the pairs of a token and one of its experts, are sorted by expert, so that the rows of an expert are adjacent.
Per token the experts keep x and the K * 2F outputs of their first products for the backward pass. The rest is computed
again from these: the gathered rows, the gated products, and nothing that needs a matrix product. The score multiplies
the gated product, not the output, so the outputs need not be kept for the gradient of the scores.

No result of a token depends on how many other tokens select its experts (law 7): see `grouped_linear`.

    shape suffixes: T tokens, H hidden_size, E experts, K experts per token, S = T * K slots, F intermediate size of an
    expert, I input size, O output size, L layers with experts
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sftron.kernels.clamped_swiglu import clamped_swiglu, clamped_swiglu_backward
from sftron.kernels.swiglu import swiglu, swiglu_backward

_MOST_ROWS = 128
"""The largest number of rows of one product in `grouped_linear`."""


class Router(nn.Module):
    """Selects `num_selected` of the experts for each token, and gives each of them a score.

    Args:
        normalizes: Whether the scores of a token are divided by their sum.
    """

    def __init__(
        self, hidden_size: int, num_experts: int, num_selected: int, *, normalizes: bool, initializer_range: float
    ) -> None:
        super().__init__()
        self.num_selected, self.normalizes = num_selected, normalizes
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size).normal_(std=initializer_range))
        self.bias: nn.Parameter | None = None
        self.routing: Routing | None = None

    def forward(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the scores, fp32 [T, K], and the indices of the experts, int64 [T, K].

        Products are in the type of x, and the softmax is in fp32, as in transformers.
        """
        bias_E = None if self.bias is None else self.bias.to(x_TH.dtype)
        logits_TE = F.linear(x_TH, self.weight.to(x_TH.dtype), bias_E)
        if self.routing is not None:
            logits_TE = self.routing.balanced(logits_TE)
        probabilities_TE = logits_TE.softmax(dim=-1, dtype=torch.float32)
        scores_TK, experts_TK = probabilities_TE.topk(self.num_selected, dim=-1)
        if self.routing is not None:
            self.routing.count(self, probabilities_TE.detach(), experts_TK)
        if self.normalizes:
            scores_TK = scores_TK / scores_TK.sum(dim=-1, keepdim=True)
        return scores_TK, experts_TK


class Gating(NamedTuple):
    """The product of gate and up, f(gate_up), and its backward pass."""

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    """(gradient, gate_up) -> gradient of gate_up, and the product"""


_SWIGLU = Gating(swiglu, partial(swiglu_backward, with_output=True))


class Experts(nn.Module):
    """The weights of all experts of a layer."""

    def __init__(self, hidden_size: int, num_experts: int, intermediate_size: int, *, initializer_range: float) -> None:
        super().__init__()
        gate_up_EOH = torch.empty(num_experts, 2 * intermediate_size, hidden_size)
        down_EHF = torch.empty(num_experts, hidden_size, intermediate_size)
        self.gate_up_proj = nn.Parameter(gate_up_EOH.normal_(std=initializer_range))
        self.down_proj = nn.Parameter(down_EHF.normal_(std=initializer_range))

    def forward(self, x_TH: Tensor, scores_TK: Tensor, experts_TK: Tensor) -> Tensor:
        """Returns the weighted sum of the outputs of each token's experts, [T, H] in the type of x."""
        return _Experts.apply(  # pyright: ignore[reportReturnType]
            x_TH, scores_TK, experts_TK, self.gate_up_proj, self.down_proj, None, None, _SWIGLU
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
        order_S, ends_E = sort_by_expert(experts_TK, len(gate_up_EOH))
        num_selected = experts_TK.shape[1]
        expert_S = None if down_bias_EH is None else experts_TK.flatten()[order_S]
        gate_up_S2F = grouped_linear(x_TH[order_S // num_selected], gate_up_EOH, ends_E)
        if gate_up_bias_EO is not None:
            gate_up_S2F += gate_up_bias_EO.to(x_TH.dtype)[expert_S]
        weighted_SF = _scaled(gating.forward(gate_up_S2F), scores_TK, order_S)
        ctx.save_for_backward(
            x_TH, scores_TK, order_S, ends_E, expert_S, gate_up_S2F, gate_up_EOH, down_EHF, down_bias_EH
        )
        ctx.gating = gating
        output_SH = grouped_linear(weighted_SF, down_EHF, ends_E)
        if down_bias_EH is not None:
            output_SH += _scaled(down_bias_EH.to(x_TH.dtype)[expert_S], scores_TK, order_S)
        return _sum_of_slots(output_SH, order_S, num_selected)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_TH, scores_TK, order_S, ends_E, expert_S, gate_up_S2F, *weights = ctx.saved_tensors
        gate_up_EOH, down_EHF, down_bias_EH = weights
        num_selected = scores_TK.shape[1]
        token_S = order_S // num_selected
        grad_SH = grad_TH[token_S]
        grad_weighted_SF = grouped_linear(grad_SH, down_EHF.transpose(1, 2), ends_E)
        grad_product_SF = _scaled(grad_weighted_SF, scores_TK, order_S)
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
        ones_S8 = grad_SH.new_ones(len(grad_SH), 8)  # the kernel of products takes whole 16 bytes
        if ctx.needs_input_grad[4]:
            grad_down = _weight_gradient(grad_SH, _scaled(product_SF, scores_TK, order_S), ends_E, down_EHF)
        if down_bias_EH is not None and ctx.needs_input_grad[6]:
            scores_S8 = _scaled(ones_S8, scores_TK, order_S)
            grad_down_bias = grouped_gradient(grad_SH, scores_S8, ends_E, down_bias_EH.dtype)[..., 0]
        del grad_SH, product_SF
        if ctx.needs_input_grad[3]:
            grad_gate_up = _weight_gradient(grad_gate_up_S2F, x_TH[token_S], ends_E, gate_up_EOH)
        if down_bias_EH is not None and ctx.needs_input_grad[5]:
            grad_gate_up_bias = grouped_gradient(grad_gate_up_S2F, ones_S8, ends_E, down_bias_EH.dtype)[..., 0]
        grad_x_TH = None
        if ctx.needs_input_grad[0]:
            grad_x_SH = grouped_linear(grad_gate_up_S2F, gate_up_EOH.transpose(1, 2), ends_E)
            grad_x_TH = _sum_of_slots(grad_x_SH, order_S, num_selected)
        return grad_x_TH, grad_scores, None, grad_gate_up, grad_down, grad_gate_up_bias, grad_down_bias, None


def _weight_gradient(grad_SO: Tensor, x_SI: Tensor, ends_E: Tensor, weight_EOI: Tensor) -> Tensor:
    """Returns the gradient of the weight, with the same order of its dimensions in memory."""
    if weight_EOI.is_contiguous():
        return grouped_gradient(grad_SO, x_SI, ends_E, weight_EOI.dtype)
    return grouped_gradient(x_SI, grad_SO, ends_E, weight_EOI.dtype).transpose(1, 2)


def sort_by_expert(experts_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Returns the slots in the order of their experts, int64 [S], and the end of each expert's range, int32 [E]."""
    sorted_S, order_S = experts_TK.flatten().sort(stable=True)
    each_E = torch.arange(num_experts, device=sorted_S.device)
    return order_S, torch.searchsorted(sorted_S, each_E, right=True, out_int32=True)


def _scaled(x_SF: Tensor, scores_TK: Tensor, order_S: Tensor) -> Tensor:
    """Returns the rows times the scores of their slots, computed in fp32 and rounded once."""
    return (x_SF * scores_TK.flatten()[order_S, None]).to(x_SF.dtype)


def _sum_of_slots(x_SH: Tensor, order_S: Tensor, num_selected: int) -> Tensor:
    """Returns the sum of each token's slots, [T, H]. Each token sums in the order of its own experts (law 7)."""
    position_S = torch.empty_like(order_S)
    position_S[order_S] = torch.arange(len(order_S), device=order_S.device)
    return x_SH[position_S].view(-1, num_selected, x_SH.shape[1]).sum(dim=1)


# --- Grouped products ---


def grouped_linear(x_SI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """Returns x @ W_e^T for the rows of each expert e, [S, O] in the type of x.

    On a GPU in bf16 it is one kernel, which computes a row the same way wherever it is. Elsewhere it is a loop over
    experts. There a matrix product may round a row differently for another number of rows (in fp32 below 16, measured
    with MKL), and how many rows an expert has depends on other documents. So all products have the same number of rows,
    the last one of an expert with rows of zeros, and the bits of a row do not depend on its position among them.
    """
    if _has_kernel(x_SI, weight_EOI):
        return F.grouped_mm(x_SI, weight_EOI.to(x_SI.dtype).transpose(1, 2), offs=ends_E)
    num_slots, num_experts = len(x_SI), len(weight_EOI)
    num_rows = _rows_of_product(num_slots, num_experts)
    output_SO = x_SI.new_empty(num_slots, weight_EOI.shape[1])
    for expert, start, end in _ranges(ends_E):
        weight_IO = weight_EOI[expert].to(x_SI.dtype).T
        for first in range(start, end, num_rows):
            last = min(first + num_rows, end)
            if last - first == num_rows:
                torch.mm(x_SI[first:last], weight_IO, out=output_SO[first:last])
            else:
                padded_RI = F.pad(x_SI[first:last], (0, 0, 0, num_rows - (last - first)))
                output_SO[first:last] = (padded_RI @ weight_IO)[: last - first]
    return output_SO


def grouped_gradient(grad_SO: Tensor, x_SI: Tensor, ends_E: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns grad^T @ x over the rows of each expert, [E, O, I] in `dtype`; zero for an expert without rows."""
    if _has_kernel(grad_SO, x_SI):
        gradient_EOI = F.grouped_mm(grad_SO.T, x_SI, offs=ends_E)
        has_rows_E = ends_E.diff(prepend=ends_E.new_zeros(1)) > 0
        # The kernel need not write the products of an expert without rows.
        return torch.where(has_rows_E[:, None, None], gradient_EOI, 0).to(dtype)
    gradient_EOI = x_SI.new_zeros(len(ends_E), grad_SO.shape[1], x_SI.shape[1], dtype=dtype)
    for expert, start, end in _ranges(ends_E):
        gradient_EOI[expert] = grad_SO[start:end].T @ x_SI[start:end]
    return gradient_EOI


def _has_kernel(*tensors: Tensor) -> bool:
    """Returns whether torch's grouped product has a kernel: on a GPU of compute capability 8.0, with bf16 rows, all of
    whole 16 bytes."""
    rows = tensors[0]
    return (
        rows.is_cuda
        and rows.dtype == torch.bfloat16
        and all(size % 8 == 0 for each in tensors for size in each.shape[1:])
        and torch.cuda.get_device_capability(rows.device) >= (8, 0)
    )


def _rows_of_product(num_slots: int, num_experts: int) -> int:
    """Returns the number of rows of each product: a power of two near the mean rows of an expert. It depends on the
    number of slots alone, not on the routing."""
    return min(_MOST_ROWS, 1 << (max(1, num_slots // num_experts) - 1).bit_length())


def _ranges(ends_E: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yields each expert with rows, with their range. On a GPU this waits for the device."""
    start = 0
    for expert, end in enumerate(ends_E.tolist()):
        if end > start:
            yield expert, start, end
        start = end


# --- The balance of the experts ---


class Routing:
    """The loads of the experts in one optimizer step, and their auxiliary loss (arXiv 2101.03961, equations 4 to 6).

        loss = E * sum over experts e of (C_e / R) * (P_e / R)

    R is the number of rows, which are the real tokens of the whole step in each layer with experts. C_e is the number
    of rows that select e, and P_e is the sum of its probabilities over all rows. Padding is no row. It is the
    definition of transformers (load_balancing_loss_func), over all layers together, micro-batches and ranks.

    C has no gradient, so that of the logits of a row follows from C alone: p * (g - sum(p * g)) for its probabilities
    p, with g = coefficient * E * C / R^2. It is added to the gradient of the logits in the backward pass. Each backward
    pass needs the C of the whole step, so with several micro-batches, all but the first have to be computed once more
    before the first backward pass, without gradients. The number of slots of a step is R * K, so R follows from C.

    Use it as a context manager around the passes of a step. A model without experts has no routers, and nothing is
    recorded.
    """

    def __init__(self, model: nn.Module, coefficient: float = 0.0) -> None:
        self._routers = [module for module in model.modules() if isinstance(module, Router)]
        self.coefficient = coefficient if self._routers else 0.0
        self._num_real, self._is_counting = 0, False
        self._pull_E: Tensor | None = None
        sizes = (len(self._routers), 2, *(self._routers[0].weight.shape[:1] if self._routers else (0,)))
        device = self._routers[0].weight.device if self._routers else None
        self.table_L2E = torch.zeros(sizes, dtype=torch.float64, device=device)
        """C and P by layer. The tables of several ranks can be added."""

    def __enter__(self) -> Routing:
        for router in self._routers:
            router.routing = self
        return self

    def __exit__(self, *_: object) -> None:
        for router in self._routers:
            router.routing = None

    @contextmanager
    def forward_pass(self, num_real: int, *, counts: bool) -> Iterator[None]:
        """Encloses the forward pass of a micro-batch, of which the first `num_real` tokens are no padding."""
        self._num_real, self._is_counting = num_real, counts
        try:
            yield
        finally:
            # Activation checkpointing repeats the forward pass in the backward pass.
            self._is_counting = False

    def before_backward(self, sum_over_ranks: Callable[[Tensor], Tensor]) -> None:
        """Computes the gradient from the loads of the whole step, which have been counted on all ranks."""
        if self.coefficient:
            counts_E = sum_over_ranks(self.table_L2E[:, 0].sum(dim=0))
            num_rows = counts_E.sum() / self._routers[0].num_selected
            self._pull_E = (self.coefficient * len(counts_E) * counts_E / num_rows**2).float()

    def measures(self, table_L2E: Tensor) -> Tensor:
        """Returns the auxiliary loss, without its coefficient, and the largest share that an expert has of the slots of
        its layer, float64 [2]; [0] for a model without experts. The table is summed over ranks."""
        if not self._routers:
            return table_L2E.new_zeros(0)
        counts_E, probabilities_E = table_L2E.sum(dim=0)
        num_rows = counts_E.sum() / self._routers[0].num_selected
        loss = len(counts_E) * (counts_E * probabilities_E).sum() / num_rows**2
        counts_LE = table_L2E[:, 0]
        return torch.stack([loss, (counts_LE / counts_LE.sum(dim=1, keepdim=True)).max()])

    # --- Called by the routers ---

    def count(self, router: Router, probabilities_TE: Tensor, experts_TK: Tensor) -> None:
        if not self._is_counting:
            return
        counts_E, sums_E = self.table_L2E[self._routers.index(router)]
        selected_S = experts_TK[: self._num_real].flatten()
        # Sums of ones are exact in any order.
        counts_E.scatter_add_(0, selected_S, torch.ones_like(selected_S, dtype=torch.float64))
        sums_E += probabilities_TE[: self._num_real].sum(dim=0, dtype=torch.float64)

    def balanced(self, logits_TE: Tensor) -> Tensor:
        """Returns the logits, to whose gradient the backward pass adds that of the auxiliary loss."""
        return _Balanced.apply(logits_TE, self) if self.coefficient else logits_TE  # pyright: ignore[reportReturnType]

    def gradient(self, logits_NE: Tensor) -> Tensor:
        """Returns the gradient of the auxiliary loss with respect to the logits of real tokens, fp32 [N, E]."""
        assert self._pull_E is not None, "before_backward has not been called"
        p_NE = logits_NE.softmax(dim=-1, dtype=torch.float32)
        return p_NE * (self._pull_E - (p_NE * self._pull_E).sum(dim=-1, keepdim=True))


def freeze_routers(model: nn.Module) -> None:
    """Freezes the weights of all routers."""
    for module in model.modules():
        if isinstance(module, Router):
            module.requires_grad_(False)


class _Balanced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor, routing: Routing) -> Tensor:
        ctx.save_for_backward(logits_TE)
        ctx.routing, ctx.num_real = routing, routing._num_real
        return logits_TE.view_as(logits_TE)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (logits_TE,) = ctx.saved_tensors
        real, padding = grad_TE.tensor_split([ctx.num_real])
        real = real + ctx.routing.gradient(logits_TE[: ctx.num_real])
        return torch.cat([real.to(grad_TE.dtype), padding]), None
