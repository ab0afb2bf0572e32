"""Causal attention within each document of a packed row; documents do not attend to each other (law 7).

The backends are compared in docs/architecture.md. "sdpa" runs anywhere and is the test oracle of the others.

    shape suffixes: T tokens of the packed row, N query heads, K key-value heads, D head size
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from sftron.kernels.device import compute_capability, is_gpu
from sftron.models.architecture import Layer
from sftron.models.attention_kernels import (
    NO_SOFTCAP,
    PLAIN,
    FlashAttention,
    FlexAttention,
    Scores,
    VarlenAttention,
    compiled_flex_attention,
    flash_attn_function,
)
from sftron.models.quantization import dtype_name
from sftron.models.sdpa_attention import SdpaAttention


class Attend(Protocol):
    """The attention function of one batch, which every layer calls."""

    def __call__(self, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, scores: Scores = PLAIN) -> Tensor:
        """Returns the attention output, [T, N, D].

        Args:
            q_TND: The queries. N is a multiple of K: each key-value head serves N / K consecutive query heads.

        Raises:
            ValueError: The backend does not implement the soft cap or the sinks; see `reason_against`.
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

_FEWEST_DOCUMENTS, _SHORTEST_LONGEST = 16, 128
"""The smallest padded number of documents and the smallest padded max_seqlen; see `attend_documents`."""


def resolve_attention(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, layers: Sequence[Layer] = ()
) -> str:
    """Returns the entry of BACKENDS for `name`, one of CHOICES; "auto" is the fastest backend that supports `device`
    and all `layers`.

    Whether kernels must be deterministic follows torch's global setting.

    Raises:
        ValueError: The requested backend cannot run on the device, with the reason. There is no silent fallback.
    """
    if name not in CHOICES:
        raise ValueError(f"attention: {name!r} is not one of {', '.join(CHOICES)}.")
    reasons = []
    for backend in (each for each in _FASTEST_FIRST if name == "auto" or each.startswith(name)):
        reason = reason_against(backend, device, dtype, head_dim, layers)
        if reason is None:
            return backend
        reasons.append(reason)
    # Several versions of flash_attn may share the same reason, which is reported once.
    reason = "; ".join(dict.fromkeys(reasons))
    raise ValueError(f"attention: {name!r} cannot run here: {reason}. Choose 'auto', or 'sdpa', which runs anywhere.")


def reason_against(
    backend: str, device: torch.device, dtype: torch.dtype, head_dim: int, layers: Sequence[Layer] = ()
) -> str | None:
    """Returns the reason why a backend cannot be used, with the value found and the value needed, or None if it can."""
    if backend == "sdpa":
        return None
    if not is_gpu(device):
        why = ", where it has no backward pass" if backend == "flex" else ""
        return f"it needs a CUDA device, this is {device.type!r}{why}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 or float16, the model in {dtype_name(dtype)}"
    majors, head_dims = _LIMITS[backend]
    major, minor = compute_capability(device)
    if major not in majors:
        upper = "" if majors.stop == _ANY_LATER else f" and below {majors.stop}.0"
        return f"{backend} needs compute capability {majors.start}.0 or later{upper}, this device has {major}.{minor}"
    if head_dim not in head_dims:
        sizes = f"{head_dims.start} to {head_dims[-1]} in steps of {head_dims.step}"
        return f"{backend} takes a head_dim of {sizes}, the model's is {head_dim}"
    lacking = _lacking(backend, layers, major)
    if lacking or not backend.startswith("flash_attn"):
        return lacking
    version = int(backend[-1])
    if version == 3 and head_dim > 192 and torch.are_deterministic_algorithms_enabled():
        return f"{backend} is deterministic up to a head_dim of 192, the model's is {head_dim}"
    try:
        flash_attn_function(version)
    except ImportError as error:
        return str(error)
    return None


def _lacking(backend: str, layers: Sequence[Layer], major: int) -> str | None:
    """Returns the reason why a backend cannot compute some layer on a device of this major compute capability."""
    if backend != "flex" and any(layer.sinks for layer in layers):
        return f"{backend} has no attention sinks that are trained, the model has"
    softcap = next((layer.softcap for layer in layers if layer.softcap is not None), None)
    if backend in NO_SOFTCAP and softcap is not None:
        return f"{backend} has no soft cap of scores that is trained, the model's is {softcap:g}"
    window = next((layer.window for layer in layers if layer.window is not None), None)
    # Its backward pass ignored the window there when this was written (flash_attn/cute/interface.py, 4.0.0b36).
    if backend == "flash_attn_4" and major == 9 and window is not None:
        return f"{backend} has no window in its backward pass on compute capability 9, the model's is {window} tokens"
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
        found = dtype_name(cu_seqlens.dtype)
        raise ValueError(f"cu_seqlens is {found}, attention kernels read it as int32: call cu_seqlens.int().")
    if backend == "sdpa":
        lengths = tuple(cu_seqlens.diff().tolist())
        if max(lengths) > max_seqlen:
            raise ValueError(f"max_seqlen is {max_seqlen}, but cu_seqlens holds a document of {max(lengths)} tokens.")
        return SdpaAttention(lengths)
    if backend == "flex":
        return FlexAttention.of(compiled_flex_attention(), cu_seqlens, num_tokens)
    cu_seqlens = pad_documents(cu_seqlens)
    max_seqlen = _power_of_two(max_seqlen, _SHORTEST_LONGEST)
    if backend == "varlen":
        return VarlenAttention.of(cu_seqlens, max_seqlen)
    function = flash_attn_function(int(backend[-1]))
    return FlashAttention(backend, function, cu_seqlens, max_seqlen, torch.are_deterministic_algorithms_enabled())


def pad_documents(cu_seqlens: Tensor) -> Tensor:
    """Appends empty documents up to a power of two: [0, 5, 9] -> [0, 5, 9, 9, ..., 9], 16 documents."""
    num_documents = len(cu_seqlens) - 1
    num_added = _power_of_two(num_documents, _FEWEST_DOCUMENTS) - num_documents
    return torch.cat([cu_seqlens, cu_seqlens[-1:].expand(num_added)])


def _power_of_two(size: int, least: int) -> int:
    return max(least, 1 << (size - 1).bit_length())
