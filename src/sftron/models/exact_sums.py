"""Sums whose bits do not depend on the order of their terms, for runs that are the same on any number of ranks.

A sum of floats depends on their order, and so on which rank computes which pack. A sum of integers does not. Here the
gradient of each pack is rounded once, to a multiple of 2^-48, and the multiples are added as 64-bit integers, over
micro-batches and ranks. Nothing else depends on the layout, because one rank computes the whole gradient of a pack,
from the same weights and in the same shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

_SCALE = 2.0**48
_LARGEST = 2.0**5
"""The bound of a pack's gradients and loss. Their multiples are below 2^53, so float64 holds them, and those of a
thousand packs are below 2^63."""
_BITS_OF_SQUARES = 62
_SLICE = 2**26
"""The number of values that are rounded at a time, which takes 2 GB; the gradients of a whole group would take five
times their own memory."""


class ExactSums:
    """Sums the gradients of the packs of a step, over micro-batches and ranks, to the same bits in any order.

    It replaces the reduction of gradients of a sharded model. Before the last micro-batch, that gives zeros.

    Args:
        model: A model that is sharded by FSDP2, over one rank or several.
        mesh: Its device mesh; with copies of the model, the first dimension is theirs.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        copies = mesh.get_group(0) if mesh.ndim == 2 else None
        self.num_copies = 1 if copies is None else copies.size()
        self._reductions, self._loss = list[_ExactReduceScatter](), _Sum()
        for module in model.modules():
            if isinstance(module, FSDPModule):
                self._reductions.append(_ExactReduceScatter(copies))
                reduction: Any = self._reductions[-1]  # the type that torch expects is private
                module.set_custom_reduce_scatter(reduction)
                if mesh.size() == 1:
                    module.set_all_reduce_hook(self._reductions[-1].sum_in_place)

    def before_backward(self, share: Tensor, *, is_last: bool) -> None:
        """Prepares the backward pass of a micro-batch, from its share of the step's loss."""
        self._loss.add(share.detach())
        for reduction in self._reductions:
            reduction.is_last = is_last

    def finish(self) -> Tensor:
        """Returns the loss of this rank's micro-batches, a multiple of 2^-48 in float64, whose sum over ranks is exact;
        NaN if it or a gradient of this rank was not below 32. Then the next step can begin."""
        loss = self._loss.integers.double() / _SCALE
        for is_exact in (self._loss.is_exact, *(each.was_exact for each in self._reductions)):
            loss = loss.where(is_exact, torch.nan)
        self._loss = _Sum()
        return loss


class _Sum:
    """A sum of tensors of one shape, in multiples of 2^-48."""

    def __init__(self) -> None:
        self.integers, self.is_exact = torch.tensor(0), torch.tensor(True)

    def add(self, values: Tensor, group: dist.ProcessGroup | None = None) -> None:
        """Adds a tensor; or, of the tensors that the ranks of `group` give, this rank's chunk of their sum."""
        num_chunks = 1 if group is None else group.size()
        chunks = values.reshape(num_chunks, -1)  # one for each rank
        length = max(1, _SLICE // num_chunks)
        shape = values.shape if group is None else chunks.shape[1:]
        if self.integers.shape != shape or self.integers.device != values.device:  # the first tensor
            assert self.integers.ndim == 0, f"a sum of tensors {tuple(self.integers.shape)} was given {tuple(shape)}"
            self.integers = torch.zeros(shape, dtype=torch.int64, device=values.device)
            self.is_exact = torch.ones((), dtype=torch.bool, device=values.device)
        for part, total in zip(chunks.split(length, 1), self.integers.view(-1).split(length), strict=True):
            is_within = part.abs() < _LARGEST
            integers = part.double().mul_(_SCALE).round_().where(is_within, 0.0).long()
            self.is_exact &= is_within.all()
            if group is not None:
                own = torch.empty_like(total)
                dist.reduce_scatter_tensor(own, integers.flatten(), group=group)
                integers = own
            total += integers.flatten()

    def write_to(self, output: Tensor) -> None:
        """Writes the sum as float32, rounded once; NaN if a value of this rank was not below 32."""
        for part, total in zip(output.view(-1).split(_SLICE), self.integers.view(-1).split(_SLICE), strict=True):
            part.copy_(total.double().div_(_SCALE).float().where(self.is_exact, torch.nan))


class _ExactReduceScatter:
    """The reduction of FSDP2 for one group of parameters, as `set_custom_reduce_scatter` takes it. For one rank FSDP2
    reduces nothing and calls only `sum_in_place`, as a hook."""

    def __init__(self, copies: dist.ProcessGroup | None) -> None:
        self._copies, self.is_last, self.sum = copies, True, _Sum()
        self.was_exact = torch.tensor(True)

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        self._add(input_tensor, output_tensor, group)

    def sum_in_place(self, gradients: Tensor) -> None:
        self._add(gradients, gradients)

    def _add(self, values: Tensor, output: Tensor, group: dist.ProcessGroup | None = None) -> None:
        self.sum.add(values, group)
        if self.is_last:
            if self._copies is not None:
                dist.all_reduce(self.sum.integers, group=self._copies)
            is_first = self._copies is None or self._copies.rank() == 0
            # FSDP2 adds the outputs of the copies afterwards, as floats: one has the sum, and the others have zeros.
            self.sum.write_to(output) if is_first else output.zero_()
            self.was_exact, self.sum = self.sum.is_exact, _Sum()
        else:
            output.zero_()


def exact_norm(parameters: Sequence[nn.Parameter], num_copies: int = 1) -> Tensor:
    """Returns the norm of all gradients, with the same bits for any sharding: their squares, as shares of the largest
    one, are added as integers. A collective if the gradients are sharded.

    Args:
        parameters: Those with gradients.
        num_copies: How many ranks have each part of the gradients.
    """
    gradients = [each.grad for each in parameters if each.grad is not None]
    own = [each.to_local() if isinstance(each, DTensor) else each for each in gradients]
    is_sharded = any(isinstance(each, DTensor) for each in gradients)
    largest = torch.full((), torch.finfo(torch.float32).tiny, device=own[0].device)
    for each in own:
        if each.numel():
            largest = torch.maximum(largest, each.abs().amax())
    if is_sharded:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    num_elements = sum(each.numel() for each in gradients)  # of whole tensors
    scale = 2.0 ** (_BITS_OF_SQUARES - num_elements.bit_length())
    total = torch.zeros((), dtype=torch.int64, device=largest.device)
    for each in own:
        for part in each.reshape(-1).split(_SLICE):
            total += (part / largest).double().square().mul(scale).round().long().sum()
    if is_sharded:
        dist.all_reduce(total)
    return (total.double() / (scale * num_copies)).sqrt().float() * largest
