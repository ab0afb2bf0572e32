"""Causal attention with a soft cap of the scores or with sinks, in plain torch and a bounded amount of memory.

Only blocks of scores exist at a time, as in flash attention (arXiv 2205.14135).

    shape suffixes: T queries, S keys, B queries of a block, C keys that a block attends to, N query heads,
    K key-value heads, G = N / K query heads for each of them, R = B * G, D head size
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sftron.models.attention_kernels import Scores

_BLOCK = 32
"""The number of queries in a block. On a CPU, blocks of 32 to 64 were fastest, because their scores remain in cache."""


def attend_in_blocks(q_TND: Tensor, k_SKD: Tensor, v_SKD: Tensor, scores: Scores) -> Tensor:
    """Returns the attention output within one document; the queries are its last T tokens.

    It computes in fp32 at least. The backward pass recomputes the scores of each block from the log-sum-exp of each
    query, so memory is proportional to T + S, and time to the number of pairs.
    """
    scale = q_TND.shape[-1] ** -0.5 if scores.scale is None else scores.scale
    blocks = _Blocks(scores.window, scale, scores.softcap)
    return _BlockwiseAttention.apply(q_TND, k_SKD, v_SKD, scores.sinks_N, blocks)


@dataclass(frozen=True, slots=True)
class _Blocks:
    window: int | None
    scale: float
    softcap: float | None

    def ranges(self, num_queries: int, num_keys: int) -> Iterator[tuple[slice, slice]]:
        """Yields each block of queries and the keys that at least one of them attends to."""
        num_before = num_keys - num_queries
        for first in range(0, num_queries, _BLOCK):
            end = min(first + _BLOCK, num_queries)
            first_key = 0 if self.window is None else max(0, num_before + first - self.window + 1)
            yield slice(first, end), slice(first_key, num_before + end)

    def scores(self, q_KBGD: Tensor, k_KCD: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the scores [K, B, G, C], minus infinity where a query does not attend to a key, and the tanh of the
        soft cap. The last query attends to the last key."""
        num_queries, num_keys = q_KBGD.shape[1], k_KCD.shape[1]
        scores = torch.bmm(q_KBGD.flatten(1, 2), k_KCD.transpose(1, 2)).view(*q_KBGD.shape[:3], num_keys)
        scores *= self.scale
        tanh = None
        if self.softcap is not None:
            tanh = scores.div_(self.softcap).tanh_()
            scores = tanh * self.softcap
        tokens = torch.arange(num_keys, device=scores.device)
        distance_BC = tokens[num_keys - num_queries :, None] - tokens
        is_hidden_BC = distance_BC < 0 if self.window is None else (distance_BC < 0) | (distance_BC >= self.window)
        return scores.masked_fill_(is_hidden_BC[:, None], -torch.inf), tanh


class _BlockwiseAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_TND: Tensor, k_SKD: Tensor, v_SKD: Tensor, sinks_N: Tensor | None, blocks: _Blocks) -> Any:
        num_kv_heads, dtype = k_SKD.shape[1], torch.promote_types(q_TND.dtype, torch.float32)
        q_KTGD, (k_KSD, v_KSD) = _grouped(q_TND, num_kv_heads, dtype), _heads_first(k_SKD, v_SKD, dtype)
        out_KTGD, lse_KTG = torch.empty_like(q_KTGD), q_KTGD.new_empty(q_KTGD.shape[:3])
        for queries, keys in blocks.ranges(len(q_TND), len(k_SKD)):
            scores_KBGC, _ = blocks.scores(q_KTGD[:, queries], k_KSD[:, keys])
            lse_KBG = scores_KBGC.logsumexp(-1)
            if sinks_N is not None:
                lse_KBG = torch.logaddexp(lse_KBG, sinks_N.to(dtype).view(num_kv_heads, 1, -1))
            weights = scores_KBGC.sub_(lse_KBG[..., None]).exp_()
            lse_KTG[:, queries] = lse_KBG
            out_KTGD[:, queries] = torch.bmm(weights.flatten(1, 2), v_KSD[:, keys]).view_as(q_KTGD[:, queries])
        out_TND = _joined(out_KTGD).to(q_TND.dtype)
        ctx.save_for_backward(q_TND, k_SKD, v_SKD, sinks_N, out_TND, lse_KTG)
        ctx.blocks = blocks
        return out_TND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TND: Tensor) -> Any:
        q_TND, k_SKD, v_SKD, sinks_N, out_TND, lse_KTG = ctx.saved_tensors
        blocks: _Blocks = ctx.blocks
        num_kv_heads, dtype = k_SKD.shape[1], lse_KTG.dtype
        # The sum of each query's weights times their gradients, which the softmax subtracts.
        delta_TN1 = (grad_TND.to(dtype) * out_TND.to(dtype)).sum(-1, keepdim=True)
        delta_KTG = _grouped(delta_TN1, num_kv_heads, dtype)[..., 0]
        q_KTGD, grad_KTGD = (_grouped(x, num_kv_heads, dtype) for x in (q_TND, grad_TND))
        k_KSD, v_KSD = _heads_first(k_SKD, v_SKD, dtype)
        dq_KTGD, dk_KSD, dv_KSD = torch.empty_like(q_KTGD), torch.zeros_like(k_KSD), torch.zeros_like(v_KSD)
        for queries, keys in blocks.ranges(len(q_TND), len(k_SKD)):
            q_KBGD, grad_KRD = q_KTGD[:, queries], grad_KTGD[:, queries].flatten(1, 2)
            scores_KBGC, tanh = blocks.scores(q_KBGD, k_KSD[:, keys])
            weights = scores_KBGC.sub_(lse_KTG[:, queries, :, None]).exp_()
            dv_KSD[:, keys].baddbmm_(weights.flatten(1, 2).transpose(1, 2), grad_KRD)
            dscores = torch.bmm(grad_KRD, v_KSD[:, keys].transpose(1, 2)).view_as(weights)
            dscores.sub_(delta_KTG[:, queries, :, None]).mul_(weights)
            if tanh is not None:
                dscores *= tanh.square_().neg_().add_(1)
            dscores = dscores.mul_(blocks.scale).flatten(1, 2)
            dq_KTGD[:, queries] = torch.bmm(dscores, k_KSD[:, keys]).view_as(q_KBGD)
            dk_KSD[:, keys].baddbmm_(dscores.transpose(1, 2), q_KBGD.flatten(1, 2))
        dsinks_N = None
        if sinks_N is not None:
            sink_weights = (sinks_N.to(dtype).view(num_kv_heads, 1, -1) - lse_KTG).exp_()
            dsinks_N = -(sink_weights * delta_KTG).sum(1).flatten().to(sinks_N.dtype)
        dk_SKD, dv_SKD = (x.transpose(0, 1).to(q_TND.dtype) for x in (dk_KSD, dv_KSD))
        return _joined(dq_KTGD).to(q_TND.dtype), dk_SKD, dv_SKD, dsinks_N, None


def _grouped(x_TND: Tensor, num_kv_heads: int, dtype: torch.dtype) -> Tensor:
    """Returns [K, T, G, D], contiguous, so that the rows of a block are the rows of one matrix for each K."""
    return x_TND.unflatten(1, (num_kv_heads, x_TND.shape[1] // num_kv_heads)).transpose(0, 1).to(dtype).contiguous()


def _heads_first(k_SKD: Tensor, v_SKD: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return k_SKD.transpose(0, 1).to(dtype).contiguous(), v_SKD.transpose(0, 1).to(dtype).contiguous()


def _joined(x_KTGD: Tensor) -> Tensor:
    return x_KTGD.transpose(0, 1).flatten(1, 2)
