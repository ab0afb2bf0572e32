"""Flash attention over packed documents: torch's own kernel, and those of the flash-attention packages.

    shape suffixes: T tokens of the flat row, N query heads, K key-value heads, D head size

All are causal, scale by 1/sqrt(D), and give each key-value head to N / K query heads without repeating it. Documents
are told by their bounds alone, so nothing of size T x T exists. Empty documents cost a launched block each, no more.
"""

import importlib
import importlib.metadata
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

# torch 2.11 and 2.12 take grouped heads as they are; 2.13 wants to be told.
_GROUPED_HEADS: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)

_ARGUMENTS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "causal", "deterministic")

_MODULES = {
    2: ("flash_attn",),
    3: ("flash_attn_interface", "flash_attn_3.flash_attn_interface"),
    4: ("flash_attn.cute",),
}
"""Where each version's flash_attn_varlen_func is."""

_INSTALLATION = {
    2: "pip install flash-attn",
    3: "build it from hopper/ of github.com/Dao-AILab/flash-attention",
    4: "pip install flash-attn-4",
}


_Method = TypeVar("_Method", bound=Callable[..., Any])


def outside_of_graphs(method: _Method) -> _Method:
    """torch.compiler.disable, whose own types say that a method is none."""
    return torch.compiler.disable(method)  # pyright: ignore[reportReturnType]


@dataclass(frozen=True, slots=True)
class VarlenAttention:
    """torch.nn.attention.varlen: flash-attention 2. Deterministic wherever torch.use_deterministic_algorithms is on.

    cu_seqlens: int32 [documents + 1] on the device of q.
    longest: [max_seqlen, 0], empty: torch.compile takes a number of ours for a constant and compiles anew for another
        one, but can be told that a length varies. So max_seqlen, at least the longest document's, is told as a length.
    """

    cu_seqlens: Tensor
    longest: Tensor

    @classmethod
    def of(cls, cu_seqlens: Tensor, max_seqlen: int) -> "VarlenAttention":
        longest = cu_seqlens.new_empty(max_seqlen, 0)
        for tensor in (cu_seqlens, longest):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return cls(cu_seqlens, longest)

    def __call__(self, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        bounds, longest = self.cu_seqlens, self.longest.shape[0]
        # A window without an end to the left and of nothing to the right is what makes this one causal.
        out_TND = varlen_attn(
            q_TND, k_TKD, v_TKD, bounds, bounds, longest, longest, window_size=(-1, 0), **_GROUPED_HEADS
        )
        assert isinstance(out_TND, Tensor)
        return out_TND


# Not frozen, for torch 2.11: see SdpaAttention.
@dataclass(slots=True)
class FlashAttention:
    """flash_attn_varlen_func of one of the packages; fields as in VarlenAttention."""

    function: Callable[..., Any]
    cu_seqlens: Tensor
    max_seqlen: int
    deterministic: bool

    # Outside of compiled graphs: not every version of 3 and 4 can be traced. Nothing would fuse with it in any case.
    @outside_of_graphs
    def __call__(self, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        # By name only: the fourth argument is the bounds in 2 and 3, and another query in 4.
        out = self.function(
            q_TND,
            k_TKD,
            v_TKD,
            cu_seqlens_q=self.cu_seqlens,
            cu_seqlens_k=self.cu_seqlens,
            max_seqlen_q=self.max_seqlen,
            max_seqlen_k=self.max_seqlen,
            causal=True,
            deterministic=self.deterministic,
        )
        # 4, and 3 until 2025, give the log-sum-exp as well, asked for or not.
        return out[0] if isinstance(out, tuple) else out


def flash_attn_function(version: int) -> Callable[..., Any]:
    """The package's flash_attn_varlen_func.

    Raises: ImportError if version 2, 3 or 4 is not installed, cannot be loaded, or does not take the arguments that
        FlashAttention passes; with what to do.
    """
    if version == 4:
        # Version 2's package carries a folder flash_attn/cute as well, of some unfinished state of 4.
        try:
            importlib.metadata.version("flash-attn-4")
        except importlib.metadata.PackageNotFoundError:
            raise ImportError(f"flash_attn 4 is not installed ({_INSTALLATION[4]})") from None
    function = None
    for module in _MODULES[version]:
        try:
            function = getattr(importlib.import_module(module), "flash_attn_varlen_func", None)
        except ModuleNotFoundError:
            continue
        except ImportError as error:
            raise ImportError(f"flash_attn {version} is installed but cannot be loaded: {error}") from error
        if function:
            break
    if function is None:
        raise ImportError(f"flash_attn {version} is not installed ({_INSTALLATION[version]})")
    missing = [name for name in _ARGUMENTS if name not in inspect.signature(function).parameters]
    if missing:
        raise ImportError(f"flash_attn {version} as installed does not take {', '.join(missing)}; install a newer one")
    return function
