"""The projections before and after attention, of each kind of layer.

shape suffixes: T tokens of the packed row, H hidden_size, W = (N + 2K) * D, N num_attention_heads,
K num_key_value_heads, D head_dim, P positions of the RoPE table
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sftron.kernels.rms_norm import rms_norm
from sftron.kernels.rope import Heads, rotate_heads, split_heads
from sftron.models.architecture import Layer, LlamaConfig
from sftron.models.latent_attention import LatentAttention
from sftron.models.layers import NORMS, LayerNormOfHeads, Linear, Norm, NormedLinear

GatedHeads = tuple[Tensor, Tensor, Tensor, Tensor]
"""Queries, keys, values, and the gate of the output."""


def make_norm(config: LlamaConfig, size: int) -> Norm:
    """Returns a norm of the model's kind, over `size` elements."""
    return NORMS[config.norm](size, config.norm_eps)


class LlamaAttention(nn.Module):
    """The projections before and after attention, with a rotary embedding on every query and key head."""

    def __init__(self, config: LlamaConfig, layer: Layer, recompute: bool) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        self.interleaved = layer.rope is not None and config.ropes[layer.rope].interleaved
        width, parts = self.num_heads * self.head_dim, self.parts(config, layer)
        options = {"initializer_range": config.initializer_range, "recompute": recompute}
        self.qkv_proj = NormedLinear(
            config.hidden_size, sum(parts.values()), bias=config.qkv_bias, parts=parts, **options
        )
        self.o_proj = Linear(width, config.hidden_size, bias=config.o_bias, **options)
        self.sinks = nn.Parameter(torch.zeros(self.num_heads)) if layer.sinks else None

    def parts(self, config: LlamaConfig, layer: Layer) -> dict[str, int]:
        """Returns the projections that are fused in qkv_proj, with their numbers of rows."""
        width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        # The rows of an output gate are in those of the queries.
        return {"q_proj": width * (1 + config.output_gate), "k_proj": kv_width, "v_proj": kv_width}

    @property
    def flops_of_pair(self) -> int:
        """The FLOPs of a query and a key that it reads, in all heads: 2 D for the score and 2 D for the value."""
        return 4 * self.num_heads * self.head_dim

    def heads(self, x_TH: Tensor, norm: Norm | None, position_ids: Tensor, table_PD: Tensor | None) -> Heads:
        """Returns q_TND, k_TKD and v_TKD, computed from the normalized x."""
        qkv_TW = self.prepare(self.qkv_proj(x_TH, norm))
        return rotate_heads(qkv_TW, position_ids, table_PD, self.num_heads, self.num_kv_heads, self.interleaved)

    def prepare(self, qkv_TW: Tensor) -> Tensor:
        """Returns queries, keys and values as they are rotated."""
        return qkv_TW

    def output(self, attended_TND: Tensor) -> Tensor:
        return self.o_proj(attended_TND.flatten(1))


class NormedHeadsAttention(LlamaAttention):
    """The attention projections of Qwen 3: each query and key head is normalized before rotation (arXiv 2505.09388)."""

    def __init__(self, config: LlamaConfig, layer: Layer, recompute: bool) -> None:
        super().__init__(config, layer, recompute)
        self.q_norm, self.k_norm = make_norm(config, config.head_dim), make_norm(config, config.head_dim)

    def prepare(self, qkv_TW: Tensor) -> Tensor:
        q_TND, k_TKD, v_TKD = split_heads(qkv_TW, self.num_heads, self.num_kv_heads)
        heads = (self.q_norm(q_TND), self.k_norm(k_TKD), v_TKD)
        return torch.cat([x_THD.flatten(1) for x_THD in heads], dim=1)


class NormedAfterRotationAttention(NormedHeadsAttention):
    """The attention projections of Hunyuan: each query and key head is normalized after rotation."""

    def heads(self, x_TH: Tensor, norm: Norm | None, position_ids: Tensor, table_PD: Tensor | None) -> Heads:
        q_TND, k_TKD, v_TKD = super().heads(x_TH, norm, position_ids, table_PD)
        return self.q_norm(q_TND), self.k_norm(k_TKD), v_TKD

    def prepare(self, qkv_TW: Tensor) -> Tensor:
        return qkv_TW


class GatedAttention(NormedHeadsAttention):
    """The attention projections of Qwen 3.5: q_proj also gives a gate of each head's output (arXiv 2505.06708)."""

    def heads(self, x_TH: Tensor, norm: Norm | None, position_ids: Tensor, table_PD: Tensor | None) -> GatedHeads:
        """Returns q_TND, k_TKD, v_TKD and the gate, [T, N, D]."""
        num_kv = 2 * self.num_kv_heads * self.head_dim
        qkv_TW = self.qkv_proj(x_TH, norm)
        q_and_gate, kv = qkv_TW.split([qkv_TW.shape[1] - num_kv, num_kv], dim=1)
        q_TND, gate_TND = q_and_gate.unflatten(1, (self.num_heads, 2, self.head_dim)).unbind(2)
        qkv_TW = self.prepare(torch.cat([q_TND.flatten(1), kv], dim=1))
        return *rotate_heads(qkv_TW, position_ids, table_PD, self.num_heads, self.num_kv_heads), gate_TND

    def output(self, attended_TND: Tensor, gate_TND: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.o_proj((attended_TND * gate_TND.sigmoid()).flatten(1))


class NormedEachHeadAttention(NormedHeadsAttention):
    """The attention projections of Cohere: each head is normalized with weights of its own before rotation."""

    def __init__(self, config: LlamaConfig, layer: Layer, recompute: bool, *, is_flat: bool = False) -> None:
        super().__init__(config, layer, recompute)
        options = {"eps": config.norm_eps, "is_flat": is_flat}
        self.q_norm = LayerNormOfHeads(self.num_heads, self.head_dim, **options)
        self.k_norm = LayerNormOfHeads(self.num_kv_heads, self.head_dim, **options)


class NormedWidthAttention(LlamaAttention):
    """The attention projections of OLMo 2: all queries and all keys are normalized as one (arXiv 2501.00656)."""

    def __init__(self, config: LlamaConfig, layer: Layer, recompute: bool) -> None:
        super().__init__(config, layer, recompute)
        self.widths = [heads * self.head_dim for heads in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]
        self.q_norm, self.k_norm = make_norm(config, self.widths[0]), make_norm(config, self.widths[1])

    def prepare(self, qkv_TW: Tensor) -> Tensor:
        q, k, v = qkv_TW.split(self.widths, dim=1)
        return torch.cat([self.q_norm(q), self.k_norm(k), v], dim=1)


class ClippedAttention(LlamaAttention):
    """The attention projections of OLMo 1: queries, keys and values are clipped (arXiv 2402.00838)."""

    def __init__(self, config: LlamaConfig, layer: Layer, recompute: bool) -> None:
        super().__init__(config, layer, recompute)
        self.bound = math.inf if config.clip_qkv is None else config.clip_qkv

    def prepare(self, qkv_TW: Tensor) -> Tensor:
        return qkv_TW if self.bound == math.inf else qkv_TW.clamp(-self.bound, self.bound)


class PositionScaledAttention(LlamaAttention):
    """The attention projections of Ministral 3: queries grow with their position (see `QueryScaling`)."""

    def __init__(self, config: LlamaConfig, layer: Layer, recompute: bool) -> None:
        super().__init__(config, layer, recompute)
        scaling = None if layer.rope is None else config.ropes[layer.rope].query_scaling
        assert scaling is not None
        self.query_scaling = scaling

    def heads(self, x_TH: Tensor, norm: Norm | None, position_ids: Tensor, table_PD: Tensor | None) -> Heads:
        q_TND, k_TKD, v_TKD = super().heads(x_TH, norm, position_ids, table_PD)
        scale_T = self.query_scaling(position_ids).to(q_TND.dtype)
        return q_TND * scale_T[:, None, None], k_TKD, v_TKD


class NormedValuesAttention(LlamaAttention):
    """The attention projections of Gemma 4: each head is normalized, those of values without weights.

    A layer may have no v_proj, where values are the keys before their norm, or, with `shares_keys`, queries alone.
    """

    def __init__(self, config: LlamaConfig, layer: Layer, recompute: bool) -> None:
        super().__init__(config, layer, recompute)
        self.q_norm, self.eps = make_norm(config, config.head_dim), config.norm_eps
        self.k_norm = None if layer.shares_keys else make_norm(config, config.head_dim)

    def parts(self, config: LlamaConfig, layer: Layer) -> dict[str, int]:
        left_out = ("k_proj", "v_proj") if layer.shares_keys else ("v_proj",) if layer.values_are_keys else ()
        return {name: rows for name, rows in super().parts(config, layer).items() if name not in left_out}

    def heads(self, x_TH: Tensor, norm: Norm | None, position_ids: Tensor, table_PD: Tensor | None) -> Heads:
        """Returns q_TND, k_TKD and v_TKD; K is 0 in a layer that shares those of another."""
        rows = list(self.qkv_proj.parts.values())
        q_TND, *kv = (x.unflatten(1, (-1, self.head_dim)) for x in self.qkv_proj(x_TH, norm).split(rows, dim=1))
        heads = [self.q_norm(q_TND)]
        if self.k_norm is not None:
            v_TKD = rms_norm(kv[-1], kv[-1].new_ones(self.head_dim), self.eps)
            heads += [self.k_norm(kv[0]), v_TKD]
        qkv_TW = torch.cat([x_THD.flatten(1) for x_THD in heads], dim=1)
        num_kv_heads = 0 if self.k_norm is None else self.num_kv_heads
        return rotate_heads(qkv_TW, position_ids, table_PD, self.num_heads, num_kv_heads)


ATTENTIONS: dict[str, Callable[..., Any]] = {
    "rotary": LlamaAttention,
    "normed_rotary": NormedHeadsAttention,
    "rotary_normed": NormedAfterRotationAttention,
    "each_normed_rotary": NormedEachHeadAttention,
    "each_normed_rotary_flat": partial(NormedEachHeadAttention, is_flat=True),
    "wide_normed_rotary": NormedWidthAttention,
    "clipped_rotary": ClippedAttention,
    "gated_rotary": GatedAttention,
    "position_scaled": PositionScaledAttention,
    "normed_values": NormedValuesAttention,
    "latent": LatentAttention,
}
