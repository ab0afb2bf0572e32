"""torch's flex attention over packed documents: one Triton kernel that skips what no query may see.

shape suffixes: T tokens of the flat row, N query heads, K key-value heads, D head size, B blocks of 128 tokens
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

_BLOCK = 128
"""Tokens; the kernel skips or takes blocks of _BLOCK x _BLOCK scores as a whole."""


@dataclass(frozen=True, slots=True)
class FlexAttention:
    """One mask for all layers of a batch. function: flex_attention, compiled unless on a CPU."""

    function: Callable[..., Any]
    block_mask: BlockMask

    def __call__(self, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q_TND, k_TKD, v_TKD))
        out = self.function(q, k, v, block_mask=self.block_mask, enable_gqa=q.shape[1] != k.shape[1])
        return out[0].transpose(0, 1)


@functools.cache
def compiled_flex_attention() -> Callable[..., Any]:
    """Uncompiled it would make all T x T scores."""
    return torch.compile(flex_attention)


def build_block_mask(cu_seqlens: Tensor, num_tokens: int) -> BlockMask:
    """A query sees the tokens of its own document up to itself.

    cu_seqlens: int32 [documents + 1], from 0 to num_tokens, on the device of q; nothing waits for it.

    torch's create_block_mask would evaluate all T x T pairs (1 GB at 32768 tokens) to find what documents in a row tell
    at once, for blocks of 4 tokens:

        documents  0 0 0 1  1 1 1 1  1 1 1 1  2 2 2 2      query block 0   p . . .     . skipped
                                                           query block 1   p p . .     p the mask is evaluated
                                                           query block 2   p F p .     F all visible
                                                           query block 3   . . . p
    """
    device = cu_seqlens.device
    document_T = document_of_token(cu_seqlens, num_tokens)
    blocks = torch.arange(0, num_tokens, _BLOCK, device=device)
    first_token, last_token = blocks, (blocks + _BLOCK - 1).clamp(max=num_tokens - 1)
    first_document, last_document = document_T[first_token], document_T[last_token]
    is_earlier_BB = first_token[:, None] > first_token
    # Documents lie in a row: if the ends that face each other share one, some pair does; if the far ends, all.
    sees_some_BB = (first_token[:, None] == first_token) | is_earlier_BB & (first_document[:, None] == last_document)
    is_whole = blocks + _BLOCK <= num_tokens
    sees_all_BB = is_earlier_BB & (last_document[:, None] == first_document) & is_whole[:, None]

    def is_visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (document_T[query] == document_T[key])

    return BlockMask.from_kv_blocks(
        *_listed(sees_some_BB & ~sees_all_BB),
        *_listed(sees_all_BB),
        BLOCK_SIZE=_BLOCK,
        mask_mod=is_visible,
        seq_lengths=(num_tokens, num_tokens),
    )


def document_of_token(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """int32 [T]: how many documents ended at or before each token; empty ones own none."""
    tokens = torch.arange(num_tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:], tokens, right=True, out_int32=True)


def _listed(chosen_BB: Tensor) -> tuple[Tensor, Tensor]:
    """As BlockMask wants it: how many key blocks a query block has [1, 1, B], and which, those first [1, 1, B, B]."""
    chosen = chosen_BB[None, None].int()
    return chosen.sum(-1, dtype=torch.int32), chosen.argsort(dim=-1, descending=True, stable=True).int()
