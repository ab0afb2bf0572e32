"""Rotary position embedding, in place, on the fused query, key and value projection.

Half-split (Hugging Face) layout: dimension i of a head is rotated together with dimension i + D/2.

    shape suffixes: T tokens of the flat row, W = (N + 2K) * D, N query heads, K key-value heads, D head size,
    P positions of the table, H any number of heads
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Heads = tuple[Tensor, Tensor, Tensor]
"""(q_TND, k_TKD, v_TKD)"""


def rotate_heads(qkv_TW: Tensor, position_ids: Tensor, table_PD: Tensor, num_heads: int, num_kv_heads: int) -> Heads:
    """Rotates the query and key heads of `qkv_TW` in place; returns (q_TND, k_TKD, v_TKD), which share its memory.

    qkv_TW: heads in the order [queries, keys, values], any float type; the arithmetic is fp32. Where a gradient is
        wanted, the result of an operation. Who uses it later sees rotated heads and adds to the gradient; who used it
        before and needs the old values for a gradient is refused by autograd.
    position_ids: int32 or int64 [T], each in [0, P).
    table_PD: fp32, of `build_rope_table`.

    Raises: ValueError for shapes that do not fit; for a leaf or a view that requires a gradient; on the CPU for a
        position outside the table. A GPU would have to be waited for: there, heads at such a position become NaN, and
        `LlamaForSFT.forward` compares Python ints beforehand.
    """
    head_dim = table_PD.shape[1]
    shape = (*position_ids.shape, (num_heads + 2 * num_kv_heads) * head_dim)
    if qkv_TW.shape != shape:
        raise ValueError(
            f"qkv_TW has shape {tuple(qkv_TW.shape)}, but {num_heads} query and twice {num_kv_heads} key-value heads "
            f"of {head_dim} at position_ids {tuple(position_ids.shape)} are {shape}. Give one position a token, and "
            "the RoPE table of the same model."
        )
    if torch.compiler.is_compiling():
        # Dynamo cannot trace mark_dirty. Out of place it is one kernel too, for 1.2 times the bytes (32/8 heads).
        return _rotated_heads(qkv_TW, position_ids, table_PD, num_heads, num_kv_heads)
    if torch.is_grad_enabled() and qkv_TW.requires_grad and (qkv_TW.is_leaf or qkv_TW._is_view()):
        kind = "leaf" if qkv_TW.is_leaf else "view"
        raise ValueError(f"qkv_TW is rotated in place, but is a {kind} that requires a gradient. Give qkv_TW.clone().")
    _, q_TND, k_TKD, v_TKD = _RotateHeads.apply(qkv_TW, position_ids, table_PD, num_heads, num_kv_heads)
    return q_TND, k_TKD, v_TKD


class _RotateHeads(torch.autograd.Function):
    """A rotation's gradient is the rotation back, so nothing of the activations is kept."""

    @staticmethod
    def forward(
        ctx: Any, qkv_TW: Tensor, position_ids: Tensor, table_PD: Tensor, num_heads: int, num_kv_heads: int
    ) -> tuple[Tensor, ...]:
        _rotate_heads_in_place(qkv_TW, position_ids, table_PD, num_heads, num_kv_heads)
        ctx.mark_dirty(qkv_TW)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(position_ids, table_PD)
        ctx.num_heads, ctx.num_kv_heads = num_heads, num_kv_heads
        # Detached, they are no views to autograd, which would replay the slicing of a changed buffer, slowly. They keep
        # the buffer's version counter, so that changing it later is still found out.
        return qkv_TW, *(x_THD.detach() for x_THD in _split(qkv_TW, num_heads, num_kv_heads))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, qkv_grad: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if qkv_grad is not None:  # of a second consumer; attention alone leaves it None
            own_grads = _split(qkv_grad, ctx.num_heads, ctx.num_kv_heads)
            grads = tuple(own if grad is None else own + grad for own, grad in zip(own_grads, grads, strict=True))
        return _rotate_back(ctx, *grads), None, None, None, None


def _rotate_back(ctx: Any, *grads: Tensor | None) -> Tensor | None:
    """The gradient of qkv_TW for those of the rotated heads; None is zero."""
    position_ids, table_PD = ctx.saved_tensors
    given = next((grad for grad in grads if grad is not None), None)
    if given is None:
        return None
    zero = given.new_zeros(())
    counts = (ctx.num_heads, ctx.num_kv_heads, ctx.num_kv_heads)
    shapes = [(len(position_ids), count, table_PD.shape[1]) for count in counts]
    heads = [zero.expand(shape) if grad is None else grad for grad, shape in zip(grads, shapes, strict=True)]
    return _fused_gradient(*heads, position_ids, table_PD)


def _split(qkv_TW: Tensor, num_heads: int, num_kv_heads: int) -> Sequence[Tensor]:
    return qkv_TW.unflatten(-1, (num_heads + 2 * num_kv_heads, -1)).split(
        [num_heads, num_kv_heads, num_kv_heads], dim=1
    )


@torch.library.custom_op("sftron::rotate_heads_in_place", mutates_args=["qkv_TW"])
def _rotate_heads_in_place(
    qkv_TW: Tensor, position_ids: Tensor, table_PD: Tensor, num_heads: int, num_kv_heads: int
) -> None:
    q_TND, k_TKD, _ = _split(qkv_TW, num_heads, num_kv_heads)
    _rotate([q_TND, k_TKD], [q_TND, k_TKD], position_ids, table_PD, inverse=False)


@torch.library.custom_op("sftron::rotated_heads", mutates_args=[])
def _rotated_heads(
    qkv_TW: Tensor, position_ids: Tensor, table_PD: Tensor, num_heads: int, num_kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    heads = _split(qkv_TW, num_heads, num_kv_heads)
    q_TND, k_TKD, v_TKD = (torch.empty_like(x_THD, memory_format=torch.contiguous_format) for x_THD in heads)
    _rotate(heads, [q_TND, k_TKD, v_TKD], position_ids, table_PD, inverse=False)
    return q_TND, k_TKD, v_TKD


@torch.library.custom_op("sftron::rotate_heads_backward", mutates_args=[])
def _fused_gradient(dq_TND: Tensor, dk_TKD: Tensor, dv_TKD: Tensor, position_ids: Tensor, table_PD: Tensor) -> Tensor:
    grad_TW = _empty_fused(dq_TND, dk_TKD)
    out = _split(grad_TW, dq_TND.shape[1], dk_TKD.shape[1])
    _rotate([dq_TND, dk_TKD, dv_TKD], out, position_ids, table_PD, inverse=True)
    return grad_TW


def _empty_fused(q_TND: Tensor, k_TKD: Tensor) -> Tensor:
    num_tokens, num_heads, head_dim = q_TND.shape
    return q_TND.new_empty(num_tokens, (num_heads + 2 * k_TKD.shape[1]) * head_dim)


@_rotate_heads_in_place.register_fake
def _(qkv_TW: Tensor, position_ids: Tensor, table_PD: Tensor, num_heads: int, num_kv_heads: int) -> None:
    pass


@_rotated_heads.register_fake
def _(qkv_TW: Tensor, position_ids: Tensor, table_PD: Tensor, num_heads: int, num_kv_heads: int) -> Heads:
    q_TND, k_TKD, v_TKD = (qkv_TW.new_empty(x_THD.shape) for x_THD in _split(qkv_TW, num_heads, num_kv_heads))
    return q_TND, k_TKD, v_TKD


@_fused_gradient.register_fake
def _(dq_TND: Tensor, dk_TKD: Tensor, dv_TKD: Tensor, position_ids: Tensor, table_PD: Tensor) -> Tensor:
    return _empty_fused(dq_TND, dk_TKD)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, position_ids, table_PD, ctx.num_heads, ctx.num_kv_heads = inputs
    ctx.save_for_backward(position_ids, table_PD)


def _rotated_heads_backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    return _rotate_back(ctx, *grads), None, None, None, None


_rotated_heads.register_autograd(_rotated_heads_backward, setup_context=_keep_for_backward)


def _rotate(
    heads: Sequence[Tensor], out: Sequence[Tensor], position_ids: Tensor, table_PD: Tensor, *, inverse: bool
) -> None:
    """Writes rotated queries and keys into `out`, which may be `heads` itself, and copies values where there are any.

    inverse: rotate back, by the negative angle.
    """
    if out[0].is_cuda:
        from sftron.kernels.rope_triton import rotate
    else:
        rotate = rotate_on_cpu
    rotate(heads, out, position_ids, table_PD, inverse=inverse)


def rotate_on_cpu(
    heads: Sequence[Tensor], out: Sequence[Tensor], position_ids: Tensor, table_PD: Tensor, *, inverse: bool
) -> None:
    """The twin of `rope_triton.rotate`, and the oracle of its tests."""
    num_positions = len(table_PD)
    lowest, highest = (int(x) for x in position_ids.aminmax()) if len(position_ids) else (0, 0)
    if lowest < 0 or highest >= num_positions:
        raise ValueError(
            f"position_ids reach from {lowest} to {highest}, the RoPE table from 0 to {num_positions - 1}. Shorten the "
            "documents, or build a table of more positions."
        )
    cos, sin = table_PD[position_ids][:, None].chunk(2, dim=-1)
    sin = -sin if inverse else sin
    for x_THD, out_THD in zip(heads[:2], out[:2], strict=True):
        x1, x2 = x_THD.chunk(2, dim=-1)
        out_THD.copy_(torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1))
    for value, copy in zip(heads[2:], out[2:], strict=True):
        copy.copy_(value)
