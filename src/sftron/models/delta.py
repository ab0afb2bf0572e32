"""Gated DeltaNet (arXiv 2412.06464) on a packed row: the gated delta rule and a causal convolution within documents.

Each head has a state S, [D, E], which is zero at the start of each document (law 7). Token t, with a query, key and
value, a decay exp(g) and a learning rate beta, corrects what the state returns for its key, and then reads it:

    S <- exp(g_t) S;  S <- S + k_t (beta_t (v_t - S^T k_t))^T;  o_t = S^T q_t

    shape suffixes: T tokens of the packed row, N value heads, K key heads (each serves N / K consecutive value heads),
    D size of a key, E size of a value, W channels, J taps
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sftron.models.attention_kernels import outside_of_graphs
from sftron.models.causal_convolution import CachedConvolve, Convolve, ConvolveInDocuments
from sftron.models.delta_rule import CHUNK_SIZE, Chunks, fla_rule, recurrent_gated_delta_rule, uses_fla


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

    @property
    def convolve(self) -> Convolve:
        """The convolution of the channels of queries, keys and values, with its activation."""
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
        on_device: The document boundaries on the device of the tokens.
        recompute: Whether the backward pass computes the delta rule again instead of keeping its matrices, some 1500
            numbers per token and value head.
    """

    def __init__(self, cu_seqlens: Tensor, on_device: Tensor, *, recompute: bool = False) -> None:
        self.cu_seqlens, self.on_device, self.recompute = cu_seqlens, on_device, recompute
        self.convolve = ConvolveInDocuments(on_device, activates=True)
        self._chunks: Chunks | None = None

    # Outside of compiled graphs, which would be specialized for the lengths of the documents.
    @outside_of_graphs
    def __call__(self, q_TKD: Tensor, k_TKD: Tensor, v_TNE: Tensor, g_TN: Tensor, beta_TN: Tensor) -> Tensor:
        if uses_fla(q_TKD.device, q_TKD.dtype):
            return fla_rule(q_TKD, k_TKD, v_TNE, g_TN, beta_TN, self.on_device)
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
        self.convolve = CachedConvolve(activates=True)
        self._state_NDE: Tensor | None = None

    def __call__(self, q_TKD: Tensor, k_TKD: Tensor, v_TNE: Tensor, g_TN: Tensor, beta_TN: Tensor) -> Tensor:
        if self._state_NDE is not None:
            out_TNE, self._state_NDE = recurrent_gated_delta_rule(q_TKD, k_TKD, v_TNE, g_TN, beta_TN, self._state_NDE)
            return out_TNE
        chunks = Chunks(torch.tensor([0, len(q_TKD)]), CHUNK_SIZE, q_TKD.device)
        out_TNE, self._state_NDE = chunks.rule_and_state(q_TKD, k_TKD, v_TNE, g_TN, beta_TN)
        return out_TNE
