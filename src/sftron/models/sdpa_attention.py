"""Causal attention on one document at a time, by torch's scaled_dot_product_attention.

Soft caps and sinks, which it does not have, are computed by models/blockwise_attention.py.

    shape suffixes: T tokens of the packed row, or queries of a document, S keys of a document, N query heads,
    K key-value heads, D head size, B batch
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sftron.kernels.device import is_gpu
from sftron.models.attention_kernels import PLAIN, Scores, outside_of_graphs
from sftron.models.blockwise_attention import attend_in_blocks

LONGEST_IN_FP32, _BF16_LENGTH_STEP = 256, 128
"""Document lengths in tokens that matter on a CPU; see `attend_causally`."""

_WINDOW_BLOCK = 128
"""The smallest block of queries that attend to a window at once; see `_attend_in_window`."""


# Not frozen because of torch 2.11; see FlashAttention.
@dataclass(slots=True)
class SdpaAttention:
    """Attention on each document by itself; `lengths` are the document lengths in tokens."""

    lengths: tuple[int, ...]

    # Excluded from compiled graphs: a graph would contain one call per document and be recompiled for each batch.
    @outside_of_graphs
    def __call__(self, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, scores: Scores = PLAIN) -> Tensor:
        # Not slices, whose gradients would each be padded with zeros to length T.
        documents = zip(*(x.split(self.lengths) for x in (q_TND, k_TKD, v_TKD)), strict=True)
        return torch.cat([attend_causally(q, k, v, scores) for q, k, v in documents])


class CachedAttention:
    """The attention of one layer, with cached keys and values of all previous tokens."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_cached = 0
        self.keys = self.values = torch.empty(0)

    def __call__(self, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, scores: Scores = PLAIN) -> Tensor:
        if self.num_cached == 0:
            self.keys, self.values = (x.new_empty(self.capacity, *x.shape[1:]) for x in (k_TKD, v_TKD))
        start, self.num_cached = self.num_cached, self.num_cached + len(k_TKD)
        self.keys[start : self.num_cached] = k_TKD
        self.values[start : self.num_cached] = v_TKD
        return attend_causally(q_TND, self.keys[: self.num_cached], self.values[: self.num_cached], scores)


def attend_causally(q_TND: Tensor, k_SKD: Tensor, v_SKD: Tensor, scores: Scores = PLAIN) -> Tensor:
    """Returns the attention output within one document of S tokens. The queries are its last T tokens; T is 1 or S.

    Time is proportional to S * window, and memory to S.
    """
    num_queries, window = len(q_TND), scores.window
    if num_queries == 1 and window is not None:
        k_SKD, v_SKD = k_SKD[-window:], v_SKD[-window:]
    if scores.sinks_N is not None or scores.softcap is not None:
        return attend_in_blocks(q_TND, k_SKD, v_SKD, scores)
    if q_TND.device.type == "cpu" and q_TND.dtype == torch.bfloat16:
        # torch's bf16 kernel compiles itself for each length and keeps 7 MB each time: 72 steps on chat data took 1.2
        # GB. Short documents are also faster in fp32 (128 tokens: 1.2 ms instead of 3.6). Long ones are slower (512
        # tokens: 18 ms instead of 9), so they are padded to a few lengths; no real query attends to the padding.
        if num_queries == 1 or num_queries <= LONGEST_IN_FP32:
            return attend_causally(q_TND.float(), k_SKD.float(), v_SKD.float(), scores).to(q_TND.dtype)
        num_added = -num_queries % _BF16_LENGTH_STEP
        q_TND, k_SKD, v_SKD = (F.pad(x, (0, 0, 0, 0, 0, num_added)) for x in (q_TND, k_SKD, v_SKD))
    if window is None or len(k_SKD) <= window:
        q, k, v = (x.transpose(0, 1)[None] for x in (q_TND, k_SKD, v_SKD))
        return _sdpa(q, k, v, scale=scores.scale, is_causal=num_queries > 1)[:num_queries]
    return _attend_in_window(q_TND, k_SKD, v_SKD, window, scores.scale)[:num_queries]


def _sdpa(q_BNTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, **options: Any) -> Tensor:
    """Returns the output of a batch of attentions, joined in one row, [B * T, N, D]."""
    num_served = q_BNTD.shape[1] // k_BKSD.shape[1]
    if num_served > 1 and is_gpu(q_BNTD):
        # torch's memory-efficient kernel, the one for heads above 256, fp32 and masks, takes no grouped heads; without
        # it, all T x T scores would exist.
        k_BKSD, v_BKSD = (x.repeat_interleave(num_served, dim=1) for x in (k_BKSD, v_BKSD))
    is_grouped = q_BNTD.shape[1] != k_BKSD.shape[1]
    out = F.scaled_dot_product_attention(q_BNTD, k_BKSD, v_BKSD, enable_gqa=is_grouped, **options)
    return out.transpose(1, 2).flatten(0, 1)


def _attend_in_window(q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, window: int, scale: float | None) -> Tensor:
    """Returns causal attention through a window that is shorter than the document of T tokens.

    The first tokens, as many as the window has, attend to all before them. After that, each block of queries attends to
    the block and the window - 1 tokens before it, and all blocks have the same mask. An example with a window of 3
    tokens and blocks of 2, where each token attends to the keys marked x:

        token 0   x             the first tokens
        token 1   x x
        token 2   x x x
        token 3     x x x       a block: keys 1 to 4
        token 4       x x x
        token 5         x x x   another: keys 3 to 6
        token 6           x x x

    The keys of all blocks are one view that repeats no memory. With blocks of about half the window, three halves of
    the scores that are needed are computed, and the gradients of this view take three times the memory of k and v.
    """
    num_tokens, block = len(q_TND), _WINDOW_BLOCK * max(1, window // (2 * _WINDOW_BLOCK))
    num_blocks, num_last = divmod(num_tokens - window, block)
    last, is_visible = num_tokens - num_last, _band(window, block, q_TND.device)
    q, k, v = (x[:window].transpose(0, 1)[None] for x in (q_TND, k_TKD, v_TKD))
    outputs = [_sdpa(q, k, v, scale=scale, is_causal=True)]
    if num_blocks:
        q = q_TND[window:last].unflatten(0, (num_blocks, block)).transpose(1, 2)
        k, v = (x[1:last].unfold(0, block + window - 1, block).transpose(2, 3) for x in (k_TKD, v_TKD))
        outputs.append(_sdpa(q, k, v, scale=scale, attn_mask=is_visible))
    if num_last:
        q, k, v = (
            x[first:].transpose(0, 1)[None]
            for x, first in ((q_TND, last), (k_TKD, last - window + 1), (v_TKD, last - window + 1))
        )
        outputs.append(_sdpa(q, k, v, scale=scale, attn_mask=is_visible[:num_last, : num_last + window - 1]))
    return torch.cat(outputs)


def _band(window: int, block: int, device: torch.device) -> Tensor:
    """Returns whether each query of a block may attend to a key, from window - 1 before the block to its end."""
    keys = torch.arange(1 - window, block, device=device)
    distance = torch.arange(block, device=device)[:, None] - keys
    return (distance >= 0) & (distance < window)
