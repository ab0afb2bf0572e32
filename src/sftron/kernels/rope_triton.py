"""The Triton kernel of rope.py, which says what it computes: one launch for queries, keys and values, of any strides.

The heads of all tokens are counted through, token by token, and a program rotates a tile of ROWS of them: with bf16 and
four warps a thread has two loads of 16 bytes from either half of its heads under way before it stores. cos and sin come
from the table, which stays in the L2 cache; the heads of a token share its lines in L1. No thread touches another's
numbers, so heads may be rotated in place.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

PAIRS = 2048
"""of numbers, rotated by one program"""


def rotate(
    heads: Sequence[Tensor], out: Sequence[Tensor], position_ids: Tensor, table_PD: Tensor, *, inverse: bool
) -> None:
    """The kernel's launch, as `rope._rotate` describes it. Heads at a position outside the table become NaN.

    heads: [q_TND, k_TKD] or with v_TKD, of any strides; out: as many, neighbours in a head being neighbours in memory.
    """
    num_tokens, num_heads, head_dim = heads[0].shape
    num_kv_heads = heads[1].shape[1]
    columns = triton.next_power_of_2(head_dim // 2)
    rows = PAIRS // columns
    num_programs = sum(triton.cdiv(num_tokens * x_THD.shape[1], rows) for x_THD in heads)
    if num_programs == 0:
        return
    assert all(out_THD.stride(2) == 1 for out_THD in out)
    # Without values their pointers are not used; the keys' stand in.
    sources = [argument for x_THD in (*heads[:2], heads[-1]) for argument in (x_THD, *x_THD.stride())]
    targets = [argument for x_THD in (*out[:2], out[-1]) for argument in (x_THD, *x_THD.stride()[:2])]
    arguments = [*sources, *targets, position_ids.contiguous(), table_PD.contiguous(), num_tokens, len(table_PD)]
    sizes = {"NUM_HEADS": num_heads, "NUM_KV_HEADS": num_kv_heads, "HALF": head_dim // 2}
    tile = {"ROWS": rows, "COLUMNS": columns, "INVERSE": inverse}
    rotate_kernel[(num_programs,)](*arguments, **sizes, **tile)


@triton.jit
def rotate_kernel(
    q_ptr, q_t, q_h, q_d, k_ptr, k_t, k_h, k_d, v_ptr, v_t, v_h, v_d,
    q_out_ptr, q_out_t, q_out_h, k_out_ptr, k_out_t, k_out_h, v_out_ptr, v_out_t, v_out_h,
    position_ptr, table_ptr, num_tokens, num_positions,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    q_tiles = tl.cdiv(num_tokens * NUM_HEADS, ROWS)
    kv_tiles = tl.cdiv(num_tokens * NUM_KV_HEADS, ROWS)
    if tile < q_tiles:
        _rotate_tile(
            tile, q_ptr, q_t, q_h, q_d, q_out_ptr, q_out_t, q_out_h, position_ptr, table_ptr, num_tokens,
            num_positions, NUM_HEADS, HALF, ROWS, COLUMNS, INVERSE,
        )  # fmt: skip
    elif tile < q_tiles + kv_tiles:
        _rotate_tile(
            tile - q_tiles, k_ptr, k_t, k_h, k_d, k_out_ptr, k_out_t, k_out_h, position_ptr, table_ptr, num_tokens,
            num_positions, NUM_KV_HEADS, HALF, ROWS, COLUMNS, INVERSE,
        )  # fmt: skip
    else:
        _rotate_tile(
            tile - q_tiles - kv_tiles, v_ptr, v_t, v_h, v_d, v_out_ptr, v_out_t, v_out_h, None, table_ptr, num_tokens,
            num_positions, NUM_KV_HEADS, HALF, ROWS, COLUMNS, INVERSE,
        )  # fmt: skip


@triton.jit
def _rotate_tile(
    tile, x_ptr, x_t, x_h, x_d, y_ptr, y_t, y_h, position_ptr, table_ptr, num_tokens, num_positions,
    NUM_HEADS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    row = tile * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    # int64: T * W passes 2^31 at 350,000 tokens of Llama 8B.
    token, head = (row // NUM_HEADS).to(tl.int64), (row % NUM_HEADS).to(tl.int64)
    is_token = token < num_tokens
    mask = is_token & (column < HALF)
    x_ptrs = x_ptr + (token * x_t + head * x_h) + column * x_d
    x1, x2 = tl.load(x_ptrs, mask=mask), tl.load(x_ptrs + HALF * x_d, mask=mask)
    if position_ptr is not None:
        position = tl.load(position_ptr + token, mask=is_token, other=0).to(tl.int64)
        in_table = mask & (position >= 0) & (position < num_positions)
        cos_ptrs = table_ptr + position * (2 * HALF) + column
        cos = tl.load(cos_ptrs, mask=in_table, other=float("nan"))
        sin = tl.load(cos_ptrs + HALF, mask=in_table, other=float("nan"))
        if INVERSE:
            sin = -sin
        x1, x2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    y_ptrs = y_ptr + (token * y_t + head * y_h) + column
    tl.store(y_ptrs, x1, mask=mask)
    tl.store(y_ptrs + HALF, x2, mask=mask)
