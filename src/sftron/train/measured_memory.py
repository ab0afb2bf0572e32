"""The memory of a training step, measured in bytes of tensors, as torch.cuda.max_memory_allocated counts them.

On a CPU, the resident memory of the process is measured too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sftron.kernels.device import gpu_functions, is_gpu
from sftron.models.llama import LlamaForSFT


@dataclass(frozen=True, slots=True)
class MeasuredPeak:
    """The bytes of a step as measured; each is None where it is not known."""

    tensors: int | None
    resident: int | None = None
    """The growth of the process since before the model was made."""


class LiveMemory(TorchDispatchMode):
    """Records the tensors made in its `with` block; what an operation allocates and frees within itself is not seen.

    Attributes:
        peak: The most bytes at a time of storages made inside.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.sizes: dict[StorageWeakRef, int] = {}
        self._most = 0
        """The bytes that exist now if none was freed since they were last counted: as long as these are no more than
        the peak, there is no need to count, which takes as long as an operation on the meta device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        made = func(*args, **kwargs)
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor) and _storage(leaf) not in given:
                self.sizes[_storage(leaf)] = size = leaf.untyped_storage().nbytes()
                self._most += size
        if self._most > self.peak:
            self.peak = max(self.peak, self.live())
        return made

    def live(self) -> int:
        """Returns the bytes of the storages made inside that exist now."""
        self.sizes = {storage: size for storage, size in self.sizes.items() if not storage.expired()}
        self._most = sum(self.sizes.values())
        return self._most


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


@contextmanager
def peak_of_step(
    model: LlamaForSFT, device: torch.device, baseline: int | None = None
) -> Iterator[Callable[[], MeasuredPeak]]:
    """Yields a function that returns, after the `with` block, the peak of the block, weights included.

    The tensors of a sharded model on a CPU are not known, because its collectives are not operations of torch.

    Args:
        baseline: The `resident_memory` before the model was made, from which the growth of the process is measured.
    """
    if is_gpu(device):
        gpu_functions(device).reset_peak_memory_stats(device)
        yield lambda: MeasuredPeak(gpu_functions(device).max_memory_allocated(device))
        return
    if baseline is not None:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets the peak

    def growth() -> int | None:
        return None if baseline is None else memory_status("VmHWM") - baseline

    if isinstance(model, FSDPModule):
        yield lambda: MeasuredPeak(None, growth())
        return
    held = [*model.parameters(), *(model.stream.buffers if model.stream else ())]
    weights = sum({_storage(each): each.untyped_storage().nbytes() for each in held}.values())
    with LiveMemory() as memory:
        yield lambda: MeasuredPeak(weights + memory.peak, growth())


def resident_memory() -> int | None:
    """Returns the bytes of this process that are in memory; None on a system other than Linux."""
    return memory_status("VmRSS") if os.access("/proc/self/clear_refs", os.W_OK) else None


def memory_status(field: str) -> int:
    """Returns a memory field of /proc/self/status in bytes.

    getrusage is not used, because it returns the peak of the parent process if that is higher.
    """
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def total_memory(device: torch.device) -> int:
    """Returns the bytes of memory of the GPU, or of the machine."""
    if is_gpu(device):
        return gpu_functions(device).get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
