"""What a device can do, in one place.

All other modules ask here instead of comparing a device's type with "cuda", so that tests can add a device which
computes on the CPU and refuses what CUDA refuses (tests/pretended.py).
"""

import os
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

GPU_TYPES = {"cuda": "nccl"}
"""The types of devices that run the Triton kernels, and the backends of torch.distributed between such devices. Each
type has the functions of torch.cuda (`gpu_functions`)."""


def is_gpu(where: torch.device | Tensor) -> bool:
    """Returns whether a device, or a tensor's device, is a GPU."""
    device = where.device if isinstance(where, Tensor) else where
    return device.type in GPU_TYPES


def runs_kernels(tensor: Tensor) -> bool:
    """Returns whether a Triton kernel computes with the tensor: on a GPU, outside graphs of torch.compile, whose
    compiler fuses the torch expressions by itself."""
    return is_gpu(tensor) and not torch.compiler.is_compiling()


def gpu_functions(device: torch.device) -> Any:
    """Returns the module with a GPU's functions, torch.cuda."""
    return torch.get_device_module(device)


def num_gpus() -> int:
    """Returns the number of GPUs that this process sees."""
    return sum(gpu_functions(torch.device(kind)).device_count() for kind in GPU_TYPES)


def default_device() -> torch.device:
    """Returns the type of device on which sftron computes: a GPU if this process sees one, else the CPU."""
    available = (kind for kind in GPU_TYPES if gpu_functions(torch.device(kind)).is_available())
    return torch.device(next(available, "cpu"))


def compute_capability(device: torch.device) -> tuple[int, int]:
    """Returns the compute capability of a GPU, such as (9, 0)."""
    major, minor = gpu_functions(device).get_device_capability(device)
    return major, minor


def computes_bfloat16(device: torch.device) -> bool:
    """Returns whether a device has products of bfloat16, which CPUs and older GPUs emulate."""
    return is_gpu(device) and compute_capability(device) >= (8, 0)


def free_memory(device: torch.device) -> int:
    """Returns the bytes that this process can still allocate on the GPU; on a CPU, its share of the host's memory."""
    if is_gpu(device):
        functions = gpu_functions(device)
        unused = functions.memory_reserved(device) - functions.memory_allocated(device)
        return functions.mem_get_info(device)[0] + unused
    if "SC_AVPHYS_PAGES" not in os.sysconf_names:  # macOS
        return 0
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return available // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def expand_segments() -> None:
    """Lets torch's allocator grow its segments of GPU memory, unless the user has set one of its variables.

    The sizes of some tensors change from step to step. Segments of a fixed size would leave reserved holes. Setting a
    variable here would have no effect: torch reads them when it is imported.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def pinned_bytes(size: int) -> Tensor:
    """Returns uint8 [size] in page-locked memory of the host, until the tensor is freed.

    torch's own allocator for such memory rounds sizes up to powers of two, which may take twice the memory.
    """
    memory = np.empty(size, np.uint8)
    functions = gpu_functions(default_device())
    runtime, address = functions.cudart(), memory.ctypes.data
    functions.check_error(int(runtime.cudaHostRegister(address, size, 0)))
    # The array has the finalizer: a torch storage frees its memory before its own finalizers run.
    weakref.finalize(memory, runtime.cudaHostUnregister, address)
    return torch.from_numpy(memory)


def device_name(device: torch.device) -> str:
    """Returns the product name of a GPU, or the type of another device."""
    return gpu_functions(device).get_device_name(device) if is_gpu(device) else device.type


def collective_backends(device: torch.device) -> str:
    """Returns the backend of torch.distributed for ranks on this type of device. Small values are exchanged between the
    CPUs, without waiting for a GPU; gradients and weights between the GPUs."""
    return f"cpu:gloo,{device.type}:{GPU_TYPES[device.type]}" if is_gpu(device) else "gloo"
