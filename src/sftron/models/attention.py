"""Causal attention within each document of a packed row; documents do not attend to each other (law 7).

The backends are compared in docs/architecture.md. "sdpa" runs anywhere and is the test oracle of the others.

    shape suffixes: T tokens of the packed row, N query heads, K key-value heads, D head size
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from sftron.models.attention_kernels import (
    FlashAttention,
    FlexAttention,
    VarlenAttention,
    build_block_mask,
    compiled_flex_attention,
    flash_attn_function,
    outside_of_graphs,
    refuse,
)


class Attend(Protocol):
    """The attention function of one batch, which every layer calls."""

    def __call__(
        self, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, *, window: int | None = None, sinks_N: Tensor | None = None
    ) -> Tensor:
        """Returns the attention output, [T, N, D].

        Args:
            q_TND: The queries. N is a multiple of K: each key-value head serves N / K consecutive query heads.
            window: The number of tokens that a token attends to, itself included; None means all tokens of its document
                up to itself.
            sinks_N: One logit per head that takes part in the softmax but has no value. No backend implements it.

        Raises:
            ValueError: A window or sinks are passed, and the backend does not implement them.
        """
        ...


CHOICES = ("auto", "sdpa", "varlen", "flash_attn", "flex")
"""The values of the configuration key; `flash_attn` is the newest version that is installed and supports the device."""

BACKENDS = ("sdpa", "varlen", "flash_attn_2", "flash_attn_3", "flash_attn_4", "flex")

_FASTEST_FIRST = ("flash_attn_4", "flash_attn_3", "varlen", "flash_attn_2", "flex", "sdpa")
"""The backends by speed. Version 3 takes 1/2 to 1/1.5 of the time of 2 on an H100 (arXiv 2407.08608). varlen is the
kernel of 2 without a package. flex reaches 85 to 90 % of its speed (pytorch.org/blog/flexattention), more head sizes.
"""

_ANY_LATER = 99
_LIMITS = {
    "varlen": (range(8, _ANY_LATER), range(8, 257, 8)),
    "flash_attn_2": (range(8, _ANY_LATER), range(8, 257, 8)),
    "flash_attn_3": (range(9, 10), range(8, 257, 8)),
    "flash_attn_4": (range(9, 12), range(8, 129, 8)),
    "flex": (range(8, _ANY_LATER), range(16, 257)),
}
"""The supported major compute capabilities and head sizes."""

_LONGEST_IN_FP32, _BF16_LENGTH_STEP = 256, 128
"""Document lengths in tokens that matter on a CPU; see `attend_causally`."""

_FEWEST_DOCUMENTS, _SHORTEST_LONGEST = 16, 128
"""The smallest padded number of documents and the smallest padded max_seqlen; see `attend_documents`."""


def resolve_attention(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Returns the entry of BACKENDS for `name`, one of CHOICES; "auto" is the fastest backend that supports `device`.

    Whether kernels must be deterministic follows torch's global setting.

    Raises:
        ValueError: The requested backend cannot run on the device, with the reason. There is no silent fallback.
    """
    if name not in CHOICES:
        raise ValueError(f"attention: {name!r} is not one of {', '.join(CHOICES)}.")
    reasons = []
    for backend in (each for each in _FASTEST_FIRST if name == "auto" or each.startswith(name)):
        reason = reason_against(backend, device, dtype, head_dim)
        if reason is None:
            return backend
        reasons.append(reason)
    # Several versions of flash_attn may share the same reason, which is reported once.
    reason = "; ".join(dict.fromkeys(reasons))
    raise ValueError(f"attention: {name!r} cannot run here: {reason}. Choose 'auto', or 'sdpa', which runs anywhere.")


def reason_against(backend: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Returns the reason why a backend cannot be used, with the value found and the value needed, or None if it can."""
    if backend == "sdpa":
        return None
    if device.type != "cuda":
        why = ", where it has no backward pass" if backend == "flex" else ""
        return f"it needs a CUDA device, this is {device.type!r}{why}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 or float16, the model in {str(dtype).removeprefix('torch.')}"
    majors, head_dims = _LIMITS[backend]
    major, minor = torch.cuda.get_device_capability(device)
    if major not in majors:
        upper = "" if majors.stop == _ANY_LATER else f" and below {majors.stop}.0"
        return f"{backend} needs compute capability {majors.start}.0 or later{upper}, this device has {major}.{minor}"
    if head_dim not in head_dims:
        sizes = f"{head_dims.start} to {head_dims[-1]} in steps of {head_dims.step}"
        return f"{backend} takes a head_dim of {sizes}, the model's is {head_dim}"
    if not backend.startswith("flash_attn"):
        return None
    version = int(backend[-1])
    if version == 3 and head_dim > 192 and torch.are_deterministic_algorithms_enabled():
        return f"{backend} is deterministic up to a head_dim of 192, the model's is {head_dim}"
    try:
        flash_attn_function(version)
    except ImportError as error:
        return str(error)
    return None


def attend_documents(backend: str, cu_seqlens: Tensor, max_seqlen: int, num_tokens: int) -> Attend:
    """Returns the attention function of one batch, to be shared by all layers.

    Kernels and compiled graphs are specialized for the number of documents and for max_seqlen. Both are rounded up to a
    power of two, so that another packing does not cause a recompilation.

    Args:
        backend: One of BACKENDS, as returned by `resolve_attention`.
        cu_seqlens: The document boundaries, int32 [documents + 1], from 0 to num_tokens; documents may be empty. "sdpa"
            reads them here, so they should be on the CPU; otherwise this read waits for the device. The other backends
            need them on the device of q.
        max_seqlen: An upper bound of the document lengths.

    Raises:
        ValueError: cu_seqlens is not int32, or a document is longer than max_seqlen (checked by "sdpa" alone).
    """
    if cu_seqlens.dtype != torch.int32:
        found = str(cu_seqlens.dtype).removeprefix("torch.")
        raise ValueError(f"cu_seqlens is {found}, attention kernels read it as int32: call cu_seqlens.int().")
    if backend == "sdpa":
        lengths = tuple(cu_seqlens.diff().tolist())
        if max(lengths) > max_seqlen:
            raise ValueError(f"max_seqlen is {max_seqlen}, but cu_seqlens holds a document of {max(lengths)} tokens.")
        return SdpaAttention(lengths)
    if backend == "flex":
        return FlexAttention(compiled_flex_attention(), build_block_mask(cu_seqlens, num_tokens))
    cu_seqlens = pad_documents(cu_seqlens)
    max_seqlen = _power_of_two(max_seqlen, _SHORTEST_LONGEST)
    if backend == "varlen":
        return VarlenAttention.of(cu_seqlens, max_seqlen)
    function = flash_attn_function(int(backend[-1]))
    return FlashAttention(function, cu_seqlens, max_seqlen, torch.are_deterministic_algorithms_enabled())


def pad_documents(cu_seqlens: Tensor) -> Tensor:
    """Appends empty documents up to a power of two: [0, 5, 9] -> [0, 5, 9, 9, ..., 9], 16 documents."""
    num_documents = len(cu_seqlens) - 1
    num_added = _power_of_two(num_documents, _FEWEST_DOCUMENTS) - num_documents
    return torch.cat([cu_seqlens, cu_seqlens[-1:].expand(num_added)])


def _power_of_two(size: int, least: int) -> int:
    return max(least, 1 << (size - 1).bit_length())


# Not frozen because of torch 2.11; see FlashAttention.
@dataclass(slots=True)
class SdpaAttention:
    """Calls torch's scaled_dot_product_attention once per document; `lengths` are the document lengths in tokens."""

    lengths: tuple[int, ...]

    # Excluded from compiled graphs: a graph would contain one call per document and be recompiled for each batch.
    @outside_of_graphs
    def __call__(
        self, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, *, window: int | None = None, sinks_N: Tensor | None = None
    ) -> Tensor:
        refuse("sdpa", sinks_N=sinks_N)
        # Not slices, whose gradients would each be padded with zeros to length T.
        documents = zip(*(x.split(self.lengths) for x in (q_TND, k_TKD, v_TKD)), strict=True)
        return torch.cat([attend_causally(q, k, v, window) for q, k, v in documents])


def attend_causally(q_TND: Tensor, k_SKD: Tensor, v_SKD: Tensor, window: int | None = None) -> Tensor:
    """Returns the attention output within one document of S tokens. The queries are its last T tokens; T is 1 or S."""
    num_queries = len(q_TND)
    if q_TND.device.type == "cpu" and q_TND.dtype == torch.bfloat16:
        # torch's bf16 kernel compiles itself for each length and keeps 7 MB each time: 72 steps on chat data took 1.2
        # GB. Short documents are also faster in fp32 (128 tokens: 1.2 ms instead of 3.6). Long ones are slower (512
        # tokens: 18 ms instead of 9), so they are padded to a few lengths; no real query attends to the padding.
        if num_queries == 1 or num_queries <= _LONGEST_IN_FP32:
            return attend_causally(q_TND.float(), k_SKD.float(), v_SKD.float(), window).to(q_TND.dtype)
        num_added = -num_queries % _BF16_LENGTH_STEP
        q_TND, k_SKD, v_SKD = (F.pad(x, (0, 0, 0, 0, 0, num_added)) for x in (q_TND, k_SKD, v_SKD))
    q, k, v = (x.transpose(0, 1)[None] for x in (q_TND, k_SKD, v_SKD))
    mask_TS = None if window is None or len(k_SKD) <= window else _window_mask(len(q_TND), len(k_SKD), window, q.device)
    is_grouped, is_causal = q.shape[1] != k.shape[1], num_queries > 1 and mask_TS is None
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_TS, is_causal=is_causal, enable_gqa=is_grouped)
    return out[0].transpose(0, 1)[:num_queries]


def _window_mask(num_queries: int, num_keys: int, window: int, device: torch.device) -> Tensor:
    """Returns whether each query, one of the last T of S tokens, may attend to a key, bool [T, S]."""
    tokens = torch.arange(num_keys, device=device)
    distance_TS = tokens[num_keys - num_queries :, None] - tokens
    return (distance_TS >= 0) & (distance_TS < window)
