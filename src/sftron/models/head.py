"""The head of a model: the output projection, and a bound of the logits in some families.

shape suffixes: T tokens, H hidden_size, V vocab_size, C rows of a chunk
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sftron.kernels.device import is_gpu

_ELEMENTS_ON_GPU, _ELEMENTS_ON_CPU = 2**27, 2**20
"""The sizes of the fp32 blocks in `bound_`."""


class Head(NamedTuple):
    """The output projection: logits are hidden @ weight^T + bias, bounded by `softcap` if that is not None.

    It is a tuple of weights, and `logits` is the function.
    """

    weight: Tensor
    """[V, H]"""
    bias: Tensor | None = None
    """[V]"""
    softcap: float | None = None

    def to(self, dtype: torch.dtype) -> Head:
        bias_V = None if self.bias is None else self.bias.to(dtype)
        return Head(self.weight.to(dtype), bias_V, self.softcap)

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """Returns the logits in the type of the hidden states, [T, V]; differentiable, unlike those of the loss."""
        head = self.to(hidden_TH.dtype)
        logits_TV = F.linear(hidden_TH, head.weight, head.bias)
        return logits_TV if self.softcap is None else torch.tanh(logits_TV / self.softcap) * self.softcap


def bound_(logits_CV: Tensor, softcap: float) -> Tensor:
    """Replaces logits by softcap * tanh(logits / softcap), and returns the derivatives, [C, V] in the logits' type.

    Both are computed in fp32 and rounded once: rounded tanh near 1 would leave no digit of 1 - tanh^2.
    """
    slopes_CV = torch.empty_like(logits_CV)
    elements = _ELEMENTS_ON_GPU if is_gpu(logits_CV) else _ELEMENTS_ON_CPU
    num_rows = max(1, elements // logits_CV.shape[1])
    starts = range(0, len(logits_CV), num_rows)
    for start in starts[:1] if logits_CV.is_meta else starts:
        rows = slice(start, start + num_rows)
        bounded_CV = (logits_CV[rows].float() / softcap).tanh_()
        logits_CV[rows] = bounded_CV * softcap
        slopes_CV[rows] = bounded_CV.square_().neg_().add_(1)
    return slopes_CV
