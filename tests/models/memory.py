"""The measurement of live tensors, and a stand-in for attention that keeps as many bytes as flash-attention."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from sftron.models.attention_kernels import PLAIN, Scores
from sftron.train import measured_memory


class LiveMemory(measured_memory.LiveMemory):
    """Also records the bytes of the largest tensor that an operation made, and the names of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.operations: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_dispatch__(func, types, args, kwargs)
        self.operations.add(func.name())
        self.largest = max([self.largest, *(each.nbytes for each in tree_leaves(made) if isinstance(each, Tensor))])
        return made


def attend(q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, _: Scores = PLAIN) -> Tensor:
    """Keeps what flash-attention keeps; no attention, but every gradient depends on every input."""
    return _FlashLike.apply(q_TND, k_TKD, v_TKD)


class _FlashLike(torch.autograd.Function):
    """Keeps q, k, v as they are given, the output, and an fp32 log-sum-exp per head and token."""

    @staticmethod
    def forward(ctx: Any, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        num_groups = q_TND.shape[1] // k_TKD.shape[1]
        out_TND = q_TND + (k_TKD * v_TKD).repeat_interleave(num_groups, dim=1)
        logsumexp_NT = q_TND.new_zeros(q_TND.shape[1], len(q_TND), dtype=torch.float32)
        ctx.save_for_backward(q_TND, k_TKD, v_TKD, out_TND, logsumexp_NT)
        return out_TND

    @staticmethod
    def backward(ctx: Any, grad_TND: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        _, k_TKD, v_TKD, _, _ = ctx.saved_tensors
        grad_TKD = grad_TND.unflatten(1, (k_TKD.shape[1], -1)).sum(dim=2)
        return grad_TND, grad_TKD * v_TKD, grad_TKD * k_TKD
