"""Gated DeltaNet (arXiv 2412.06464) on a packed row: the gated delta rule and a causal convolution within documents.

Each head has a state S, [D, E], which is zero at the start of each document (law 7). Token t, with a query, key and
value, a decay exp(g) and a learning rate beta, corrects what the state returns for its key, and then reads it:

    S <- exp(g_t) S;  S <- S + k_t (beta_t (v_t - S^T k_t))^T;  o_t = S^T q_t

Training computes it in chunks of tokens, which turns all of it but one product per chunk into batched matrix products.
For a chunk with the sums G of g from its start, and the strictly lower triangle A_ij = beta_i exp(G_i - G_j) k_i.k_j,
(I + A) [u w] = [beta v, beta exp(G) k] gives the corrections v' = u - w S, from which the outputs and the next state
follow: o = exp(G) q S + (q k^T exp(G_i - G_j)) v', S <- exp(G_C) S + (exp(G_C - G) k)^T v'.

    shape suffixes: T tokens of the packed row, N value heads, K key heads (each serves N / K consecutive value heads),
    D size of a key, E size of a value, M chunks of all documents, C tokens of a chunk, W channels, J taps
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from sftron.models.attention_kernels import outside_of_graphs

CHUNK_SIZE = 64
"""The chunk size of the kernels in fla, and of transformers."""

_L2_EPS = 1e-6
"""Added to the squared length of queries and keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSizes:
    """The sizes of the heads and of the convolution of all delta layers of a model."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    num_taps: int

    @property
    def widths(self) -> list[int]:
        """The numbers of channels of all queries, keys and values."""
        width = self.num_key_heads * self.key_dim
        return [width, width, self.num_value_heads * self.value_dim]

    @property
    def rows(self) -> list[int]:
        """The rows of the projections in_proj_qkv, in_proj_z (the output gate), in_proj_b and in_proj_a."""
        return [sum(self.widths), self.widths[2], self.num_value_heads, self.num_value_heads]

    @property
    def flops(self) -> int:
        """The FLOPs of a token's forward pass through a layer, other than those of its projections."""
        return 6 * self.num_value_heads * self.key_dim * self.value_dim + 2 * self.num_taps * sum(self.widths)


@cache
def bytes_for_backward(sizes: DeltaSizes, num_tokens: int, longest: int, dtype: torch.dtype) -> int:
    """Returns the bytes that the delta rule of a layer keeps for its backward pass, without its inputs, for documents
    of `longest` tokens. It is computed on the meta device."""
    cu_seqlens = torch.tensor([*range(0, num_tokens, longest), num_tokens])
    with torch.device("meta"):
        heads = ((sizes.num_key_heads, sizes.key_dim),) * 2 + ((sizes.num_value_heads, sizes.value_dim),)
        q, k, v = (torch.empty(num_tokens, *each, dtype=dtype, requires_grad=True) for each in heads)
        g, beta = (torch.empty(num_tokens, sizes.num_value_heads, requires_grad=True) for _ in range(2))
    found: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage()._cdata] = tensor
        return tensor

    chunks = _Chunks(cu_seqlens, CHUNK_SIZE, torch.device("meta"))
    with torch.autograd.graph.saved_tensors_hooks(keep, keep):
        output = chunks.rule(q, k, v, g, beta)
    inputs = {x.untyped_storage()._cdata for x in (q, k, v, g, beta, output)}
    return sum(x.untyped_storage().nbytes() for key, x in found.items() if key not in inputs)


class Recur(Protocol):
    """The recurrent functions of one batch, or of one layer in generation, which a delta layer calls."""

    def convolve(self, x_TW: Tensor, weight_WJ: Tensor) -> Tensor:
        """Returns `causal_convolution` of x within each document, [T, W]."""
        ...

    def __call__(self, q_TKD: Tensor, k_TKD: Tensor, v_TNE: Tensor, g_TN: Tensor, beta_TN: Tensor) -> Tensor:
        """Returns `chunk_gated_delta_rule` within each document, [T, N, E]."""
        ...


class RecurInDocuments:
    """The recurrent functions of a batch, to be shared by all layers.

    Args:
        cu_seqlens: The document boundaries, int [documents + 1]; documents may be empty. Without fla they are read
            once, so they should be on the CPU; otherwise this read waits for the device.
        recompute: Whether the backward pass computes the delta rule again instead of keeping its matrices, some 1500
            numbers per token and value head.
    """

    def __init__(self, cu_seqlens: Tensor, *, recompute: bool = False) -> None:
        self.cu_seqlens, self.recompute = cu_seqlens, recompute
        self._offsets: Tensor | None = None
        self._chunks: _Chunks | None = None

    # Outside of compiled graphs, which would be specialized for the lengths of the documents.
    @outside_of_graphs
    def convolve(self, x_TW: Tensor, weight_WJ: Tensor) -> Tensor:
        if self._offsets is None or self._offsets.device != x_TW.device:
            self._offsets = offsets_in_documents(self.cu_seqlens.to(x_TW.device), len(x_TW))
        return _Convolution.apply(x_TW, weight_WJ, self._offsets)  # pyright: ignore[reportReturnType]

    @outside_of_graphs
    def __call__(self, q_TKD: Tensor, k_TKD: Tensor, v_TNE: Tensor, g_TN: Tensor, beta_TN: Tensor) -> Tensor:
        if uses_fla(q_TKD.device, q_TKD.dtype):
            return _fla_rule(q_TKD, k_TKD, v_TNE, g_TN, beta_TN, self.cu_seqlens)
        if self._chunks is None or self._chunks.device != q_TKD.device:
            self._chunks = _Chunks(self.cu_seqlens, CHUNK_SIZE, q_TKD.device)
        if self.recompute and torch.is_grad_enabled():
            tensors = (q_TKD, k_TKD, v_TNE, g_TN, beta_TN)
            # It uses no random numbers, so the state of the generators need not be preserved.
            return checkpoint(self._chunks.rule, *tensors, use_reentrant=False, preserve_rng_state=False)
        return self._chunks.rule(q_TKD, k_TKD, v_TNE, g_TN, beta_TN)


class CachedRecur:
    """The recurrent functions of one layer in generation, with its state and the last inputs of the convolution."""

    def __init__(self) -> None:
        self._inputs_JW: Tensor | None = None
        self._state_NDE: Tensor | None = None

    def convolve(self, x_TW: Tensor, weight_WJ: Tensor) -> Tensor:
        num_kept = weight_WJ.shape[1] - 1
        if self._inputs_JW is None:
            self._inputs_JW = x_TW.new_zeros(num_kept, x_TW.shape[1])
        inputs_TW = torch.cat([self._inputs_JW, x_TW])
        self._inputs_JW = inputs_TW[len(inputs_TW) - num_kept :].clone()
        cu_seqlens = torch.tensor([0, len(inputs_TW)], device=x_TW.device)
        return causal_convolution(inputs_TW, weight_WJ, cu_seqlens)[num_kept:]

    def __call__(self, q_TKD: Tensor, k_TKD: Tensor, v_TNE: Tensor, g_TN: Tensor, beta_TN: Tensor) -> Tensor:
        if self._state_NDE is not None:
            out_TNE, self._state_NDE = recurrent_gated_delta_rule(q_TKD, k_TKD, v_TNE, g_TN, beta_TN, self._state_NDE)
            return out_TNE
        chunks = _Chunks(torch.tensor([0, len(q_TKD)]), CHUNK_SIZE, q_TKD.device)
        out_TNE, (self._state_NDE,) = chunks.rule_and_states(q_TKD, k_TKD, v_TNE, g_TN, beta_TN)
        return out_TNE


# --- The causal convolution ---


def causal_convolution(x_TW: Tensor, weight_WJ: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Returns silu(sum over j of weight[:, j] * x[t - (J - 1) + j]), [T, W] in x's type; there is nothing before the
    first token of a document. It is computed in fp32, rounded once, and saves x for the backward pass."""
    offsets_T = offsets_in_documents(cu_seqlens.to(x_TW.device), len(x_TW))
    return _Convolution.apply(x_TW, weight_WJ, offsets_T)  # pyright: ignore[reportReturnType]


def offsets_in_documents(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """Returns the position of each token in its document, int64 [T], without waiting for a device."""
    tokens_T = torch.arange(num_tokens, device=cu_seqlens.device)
    documents_T = torch.searchsorted(cu_seqlens, tokens_T.to(cu_seqlens.dtype), right=True) - 1
    return tokens_T - cu_seqlens[documents_T]


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TW: Tensor, weight_WJ: Tensor, offsets_T: Tensor) -> Tensor:
        ctx.save_for_backward(x_TW, weight_WJ, offsets_T)
        return F.silu(_convolved(_wide(x_TW), _wide(weight_WJ), offsets_T), inplace=True).to(x_TW.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TW: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_TW, weight_WJ, offsets_T = ctx.saved_tensors
        wide_x_TW, wide_weight_WJ = _wide(x_TW), _wide(weight_WJ)
        y_TW = _convolved(wide_x_TW, wide_weight_WJ, offsets_T)
        grad_y_TW = torch.ops.aten.silu_backward(_wide(grad_TW), y_TW)
        num_taps = weight_WJ.shape[1]
        grad_x_TW = grad_y_TW * wide_weight_WJ[:, -1]
        grad_weights_W = [(grad_y_TW * wide_x_TW).sum(0)]
        for shift in range(1, num_taps):
            grads_TW = _where_inside(grad_y_TW[shift:], offsets_T, shift)
            grad_x_TW[: len(grads_TW)].addcmul_(grads_TW, wide_weight_WJ[:, -1 - shift])
            grad_weights_W.append((grads_TW * wide_x_TW[: len(grads_TW)]).sum(0))
        grad_weight_WJ = torch.stack(grad_weights_W[::-1], dim=1)
        return grad_x_TW.to(x_TW.dtype), grad_weight_WJ.to(weight_WJ.dtype), None


def _convolved(x_TW: Tensor, weight_WJ: Tensor, offsets_T: Tensor) -> Tensor:
    y_TW = x_TW * weight_WJ[:, -1]
    for shift in range(1, weight_WJ.shape[1]):
        before_TW = _where_inside(x_TW[: max(len(x_TW) - shift, 0)], offsets_T, shift)
        y_TW[shift:].addcmul_(before_TW, weight_WJ[:, -1 - shift])
    return y_TW


def _where_inside(x_TW: Tensor, offsets_T: Tensor, shift: int) -> Tensor:
    """Returns x, with zeros in the rows of pairs (token - shift, token) that are not in one document. They are not
    multiplied by 0, which would keep another document's NaN."""
    return torch.where((offsets_T[shift:] >= shift)[:, None], x_TW, 0.0)


def _wide(x: Tensor) -> Tensor:
    """Returns x in fp32, or in fp64 if it is of that type, as in tests."""
    return x if x.dtype == torch.float64 else x.float()


# --- The gated delta rule ---


def chunk_gated_delta_rule(
    q_TKD: Tensor,
    k_TKD: Tensor,
    v_TNE: Tensor,
    g_TN: Tensor,
    beta_TN: Tensor,
    cu_seqlens: Tensor,
    chunk_size: int = CHUNK_SIZE,
) -> Tensor:
    """Returns the outputs of the gated delta rule within each document, [T, N, E] in v's type, computed in fp32.

    Every document is padded to whole chunks; the recurrence over chunks runs in all documents at once.

    Args:
        q_TKD, k_TKD: Queries and keys, normalized here to length 1 (and queries divided by the root of D).
        g_TN: The logarithm of the decay, at most 0.
        beta_TN: The learning rate, from 0 to 1.
        cu_seqlens: The document boundaries, int [documents + 1]; documents may be empty.
    """
    return _Chunks(cu_seqlens, chunk_size, q_TKD.device).rule(q_TKD, k_TKD, v_TNE, g_TN, beta_TN)


def recurrent_gated_delta_rule(
    q_TKD: Tensor, k_TKD: Tensor, v_TNE: Tensor, g_TN: Tensor, beta_TN: Tensor, state_NDE: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the outputs of consecutive tokens of one document, [T, N, E] in v's type, and the state after them,
    [N, D, E] in fp32. It computes one token after the other; see `chunk_gated_delta_rule`."""
    q_TKD, k_TKD = _normalized(q_TKD, k_TKD)
    num_served = v_TNE.shape[1] // q_TKD.shape[1]
    q_TND, k_TND = (x_TKD.repeat_interleave(num_served, dim=1) for x_TKD in (q_TKD, k_TKD))
    outputs_NE = []
    for q_ND, k_ND, v_NE, g_N, beta_N in zip(q_TND, k_TND, _wide(v_TNE), _wide(g_TN), _wide(beta_TN), strict=True):
        state_NDE = state_NDE * g_N.exp()[:, None, None]
        correction_NE = (v_NE - torch.einsum("nde,nd->ne", state_NDE, k_ND)) * beta_N[:, None]
        state_NDE = state_NDE + k_ND[:, :, None] * correction_NE[:, None]
        outputs_NE.append(torch.einsum("nde,nd->ne", state_NDE, q_ND))
    return torch.stack(outputs_NE).to(v_TNE.dtype), state_NDE


def _normalized(q_TKD: Tensor, k_TKD: Tensor) -> tuple[Tensor, Tensor]:
    q_TKD, k_TKD = (_wide(x) * (_wide(x).square().sum(-1, keepdim=True) + _L2_EPS).rsqrt() for x in (q_TKD, k_TKD))
    return q_TKD * q_TKD.shape[-1] ** -0.5, k_TKD


class _Chunks:
    """The division of a batch's documents into chunks of at most C tokens, for chunks of C tokens with padding.

    Documents are ordered by their number of chunks, the longest first, and their chunks by their number in the
    document, so the chunks of one step of the recurrence, and the states that go on, are always the first ones:

        documents of 2, 9 and 5 tokens, C = 4    chunks of step 0: 9 5 2 | step 1: 9 5 | step 2: 9
    """

    def __init__(self, cu_seqlens: Tensor, chunk_size: int, device: torch.device) -> None:
        self.chunk_size, self.device = chunk_size, device
        starts, lengths = cu_seqlens[:-1].cpu().long(), cu_seqlens.diff().cpu().long()
        self._num_tokens = int(lengths.sum())
        num_chunks = (lengths + chunk_size - 1) // chunk_size
        order = num_chunks.argsort(descending=True, stable=True)
        steps = torch.arange(int(num_chunks.max()))
        self.num_documents = (num_chunks > steps[:, None]).sum(1).tolist()
        """The number of documents that have a chunk in each step."""
        # The first token of each chunk, and its number of tokens.
        documents = torch.cat([order[:count] for count in self.num_documents])
        step_of = steps.repeat_interleave(torch.tensor(self.num_documents))
        first = starts[documents] + step_of * chunk_size
        within = torch.arange(chunk_size)
        is_token = within < (lengths[documents] - step_of * chunk_size)[:, None]
        self._tokens_MC = torch.where(is_token, first[:, None] + within, -1)

    @cached_property
    def _slots(self) -> Tensor:
        """The position of each token in the flattened chunks, [T]."""
        tokens = self._tokens_MC.flatten()
        slots_T = torch.empty(self._num_tokens, dtype=torch.long)
        (filled,) = torch.nonzero(tokens >= 0, as_tuple=True)
        slots_T[tokens[filled]] = filled
        return slots_T

    @cache  # noqa: B019 the object lives as long as its batch
    def _indices(self, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the rows of [T * heads, ...] for [M, heads, C, ...], those of the latter for the former, and the rows
        of the latter that are padding."""
        heads = torch.arange(num_heads)
        tokens_MC, slots_T, size = self._tokens_MC, self._slots, self.chunk_size
        into = torch.where(tokens_MC >= 0, tokens_MC * num_heads, -1)[:, None] + heads[:, None]
        into = torch.where((tokens_MC >= 0)[:, None], into, -1).flatten()
        out = ((slots_T // size)[:, None] * num_heads + heads) * size + (slots_T % size)[:, None]
        (holes,) = torch.nonzero(into < 0, as_tuple=True)
        return into.clamp_min(0).to(self.device), out.flatten().to(self.device), holes.to(self.device)

    def _into_chunks(self, x: Tensor) -> Tensor:
        """Returns [T, heads, ...] as [M, heads, C, ...] with zeros in the padding."""
        into, out, holes = self._indices(x.shape[1])
        rows = _Rearrange.apply(x.flatten(0, 1), into, out, holes, None)
        return rows.view(-1, x.shape[1], self.chunk_size, *x.shape[2:])  # pyright: ignore[reportAttributeAccessIssue]

    def _out_of_chunks(self, x: Tensor) -> Tensor:
        """Returns [M, heads, C, ...] as [T, heads, ...]."""
        into, out, holes = self._indices(x.shape[1])
        rows = _Rearrange.apply(x.flatten(0, 2), out, into, None, holes)
        return rows.view(-1, x.shape[1], *x.shape[3:])  # pyright: ignore[reportAttributeAccessIssue]

    def rule(self, *tensors: Tensor) -> Tensor:
        """Returns the outputs of `chunk_gated_delta_rule` for its tensors."""
        return self._rule(*tensors, with_states=False)[0]

    def rule_and_states(self, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the outputs, and the states after the last tokens of the documents, [documents, N, D, E] in fp32, for
        documents of equally many chunks."""
        out_TNE, states = self._rule(*tensors, with_states=True)
        assert states is not None
        return out_TNE, states

    def _rule(
        self, q_TKD: Tensor, k_TKD: Tensor, v_TNE: Tensor, g_TN: Tensor, beta_TN: Tensor, *, with_states: bool
    ) -> tuple[Tensor, Tensor | None]:
        # Padding has g = 0, beta = 0 and k = 0: it changes no state.
        q_MKCD, k_MKCD = (self._into_chunks(x) for x in _normalized(q_TKD, k_TKD))
        v_MNCE, g_MNC, beta_MNC = (self._into_chunks(_wide(x)) for x in (v_TNE, g_TN, beta_TN))
        num_served = v_TNE.shape[1] // q_TKD.shape[1]
        sums_MNC = g_MNC.cumsum(-1)
        is_later = torch.ones(self.chunk_size, self.chunk_size, dtype=torch.bool, device=self.device).triu(1)
        decay_MNCC = (sums_MNC[..., None] - sums_MNC[..., None, :]).masked_fill(is_later, -torch.inf).exp()
        scores_MNCC = _for_values(q_MKCD @ k_MKCD.mT, num_served) * decay_MNCC
        system_MNCC = _for_values(k_MKCD @ k_MKCD.mT, num_served) * decay_MNCC * beta_MNC[..., None]
        q_MNCD, k_MNCD = (_for_values(x, num_served) for x in (q_MKCD, k_MKCD))
        wanted = torch.cat([v_MNCE, k_MNCD * sums_MNC.exp()[..., None]], dim=-1) * beta_MNC[..., None]
        # Only the strictly lower triangle of the system is read.
        solved = torch.linalg.solve_triangular(system_MNCC, wanted, upper=False, unitriangular=True)
        u_MNCE, w_MNCD = solved.split([v_TNE.shape[-1], k_TKD.shape[-1]], dim=-1)
        last_MN1 = sums_MNC[..., -1:]
        states_MNDE, corrections_MNCE, final = self._scan(
            u_MNCE, w_MNCD, k_MNCD * (last_MN1 - sums_MNC).exp()[..., None], last_MN1.exp()[..., None], with_states
        )
        read_MNCE = (q_MNCD * sums_MNC.exp()[..., None]) @ states_MNDE
        return self._out_of_chunks(read_MNCE + scores_MNCC @ corrections_MNCE).to(v_TNE.dtype), final

    def _scan(
        self, u_MNCE: Tensor, w_MNCD: Tensor, k_MNCD: Tensor, decay_MN11: Tensor, with_states: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns the states before all chunks and the corrections in them; with_states, also the states at the end."""
        num_heads, size = u_MNCE.shape[1], u_MNCE.shape[-1]
        state = u_MNCE.new_zeros(self.num_documents[0] * num_heads, w_MNCD.shape[-1], size)
        # The heads of all documents are one dimension, and the chunks of a step a part of it. They are not slices,
        # whose gradients would each be padded with zeros to all M chunks.
        counts = [num * num_heads for num in self.num_documents]
        steps = zip(*(x.flatten(0, 1).split(counts) for x in (u_MNCE, w_MNCD, k_MNCD, decay_MN11)), strict=True)
        states, corrections = [], []
        for step, (u, w, k, decay) in enumerate(steps):
            states.append(state)
            corrections.append(torch.baddbmm(u, w, state, alpha=-1))
            num_going_on = len(u) if with_states else ([*counts, 0])[step + 1]
            if num_going_on:
                rows = slice(num_going_on)
                state = torch.baddbmm(state[rows] * decay[rows], k[rows].mT, corrections[-1][rows])
        shape = (-1, num_heads)
        return (
            torch.cat(states).unflatten(0, shape),
            torch.cat(corrections).unflatten(0, shape),
            state.unflatten(0, shape) if with_states else None,
        )


def _for_values(x_MK: Tensor, num_served: int) -> Tensor:
    """Returns what key heads have, [M, K, ...], for the value heads that each serves, [M, N, ...]."""
    return x_MK if num_served == 1 else x_MK.repeat_interleave(num_served, dim=1)


class _Rearrange(torch.autograd.Function):
    """The rows of x in another order, with zeros in holes; and its gradient by the inverse order, with which no row is
    added to another one."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, rows: Tensor, inverse: Tensor, holes: Tensor | None, inverse_holes: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(inverse, inverse_holes)
        return _rows(x, rows, holes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        inverse, inverse_holes = ctx.saved_tensors
        return _rows(grad.contiguous(), inverse, inverse_holes), None, None, None, None


def _rows(x: Tensor, rows: Tensor, holes: Tensor | None) -> Tensor:
    found = x.index_select(0, rows)
    return found if holes is None else found.index_fill_(0, holes, 0.0)


# --- fla's kernel ---

_FLA_ARGUMENTS = ("q", "k", "v", "g", "beta", "use_qk_l2norm_in_kernel", "cu_seqlens")


def uses_fla(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether the kernel of flash-linear-attention computes the delta rule; it takes bf16 and fp16 on a GPU."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and find_spec("fla") is not None


@cache
def _fla_function() -> Any:
    """Returns the function of the package.

    Raises:
        ImportError: The installed version has other arguments; the message names them.
    """
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule as function  # pyright: ignore[reportMissingImports]

    require_arguments(function)
    return function


def require_arguments(function: Any) -> None:
    """Raises ImportError if fla's function lacks one of the arguments that are passed."""
    found = inspect.signature(inspect.unwrap(function)).parameters
    if missing := [name for name in _FLA_ARGUMENTS if name not in found]:
        raise ImportError(
            f"chunk_gated_delta_rule of the installed fla has no argument {', '.join(missing)}, only "
            f"{', '.join(found)}; install flash-linear-attention 0.4 or later, or none"
        )


def _fla_rule(q_TKD: Tensor, k_TKD: Tensor, v_TNE: Tensor, g_TN: Tensor, beta_TN: Tensor, cu_seqlens: Tensor) -> Tensor:
    # Older versions have one key head for each value head. It finds its chunks once for one object cu_seqlens.
    q_TKD, k_TKD = (_for_values(x, v_TNE.shape[1] // q_TKD.shape[1]) for x in (q_TKD, k_TKD))
    tensors = {"q": q_TKD, "k": k_TKD, "v": v_TNE, "g": g_TN.float(), "beta": beta_TN}
    batch = {name: x[None] for name, x in tensors.items()}
    return _fla_function()(**batch, use_qk_l2norm_in_kernel=True, cu_seqlens=cu_seqlens)[0][0]
