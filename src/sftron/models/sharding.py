"""Sharding of the parameters over ranks with FSDP2, in one group per block and one for all other parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from sftron.kernels.device import collective_backends
from sftron.models.llama import LlamaForSFT
from sftron.models.routing import is_correction


def shard_model(model: LlamaForSFT, mesh: DeviceMesh, context_group: dist.ProcessGroup | None = None) -> None:
    """Shards every parameter by rows over the last dimension of the mesh, and replicates it over any other dimension.
    The ranks of `context_group` share the rows of batches.

    Master weights remain fp32. Weights are gathered in model.compute_dtype; gradients are reduced in fp32 and summed
    rather than averaged, because the loss is already normalized over the whole step (law 8). In bf16, the weights of
    norms and the gradients of a micro-batch are rounded once (by 2^-9 at most), unlike in a single process. The model
    may be on the meta device.
    """
    model.context_group = context_group
    policy = MixedPrecisionPolicy(
        param_dtype=model.compute_dtype,
        reduce_dtype=torch.float32,
        # The RoPE table is an input of every block and must remain fp32.
        cast_forward_inputs=False,
    )
    # Gathered in compute_dtype, corrections would select other experts. What is streamed, each rank reads by itself.
    streamed = model.stream.names if model.stream else ()
    fixed = {each for name, each in model.named_parameters() if is_correction(name) or name in streamed}
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy, ignored_params=fixed)
    # Embeddings, final norm and head stay gathered between the forward and the backward pass, because the head is used
    # last in one and first in the other. The loss also uses the head outside of `forward`.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False, ignored_params=fixed)
    register_fsdp_forward_method(model, "attend_with")
    for module in _sharded_modules(model):
        module.set_gradient_divide_factor(1.0)
        # gloo lacks the scaled sum that a divide factor would otherwise require.
        module.set_force_sum_reduction_for_comms(True)


def mesh_of_one_rank(device: torch.device) -> DeviceMesh:
    """Returns a mesh for a single process, whose model is then computed as each of several ranks computes it."""
    if not dist.is_initialized():
        backend = collective_backends(device)
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh(device.type, (1,), mesh_dim_names=("shard",))


@contextmanager
def whole_head(model: LlamaForSFT) -> Iterator[None]:
    """Gathers the embeddings and the head, so that `model` can be used outside of a training step.

    They are resharded at exit, because weights that stay gathered would not receive the next update.
    """
    for module in _sharded_modules(model):
        if module is model:
            module.unshard()
    try:
        yield
    finally:
        for module in _sharded_modules(model):
            module.reshard()


@contextmanager
def gathered_blocks(model: LlamaForSFT, fits: Callable[[int], bool]) -> Iterator[None]:
    """Gathers each block once instead of in each forward pass, which would gather as much for a token of an answer as
    for a step.

    They are resharded at exit, because weights that stay gathered would not receive the next update.

    Args:
        fits: Returns whether this number of bytes, of all blocks, fits into memory, alike on all ranks. If it does not,
            nothing changes.
    """
    blocks = [module for module in _sharded_modules(model) if module is not model]
    gathered = (
        each.numel() * (model.compute_dtype if each.dtype.is_floating_point else each.dtype).itemsize
        for block in model.model.layers
        for each in block.parameters()
    )
    if not blocks or not fits(sum(gathered)):
        yield
        return
    for block in blocks:
        block.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for block in blocks:
            block.set_reshard_after_forward(True, recurse=False)
            block.reshard()


def sum_over_copies(model: nn.Module, wanted: bool) -> None:
    """Sets whether the next backward passes also sum gradients over the replicas of the model, which only the last
    micro-batch of a step has to do."""
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(wanted)


def _sharded_modules(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def local_shard(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Returns the part of a tensor on this rank, and its offset in the whole tensor for each dimension."""
    if not isinstance(tensor, DTensor):
        return tensor, (0,) * tensor.ndim
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), tuple(offset)


def whole(tensor: Tensor) -> Tensor:
    """Returns the tensor, gathered from all ranks. This is a collective operation that every rank has to call."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
