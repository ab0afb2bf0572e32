"""The memory of attention: what it keeps for the backward pass, and the buffers of each backend's GPU kernels.

shape suffixes: T tokens of the packed row, N query heads, K key-value heads, D head size
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sftron.models.attention_kernels import PLAIN, Scores
from sftron.models.context import share_heads
from sftron.models.sdpa_attention import LONGEST_IN_FP32


def lengths_of(num_tokens: int, longest: int) -> list[int]:
    """Returns the lengths of documents of `longest` tokens in a row; the last may be shorter."""
    return [min(longest, num_tokens - start) for start in range(0, num_tokens, longest)]


def backward_bytes(backend: str, tokens: int, documents: int, heads: int, kv_heads: int, head_dim: int) -> int:
    """Returns the bytes of the buffers of a GPU kernel's backward pass, without the gradients of its inputs.

    FlashAttention sums dq in fp32, with 128 more rows for each document. Version 2, and varlen, which is the same
    kernel, make dk and dv of every query head (mha_varlen_bwd in torch's flash_api.cpp). Versions 3 and 4 sum dk and dv
    of the key-value heads in fp32. The kernel of sdpa sums dq in fp32, and with heads above 256 also dk and dv. flex
    has no such buffer.
    """
    if backend == "flex":
        return 0
    if backend == "sdpa":
        return 4 * tokens * heads * head_dim * (1 if head_dim <= 256 else 3)
    rows = tokens + 128 * (-(-documents // 16) * 16)  # the number of documents is padded; see `attend_documents`
    block = 32 if head_dim <= 128 else 64
    sums = 4 * rows * heads * (-(-head_dim // block) * block + 1)  # 1 for the sums of dout * out
    if kv_heads == heads:
        return sums
    return sums + head_dim * (4 * tokens * heads if backend in ("varlen", "flash_attn_2") else 8 * rows * kv_heads)


@dataclass(frozen=True, slots=True)
class MetaAttention:
    """Takes the memory of attention and computes nothing, by a kernel whose shapes torch knows on the meta device."""

    backend: str
    num_tokens: int
    longest_document: int
    num_documents: int
    num_sharing: int
    on_gpu: bool

    def __call__(self, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, _scores: Scores = PLAIN) -> Tensor:
        heads, num_heads = [q_TND, k_TKD, v_TKD], q_TND.shape[1]
        if self.num_sharing > 1:
            heads = self._exchanged(heads)
        if self.backend == "sdpa":
            documents = zip(*(x.split(lengths_of(len(x), self.longest_document)) for x in heads), strict=True)
            out_TND = torch.cat([self._of_document(q, k, v) for q, k, v in documents])
        else:
            out_TND = self._kernel(heads[0], heads[1], heads[2], self.num_tokens, self.num_documents)
        return out_TND if self.num_sharing == 1 else out_TND[:, :num_heads].clone()

    def _exchanged(self, heads: Sequence[Tensor]) -> list[Tensor]:
        """Returns as many numbers as the rank with the most heads receives of all tokens: with its own tokens, and with
        num_sharing times its heads."""
        shares = share_heads(heads[0].shape[1], heads[1].shape[1], self.num_sharing)
        most = max(zip(shares.queries, shares.keys, shares.keys, strict=True), key=sum)
        counts = [self.num_sharing * count for count in most]
        sent = [F.pad(x, (0, 0, 0, count - x.shape[1])) for x, count in zip(heads, counts, strict=True)]
        return list(torch.cat(sent, dim=1).clone().split(counts, dim=1))

    def _of_document(self, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        dtype = torch.float32 if not self.on_gpu and self.longest_document <= LONGEST_IN_FP32 else q_TND.dtype
        if self.on_gpu and q_TND.shape[1] != k_TKD.shape[1]:
            k_TKD, v_TKD = (x.repeat_interleave(q_TND.shape[1] // x.shape[1], dim=1) for x in (k_TKD, v_TKD))
        return self._kernel(q_TND.to(dtype), k_TKD.to(dtype), v_TKD.to(dtype), len(q_TND), 1).to(q_TND.dtype)

    def _kernel(self, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, num_tokens: int, num_documents: int) -> Tensor:
        heads = [x.transpose(0, 1)[None] for x in (q_TND, k_TKD, v_TKD)]
        out = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*heads, 0.0, True)[0]
        if self.on_gpu and out.requires_grad:
            # With shared rows, the heads of all tokens.
            queries, keys = (len(x) * x.shape[1] // num_tokens for x in (q_TND, k_TKD))
            num_bytes = backward_bytes(self.backend, num_tokens, num_documents, queries, keys, q_TND.shape[2])
            buffers: list[Tensor] = []
            node: Any = out.grad_fn
            node.register_prehook(lambda _: buffers.append(torch.empty(num_bytes, dtype=torch.uint8, device="meta")))
            node.register_hook(lambda *_: buffers.clear())
        return out[0].transpose(0, 1)
