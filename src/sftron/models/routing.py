"""Routers of mixtures of experts, which select experts for each token, and the balance of their choices.

    p = softmax(x @ R^T) over all experts; the K largest are the token's scores, with or without a division by their sum
    (arXiv 2401.04088, 2409.02060); divided, they are the softmax of the K logits alone

A router may have a bias (gpt-oss, arXiv 2508.10925). That of Gemma 4 reads x / rms(x) times a scale of each element,
and multiplies each score by a factor of its expert.

    s = sigmoid(x @ R^T); the K experts with the largest s + c are the token's, where c is a fixed correction of each
    expert, and all are of the groups whose two largest s + c have the largest sums; their s, divided by their sum or
    not, times a factor are the scores (DeepSeek V3, arXiv 2412.19437, equations 12 to 16)

    shape suffixes: T tokens, N real tokens, H hidden_size, E experts, G groups of experts, K experts per token,
    S = T * K slots, L layers with experts
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sftron.kernels.rms_norm import rms_norm
from sftron.models.mixtures import Mixture

CORRECTION = "e_score_correction_bias"
"""The last part of the name of a correction. It is a parameter that is never trained, whose type is always fp32."""


class Router(nn.Module):
    """Selects some of the experts for each token, and gives each of them a score."""

    has_aux_loss: ClassVar[bool] = True
    """Whether the auxiliary loss of `Routing` can be trained."""

    def __init__(self, hidden_size: int, mixture: Mixture, *, initializer_range: float) -> None:
        super().__init__()
        self.num_selected, self.normalizes = mixture.num_selected, mixture.normalizes
        self.weights_per_token = mixture.num_experts * hidden_size
        self.weight = nn.Parameter(torch.empty(mixture.num_experts, hidden_size).normal_(std=initializer_range))
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


class CorrectedRouter(Router):
    """The router of DeepSeek V3, whose experts are balanced by a fixed correction in place of an auxiliary loss."""

    has_aux_loss = False

    def __init__(self, hidden_size: int, mixture: Mixture, *, initializer_range: float) -> None:
        super().__init__(hidden_size, mixture, initializer_range=initializer_range)
        self.num_groups, self.num_selected_groups = mixture.num_groups, mixture.num_selected_groups
        self.score_scale = mixture.score_scale
        self.e_score_correction_bias = nn.Parameter(torch.zeros(mixture.num_experts), requires_grad=False)

    def forward(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the same as that of `Router`. Everything is in fp32, as in transformers."""
        scores_TE = F.linear(x_TH.float(), self.weight.float()).sigmoid()
        experts_TK = self._selected(scores_TE.detach() + self.e_score_correction_bias)
        if self.routing is not None:
            scores = scores_TE.detach()
            self.routing.count(self, scores / scores.sum(dim=-1, keepdim=True), experts_TK)
        scores_TK = scores_TE.gather(1, experts_TK)
        if self.normalizes:
            scores_TK = scores_TK / (scores_TK.sum(dim=-1, keepdim=True) + 1e-20)
        return scores_TK * self.score_scale, experts_TK

    def _selected(self, corrected_TE: Tensor) -> Tensor:
        """Returns the experts with the largest corrected scores within the best groups, int64 [T, K]."""
        if self.num_selected_groups < self.num_groups:
            corrected_TGE = corrected_TE.unflatten(1, (self.num_groups, -1))
            sums_TG = corrected_TGE.topk(2, dim=-1).values.sum(dim=-1)
            groups_TG = sums_TG.topk(self.num_selected_groups, dim=-1).indices
            is_out_TG = torch.ones_like(sums_TG, dtype=torch.bool).scatter_(1, groups_TG, False)
            corrected_TE = corrected_TGE.masked_fill(is_out_TG[:, :, None], -torch.inf).flatten(1)
        return corrected_TE.topk(self.num_selected, dim=-1).indices


class ScaledRouter(Router):
    """The router of Gemma 4, which has a norm of its own; its `eps` is that of the norm."""

    def __init__(self, hidden_size: int, mixture: Mixture, *, initializer_range: float, eps: float) -> None:
        super().__init__(hidden_size, mixture, initializer_range=initializer_range)
        self.scale = nn.Parameter(torch.ones(hidden_size))
        self.per_expert_scale = nn.Parameter(torch.ones(mixture.num_experts))
        self.eps = eps

    def forward(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the same as that of `Router`, given rows that no norm has changed."""
        # In fp32: the weights that FSDP gathers may be in bf16.
        factors_H = self.scale.float() * len(self.scale) ** -0.5
        scores_TK, experts_TK = super().forward(rms_norm(x_TH, factors_H, self.eps))
        # The gradient of an index would be summed in any order.
        return scores_TK * self.per_expert_scale.expand(len(x_TH), -1).gather(1, experts_TK), experts_TK


ROUTERS: dict[str, type[Router]] = {"softmax": Router, "corrected": CorrectedRouter}


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
    recorded. `CorrectedRouter` has no such loss: its p are s divided by their sum, and the coefficient must be 0.
    """

    def __init__(self, model: nn.Module, coefficient: float = 0.0) -> None:
        self._routers = [module for module in model.modules() if isinstance(module, Router)]
        assert not coefficient or all(router.has_aux_loss for router in self._routers)
        self.coefficient = coefficient if self._routers else 0.0
        self._num_real, self._is_counting = 0, False
        self._passed: set[Router] | None = None
        """The routers that the forward pass of a micro-batch has passed; None outside of one."""
        self._pull_E: Tensor | None = None
        sizes = (len(self._routers), 2, *(self._routers[0].weight.shape[:1] if self._routers else (0,)))
        device = next(model.parameters()).device
        self.table_L2E = torch.zeros(sizes, dtype=torch.float64, device=device)
        """C and P by layer; of size 0 for a model without experts. The tables of several ranks can be added."""

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
        self._num_real, self._is_counting, self._passed = num_real, counts, set()
        try:
            yield
        finally:
            # Activation checkpointing repeats the forward pass in the backward pass.
            self._is_counting, self._passed = False, None

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
        if self._passed is not None and self.coefficient:
            if router in self._passed:
                raise ValueError(
                    "the objective computes the hidden states of a micro-batch twice, and the auxiliary loss of the "
                    "routers would count both; set model.router_aux_loss_coef to 0, or call hidden_states once"
                )
            self._passed.add(router)
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


def freeze_routers(model: nn.Module) -> None:
    """Freezes the weights of all routers."""
    for module in model.modules():
        if isinstance(module, Router):
            module.requires_grad_(False)


def is_correction(name: str) -> bool:
    """Returns whether a parameter, by its name, is the fixed correction of a router."""
    return name.endswith(f".{CORRECTION}")
