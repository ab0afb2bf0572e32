"""A pretended GPU: a device that computes on the CPU, refuses what CUDA refuses, and counts what waits for the device.

Its tensors say `gpu:0`, so all branches that a GPU takes (kernels/device.py) are taken. Refused are

    attention of unequal numbers of heads by SDPA, for which CUDA may hold all T x T scores
    operations on tensors of both devices, empty ones too, but for numbers (0 dimensions), copies and indices
    .numpy() of its tensors
    pointers to CPU tensors in Triton kernels, which the interpreter runs here

Counted as waits are reads of values, copies to the CPU that are not into pinned memory, copies from unpinned memory,
and what the host has to know the values for (boolean indices, torch.nonzero, ...).

Not pretended: streams (everything is in order), the numerics of machine code, speed, NCCL, and what computes by
pointers without Triton (8-bit states of bitsandbytes).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import DTensor
from torch.utils import backend_registration
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

from sftron.kernels import cross_entropy, rms_norm, swiglu
from sftron.kernels import device as devices
from sftron.kernels.operators import OPS
from tests.models import varlen_on_cpu

TYPE = "gpu"
MEMORY = 80 * 10**9
"""The memory of the device, in bytes."""

_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
_MAY_MIX = {"copy_", "_to_copy", *_INDEXING}
"""The operations that CUDA computes with tensors of both devices: copies, and indices, which it copies."""
_JOINS = {"cat", "stack"}
"""The operations that take not even numbers of the CPU."""
_READS = {
    *("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2", "unique_dim", "allclose"),
    *("unique_consecutive", "bincount", "repeat_interleave"),
}
"""The operations whose result, or the shape of their result, the host has to wait for."""


class PretendedTensor(Tensor):
    """A tensor on the device; `own` holds its values."""

    own: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @staticmethod
    def __new__(cls, own: Tensor) -> PretendedTensor:
        options = {"strides": own.stride(), "storage_offset": own.storage_offset(), "dtype": own.dtype}
        made = Tensor._make_wrapper_subclass(cls, own.shape, device=torch.device(TYPE, 0), **options)
        made.own = own
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})

    def __repr__(self) -> str:
        return f"PretendedTensor({self.own})"


class _Mode(TorchDispatchMode):
    """Sees operations without a tensor of the device, such as torch.zeros(device=...)."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it comes back with the local tensors
        if any(issubclass(each, FakeTensor) for each in types):
            return func(*args, **kwargs or {})
        return _computed(func, args, kwargs or {})


class PretendedGpu:
    """What happened on the device; `waits` and `launches` count what was seen since `reset`."""

    capability = (9, 0)

    def __init__(self, *, launches_kernels: bool) -> None:
        self.device = torch.device(TYPE, 0)
        self.launches_kernels = launches_kernels
        self.waits: Counter[str] = Counter()
        """The number of waits by `operation file:line`, the innermost line of sftron."""
        self.launches: Counter[str] = Counter()
        """The number of launches of each Triton kernel."""
        self.pinned: dict[int, Any] = {}
        """The storages of pinned memory by address, which are kept, so that no address is used again; of registered
        memory, its size."""

    def reset(self) -> None:
        self.waits.clear()
        self.launches.clear()

    def wait(self, operation: str) -> None:
        self.waits[f"{operation} {_line_of_sftron()}"] += 1

    def wait_for_copies(self, sources: list[Tensor], is_async: bool) -> None:
        """Counts the copies from the CPU for which the host waits."""
        for each in sources:
            if each.numel() and not (is_async and self.is_pinned(each)):
                self.wait("host to device")

    def pin(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self.pinned[storage.data_ptr()] = storage
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.pinned


_gpu: PretendedGpu | None = None
"""The device of the test that runs."""


def _line_of_sftron() -> str:
    frame = sys._getframe(1)
    while frame is not None:
        _, found, file = frame.f_code.co_filename.rpartition("/sftron/")
        if found:
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


def _is_of_gpu(device: Any) -> bool:
    return device is not None and torch.device(device).type == TYPE


def _plain(value: Any) -> Any:
    return value.own if isinstance(value, PretendedTensor) else value


def _computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns what the operation gives on the device, or raises RuntimeError as CUDA does."""
    assert _gpu is not None, "a tensor of the pretended device outlived its test"
    namespace, name = func.namespace, func._schema.name.partition("::")[2]
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    on_gpu = [each for each in tensors if isinstance(each, PretendedTensor)]
    on_cpu = [each for each in tensors if not isinstance(each, PretendedTensor) and each.device.type == "cpu"]
    target = kwargs.get("device")
    if on_gpu and name not in _MAY_MIX and any(each.ndim or name in _JOINS for each in on_cpu):
        shapes = ", ".join(f"{each.device} {tuple(each.shape)}" for each in tensors)
        raise RuntimeError(f"Expected all tensors to be on the same device, but {func} was given {shapes}")
    if on_gpu or _is_of_gpu(target):
        _count_waits(_gpu, name, args, kwargs, on_cpu)
    if namespace == "sftron" and on_gpu and _gpu.launches_kernels:
        with _Mode():
            return OPS[name](*args, **kwargs)
    is_result_on_gpu = _is_of_gpu(target) if target is not None else bool(on_gpu)
    if _is_of_gpu(target):
        kwargs = {**kwargs, "device": torch.device("cpu")}
    compute = _OTHERWISE.get(str(func), func)
    out = compute(*tree_map(_plain, args), **tree_map(_plain, kwargs))
    if is_result_on_gpu:
        out = tree_map(lambda each: PretendedTensor(each) if type(each) is Tensor else each, out)
    if not func._schema.returns:
        return None
    if not on_gpu or _is_out_variant(func, kwargs):
        return kwargs.get("out", out)
    return return_and_correct_aliasing(func, args, kwargs, out)


def _is_out_variant(func: Any, kwargs: dict[str, Any]) -> bool:
    return "out" in kwargs or any(each.is_out for each in func._schema.arguments)


def _count_waits(gpu: PretendedGpu, name: str, args: Any, kwargs: Any, on_cpu: list[Tensor]) -> None:
    is_async = kwargs.get("non_blocking", False) or (name == "copy_" and args[2:] == (True,))
    if name in _READS and not (name == "repeat_interleave" and kwargs.get("output_size") is not None):
        gpu.wait(name)
    elif name == "_to_copy" and kwargs.get("device") is not None:
        if isinstance(args[0], PretendedTensor) and not _is_of_gpu(kwargs["device"]):
            gpu.wait("device to host")
        gpu.wait_for_copies(on_cpu, is_async)
    elif name == "copy_":
        if not isinstance(args[0], PretendedTensor) and not (is_async and gpu.is_pinned(args[0])):
            gpu.wait("device to host")
        gpu.wait_for_copies([each for each in on_cpu if each is not args[0]], is_async)
    elif name in _INDEXING:
        gpu.wait_for_copies([each for each in on_cpu if each.ndim], is_async)
        if any(each.dtype in (torch.bool, torch.uint8) for each in args[1] if each is not None):
            gpu.wait("boolean index")


def _product_in(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    return torch.mm(a.to(out_dtype), b.to(out_dtype))


def _sum_and_product(
    total: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, *, beta: float = 1, alpha: float = 1, out: Any = None
) -> Tensor:
    result = torch.addmm(total, a.to(out_dtype), b.to(out_dtype), beta=beta, alpha=alpha)
    return result if out is None else out.copy_(result)


_OTHERWISE: dict[str, Callable[..., Any]] = {
    "aten.mm.dtype": _product_in,
    "aten.addmm.dtype": _sum_and_product,
    "aten.addmm.dtype_out": _sum_and_product,
    "torch_attn._varlen_attn.default": varlen_on_cpu.forward,
    "torch_attn._varlen_attn_backward.default": varlen_on_cpu.backward,
    "sftron.normalize.default": rms_norm.normalize,
    "sftron.normalize_backward.default": rms_norm.normalize_backward,
    "sftron.swiglu.default": swiglu.swiglu,
    "sftron.swiglu_backward.default": swiglu.swiglu_backward,
    "sftron.cross_entropy_gradient_.default": cross_entropy.cross_entropy_gradient_,
    "sftron.add_product_.default": lambda *args: cross_entropy.add_product_(*args[:3], is_first=not args[3]),
}
"""What computes operations on the CPU that are not implemented there."""


def _without_gradients(mode: Any = True) -> Any:
    """Stands for torch.inference_mode, in which composite operations would come here whole."""
    if callable(mode):
        return torch.no_grad()(mode)
    return torch.no_grad() if mode else nullcontext()


class _Stream:
    """Everything is in order here, so no stream has anything to wait for."""

    def __getattr__(self, _: str) -> Callable[..., Any]:
        return lambda *_, **__: self

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None: ...


class _Runtime:
    """Stands for the CUDA runtime, as far as it pins memory."""

    @staticmethod
    def cudaHostRegister(address: int, size: int, flags: int) -> int:  # noqa: N802
        assert _gpu is not None
        assert size > 0
        _gpu.pinned[address] = size
        return 0

    @staticmethod
    def cudaHostUnregister(address: int) -> int:  # noqa: N802
        if _gpu is not None:
            _gpu.pinned.pop(address, None)  # of an earlier test's device
        return 0


class _Functions(SimpleNamespace):
    """Stands for the module torch.cuda."""

    @staticmethod
    def is_available() -> bool:
        return _gpu is not None


def _functions() -> _Functions:
    seen = torch.zeros(16, dtype=torch.uint8)
    return _Functions(
        is_initialized=lambda: _gpu is not None,
        _is_in_bad_fork=lambda: False,
        current_device=lambda: 0,
        set_device=lambda _: None,
        cudart=_Runtime,
        check_error=lambda status: None,
        device_count=lambda: int(_gpu is not None),
        get_device_name=lambda *_: "Pretended GPU",
        get_device_capability=lambda *_: _gpu.capability if _gpu else (0, 0),
        get_device_properties=lambda *_: SimpleNamespace(total_memory=MEMORY, multi_processor_count=4),
        mem_get_info=lambda *_: (MEMORY, MEMORY),
        max_memory_allocated=lambda *_: 2 * 10**9,
        max_memory_reserved=lambda *_: 3 * 10**9,
        memory_allocated=lambda *_: 10**9,
        memory_reserved=lambda *_: 3 * 10**9,
        reset_peak_memory_stats=lambda *_: None,
        empty_cache=lambda: None,
        synchronize=lambda *_: None,
        current_stream=lambda *_: _Stream(),
        Stream=lambda *_, **__: _Stream(),
        Event=lambda *_, **__: _Stream(),
        stream=lambda *_: _Stream(),
        device=lambda *_: _Stream(),
        manual_seed=lambda _: None,
        manual_seed_all=lambda _: None,
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        get_rng_state=lambda *_: seen,
        set_rng_state=lambda *_: None,
        get_rng_state_all=lambda: [seen],
        set_rng_state_all=lambda *_: None,
    )


class _Hook(torch._C._acc.PrivateUse1Hooks):
    """Tells torch that the device is there, in the tests that have it alone."""

    def is_available(self) -> bool:
        return _gpu is not None

    def has_primary_context(self, _: int) -> bool:
        return _gpu is not None

    def is_built(self) -> bool:
        return True


def _register() -> None:
    """Gives torch the type of the device, which lasts for the process."""
    if not hasattr(torch, TYPE):
        backend_registration._setup_privateuseone_for_python_backend(TYPE, _functions(), _Hook())
        _device_constructors()  # it remembers torch.empty and torch.tensor, which are replaced below


@contextmanager
def pretended_gpu(*, launches_kernels: bool = False) -> Iterator[PretendedGpu]:
    """Puts the device into this process, which `default_device` and so every run then takes.

    With `launches_kernels`, Triton's interpreter runs our kernels; otherwise the torch expressions compute the same in
    a tenth of the time.
    """
    global _gpu
    _register()
    from triton.runtime import interpreter

    gpu = _gpu = PretendedGpu(launches_kernels=launches_kernels)
    make, tolist, empty, run = torch.tensor, Tensor.tolist, torch.empty, interpreter.GridExecutor.__call__
    attend = F.scaled_dot_product_attention

    def tensor(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:  # it makes its result below the mode
        return make(*args, **kwargs).to(device) if _is_of_gpu(device) else make(*args, device=device, **kwargs)

    def as_list(self: Tensor) -> Any:
        if not isinstance(self, PretendedTensor):
            return tolist(self)
        gpu.wait("tolist")
        return tolist(self.own)

    def empty_pinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        return gpu.pin(empty(*args, **kwargs)) if pin_memory else empty(*args, **kwargs)

    def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, Tensor) and not isinstance(each, PretendedTensor):
                raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
        gpu.launches[executor.fn.__name__] += 1
        run(executor, *map(_plain, args), **{name: _plain(each) for name, each in kwargs.items()})

    def equal_heads(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(query, PretendedTensor) and query.shape[-3] != key.shape[-3]:
            raise RuntimeError(f"{query.shape[-3]} and {key.shape[-3]} heads: CUDA would hold all scores at once")
        return attend(query, key, *args, **kwargs)

    def resizes(change: Callable[[Tensor], None]) -> Callable[[Tensor], None]:  # memory is not pretended
        return lambda tensor: None if isinstance(tensor, PretendedTensor) else change(tensor)

    with ExitStack() as stack:
        for name in ("alloc_storage", "free_storage"):
            stack.enter_context(mock.patch.object(_fsdp_param, name, resizes(getattr(_fsdp_param, name))))
        for target, name, value in (
            (devices, "GPU_TYPES", {TYPE: "gloo"}),
            (torch, "tensor", tensor),
            (torch, "inference_mode", _without_gradients),
            (torch, "empty", empty_pinned),
            (F, "scaled_dot_product_attention", equal_heads),
            (Tensor, "tolist", as_list),
            (Tensor, "pin_memory", lambda self: gpu.pin(self.clone())),
            (Tensor, "is_pinned", lambda self, *_: gpu.is_pinned(self)),
            (interpreter.GridExecutor, "__call__", launch),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        # The threads of other devices were counted at the first backward pass of the process, before this device came.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(_Mode())
        try:
            yield gpu
        finally:
            _gpu = None
