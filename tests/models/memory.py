"""Bytes of the tensors that are alive, counted at every operation; and a stand-in for attention that keeps as many."""

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Records what happens in its `with` block; what an operation allocates and frees within itself is not seen.

    Attributes:
        peak: the most bytes at a time of storages made inside.
        largest: the bytes of the largest tensor that an operation made.
        operations: the names of all operations.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.largest = 0
        self.sizes: dict[StorageWeakRef, int] = {}
        self.operations: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        made = func(*args, **kwargs)
        self.operations.add(func.name())
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                self.largest = max(self.largest, leaf.numel() * leaf.element_size())
                if _storage(leaf) not in given:
                    self.sizes[_storage(leaf)] = leaf.untyped_storage().nbytes()
        self.sizes = {storage: size for storage, size in self.sizes.items() if not storage.expired()}
        self.peak = max(self.peak, sum(self.sizes.values()))
        return made


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def attend(q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
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
