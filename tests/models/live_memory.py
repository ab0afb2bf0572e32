"""Bytes of the tensors that are alive, counted at every operation; also of fake ones, which cost nothing."""

from typing import Any

import torch
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
        given = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        made = func(*args, **kwargs)
        self.operations.add(func.name())
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor):
                self.largest = max(self.largest, leaf.numel() * leaf.element_size())
                if _storage(leaf) not in given:
                    self.sizes[_storage(leaf)] = leaf.untyped_storage().nbytes()
        self.sizes = {storage: size for storage, size in self.sizes.items() if not storage.expired()}
        self.peak = max(self.peak, sum(self.sizes.values()))
        return made


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())
