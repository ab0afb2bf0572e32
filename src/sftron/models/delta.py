"""Gated DeltaNet (arXiv 2412.06464) on a packed row: the gated delta rule and a causal convolution within documents.

Each head has a state S, [D, E], which is zero at the start of each document (law 7). Token t, with a query, key and
value, a decay exp(g) and a learning rate beta, corrects what the state returns for its key, and then reads it:

    S <- exp(g_t) S;  S <- S + k_t (beta_t (v_t - S^T k_t))^T;  o_t = S^T q_t

    shape suffixes: T tokens of the packed row, N value heads, K key heads (each serves N / K consecutive value heads),
    D size of a key, E size of a value, W channels, J taps
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from sftron.models.attention_kernels import outside_of_graphs
from sftron.models.delta_rule import CHUNK_SIZE, Chunks, fla_rule, recurrent_gated_delta_rule, uses_fla, wide


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSizes:
    """The sizes of the heads and of the convolution of all delta layers of a model."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    num_taps: int

    @property
    def widths(self) -> list[int]:
        """The numbers of channels of all queries, keys and values."""
        width = self.num_key_heads * self.key_dim
        return [width, width, self.num_value_heads * self.value_dim]

    @property
    def rows(self) -> list[int]:
        """The rows of the projections in_proj_qkv, in_proj_z (the output gate), in_proj_b and in_proj_a."""
        return [sum(self.widths), self.widths[2], self.num_value_heads, self.num_value_heads]


class Recur(Protocol):
    """The recurrent functions of one batch, or of one layer in generation."""

    def convolve(self, x_TW: Tensor, weight_WJ: Tensor) -> Tensor:
        """Returns `causal_convolution` of x within each document, [T, W]."""
        ...

    def __call__(self, q_TKD: Tensor, k_TKD: Tensor, v_TNE: Tensor, g_TN: Tensor, beta_TN: Tensor) -> Tensor:
        """Returns the outputs of the gated delta rule within each document, [T, N, E]."""
        ...


class MixDelta(Protocol):
    """The function of one batch, or of one layer in generation, which a delta layer calls."""

    def __call__(self, sizes: DeltaSizes, qkv_TW: Tensor, taps_WJ: Tensor, g_TN: Tensor, beta_TN: Tensor) -> Tensor:
        """Returns the outputs of the delta rule for the convolved channels, [T, N, E]."""
        ...


@dataclass(frozen=True, slots=True)
class ConvolvedRecur:
    """The convolution and the delta rule by these recurrent functions."""

    recur: Recur

    def __call__(self, sizes: DeltaSizes, qkv_TW: Tensor, taps_WJ: Tensor, g_TN: Tensor, beta_TN: Tensor) -> Tensor:
        q, k, v = self.recur.convolve(qkv_TW, taps_WJ).split(sizes.widths, dim=1)
        keys, values = (sizes.num_key_heads, sizes.key_dim), (sizes.num_value_heads, sizes.value_dim)
        return self.recur(q.unflatten(1, keys), k.unflatten(1, keys), v.unflatten(1, values), g_TN, beta_TN)


class RecurInDocuments:
    """The recurrent functions of a batch, to be shared by all layers.

    Args:
        cu_seqlens: The document boundaries, int [documents + 1]; documents may be empty. Without fla they are read
            once, so they should be on the CPU; otherwise this read waits for the device.
        recompute: Whether the backward pass computes the delta rule again instead of keeping its matrices, some 1500
            numbers per token and value head.
    """

    def __init__(self, cu_seqlens: Tensor, *, recompute: bool = False) -> None:
        self.cu_seqlens, self.recompute = cu_seqlens, recompute
        self._offsets: Tensor | None = None
        self._chunks: Chunks | None = None

    # Outside of compiled graphs, which would be specialized for the lengths of the documents.
    @outside_of_graphs
    def convolve(self, x_TW: Tensor, weight_WJ: Tensor) -> Tensor:
        if self._offsets is None or self._offsets.device != x_TW.device:
            self._offsets = offsets_in_documents(self.cu_seqlens.to(x_TW.device), len(x_TW))
        return _Convolution.apply(x_TW, weight_WJ, self._offsets)  # pyright: ignore[reportReturnType]

    @outside_of_graphs
    def __call__(self, q_TKD: Tensor, k_TKD: Tensor, v_TNE: Tensor, g_TN: Tensor, beta_TN: Tensor) -> Tensor:
        if uses_fla(q_TKD.device, q_TKD.dtype):
            return fla_rule(q_TKD, k_TKD, v_TNE, g_TN, beta_TN, self.cu_seqlens)
        if self._chunks is None or self._chunks.device != q_TKD.device:
            self._chunks = Chunks(self.cu_seqlens, CHUNK_SIZE, q_TKD.device)
        if self.recompute and torch.is_grad_enabled():
            tensors = (q_TKD, k_TKD, v_TNE, g_TN, beta_TN)
            # It uses no random numbers, so the state of the generators need not be preserved.
            return checkpoint(self._chunks.rule, *tensors, use_reentrant=False, preserve_rng_state=False)
        return self._chunks.rule(q_TKD, k_TKD, v_TNE, g_TN, beta_TN)


class CachedRecur:
    """The recurrent functions of one layer in generation, with its state and the last inputs of the convolution."""

    def __init__(self) -> None:
        self._inputs_JW: Tensor | None = None
        self._state_NDE: Tensor | None = None

    def convolve(self, x_TW: Tensor, weight_WJ: Tensor) -> Tensor:
        num_kept = weight_WJ.shape[1] - 1
        if self._inputs_JW is None:
            self._inputs_JW = x_TW.new_zeros(num_kept, x_TW.shape[1])
        inputs_TW = torch.cat([self._inputs_JW, x_TW])
        self._inputs_JW = inputs_TW[len(inputs_TW) - num_kept :].clone()
        cu_seqlens = torch.tensor([0, len(inputs_TW)], device=x_TW.device)
        return causal_convolution(inputs_TW, weight_WJ, cu_seqlens)[num_kept:]

    def __call__(self, q_TKD: Tensor, k_TKD: Tensor, v_TNE: Tensor, g_TN: Tensor, beta_TN: Tensor) -> Tensor:
        if self._state_NDE is not None:
            out_TNE, self._state_NDE = recurrent_gated_delta_rule(q_TKD, k_TKD, v_TNE, g_TN, beta_TN, self._state_NDE)
            return out_TNE
        chunks = Chunks(torch.tensor([0, len(q_TKD)]), CHUNK_SIZE, q_TKD.device)
        out_TNE, self._state_NDE = chunks.rule_and_state(q_TKD, k_TKD, v_TNE, g_TN, beta_TN)
        return out_TNE


# --- The causal convolution ---


def causal_convolution(x_TW: Tensor, weight_WJ: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Returns silu(sum over j of weight[:, j] * x[t - (J - 1) + j]), [T, W] in x's type; there is nothing before the
    first token of a document. It is computed in fp32, rounded once, and saves x for the backward pass."""
    offsets_T = offsets_in_documents(cu_seqlens.to(x_TW.device), len(x_TW))
    return _Convolution.apply(x_TW, weight_WJ, offsets_T)  # pyright: ignore[reportReturnType]


def offsets_in_documents(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """Returns the position of each token in its document, int64 [T], without waiting for a device."""
    tokens_T = torch.arange(num_tokens, device=cu_seqlens.device)
    documents_T = torch.searchsorted(cu_seqlens, tokens_T.to(cu_seqlens.dtype), right=True) - 1
    return tokens_T - cu_seqlens[documents_T]


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TW: Tensor, weight_WJ: Tensor, offsets_T: Tensor) -> Tensor:
        ctx.save_for_backward(x_TW, weight_WJ, offsets_T)
        return F.silu(_convolved(wide(x_TW), wide(weight_WJ), offsets_T), inplace=True).to(x_TW.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TW: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_TW, weight_WJ, offsets_T = ctx.saved_tensors
        wide_x_TW, wide_weight_WJ = wide(x_TW), wide(weight_WJ)
        y_TW = _convolved(wide_x_TW, wide_weight_WJ, offsets_T)
        grad_y_TW = torch.ops.aten.silu_backward(wide(grad_TW), y_TW)
        num_taps = weight_WJ.shape[1]
        grad_x_TW = grad_y_TW * wide_weight_WJ[:, -1]
        grad_weights_W = [(grad_y_TW * wide_x_TW).sum(0)]
        for shift in range(1, num_taps):
            grads_TW = _where_inside(grad_y_TW[shift:], offsets_T, shift)
            grad_x_TW[: len(grads_TW)].addcmul_(grads_TW, wide_weight_WJ[:, -1 - shift])
            grad_weights_W.append((grads_TW * wide_x_TW[: len(grads_TW)]).sum(0))
        grad_weight_WJ = torch.stack(grad_weights_W[::-1], dim=1)
        return grad_x_TW.to(x_TW.dtype), grad_weight_WJ.to(weight_WJ.dtype), None


def _convolved(x_TW: Tensor, weight_WJ: Tensor, offsets_T: Tensor) -> Tensor:
    y_TW = x_TW * weight_WJ[:, -1]
    for shift in range(1, weight_WJ.shape[1]):
        before_TW = _where_inside(x_TW[: max(len(x_TW) - shift, 0)], offsets_T, shift)
        y_TW[shift:].addcmul_(before_TW, weight_WJ[:, -1 - shift])
    return y_TW


def _where_inside(x_TW: Tensor, offsets_T: Tensor, shift: int) -> Tensor:
    """Returns x, with zeros in the rows of pairs (token - shift, token) that are not in one document. They are not
    multiplied by 0, which would keep another document's NaN."""
    return torch.where((offsets_T[shift:] >= shift)[:, None], x_TW, 0.0)
