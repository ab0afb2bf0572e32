"""Rotary position embedding on the fused query, key and value projection.

Half-split (Hugging Face) layout: dimension i of a head is rotated together with dimension i + D/2.

    shape suffixes: T tokens of the flat row, W = (N + 2K) * D, N query heads, K key-value heads, D head size,
    P positions of the table
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """`rope_type: linear`: every frequency is divided by `factor` (Position Interpolation, arXiv 2306.15595)."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """`rope_type: llama3`: low frequencies are divided by `factor`, high ones kept, those between interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


RopeScaling = LinearScaling | Llama3Scaling


def build_rope_table(num_positions: int, head_dim: int, rope_theta: float, scaling: RopeScaling | None) -> Tensor:
    """cos and sin of every angle, fp32 [P, D] on the CPU: columns [0, D/2) hold cos, [D/2, D) hold sin.

    Built by transformers' own fp32 expressions (modeling_rope_utils.py), operation for operation, so that fp32 logits
    agree to rounding at any position: an angle of 1e5 rad computed in another order is off by 1e-2.
    """
    with torch.device("cpu"):
        inv_freq = 1.0 / (rope_theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
        angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * _scale(inv_freq, scaling)
        return torch.cat([angles.cos(), angles.sin()], dim=-1)


def _scale(inv_freq: Tensor, scaling: RopeScaling | None) -> Tensor:
    if scaling is None:
        return inv_freq
    if isinstance(scaling, LinearScaling):
        return inv_freq / scaling.factor
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    original = scaling.original_max_position_embeddings
    wavelength = 2 * math.pi / inv_freq
    divided = torch.where(wavelength > original / low, inv_freq / scaling.factor, inv_freq)
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * divided / scaling.factor + smooth * divided
    is_between = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(is_between, between, divided)


def rotate_qk(qkv_TW: Tensor, position_ids: Tensor, table_PD: Tensor, num_heads: int, num_kv_heads: int) -> Tensor:
    """A copy of `qkv` in which the query and key heads are rotated; the value heads are as they were.

    qkv_TW: heads in the order [queries, keys, values], any float type; the arithmetic is fp32.
    position_ids: int [T], each below P. Not checked here: that would wait for the device. `LlamaForSFT.forward` and
        `greedy_generate` compare Python ints with P instead.
    """
    return _RotateQK.apply(qkv_TW, position_ids, table_PD, num_heads + num_kv_heads)


class _RotateQK(torch.autograd.Function):
    """A rotation's gradient is the rotation back, so nothing of the activations is kept."""

    @staticmethod
    def forward(ctx: Any, qkv_TW: Tensor, position_ids: Tensor, table_PD: Tensor, num_rotated: int) -> Tensor:
        ctx.save_for_backward(position_ids, table_PD)
        ctx.num_rotated = num_rotated
        cos, sin = table_PD[position_ids].chunk(2, dim=-1)
        return _rotate(qkv_TW, cos, sin, num_rotated)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TW: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        position_ids, table_PD = ctx.saved_tensors
        cos, sin = table_PD[position_ids].chunk(2, dim=-1)
        return _rotate(grad_TW, cos, -sin, ctx.num_rotated), None, None, None


def _rotate(x_TW: Tensor, cos: Tensor, sin: Tensor, num_rotated: int) -> Tensor:
    half = cos.shape[-1]
    width = num_rotated * 2 * half
    x1, x2 = x_TW[:, :width].unflatten(-1, (num_rotated, 2, half)).unbind(dim=2)
    cos, sin = cos[:, None], sin[:, None]
    out_TW = torch.empty_like(x_TW, memory_format=torch.contiguous_format)
    y1, y2 = out_TW[:, :width].unflatten(-1, (num_rotated, 2, half)).unbind(dim=2)
    y1.copy_(x1 * cos - x2 * sin)
    y2.copy_(x2 * cos + x1 * sin)
    out_TW[:, width:] = x_TW[:, width:]
    return out_TW
