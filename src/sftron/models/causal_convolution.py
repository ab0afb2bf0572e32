"""The causal convolution of each channel for itself, which starts again in each document of a packed row (law 7).

tokens          a0 a1 a2 a3 | b0 b1
3 taps read      .  .       |  .  .     nothing before the first token of a document
                 .  a0 a0 a1|  .  b0
                 a0 a1 a2 a3|  b0 b1

shape suffixes: T tokens of the packed row, W channels, J taps
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sftron.models.attention_kernels import outside_of_graphs
from sftron.models.delta_rule import wide


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionSizes:
    """What a model states of the convolutions of its layers, of which each has hidden_size channels."""

    num_taps: int
    bias: bool
    """Whether the convolution and the projections before and after it have biases."""


class Taps(nn.Module):
    """The weights of a convolution of each channel for itself, in the shape of nn.Conv1d."""

    def __init__(self, num_channels: int, num_taps: int, initializer_range: float, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_channels, 1, num_taps))
        self.bias = nn.Parameter(torch.zeros(num_channels)) if bias else None
        nn.init.normal_(self.weight, std=initializer_range)


class Convolve(Protocol):
    """The convolution of one batch, or of one layer in generation."""

    def __call__(self, x_TW: Tensor, weight_WJ: Tensor) -> Tensor:
        """Returns `causal_convolution` of x within each document, [T, W]."""
        ...


class ConvolveInDocuments:
    """The convolution of a batch, to be shared by all layers.

    Args:
        cu_seqlens: The document boundaries, int [documents + 1]; documents may be empty.
        activates: Whether the sum is the input of SiLU.
    """

    def __init__(self, cu_seqlens: Tensor, *, activates: bool) -> None:
        self.cu_seqlens, self.activates = cu_seqlens, activates
        self._offsets: Tensor | None = None

    # Outside of compiled graphs, which would be specialized for the lengths of the documents.
    @outside_of_graphs
    def __call__(self, x_TW: Tensor, weight_WJ: Tensor) -> Tensor:
        if self._offsets is None or self._offsets.device != x_TW.device:
            self._offsets = offsets_in_documents(self.cu_seqlens.to(x_TW.device), len(x_TW))
        return _Convolution.apply(x_TW, weight_WJ, self._offsets, self.activates)  # pyright: ignore[reportReturnType]


class CachedConvolve:
    """The convolution of one layer in generation, with the last inputs of its document."""

    def __init__(self, *, activates: bool) -> None:
        self.activates = activates
        self._inputs_JW: Tensor | None = None

    def __call__(self, x_TW: Tensor, weight_WJ: Tensor) -> Tensor:
        num_kept = weight_WJ.shape[1] - 1
        if self._inputs_JW is None:
            self._inputs_JW = x_TW.new_zeros(num_kept, x_TW.shape[1])
        inputs_TW = torch.cat([self._inputs_JW, x_TW])
        self._inputs_JW = inputs_TW[len(inputs_TW) - num_kept :].clone()
        cu_seqlens = torch.tensor([0, len(inputs_TW)], device=x_TW.device)
        return causal_convolution(inputs_TW, weight_WJ, cu_seqlens, activates=self.activates)[num_kept:]


def causal_convolution(x_TW: Tensor, weight_WJ: Tensor, cu_seqlens: Tensor, *, activates: bool = True) -> Tensor:
    """Returns silu(sum over j of weight[:, j] * x[t - (J - 1) + j]), or the sum itself, [T, W] in x's type; there is
    nothing before the first token of a document. It is computed in fp32, rounded once, and saves x for the backward
    pass."""
    offsets_T = offsets_in_documents(cu_seqlens.to(x_TW.device), len(x_TW))
    return _Convolution.apply(x_TW, weight_WJ, offsets_T, activates)  # pyright: ignore[reportReturnType]


def offsets_in_documents(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """Returns the position of each token in its document, int64 [T], without waiting for a device."""
    tokens_T = torch.arange(num_tokens, device=cu_seqlens.device)
    documents_T = torch.searchsorted(cu_seqlens, tokens_T.to(cu_seqlens.dtype), right=True) - 1
    return tokens_T - cu_seqlens[documents_T]


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TW: Tensor, weight_WJ: Tensor, offsets_T: Tensor, activates: bool) -> Tensor:
        ctx.save_for_backward(x_TW, weight_WJ, offsets_T)
        ctx.activates = activates
        y_TW = _convolved(wide(x_TW), wide(weight_WJ), offsets_T)
        return (F.silu(y_TW, inplace=True) if activates else y_TW).to(x_TW.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TW: Tensor) -> tuple[Tensor, Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_TW, weight_WJ, offsets_T = ctx.saved_tensors
        wide_x_TW, wide_weight_WJ = wide(x_TW), wide(weight_WJ)
        grad_y_TW = wide(grad_TW)
        if ctx.activates:
            y_TW = _convolved(wide_x_TW, wide_weight_WJ, offsets_T)
            grad_y_TW = torch.ops.aten.silu_backward(grad_y_TW, y_TW)
        num_taps = weight_WJ.shape[1]
        grad_x_TW = grad_y_TW * wide_weight_WJ[:, -1]
        grad_weights_W = [(grad_y_TW * wide_x_TW).sum(0)]
        for shift in range(1, num_taps):
            grads_TW = _where_inside(grad_y_TW[shift:], offsets_T, shift)
            grad_x_TW[: len(grads_TW)].addcmul_(grads_TW, wide_weight_WJ[:, -1 - shift])
            grad_weights_W.append((grads_TW * wide_x_TW[: len(grads_TW)]).sum(0))
        grad_weight_WJ = torch.stack(grad_weights_W[::-1], dim=1)
        return grad_x_TW.to(x_TW.dtype), grad_weight_WJ.to(weight_WJ.dtype), None, None


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
