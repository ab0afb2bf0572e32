"""Rotary position embedding of the fused query, key and value projection, with one kernel launch per direction.

The first R dimensions of each head are rotated. The layout of most families is half-split: dimension i is rotated
together with dimension i + R/2. In an interleaved layout, dimension 2i is rotated together with 2i + 1.

    shape suffixes: T tokens of the packed row, W = (N + 2K) * D, N query heads, K key-value heads, D head size,
    P rows of the table, H any number of heads
"""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sftron.kernels.device import is_gpu
from sftron.kernels.operators import operator

Heads = tuple[Tensor, Tensor, Tensor]
"""(q_TND, k_TKD, v_TKD)"""


def rotate_heads(
    qkv_TW: Tensor,
    position_ids: Tensor,
    table_PD: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    interleaved: bool = False,
) -> Heads:
    """Returns the rotated query and key heads and the value heads of `qkv_TW`: (q_TND, k_TKD, v_TKD), contiguous.

    No activation is saved for the backward pass, because the gradient of a rotation is the inverse rotation.

    Args:
        qkv_TW: The heads in the order [queries, keys, values], of any float type; the arithmetic is fp32.
        position_ids: The row in the table for each token, int32 or int64 [T].
        table_PD: fp32 [P, R], from `build_rope_table`; None returns all heads as they are, as views.

    Raises:
        ValueError: Shapes do not match, or, on a CPU, a position is outside the table. On a GPU this check would need a
            synchronization; there, heads at such a position become NaN, and `LlamaForSFT.forward` compares Python ints
            beforehand.
    """
    if table_PD is None:
        q_TND, k_TKD, v_TKD = split_heads(qkv_TW, num_heads, num_kv_heads)
        return q_TND, k_TKD, v_TKD
    num_all_heads, rotary_dim = num_heads + 2 * num_kv_heads, table_PD.shape[1]
    head_dim, rest = divmod(qkv_TW.shape[1], num_all_heads)
    if position_ids.shape != qkv_TW.shape[:1] or rest or head_dim < rotary_dim:
        raise ValueError(
            f"qkv_TW has shape {tuple(qkv_TW.shape)}, which does not fit {num_heads} query and twice {num_kv_heads} "
            f"key-value heads of at least {rotary_dim} dimensions at position_ids {tuple(position_ids.shape)}. Give "
            "one position per token, and the RoPE table of the same model."
        )
    sizes = num_heads, num_kv_heads, interleaved
    if torch.is_grad_enabled():
        return _RotateHeads.apply(qkv_TW, position_ids, table_PD, *sizes)
    return _rotate_heads(qkv_TW, position_ids, table_PD, *sizes)


def split_heads(qkv_TW: Tensor, num_heads: int, num_kv_heads: int) -> Sequence[Tensor]:
    """Returns the views [q_TND, k_TKD, v_TKD]."""
    counts = [num_heads, num_kv_heads, num_kv_heads]
    return qkv_TW.unflatten(-1, (sum(counts), -1)).split(counts, dim=1)


def _rotated_heads(
    qkv_TW: Tensor, position_ids: Tensor, table_PD: Tensor, num_heads: int, num_kv_heads: int, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    heads = split_heads(qkv_TW, num_heads, num_kv_heads)
    out = _empty_heads(heads)
    _rotate(heads, out, position_ids, table_PD, inverse=False, interleaved=interleaved)
    return out


def _empty_heads(heads: Sequence[Tensor]) -> Heads:
    q_TND, k_TKD, v_TKD = (x_THD.new_empty(x_THD.shape) for x_THD in heads)
    return q_TND, k_TKD, v_TKD


def _fused_gradient(
    dq_TND: Tensor, dk_TKD: Tensor, dv_TKD: Tensor, position_ids: Tensor, table_PD: Tensor, interleaved: bool
) -> Tensor:
    grad_TW = _empty_fused(dq_TND, dk_TKD)
    out = split_heads(grad_TW, dq_TND.shape[1], dk_TKD.shape[1])
    _rotate([dq_TND, dk_TKD, dv_TKD], out, position_ids, table_PD, inverse=True, interleaved=interleaved)
    return grad_TW


def _empty_fused(q_TND: Tensor, k_TKD: Tensor, *_: Any) -> Tensor:
    num_tokens, num_heads, head_dim = q_TND.shape
    return q_TND.new_empty(num_tokens, (num_heads + 2 * k_TKD.shape[1]) * head_dim)


_rotate_heads = operator(
    "rotate_heads",
    _rotated_heads,
    fake=lambda qkv_TW, _rows, _table, *sizes: _empty_heads(split_heads(qkv_TW, *sizes[:2])),
    devices=["CPU", "CUDA"],
)
_rotate_heads_backward = operator("rotate_heads_backward", _fused_gradient, fake=_empty_fused, devices=["CPU", "CUDA"])


class _RotateHeads(torch.autograd.Function):
    """A call costs the host a third of a call with `torch.library.register_autograd` (25 us instead of 76 us)."""

    @staticmethod
    def forward(ctx: Any, qkv_TW: Tensor, position_ids: Tensor, table_PD: Tensor, *sizes: Any) -> Heads:
        ctx.save_for_backward(position_ids, table_PD)
        *_, ctx.interleaved = sizes
        return _rotate_heads(qkv_TW, position_ids, table_PD, *sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _rotate_heads_backward(*grads, *ctx.saved_tensors, ctx.interleaved), None, None, None, None, None


def _rotate(
    heads: Sequence[Tensor], out: Sequence[Tensor], position_ids: Tensor, table_PD: Tensor, **options: bool
) -> None:
    """Writes rotated queries and keys, and unchanged values, to `out`; `inverse` rotates by the negative angle."""
    rotate = launch_rotate if is_gpu(out[0]) else rotate_on_cpu
    rotate(heads, out, position_ids, table_PD, **options)


def rotate_on_cpu(
    heads: Sequence[Tensor],
    out: Sequence[Tensor],
    position_ids: Tensor,
    table_PD: Tensor,
    *,
    inverse: bool,
    interleaved: bool = False,
) -> None:
    """Implements `_rotate` in torch; this is also the test oracle of `launch_rotate`."""
    num_positions, rotary_dim = table_PD.shape
    lowest, highest = (int(x) for x in position_ids.aminmax()) if len(position_ids) else (0, 0)
    if lowest < 0 or highest >= num_positions:
        raise ValueError(
            f"position_ids range from {lowest} to {highest}, but the RoPE table from 0 to {num_positions - 1}. Shorten "
            "the documents, or build a table with more positions."
        )
    cos, sin = table_PD[position_ids][:, None].chunk(2, dim=-1)
    sin = -sin if inverse else sin
    for x_THD, out_THD in zip(heads[:2], out[:2], strict=True):
        rotated, unrotated = x_THD[..., :rotary_dim], x_THD[..., rotary_dim:]
        if interleaved:
            x1, x2 = rotated[..., ::2], rotated[..., 1::2]
            rotated = torch.stack([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1).flatten(-2)
        else:
            x1, x2 = rotated.chunk(2, dim=-1)
            rotated = torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1)
        out_THD[..., :rotary_dim].copy_(rotated)
        out_THD[..., rotary_dim:].copy_(unrotated)
    out[2].copy_(heads[2])


if find_spec("triton"):
    import triton
    import triton.language as tl

    # All heads are numbered token by token, and each program rotates a tile of ROWS of them. In bf16 with four warps,
    # each thread has two 16-byte loads from each half of its heads in flight before it stores. cos and sin come from
    # the table, which stays in the L2 cache; the heads of one token share its cache lines in L1.

    PAIRS = 2048
    """The number of rotated pairs per program."""

    def launch_rotate(
        heads: Sequence[Tensor],
        out: Sequence[Tensor],
        position_ids: Tensor,
        table_PD: Tensor,
        *,
        inverse: bool,
        interleaved: bool = False,
    ) -> None:
        """Implements `_rotate` with the Triton kernel. Heads at a position outside the table become NaN.

        `heads` may have any strides; in `out`, the elements of a head must be contiguous.
        """
        num_tokens, num_heads, head_dim = heads[0].shape
        num_kv_heads = heads[1].shape[1]
        columns = triton.next_power_of_2(head_dim // 2)
        rows = PAIRS // columns
        num_programs = sum(triton.cdiv(num_tokens * x_THD.shape[1], rows) for x_THD in heads)
        if num_programs == 0:
            return
        assert all(out_THD.stride(2) == 1 for out_THD in out)
        sources = [argument for x_THD in heads for argument in (x_THD, *x_THD.stride())]
        targets = [argument for x_THD in out for argument in (x_THD, *x_THD.stride()[:2])]
        arguments = [*sources, *targets, position_ids.contiguous(), table_PD.contiguous(), num_tokens, len(table_PD)]
        # Without key-value heads there is no program for them, but their tokens are divided by NUM_KV_HEADS.
        sizes = {"NUM_HEADS": num_heads, "NUM_KV_HEADS": max(num_kv_heads, 1), "HALF": head_dim // 2}
        layout = {"ROTATED": table_PD.shape[1] // 2, "INTERLEAVED": interleaved, "INVERSE": inverse}
        tile = {"ROWS": rows, "COLUMNS": columns}
        rotate_kernel[(num_programs,)](*arguments, **sizes, **layout, **tile)

    @triton.jit
    def rotate_kernel(
        q_ptr, q_t, q_h, q_d, k_ptr, k_t, k_h, k_d, v_ptr, v_t, v_h, v_d,
        q_out_ptr, q_out_t, q_out_h, k_out_ptr, k_out_t, k_out_h, v_out_ptr, v_out_t, v_out_h,
        position_ptr, table_ptr, num_tokens, num_positions,
        NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr,
        ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr,
        ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        tile = tl.program_id(0)
        q_tiles = tl.cdiv(num_tokens * NUM_HEADS, ROWS)
        kv_tiles = tl.cdiv(num_tokens * NUM_KV_HEADS, ROWS)
        if tile < q_tiles:
            _rotate_tile(
                tile, q_ptr, q_t, q_h, q_d, q_out_ptr, q_out_t, q_out_h, position_ptr, table_ptr, num_tokens,
                num_positions, NUM_HEADS, HALF, ROTATED, INTERLEAVED, INVERSE, ROWS, COLUMNS,
            )  # fmt: skip
        elif tile < q_tiles + kv_tiles:
            _rotate_tile(
                tile - q_tiles, k_ptr, k_t, k_h, k_d, k_out_ptr, k_out_t, k_out_h, position_ptr, table_ptr, num_tokens,
                num_positions, NUM_KV_HEADS, HALF, ROTATED, INTERLEAVED, INVERSE, ROWS, COLUMNS,
            )  # fmt: skip
        else:
            _rotate_tile(
                tile - q_tiles - kv_tiles, v_ptr, v_t, v_h, v_d, v_out_ptr, v_out_t, v_out_h, None, table_ptr,
                num_tokens, num_positions, NUM_KV_HEADS, HALF, HALF, INTERLEAVED, INVERSE, ROWS, COLUMNS,
            )  # fmt: skip

    @triton.jit
    def _rotate_tile(
        tile, x_ptr, x_t, x_h, x_d, y_ptr, y_t, y_h, position_ptr, table_ptr, num_tokens, num_positions,
        NUM_HEADS: tl.constexpr, HALF: tl.constexpr, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr,
        INVERSE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        row = tile * ROWS + tl.arange(0, ROWS)[:, None]
        column = tl.arange(0, COLUMNS)[None, :]
        # int64, because T * W exceeds 2^31 at 350,000 tokens of Llama 8B.
        token, head = (row // NUM_HEADS).to(tl.int64), (row % NUM_HEADS).to(tl.int64)
        is_token = token < num_tokens
        mask = is_token & (column < HALF)
        x_ptrs, y_ptrs = x_ptr + (token * x_t + head * x_h), y_ptr + (token * y_t + head * y_h)
        # The first ROTATED columns are rotated pairs, the others any two dimensions that stay as they are.
        if INTERLEAVED:
            # Loaded side by side: two loads of every second number would have 16 bits for each access.
            both = tl.arange(0, 2 * COLUMNS)[None, :]
            mask_of_both = is_token & (both < 2 * HALF)
            x1, x2 = tl.split(tl.reshape(tl.load(x_ptrs + both * x_d, mask=mask_of_both), [ROWS, COLUMNS, 2]))
        else:
            first, second = column, column + HALF
            if ROTATED != HALF:
                first = tl.where(column < ROTATED, column, column + ROTATED)
                second = tl.where(column < ROTATED, column + ROTATED, column + HALF)
            x1, x2 = tl.load(x_ptrs + first * x_d, mask=mask), tl.load(x_ptrs + second * x_d, mask=mask)
        if position_ptr is not None:
            position = tl.load(position_ptr + token, mask=is_token, other=0).to(tl.int64)
            in_table = mask & (position >= 0) & (position < num_positions) & (column < ROTATED)
            cos_ptrs = table_ptr + position * (2 * ROTATED) + column
            cos = tl.load(cos_ptrs, mask=in_table, other=float("nan"))
            sin = tl.load(cos_ptrs + ROTATED, mask=in_table, other=float("nan"))
            if INVERSE:
                sin = -sin
            y1, y2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
            if ROTATED == HALF:
                x1, x2 = y1, y2
            else:
                x1, x2 = tl.where(column < ROTATED, y1, x1), tl.where(column < ROTATED, y2, x2)
        if INTERLEAVED:
            tl.store(y_ptrs + both, tl.reshape(tl.join(x1, x2), [ROWS, 2 * COLUMNS]), mask=mask_of_both)
        else:
            tl.store(y_ptrs + first, x1, mask=mask)
            tl.store(y_ptrs + second, x2, mask=mask)
