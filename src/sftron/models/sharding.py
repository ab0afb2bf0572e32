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
    """Split every parameter's rows over the mesh's last dimension (and copy them over its first, if there are two).

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
        # gloo knows no scaled sum, which is what a divide factor would otherwise ask for.
        module.set_force_sum_reduction_for_comms(True)


@contextmanager
def whole_head(model: LlamaForSFT) -> Iterator[None]:
    """While it is open, `model` may be asked outside of a training step: embeddings and head are whole.

    Afterwards they are split again: whole weights that no backward pass has given back would not see the next update.
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
    """Whether the next backward passes sum gradients over copies of the model, too, or keep what ranks of one copy have
    summed for the pass that does: so a step crosses from copy to copy once, not once a micro-batch."""
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(wanted)


def _sharded_modules(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def local_rows(parameter: Tensor) -> tuple[Tensor, int]:
    """The rows of a parameter that this rank holds, and the number of the first of them."""
    if not isinstance(parameter, DTensor):
        return parameter, 0
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return parameter.to_local(), offset[0]


def whole(tensor: Tensor) -> Tensor:
    """The tensor, put together of all ranks' rows; every rank has to ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
