"""One packed row on several ranks: each has consecutive tokens of it, and mixes all tokens for a part of the heads.

Before and after what mixes tokens, ranks exchange tokens for heads (Ulysses, arXiv 2309.14509). A row of 5 tokens and 3
heads on 2 ranks:

                 rank 0   rank 1                           rank 0   rank 1
    token 0, 1   0 1 2                to heads ->          0 1      2
    token 2      0 1 2             <- to tokens            0 1      2
    token 3, 4            0 1 2                            0 1      2

So the functions of attention and of the delta rule are those of one rank, for a whole row with fewer heads. Of a
convolution without a state, the heads are its channels. A part may have any number of tokens and of heads.

    shape suffixes: T tokens of this rank, S tokens of the packed row, N query or value heads, K key-value or key heads,
    D head size, W, V numbers per token, J taps
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from sftron.models.attention import Attend
from sftron.models.attention_kernels import PLAIN, Scores
from sftron.models.causal_convolution import Convolve
from sftron.models.delta import DeltaSizes, MixDelta


@dataclass(frozen=True, slots=True)
class Context:
    """The ranks that share a packed row."""

    counts: tuple[int, ...]
    """The number of the row's tokens that each rank of the group has, in the order of the ranks; none is 0."""
    group: dist.ProcessGroup | None = None
    """None is that of all ranks."""

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        return len(self.counts)

    @property
    def tokens(self) -> slice:
        """The tokens of the row that this rank has."""
        end = sum(self.counts[: self.rank + 1])
        return slice(end - self.counts[self.rank], end)

    def to_heads(self, x_TV: Tensor, widths: Sequence[int]) -> Tensor:
        """Returns what all tokens have for this rank, [S, widths[rank]].

        Args:
            x_TV: What this rank's tokens have for each rank, of these widths, side by side.
        """
        return _Exchange.apply(x_TV, self, tuple(widths), True)  # pyright: ignore[reportReturnType]

    def to_tokens(self, x_SW: Tensor, widths: Sequence[int]) -> Tensor:
        """Returns what this rank's tokens have on all ranks, [T, sum of widths]: the inverse of `to_heads`."""
        return _Exchange.apply(x_SW, self, tuple(widths), False)  # pyright: ignore[reportReturnType]


class _Exchange(torch.autograd.Function):
    """Each exchange is the gradient of the other one; nothing is saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, context: Context, widths: tuple[int, ...], to_heads: bool) -> Tensor:
        ctx.options = context, widths, to_heads
        return _exchanged(x, context, widths, to_heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        context, widths, to_heads = ctx.options
        return _exchanged(grad, context, widths, not to_heads), None, None, None


def _exchanged(x: Tensor, context: Context, widths: tuple[int, ...], to_heads: bool) -> Tensor:
    num_tokens, width = context.counts[context.rank], widths[context.rank]
    sizes_of_tokens = [num_tokens * each for each in widths]
    sizes_of_heads = [count * width for count in context.counts]
    if to_heads:
        parts = torch.cat([part.flatten() for part in x.split(widths, dim=1)])
        # The tokens of the ranks follow each other in the row.
        return _sent(parts, sizes_of_tokens, sizes_of_heads, context.group).view(-1, width)
    parts = _sent(x.contiguous().flatten(), sizes_of_heads, sizes_of_tokens, context.group).split(sizes_of_tokens)
    return torch.cat([part.view(num_tokens, -1) for part in parts], dim=1)


def _sent(parts: Tensor, sizes: list[int], sizes_received: list[int], group: dist.ProcessGroup | None) -> Tensor:
    """Sends consecutive parts to the ranks, and returns theirs, one after the other."""
    received = parts.new_empty(sum(sizes_received))
    dist.all_to_all_single(received, parts, sizes_received, sizes, group=group)
    return received


# --- The heads of each rank ---


@dataclass(frozen=True, slots=True)
class HeadShares:
    """The numbers of heads of each rank, and how many copies of each key-value head the ranks have together."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    copies: tuple[int, ...]

    def with_copies(self, x_TKD: Tensor) -> Tensor:
        """Returns the key-value heads of all ranks, side by side."""
        if all(number == 1 for number in self.copies):
            return x_TKD
        heads = x_TKD.split(1, dim=1)
        # Not an index, whose gradient would add the copies in the type of x, in any order.
        return torch.cat([head.expand(-1, number, -1) for head, number in zip(heads, self.copies, strict=True)], dim=1)


@cache
def share_heads(num_heads: int, num_kv_heads: int, num_ranks: int) -> HeadShares:
    """Returns the shares of consecutive heads; the first ranks have one more if the number of ranks does not divide
    that of the heads.

    A rank has the key-value heads that its query heads read. If they do not read all of them equally often, it has one
    for each query head, because attention needs groups of one size:

        9 query heads, 3 key-value heads, 2 ranks    queries  0 1 2 3 4 | 5 6 7 8
                                                     keys     0 0 0 1 1 | 1 2 2 2

    Raises:
        ValueError: There are more ranks than heads.
    """
    if num_ranks > num_heads:
        raise ValueError(f"{num_ranks} ranks cannot share {num_heads} heads; use at most {num_heads} ranks")
    queries = [num_heads // num_ranks + (rank < num_heads % num_ranks) for rank in range(num_ranks)]
    keys = []
    for end, count in zip(accumulate(queries), queries, strict=True):
        read = [head * num_kv_heads // num_heads for head in range(end - count, end)]
        keys.append(sorted(set(read)) if len(set(Counter(read).values())) == 1 else read)
    copies = Counter(chain.from_iterable(keys))
    return HeadShares(tuple(queries), tuple(map(len, keys)), tuple(copies[head] for head in range(num_kv_heads)))


# --- Attention, convolutions and the delta rule ---


@dataclass(frozen=True, slots=True)
class ContextAttention:
    """Attention of the tokens of this rank, by an attention function for the whole row."""

    attend: Attend
    context: Context

    def __call__(self, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, scores: Scores = PLAIN) -> Tensor:
        context, head_dim = self.context, q_TND.shape[2]
        shares = share_heads(q_TND.shape[1], k_TKD.shape[1], context.size)
        k_TKD, v_TKD = shares.with_copies(k_TKD), shares.with_copies(v_TKD)
        counts = shares.queries, shares.keys, shares.keys
        heads = zip(
            *(x.split(count, dim=1) for x, count in zip((q_TND, k_TKD, v_TKD), counts, strict=True)), strict=True
        )
        qkv_TV = torch.cat(list(chain.from_iterable(heads)), dim=1).flatten(1)
        qkv_SW = context.to_heads(qkv_TV, [head_dim * (q + 2 * k) for q, k in zip(*counts[:2], strict=True)])
        own = [count[context.rank] for count in counts]
        q_SND, k_SKD, v_SKD = qkv_SW.unflatten(1, (-1, head_dim)).split(own, dim=1)
        if scores.sinks_N is not None:
            scores = scores._replace(sinks_N=scores.sinks_N.split(shares.queries)[context.rank])
        out_SND = self.attend(q_SND, k_SKD, v_SKD, scores)
        out_TV = context.to_tokens(out_SND.flatten(1), [head_dim * count for count in shares.queries])
        return out_TV.unflatten(1, (-1, head_dim))


@dataclass(frozen=True, slots=True)
class ContextConvolution:
    """The convolution of the tokens of this rank, by one for the whole row. Ranks share channels as they do heads."""

    convolve: Convolve
    context: Context

    def __call__(self, x_TW: Tensor, weight_WJ: Tensor) -> Tensor:
        context, num_channels = self.context, x_TW.shape[1]
        counts = share_heads(num_channels, num_channels, context.size).queries
        own_taps_WJ = weight_WJ.split(counts)[context.rank]
        return context.to_tokens(self.convolve(context.to_heads(x_TW, counts), own_taps_WJ), counts)


@dataclass(frozen=True, slots=True)
class ContextDelta:
    """The convolution and the delta rule of the tokens of this rank, by a function for the whole row."""

    mix: MixDelta
    context: Context

    def __call__(self, sizes: DeltaSizes, qkv_TW: Tensor, taps_WJ: Tensor, g_TN: Tensor, beta_TN: Tensor) -> Tensor:
        context, rank = self.context, self.context.rank
        shares = share_heads(sizes.num_value_heads, sizes.num_key_heads, context.size)
        channels = _channels_of_ranks(qkv_TW, sizes, shares)
        qkv_SW = context.to_heads(torch.cat(channels, dim=1), [part.shape[1] for part in channels])
        # The decay is fp32, in which any type of the learning rate is exact.
        rates = zip(*(x.to(g_TN.dtype).split(shares.queries, dim=1) for x in (g_TN, beta_TN)), strict=True)
        rates_SN = context.to_heads(torch.cat(list(chain.from_iterable(rates)), dim=1), [2 * n for n in shares.queries])
        g_SN, beta_SN = rates_SN.chunk(2, dim=1)
        own = replace(sizes, num_key_heads=shares.keys[rank], num_value_heads=shares.queries[rank])
        own_taps_WJ = _channels_of_ranks(taps_WJ.T, sizes, shares)[rank].T
        read_SNE = self.mix(own, qkv_SW, own_taps_WJ, g_SN, beta_SN.to(beta_TN.dtype))
        read_TV = context.to_tokens(read_SNE.flatten(1), [sizes.value_dim * count for count in shares.queries])
        return read_TV.unflatten(1, (-1, sizes.value_dim))


def _channels_of_ranks(qkv_TW: Tensor, sizes: DeltaSizes, shares: HeadShares) -> list[Tensor]:
    """Returns the queries, keys and values of each rank's heads."""
    q, k, v = qkv_TW.split(sizes.widths, dim=1)
    q_TKD, k_TKD = (shares.with_copies(x.unflatten(1, (sizes.num_key_heads, sizes.key_dim))) for x in (q, k))
    v_TNE = v.unflatten(1, (sizes.num_value_heads, sizes.value_dim))
    counts = shares.keys, shares.keys, shares.queries
    heads = zip(*(x.split(count, dim=1) for x, count in zip((q_TKD, k_TKD, v_TNE), counts, strict=True)), strict=True)
    return [torch.cat([x.flatten(1) for x in part], dim=1) for part in heads]
