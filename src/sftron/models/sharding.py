"""Parameters split over ranks: FSDP2, one group a block and one for the rest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from sftron.models.llama import LlamaForSFT


def shard_model(model: LlamaForSFT, mesh: DeviceMesh) -> None:
    """Splits every parameter's rows over the mesh's last dimension (and copies them over its first, if there are two).

    Masters stay fp32; weights travel in model.compute_dtype, gradients in fp32, and are summed, not averaged: the
    step's one division has been made by then (law 8). The model may be on the meta device.

    In bf16 two things are rounded once (by 2^-9 at most) that a single process has in fp32: the weights of norms, as
    all other weights are, and the gradients of a micro-batch, before they are summed. No update is lost by it.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=model.compute_dtype,
        reduce_dtype=torch.float32,
        # The RoPE table is an input of every block, and stays fp32.
        cast_forward_inputs=False,
    )
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    # Embeddings, final norm and head stay whole from the forward pass to the backward pass, as the head is used last
    # in one and first in the other; also outside of `forward`, by the loss.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    register_fsdp_forward_method(model, "attend_with")
    for module in _sharded_modules(model):
        module.set_gradient_divide_factor(1.0)
        # gloo has no scaled sum, which a divide factor would otherwise need.
        module.set_force_sum_reduction_for_comms(True)


@contextmanager
def whole_head(model: LlamaForSFT) -> Iterator[None]:
    """Makes embeddings and head whole, so that `model` serves outside of a training step too.

    Afterwards they are split again: whole weights that no backward pass has split would not see the next update.
    """
    for module in _sharded_modules(model):
        if module is model:
            module.unshard()
    try:
        yield
    finally:
        for module in _sharded_modules(model):
            module.reshard()


def sum_over_copies(model: nn.Module, wanted: bool) -> None:
    """Sets whether the next backward passes sum gradients over copies of the model, too, or keep the sums of the ranks
    of one copy for the pass that does: so a step crosses from copy to copy once, not once a micro-batch."""
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(wanted)


def _sharded_modules(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def local_shard(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Returns the part of a tensor that this rank holds, and where in the whole tensor it begins, in each dimension."""
    if not isinstance(tensor, DTensor):
        return tensor, (0,) * tensor.ndim
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), tuple(offset)


def whole(tensor: Tensor) -> Tensor:
    """Returns the tensor, gathered from all ranks; each of them has to call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
