"""Inputs of RoPE, and its definition: each pair of dimensions is a complex number, turned by the position's angle."""

from typing import NamedTuple

import torch
from torch import Tensor

from sftron.kernels.rope_table import build_rope_table

SHAPES = [(4, 4, 64), (6, 2, 80), (3, 1, 96), (5, 5, 128), (2, 1, 256)]
"""(N, K, D): as many key-value heads as query heads, and fewer; powers of two, and not."""


class Case(NamedTuple):
    """qkv [T, W], position_ids int32 [T], table [P, D]"""

    qkv: Tensor
    position_ids: Tensor
    table: Tensor
    num_heads: int
    num_kv_heads: int


def make_case(
    num_heads: int, num_kv_heads: int, head_dim: int, num_tokens: int = 7, dtype: torch.dtype = torch.float32
) -> Case:
    """Random heads at positions that restart twice, out of order, up to the last one of the table."""
    torch.manual_seed(0)
    position_ids = torch.tensor([0, 1, 2, 0, 40, 7, 3, 5, 8, 0, 39])[:num_tokens].int()
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    return Case(qkv, position_ids, build_rope_table(41, head_dim, 10000.0, None), num_heads, num_kv_heads)


def turned(case: Case, *, inverse: bool = False) -> Tensor:
    """qkv in fp64, its query and key heads turned, backwards if `inverse`."""
    num_rotated, (cos, sin) = case.num_heads + case.num_kv_heads, case.table.double().chunk(2, dim=-1)
    turn = torch.complex(cos, -sin if inverse else sin)[case.position_ids, None]
    heads = case.qkv.double().unflatten(-1, (num_rotated + case.num_kv_heads, 2, -1))
    rotated = turn * torch.complex(*heads[:, :num_rotated].unbind(2))
    return torch.cat([torch.stack([rotated.real, rotated.imag], dim=2), heads[:, num_rotated:]], dim=1).flatten(1)


def gradients(case: Case) -> dict[str, tuple[Tensor, ...]]:
    """Gradients of q, k and v of one value, as they come from: a copy, SDPA's layout, a sum, every second number."""
    heads = case.num_heads, case.num_kv_heads, case.num_kv_heads
    shapes = [(len(case.qkv), count, case.table.shape[1]) for count in heads]
    torch.manual_seed(1)
    plain = [torch.randn(shape).to(case.qkv.dtype) for shape in shapes]
    return {
        "contiguous": tuple(plain),
        "transposed": tuple(x.transpose(0, 1).contiguous().transpose(0, 1) for x in plain),
        "expanded": tuple(x[:1, :1, :1].expand(x.shape) for x in plain),
        "expanded over tokens": tuple(x[:1].expand(x.shape) for x in plain),
        "every second": tuple(x.repeat_interleave(2, dim=-1)[..., ::2] for x in plain),
    }
