"""Causal attention within each document of a flat row; no document sees another (law 7).

backend     where                     how
sdpa        anywhere                  torch's scaled_dot_product_attention, one document after another; the oracle
varlen      CUDA, bf16 or fp16        torch.nn.attention.varlen: flash-attention 2, part of torch
flash_attn  CUDA, bf16 or fp16        the flash-attn package

shape suffixes: T tokens of the flat row, N query heads, K key-value heads, D head size
"""

import importlib.util
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q_TND, k_TKD, v_TKD) -> out_TND. N is a multiple of K: each key-value head serves N / K query heads in a row."""

BACKENDS = ("sdpa", "varlen", "flash_attn")

_LONGEST_IN_FP32, _BF16_LENGTH_STEP = 256, 128
"""Of documents on a CPU, in tokens; see attend_causally."""


def resolve_attention(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """The backend to use for `name`, one of BACKENDS or "auto": the fastest that is correct on `device` in `dtype`.

    Raises: ValueError if the named backend cannot run there, with the reason and what to do. Never a fallback: a run
        that silently attends otherwise than it was told to is the failure this project exists to prevent.
    """
    if name == "auto":
        return "sdpa" if _reason_against("varlen", device, dtype) else "varlen"
    if name not in BACKENDS:
        raise ValueError(f"attention: {name!r} is not one of auto, {', '.join(BACKENDS)}.")
    reason = _reason_against(name, device, dtype)
    if reason:
        raise ValueError(
            f"attention: {name!r} cannot run here: {reason}. Choose 'auto', or 'sdpa', which runs anywhere."
        )
    return name


def _reason_against(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    if name == "sdpa":
        return None
    if device.type != "cuda":
        return f"it needs a CUDA device, this is {device.type!r}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 or float16, the model in {str(dtype).removeprefix('torch.')}"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"it needs compute capability 8.0 (A100) or later, this device has {capability[0]}.{capability[1]}"
    if name == "flash_attn" and importlib.util.find_spec("flash_attn") is None:
        return "the package is not installed (pip install flash-attn)"
    return None


def attend_documents(backend: str, cu_seqlens: Tensor, max_seqlen: int) -> Attend:
    """The attention of one batch, made once and called by every layer.

    backend: one of BACKENDS, as `resolve_attention` gave it.
    cu_seqlens: int32 [documents + 1], from 0 to T. For sdpa it is read here, once for all layers, so there it should be
        on the CPU; on a device this one read waits for it. The others want it on the device of q.
    max_seqlen: at least the longest document's length.

    Raises: ValueError (sdpa only, where the numbers are at hand) if a document is longer than max_seqlen.
    """
    if backend == "varlen":
        return partial(_attend_varlen, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
    if backend == "flash_attn":
        return partial(_attend_flash_attn, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
    lengths = cu_seqlens.diff().tolist()
    if max(lengths) > max_seqlen:
        raise ValueError(f"max_seqlen is {max_seqlen}, but cu_seqlens holds a document of {max(lengths)} tokens.")
    return partial(_attend_sdpa, lengths=lengths)


def _attend_sdpa(q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, *, lengths: list[int]) -> Tensor:
    # split, not slices: its backward is one concatenation, where each slice would add a zero-filled gradient of all T.
    documents = zip(*(x.split(lengths) for x in (q_TND, k_TKD, v_TKD)), strict=True)
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


def _attend_varlen(q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, *, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11 and 2.12 take grouped heads as they are; 2.13 wants to be told.
    tells_grouped = "enable_gqa" in inspect.signature(varlen_attn).parameters
    grouped: dict[str, Any] = {"enable_gqa": q_TND.shape[1] != k_TKD.shape[1]} if tells_grouped else {}
    out = varlen_attn(
        q_TND, k_TKD, v_TKD, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, window_size=(-1, 0), **grouped
    )
    assert isinstance(out, Tensor)
    return out


def _attend_flash_attn(q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, *, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    from flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func(q_TND, k_TKD, v_TKD, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, causal=True)
