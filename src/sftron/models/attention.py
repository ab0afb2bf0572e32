"""Causal attention within each document of a packed row; documents do not attend to each other (law 7).

The backends are compared in docs/architecture.md. "sdpa" runs anywhere and is the test oracle of the others.

    shape suffixes: T tokens of the packed row, N query heads, K key-value heads, D head size
"""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from sftron.errors import show
from sftron.kernels.device import compute_capability, is_gpu
from sftron.models.architecture import Layer
from sftron.models.attention_kernels import (
    PLAIN,
    FlashAttention,
    FlexAttention,
    Scores,
    VarlenAttention,
    compiled_flex_attention,
    flash_attn_function,
    lacking,
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
            ValueError: The backend does not implement the soft cap or the sinks; see `lacking`.
        """
        ...


CHOICES = ("auto", "sdpa", "varlen", "flash_attn", "flex")
"""The values of the configuration key; `flash_attn` is the newest version that is installed and supports the device."""

BACKENDS = ("sdpa", "varlen", "flash_attn_2", "flash_attn_3", "flash_attn_4", "flex")

_TRIED = {
    "auto": ("varlen", "flash_attn_3", "flash_attn_2", "flex", "sdpa"),
    "flash_attn": ("flash_attn_4", "flash_attn_3", "flash_attn_2"),
}
"""The order in which backends are tried. Only a measurement on a GPU may move one before varlen, torch's own kernel, or
add version 4, a beta whose first calls compile. flex reaches 85 to 90 % of the speed of version 2
(pytorch.org/blog/flexattention) with more options."""

_ANY_LATER = 99
_LIMITS = {
    "varlen": (range(8, _ANY_LATER), range(8, 257, 8)),
    "flash_attn_2": (range(8, _ANY_LATER), range(8, 257, 8)),
    "flash_attn_3": (range(9, 10), range(8, 257, 8)),
    "flash_attn_4": (range(9, 12), range(8, 129, 8)),
    "flex": (range(8, _ANY_LATER), range(16, 257)),
}
"""The supported major compute capabilities and head sizes."""

_DOCUMENT_STEP, _SHORTEST_LONGEST = 16, 128
"""The number of documents is padded to a multiple of the first, and max_seqlen to the second at least; see
`attend_documents`."""

_PLAIN_LAYER = Layer()

_MOST_TRIAL_ERROR = 0.05
"""The largest error of a backend's trial, relative to the norm; bf16 rounds to 0.01, and mistakes are of order 1."""


def print_error(line: str) -> None:
    show(line, to=sys.stderr)


def resolve_attention(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    layer: Layer = _PLAIN_LAYER,
    report: Callable[[str], object] = print_error,
) -> str:
    """Returns the entry of BACKENDS by which a layer computes attention.

    Whether kernels must be deterministic follows torch's global setting.

    Args:
        name: One of CHOICES; "auto" is the first backend that supports the device and the layer.
        report: Called with a line for each backend that supports them but fails in `trial_failure`.

    Raises:
        ValueError: The requested backend cannot run on the device, with the reason. There is no silent fallback.
    """
    if name not in CHOICES:
        raise ValueError(f"attention: {name!r} is not one of {', '.join(CHOICES)}.")
    # A window that a trial on few tokens notices. All layers that differ in nothing else share the trial.
    trial_layer = Layer(window=layer.window and 24, scale=layer.scale, softcap=layer.softcap, sinks=layer.sinks)
    reasons = []
    for backend in _TRIED.get(name, (name,)):
        reason = reason_against(backend, device, dtype, head_dim, layer)
        if (
            reason is None
            and backend != "sdpa"
            and (reason := trial_failure(backend, device, dtype, head_dim, trial_layer))
        ):
            report(f"attention: {backend} is not used: {reason}")
        if reason is None:
            return backend
        reasons.append(reason)
    # Several versions of flash_attn may share the same reason, which is reported once.
    reason = "; ".join(dict.fromkeys(reasons))
    raise ValueError(f"attention: {name!r} cannot run here: {reason}. Choose 'auto', or 'sdpa', which runs anywhere.")


def describe_backends(backends: Sequence[str]) -> str:
    """Returns "varlen", or "varlen in 25 layers, sdpa in 5 layers", given the backend of each layer."""
    counts = Counter(filter(None, backends))
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{name} in {number} layers" for name, number in counts.items()) or "none"


def reason_against(
    backend: str, device: torch.device, dtype: torch.dtype, head_dim: int, layer: Layer = _PLAIN_LAYER
) -> str | None:
    """Returns the reason why a backend cannot be used, with the value found and the value needed, or None if it can."""
    if backend == "sdpa":
        return None
    if not is_gpu(device):
        why = ", where it has no backward pass" if backend == "flex" else ""
        return f"it needs a CUDA device, but the device is {device.type!r}{why}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 or float16, but the model computes in {dtype_name(dtype)}"
    majors, head_dims = _LIMITS[backend]
    major, minor = compute_capability(device)
    if major not in majors:
        upper = "" if majors.stop == _ANY_LATER else f" and below {majors.stop}.0"
        return f"{backend} needs compute capability {majors.start}.0 or later{upper}, but the GPU has {major}.{minor}"
    if head_dim not in head_dims:
        sizes = f"{head_dims.start} to {head_dims[-1]} in steps of {head_dims.step}"
        return f"{backend} takes a head_dim of {sizes}, but the model has {head_dim}"
    if reason := lacking(backend, layer.softcap, has_sinks=layer.sinks):
        return reason
    if not backend.startswith("flash_attn"):
        return None
    version = int(backend[-1])
    if version == 3 and head_dim > 192 and torch.are_deterministic_algorithms_enabled():
        return f"{backend} is deterministic up to a head_dim of 192, but the model has {head_dim}"
    try:
        flash_attn_function(version)
    except ImportError as error:
        return str(error)
    return None


@cache
def trial_failure(backend: str, device: torch.device, dtype: torch.dtype, head_dim: int, layer: Layer) -> str | None:
    """Returns how a backend fails on two small documents on the device, forward and backward; None if it computes what
    sdpa computes on the CPU in fp32. A process tries each case once."""
    with torch.device("cpu"), torch.inference_mode(False):  # whatever the caller has set
        generator = torch.Generator().manual_seed(0)
        heads, weights = (torch.randn(128, num, head_dim, generator=generator).to(dtype) for num in (8, 4))
        sinks, bounds = torch.linspace(-1, 1, 4), torch.tensor([0, 48, 128], dtype=torch.int32)

    def results(name: str, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        with torch.inference_mode(False), torch.enable_grad():
            q, k, v = (x.to(device, dtype).requires_grad_() for x in heads.split([4, 2, 2], dim=1))
            scores = Scores(layer.window, layer.scale, layer.softcap, sinks.to(device) if layer.sinks else None)
            out = attend_documents(name, bounds.to(device), 80, 128)(q, k, v, scores)
            gradients = torch.autograd.grad(out, (q, k, v), weights.to(device, dtype))
        return [x.detach().cpu().float() for x in (out, *gradients)]

    try:
        found = results(backend, device, dtype)
    except Exception as error:  # a kernel of others may raise anything
        return f"on a trial, {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    finally:
        if backend == "flex":
            torch._dynamo.reset()  # or else the sizes of the trial's heads would count as the first of several
    expected = results("sdpa", torch.device("cpu"), torch.float32)
    errors = [float((x - exact).norm() / exact.norm()) for x, exact in zip(found, expected, strict=True)]
    if all(error <= _MOST_TRIAL_ERROR for error in errors):  # false for NaN
        return None
    measured = ", ".join(f"{error:.1g}" for error in errors)
    return f"its trial got outputs and gradients of q, k and v wrong by {measured}, above {_MOST_TRIAL_ERROR}"


def attend_documents(backend: str, cu_seqlens: Tensor, max_seqlen: int, num_tokens: int) -> Attend:
    """Returns the attention function of one batch, to be shared by all layers.

    Kernels and compiled graphs may be specialized for the number of documents and for max_seqlen, so both are padded:
    the number to a multiple of 16, because the backward pass of flash attention takes memory for each document, and
    max_seqlen to a power of two.

    Args:
        backend: One of BACKENDS, as returned by `resolve_attention`.
        cu_seqlens: The document boundaries, int32 [documents + 1], from 0 to num_tokens; documents may be empty. "sdpa"
            reads them here, so it takes them on the CPU; otherwise this read waits for the device. The other backends
            take them on the device of q.
        max_seqlen: An upper bound of the document lengths.

    Raises:
        ValueError: cu_seqlens is not int32, or a document is longer than max_seqlen (checked by "sdpa" alone).
    """
    if cu_seqlens.dtype != torch.int32:
        found = dtype_name(cu_seqlens.dtype)
        raise ValueError(f"cu_seqlens is {found}, but attention kernels read int32: call cu_seqlens.int().")
    if backend == "sdpa":
        lengths = tuple(cu_seqlens.diff().tolist())
        if max(lengths) > max_seqlen:
            raise ValueError(f"max_seqlen is {max_seqlen}, but cu_seqlens holds a document of {max(lengths)} tokens.")
        return SdpaAttention(lengths)
    if backend == "flex":
        return FlexAttention.of(compiled_flex_attention(), cu_seqlens, num_tokens)
    cu_seqlens = pad_documents(cu_seqlens)
    max_seqlen = max(_SHORTEST_LONGEST, 1 << (max_seqlen - 1).bit_length())
    if backend == "varlen":
        return VarlenAttention.of(cu_seqlens, max_seqlen)
    function = flash_attn_function(int(backend[-1]))
    return FlashAttention(backend, function, cu_seqlens, max_seqlen, torch.are_deterministic_algorithms_enabled())


def pad_documents(cu_seqlens: Tensor) -> Tensor:
    """Appends empty documents up to a multiple of 16: [0, 5, 9] -> [0, 5, 9, 9, ..., 9], 16 documents."""
    return torch.cat([cu_seqlens, cu_seqlens[-1:].expand(-(len(cu_seqlens) - 1) % _DOCUMENT_STEP)])
