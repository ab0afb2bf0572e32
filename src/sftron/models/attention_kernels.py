"""GPU attention kernels for packed documents: torch's varlen, the flash-attention packages, and torch's flex.

All are causal, and take only the boundaries of the documents and a window; nothing of size T x T is allocated.

    shape suffixes: T tokens of the packed row, N query heads, K key-value heads, D head size, B blocks of 128 tokens
"""

import functools
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.attention.varlen import varlen_attn

_Method = TypeVar("_Method", bound=Callable[..., Any])


def outside_of_graphs(method: _Method) -> _Method:
    """Applies torch.compiler.disable, whose type annotations exclude methods."""
    return torch.compiler.disable(method)  # pyright: ignore[reportReturnType]


class Scores(NamedTuple):
    """How a layer computes the scores of attention, and which keys a query has."""

    window: int | None = None
    """The number of tokens that a token attends to, itself included; None means all tokens of its document up to
    itself."""
    scale: float | None = None
    """The factor of the scores; None means 1 / sqrt(D)."""
    softcap: float | None = None
    """The bound c of the scaled scores s, which become c * tanh(s / c) (Gemma 2, arXiv 2408.00118)."""
    sinks_N: Tensor | None = None
    """One logit per head that takes part in the softmax but has no value (gpt-oss, arXiv 2508.10925)."""


PLAIN = Scores()

_NO_SOFTCAP = ("varlen", "flash_attn_4")
"""The backends without a soft cap. Version 4 has none in its backward pass (Dao-AILab/flash-attention, pull request
2544)."""


def lacking(backend: str, softcap: float | None, *, has_sinks: bool) -> str | None:
    """Returns what a backend does not implement of these; None if it implements them.

    flash-attention 4 has sinks, but their gradient only since version 4.0.0b37 (pull request 2706), or else none.
    """
    if has_sinks and backend != "flex":
        return f"{backend} cannot train attention sinks, which this model has"
    if softcap is not None and backend in _NO_SOFTCAP:
        return f"{backend} cannot train with a soft cap of scores, and this model's is {softcap:g}"
    return None


def _refuse(backend: str, scores: Scores) -> None:
    if reason := lacking(backend, scores.softcap, has_sinks=scores.sinks_N is not None):
        raise ValueError(f"attention: {reason}. Choose 'flex' or 'sdpa'.")


# --- torch.nn.attention.varlen ---

# torch 2.11 supports grouped heads by default; 2.12 and later require this argument.
_GROUPED_HEADS: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)


@dataclass(frozen=True, slots=True)
class VarlenAttention:
    """torch.nn.attention.varlen (flash-attention 2); deterministic if torch.use_deterministic_algorithms is enabled."""

    cu_seqlens: Tensor
    """The document boundaries, int32 [documents + 1], on the device of q."""
    longest: Tensor
    """An empty tensor [max_seqlen, 0]: a dimension can be dynamic, but torch.compile recompiles for each new int."""

    @classmethod
    def of(cls, cu_seqlens: Tensor, max_seqlen: int) -> "VarlenAttention":
        longest = cu_seqlens.new_empty(max_seqlen, 0)
        for tensor in (cu_seqlens, longest):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return cls(cu_seqlens, longest)

    def __call__(self, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, scores: Scores = PLAIN) -> Tensor:
        _refuse("varlen", scores)
        bounds, longest = self.cu_seqlens, self.longest.shape[0]
        # The numbers of tokens before and after a token that it attends to; -1 is unlimited.
        num_before = -1 if scores.window is None else scores.window - 1
        options: dict[str, Any] = {"window_size": (num_before, 0), "scale": scores.scale}
        out_TND = varlen_attn(q_TND, k_TKD, v_TKD, bounds, bounds, longest, longest, **options, **_GROUPED_HEADS)
        assert isinstance(out_TND, Tensor)
        return out_TND


# --- The flash-attention packages ---

_MODULES = {
    2: ("flash_attn",),
    3: ("flash_attn_interface", "flash_attn_3.flash_attn_interface"),
    4: ("flash_attn.cute",),
}
"""The modules that may define flash_attn_varlen_func, for each version."""

_INSTALLATION = {
    2: "pip install flash-attn",
    3: "build it from hopper/ of github.com/Dao-AILab/flash-attention",
    4: "pip install flash-attn-4",
}


# Not frozen: torch 2.11 guards on frozen objects and recompiles.
@dataclass(slots=True)
class FlashAttention:
    """flash_attn_varlen_func from one of the packages; cu_seqlens and max_seqlen are as in VarlenAttention."""

    backend: str
    function: Callable[..., Any]
    cu_seqlens: Tensor
    max_seqlen: int
    deterministic: bool

    # Excluded from compiled graphs: some versions of 3 and 4 cannot be traced.
    @outside_of_graphs
    def __call__(self, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, scores: Scores = PLAIN) -> Tensor:
        _refuse(self.backend, scores)
        # What is not needed is not passed, because the versions differ in the values that mean "none".
        window_size = None if scores.window is None else (scores.window - 1, 0)
        options = {"window_size": window_size, "softmax_scale": scores.scale, "softcap": scores.softcap}
        # Keyword arguments only: the fourth positional one is cu_seqlens in versions 2 and 3, and another query in 4.
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
            **{name: value for name, value in options.items() if value is not None},
        )
        # Version 4, and version 3 until 2025, always return the log-sum-exp as well.
        return out[0] if isinstance(out, tuple) else out


def flash_attn_function(version: int) -> Callable[..., Any]:
    """Returns flash_attn_varlen_func of a version (2, 3 or 4).

    Raises:
        ImportError: It is not installed or cannot be loaded, with the remedy.
    """
    if version == 4:
        # The package of version 2 also contains flash_attn/cute, which is an unfinished copy of version 4.
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
    return function


# --- torch's flex attention: one Triton kernel that skips fully masked blocks ---

_BLOCK = 128
"""The block size in tokens; the kernel skips or computes _BLOCK x _BLOCK scores at once."""


# Not frozen: a mask is added at the first call with its window.
@dataclass(slots=True)
class FlexAttention:
    """flex_attention with one block mask for each window, which the layers of a batch share."""

    function: Callable[..., Any]
    """flex_attention, compiled except on a CPU."""
    cu_seqlens: Tensor
    num_tokens: int
    block_masks: dict[int | None, BlockMask]
    """The masks by window."""

    @classmethod
    def of(cls, function: Callable[..., Any], cu_seqlens: Tensor, num_tokens: int) -> "FlexAttention":
        return cls(function, cu_seqlens, num_tokens, {None: build_block_mask(cu_seqlens, num_tokens)})

    def __call__(self, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, scores: Scores = PLAIN) -> Tensor:
        if scores.window not in self.block_masks:
            self.block_masks[scores.window] = build_block_mask(self.cu_seqlens, self.num_tokens, scores.window)
        options: dict[str, Any] = {"block_mask": self.block_masks[scores.window], "scale": scores.scale}
        if scores.softcap is not None:
            options["score_mod"] = _capped_by(scores.softcap)
        q, k, v = (x.transpose(0, 1)[None] for x in (q_TND, k_TKD, v_TKD))
        is_grouped = q.shape[1] != k.shape[1]
        if scores.sinks_N is None:
            return self.function(q, k, v, enable_gqa=is_grouped, **options)[0].transpose(0, 1)
        out, aux = self.function(q, k, v, enable_gqa=is_grouped, return_aux=AuxRequest(lse=True), **options)
        # With a sink, the sum of exponentials is exp(lse) + exp(sink).
        share_NT = torch.sigmoid(aux.lse[0] - scores.sinks_N.float()[:, None])
        return (out[0] * share_NT[..., None]).to(out.dtype).transpose(0, 1)


@functools.cache
def _capped_by(softcap: float) -> Callable[..., Tensor]:
    """Returns the same function at each call, because torch compiles flex_attention for each."""

    def capped(score: Tensor, _batch: Tensor, _head: Tensor, _query: Tensor, _key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


@functools.cache
def compiled_flex_attention() -> Callable[..., Any]:
    """Returns flex_attention, compiled; without compilation it would allocate all T x T scores."""
    return torch.compile(flex_attention)


def build_block_mask(cu_seqlens: Tensor, num_tokens: int, window: int | None = None) -> BlockMask:
    """Returns the block mask by which a query attends to the tokens of its own document up to itself, or to the last
    `window` of them.

    torch's create_block_mask evaluates all T x T pairs (1 GB at 32768 tokens). Since documents are contiguous, their
    boundaries are sufficient. An example with blocks of 4 tokens:

        documents  0 0 0 1  1 1 1 1  1 1 1 1  2 2 2 2      query block 0   p . . .     . skipped
                                                           query block 1   p p . .     p the mask is evaluated
                                                           query block 2   p F p .     F all visible
                                                           query block 3   . . . p

    Args:
        cu_seqlens: The document boundaries, int32 [documents + 1], from 0 to num_tokens, on the device of q. Reading
            them does not synchronize with the device.
    """
    device = cu_seqlens.device
    # The index of each token's document: the number of documents that end at or before it. Empty documents get no
    # token.
    tokens = torch.arange(num_tokens, dtype=cu_seqlens.dtype, device=device)
    document_T = torch.searchsorted(cu_seqlens[1:], tokens, right=True, out_int32=True)
    blocks = torch.arange(0, num_tokens, _BLOCK, device=device)
    first_token, last_token = blocks, (blocks + _BLOCK - 1).clamp(max=num_tokens - 1)
    first_document, last_document = document_T[first_token], document_T[last_token]
    is_earlier_BB = first_token[:, None] > first_token
    # Since documents are contiguous, two blocks have a visible pair if their nearest tokens share a document, and all
    # pairs are visible if their farthest tokens do.
    sees_some_BB = (first_token[:, None] == first_token) | is_earlier_BB & (first_document[:, None] == last_document)
    is_whole = blocks + _BLOCK <= num_tokens
    sees_all_BB = is_earlier_BB & (last_document[:, None] == first_document) & is_whole[:, None]

    def is_visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (document_T[query] == document_T[key])

    def is_in_window(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        assert window is not None
        return is_visible(batch, head, query, key) & (query - key < window)

    if window is not None:
        sees_some_BB &= first_token[:, None] - last_token < window
        sees_all_BB &= last_token[:, None] - first_token < window

    return BlockMask.from_kv_blocks(
        *_listed(sees_some_BB & ~sees_all_BB),
        *_listed(sees_all_BB),
        BLOCK_SIZE=_BLOCK,
        mask_mod=is_visible if window is None else is_in_window,
        seq_lengths=(num_tokens, num_tokens),
    )


def _listed(chosen_BB: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the number of key blocks of each query block [1, 1, B], and their indices, listed first [1, 1, B, B]."""
    chosen = chosen_BB[None, None].int()
    return chosen.sum(-1, dtype=torch.int32), chosen.argsort(dim=-1, descending=True, stable=True).int()
