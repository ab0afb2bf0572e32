"""The feed-forward networks of blocks, one of which is a mixture of experts.

shape suffixes: T tokens of the packed row, H hidden_size, F intermediate_size
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from sftron.kernels.xielu import BETA, xielu
from sftron.models.architecture import LlamaConfig
from sftron.models.experts import BiasedExperts, Experts
from sftron.models.layers import ActiveLinear, GatedLinear, Linear, Norm, NormedLinear, recomputed
from sftron.models.projections import make_norm
from sftron.models.routing import ROUTERS, ScaledRouter


class LlamaMLP(nn.Module):
    """The feed-forward network with a gate."""

    def __init__(self, config: LlamaConfig, recompute: bool) -> None:
        super().__init__()
        options = {"initializer_range": config.initializer_range, "recompute": recompute, "bias": config.mlp_bias}
        sizes, activation = (config.intermediate_size, config.hidden_size), config.activation
        parts = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
        self.gate_up_proj = NormedLinear(config.hidden_size, 2 * config.intermediate_size, parts=parts, **options)
        self.down_proj = GatedLinear(*sizes, activation=activation, **options)

    def forward(self, x_TH: Tensor, norm: Norm | None) -> Tensor:
        return self.down_proj(self.gate_up_proj(x_TH, norm))


class PlainMLP(nn.Module):
    """The feed-forward network without a gate."""

    def __init__(self, config: LlamaConfig, recompute: bool) -> None:
        super().__init__()
        options = {"initializer_range": config.initializer_range, "recompute": recompute, "bias": config.mlp_bias}
        sizes, activation = (config.intermediate_size, config.hidden_size), config.activation
        self.up_proj = NormedLinear(config.hidden_size, config.intermediate_size, **options)
        self.down_proj = ActiveLinear(*sizes, activation=activation, **options)

    def forward(self, x_TH: Tensor, norm: Norm | None) -> Tensor:
        return self.down_proj(self.up_proj(x_TH, norm))


class Xielu(nn.Module):
    """The activation xIELU of a layer, whose two numbers are trained (arXiv 2411.13010)."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p = nn.Parameter(torch.tensor([0.8]).expm1().log())
        self.alpha_n = nn.Parameter(torch.tensor([0.8 - BETA]).expm1().log())

    def forward(self, x_TF: Tensor) -> Tensor:
        return xielu(x_TF, self.alpha_p, self.alpha_n)


class XieluMLP(nn.Module):
    """The feed-forward network without a gate, with an activation that is trained (Apertus, arXiv 2509.14233).

    With `recompute`, the output of the activation is computed again, bit for bit, other than under torch.compile.
    """

    def __init__(self, config: LlamaConfig, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        options = {"initializer_range": config.initializer_range, "recompute": recompute, "bias": config.mlp_bias}
        self.up_proj = NormedLinear(config.hidden_size, config.intermediate_size, **options)
        self.act_fn = Xielu()
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, **options)

    def forward(self, x_TH: Tensor, norm: Norm | None) -> Tensor:
        up_TF = self.up_proj(x_TH, norm)
        active_TF = self.act_fn(up_TF)
        if not self.recompute or torch.compiler.is_compiling():
            return self.down_proj(active_TF)
        with recomputed(active_TF, lambda: self.act_fn(up_TF)):
            return self.down_proj(active_TF)


class ExpertsMLP(nn.Module):
    """A mixture of experts in place of the feed-forward network (arXiv 2401.04088)."""

    def __init__(self, config: LlamaConfig, recompute: bool) -> None:
        super().__init__()
        mixture, size, std = config.mixture, config.hidden_size, config.initializer_range
        assert mixture is not None
        self.gate = ROUTERS[mixture.router](size, mixture, initializer_range=std)
        sizes = (size, mixture.num_experts, mixture.intermediate_size)
        self.experts = Experts(*sizes, activation=config.activation, initializer_range=std)
        # The router and a shared expert have their own.
        self.weights_per_token = 3 * size * mixture.intermediate_size * mixture.num_selected

    def forward(self, x_TH: Tensor, norm: Norm | None) -> Tensor:
        normed_TH = x_TH if norm is None else norm(x_TH)
        return self.experts(normed_TH, *self.gate(normed_TH))


class BiasedExpertsMLP(ExpertsMLP):
    """A mixture of experts whose router and experts have biases, and whose gates are clamped (gpt-oss)."""

    def __init__(self, config: LlamaConfig, recompute: bool) -> None:
        super().__init__(config, recompute)
        mixture, options = config.mixture, {"initializer_range": config.initializer_range}
        assert mixture is not None
        self.gate.bias = nn.Parameter(torch.zeros(mixture.num_experts))
        sizes = (config.hidden_size, mixture.num_experts, mixture.intermediate_size)
        self.experts = BiasedExperts(*sizes, alpha=mixture.swiglu_alpha, limit=mixture.swiglu_limit, **options)


class SharedExpertMLP(ExpertsMLP):
    """A mixture of experts, and one expert of all tokens, times a gate of its own (Qwen 2 MoE, arXiv 2407.10671)."""

    def __init__(self, config: LlamaConfig, recompute: bool) -> None:
        super().__init__(config, recompute)
        assert config.mixture is not None
        assert config.mixture.shared_size is not None
        self.shared_expert = LlamaMLP(replace(config, intermediate_size=config.mixture.shared_size), recompute)
        options = {"initializer_range": config.initializer_range, "recompute": recompute}
        self.shared_expert_gate = Linear(config.hidden_size, 1, bias=False, **options)

    def forward(self, x_TH: Tensor, norm: Norm | None) -> Tensor:
        normed_TH = x_TH if norm is None else norm(x_TH)
        routed_TH = self.experts(normed_TH, *self.gate(normed_TH))
        return routed_TH + self.shared_expert_gate(normed_TH).sigmoid() * self.shared_expert(x_TH, norm)


class AddedExpertsMLP(ExpertsMLP):
    """A mixture of experts, and experts of all tokens, which are one MLP (DeepSeekMoE, arXiv 2401.06066)."""

    def __init__(self, config: LlamaConfig, recompute: bool) -> None:
        super().__init__(config, recompute)
        assert config.mixture is not None
        assert config.mixture.shared_size is not None
        self.shared_experts = LlamaMLP(replace(config, intermediate_size=config.mixture.shared_size), recompute)

    def forward(self, x_TH: Tensor, norm: Norm | None) -> Tensor:
        normed_TH = x_TH if norm is None else norm(x_TH)
        return self.experts(normed_TH, *self.gate(normed_TH)) + self.shared_experts(x_TH, norm)


class MLPBesideExperts(LlamaMLP):
    """The feed-forward network, and a mixture of experts that reads the same x, each between norms (Gemma 4)."""

    def __init__(self, config: LlamaConfig, recompute: bool) -> None:
        super().__init__(config, recompute)
        mixture, size, std = config.mixture, config.hidden_size, config.initializer_range
        assert mixture is not None
        self.gate = ScaledRouter(size, mixture, eps=config.norm_eps, initializer_range=std)
        sizes = (size, mixture.num_experts, mixture.intermediate_size)
        self.experts = Experts(*sizes, activation=config.activation, initializer_range=std)
        self.post_feedforward_layernorm_1 = make_norm(config, size)
        self.pre_feedforward_layernorm_2 = make_norm(config, size)
        self.post_feedforward_layernorm_2 = make_norm(config, size)
        # The layers of MLP and router have an attribute of this name themselves.
        self.weights_per_token = 3 * size * mixture.intermediate_size * mixture.num_selected

    def forward(self, x_TH: Tensor, norm: Norm | None) -> Tensor:
        dense_TH = self.post_feedforward_layernorm_1(super().forward(x_TH, norm))
        routed_TH = self.experts(self.pre_feedforward_layernorm_2(x_TH), *self.gate(x_TH))
        return dense_TH + self.post_feedforward_layernorm_2(routed_TH)


MLPS: dict[str, type[LlamaMLP | PlainMLP | XieluMLP | ExpertsMLP]] = {
    "gated": LlamaMLP,
    "plain": PlainMLP,
    "xielu": XieluMLP,
    "experts": ExpertsMLP,
    "shared_experts": SharedExpertMLP,
    "added_experts": AddedExpertsMLP,
    "biased_experts": BiasedExpertsMLP,
    "beside_experts": MLPBesideExperts,
}
