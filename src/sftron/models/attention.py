"""Causal attention within each document of a flat row; no document sees another (law 7).

backend           where                    how
sdpa              anywhere                 torch's scaled_dot_product_attention, one document after another; the oracle
varlen            CUDA 8.0, bf16 or fp16   torch.nn.attention.varlen: flash-attention 2, part of torch
flash_attn_2      CUDA 8.0, bf16 or fp16   the flash-attn package
flash_attn_3      CUDA 9.x, bf16 or fp16   the flash-attention 3 package, for Hopper
flash_attn_4      CUDA 9.x to 11.x, same   the flash-attn-4 package, for Hopper and Blackwell
flex              CUDA 8.0, bf16 or fp16   torch's flex attention, compiled

shape suffixes: T tokens of the flat row, N query heads, K key-value heads, D head size
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sftron.models.flash_attention import FlashAttention, VarlenAttention, flash_attn_function, outside_of_graphs
from sftron.models.flex_attention import FlexAttention, build_block_mask, compiled_flex_attention

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q_TND, k_TKD, v_TKD) -> out_TND. N is a multiple of K: each key-value head serves N / K query heads in a row."""

CHOICES = ("auto", "sdpa", "varlen", "flash_attn", "flex")
"""What a user may ask for; `flash_attn` is the newest version that is installed and can run on the device."""

BACKENDS = ("sdpa", "varlen", "flash_attn_2", "flash_attn_3", "flash_attn_4", "flex")

_FASTEST_FIRST = ("flash_attn_4", "flash_attn_3", "varlen", "flash_attn_2", "flex", "sdpa")
"""4 and 3 use what Blackwell and Hopper added to the tensor cores: 3 takes 1/1.5 to 1/2 of 2's time on an H100 (arXiv
2407.08608). varlen is 2's kernel without a package, and stays inside a compiled block. flex comes to 85 to 90 % of 2
(pytorch.org/blog/flexattention), and takes head sizes that the others do not."""

_ANY_LATER = 99


@dataclass(frozen=True, slots=True)
class _Limits:
    """majors: of the compute capability."""

    majors: range
    head_dims: range


_LIMITS = {
    "varlen": _Limits(range(8, _ANY_LATER), range(8, 257, 8)),
    "flash_attn_2": _Limits(range(8, _ANY_LATER), range(8, 257, 8)),
    "flash_attn_3": _Limits(range(9, 10), range(8, 257, 8)),
    "flash_attn_4": _Limits(range(9, 12), range(8, 129, 8)),
    "flex": _Limits(range(8, _ANY_LATER), range(16, 257)),
}

_LONGEST_IN_FP32, _BF16_LENGTH_STEP = 256, 128
"""Of documents on a CPU, in tokens; see attend_causally."""

_FEWEST_DOCUMENTS, _SHORTEST_LONGEST = 16, 128
"""The smallest bucket of each; see attend_documents."""


def resolve_attention(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """The backend to use for `name`, one of CHOICES: for "auto" the fastest that is correct on `device`.

    Whether deterministic kernels are asked for is read here, from torch.

    Returns: one of BACKENDS.
    Raises: ValueError if what is named cannot run there, with the reason and what to do. Never a fallback: a run
        that silently attends otherwise than it was told to is the failure this project exists to prevent.
    """
    if name not in CHOICES:
        raise ValueError(f"attention: {name!r} is not one of {', '.join(CHOICES)}.")
    candidates = [backend for backend in _FASTEST_FIRST if name == "auto" or backend.startswith(name)]
    reasons = []
    for backend in candidates:
        reason = reason_against(backend, device, dtype, head_dim)
        if reason is None:
            return backend
        reasons.append(reason)
    # A device or type that no version of flash_attn can use is said once.
    reason = "; ".join(dict.fromkeys(reasons))
    raise ValueError(f"attention: {name!r} cannot run here: {reason}. Choose 'auto', or 'sdpa', which runs anywhere.")


def reason_against(backend: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why one of BACKENDS cannot run there, with both values; None if it can."""
    if backend == "sdpa":
        return None
    if device.type != "cuda":
        why = ", where it has no backward pass" if backend == "flex" else ""
        return f"it needs a CUDA device, this is {device.type!r}{why}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 or float16, the model in {str(dtype).removeprefix('torch.')}"
    majors, head_dims = _LIMITS[backend].majors, _LIMITS[backend].head_dims
    major, minor = torch.cuda.get_device_capability(device)
    if major not in majors:
        upper = "" if majors.stop == _ANY_LATER else f" and below {majors.stop}.0"
        return f"{backend} needs compute capability {majors.start}.0 or later{upper}, this device has {major}.{minor}"
    if head_dim not in head_dims:
        return (
            f"{backend} takes a head_dim of {head_dims.start} to {head_dims[-1]} in steps of {head_dims.step}, "
            f"the model's is {head_dim}"
        )
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
    """The attention of one batch, made once and called by every layer.

    backend: one of BACKENDS, as `resolve_attention` gave it.
    cu_seqlens: int32 [documents + 1], from 0 to num_tokens; documents may be empty. For sdpa it is read here, once for
        all layers, so there it should be on the CPU; on a device this one read waits for it. The others want it on the
        device of q.
    max_seqlen: at least the longest document's length.

    Kernels and graphs are chosen by the number of bounds and by max_seqlen, so both are rounded up to a power of two,
    here: nothing is compiled anew for each batch.

    Raises: ValueError if cu_seqlens is not int32, or (sdpa only, where the numbers are at hand) if a document is longer
        than max_seqlen.
    """
    if cu_seqlens.dtype != torch.int32:
        found = str(cu_seqlens.dtype).removeprefix("torch.")
        raise ValueError(f"cu_seqlens is {found}, attention kernels read it as int32: call cu_seqlens.int().")
    if backend == "sdpa":
        return SdpaAttention(_lengths(cu_seqlens, max_seqlen))
    if backend == "flex":
        return FlexAttention(compiled_flex_attention(), build_block_mask(cu_seqlens, num_tokens))
    cu_seqlens = pad_documents(cu_seqlens)
    max_seqlen = _power_of_two(max_seqlen, _SHORTEST_LONGEST)
    if backend == "varlen":
        return VarlenAttention.of(cu_seqlens, max_seqlen)
    function = flash_attn_function(int(backend[-1]))
    return FlashAttention(function, cu_seqlens, max_seqlen, torch.are_deterministic_algorithms_enabled())


def pad_documents(cu_seqlens: Tensor) -> Tensor:
    """Empty documents at the end, up to a power of two of them: [0, 5, 9] -> [0, 5, 9, 9, ..., 9], 16 documents."""
    num_documents = len(cu_seqlens) - 1
    num_added = _power_of_two(num_documents, _FEWEST_DOCUMENTS) - num_documents
    return torch.cat([cu_seqlens, cu_seqlens[-1:].expand(num_added)])


def _power_of_two(size: int, least: int) -> int:
    return max(least, 1 << (size - 1).bit_length())


def _lengths(cu_seqlens: Tensor, max_seqlen: int) -> tuple[int, ...]:
    lengths = tuple(cu_seqlens.diff().tolist())
    if max(lengths) > max_seqlen:
        raise ValueError(f"max_seqlen is {max_seqlen}, but cu_seqlens holds a document of {max(lengths)} tokens.")
    return lengths


# Not frozen: torch 2.11 looks into what is frozen, though the call is no part of a graph, and compiles anew for it.
@dataclass(slots=True)
class SdpaAttention:
    """One call of torch's scaled_dot_product_attention a document; lengths: of the documents, in tokens."""

    lengths: tuple[int, ...]

    # Outside of compiled graphs: a graph would hold one call a document, and be made anew for each batch.
    @outside_of_graphs
    def __call__(self, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        # split, not slices: its backward is one concatenation, where each slice would add a zero-filled gradient of
        # all T.
        documents = zip(*(x.split(self.lengths) for x in (q_TND, k_TKD, v_TKD)), strict=True)
        return torch.cat([attend_causally(q, k, v) for q, k, v in documents])


def attend_causally(q_TND: Tensor, k_SKD: Tensor, v_SKD: Tensor) -> Tensor:
    """Attention within a single document; the T queries are its last ones, and T is 1 or S."""
    num_queries = len(q_TND)
    if q_TND.device.type == "cpu" and q_TND.dtype == torch.bfloat16:
        # torch's bf16 kernel compiles itself anew for each length and keeps 7 MB of it for good: 72 steps of chat took
        # 1.2 GB. Short documents are also faster in fp32 (128 tokens: 1.2 ms against 3.6), long ones slower (512: 18
        # against 9), so those are filled up to a few lengths; no real query sees what comes after it.
        if num_queries == 1 or num_queries <= _LONGEST_IN_FP32:
            return attend_causally(q_TND.float(), k_SKD.float(), v_SKD.float()).to(q_TND.dtype)
        num_added = -num_queries % _BF16_LENGTH_STEP
        q_TND, k_SKD, v_SKD = (F.pad(x, (0, 0, 0, 0, 0, num_added)) for x in (q_TND, k_SKD, v_SKD))
    q, k, v = (x.transpose(0, 1)[None] for x in (q_TND, k_SKD, v_SKD))
    is_grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=num_queries > 1, enable_gqa=is_grouped)
    return out[0].transpose(0, 1)[:num_queries]
