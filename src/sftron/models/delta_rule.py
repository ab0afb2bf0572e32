"""The gated delta rule (arXiv 2412.06464) within documents, in chunks, token by token, and by the kernel of fla.

Training computes it in chunks of tokens, which turns all of it but one product per chunk into batched matrix products.
For a chunk with the sums G of g from its start, and the strictly lower triangle A_ij = beta_i exp(G_i - G_j) k_i.k_j,
(I + A) [u w] = [beta v, beta exp(G) k] gives the corrections v' = u - w S, from which the outputs and the next state
follow: o = exp(G) q S + (q k^T exp(G_i - G_j)) v', S <- exp(G_C) S + (exp(G_C - G) k)^T v'.

    shape suffixes: as in delta.py, and M chunks of all documents, C tokens of a chunk
"""

from __future__ import annotations

import inspect
from functools import cache, cached_property
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sftron.kernels.device import is_gpu

CHUNK_SIZE = 64
"""The chunk size of the kernels in fla, and of transformers."""

_L2_EPS = 1e-6
"""Added to the squared length of queries and keys."""


def recurrent_gated_delta_rule(
    q_TKD: Tensor, k_TKD: Tensor, v_TNE: Tensor, g_TN: Tensor, beta_TN: Tensor, state_NDE: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the outputs of consecutive tokens of one document, [T, N, E] in v's type, and the state after them,
    [N, D, E] in fp32. It computes one token after the other; see `Chunks`."""
    q_TKD, k_TKD = _normalized(q_TKD, k_TKD)
    num_served = v_TNE.shape[1] // q_TKD.shape[1]
    q_TND, k_TND = (x_TKD.repeat_interleave(num_served, dim=1) for x_TKD in (q_TKD, k_TKD))
    outputs_NE = []
    for q_ND, k_ND, v_NE, g_N, beta_N in zip(q_TND, k_TND, wide(v_TNE), wide(g_TN), wide(beta_TN), strict=True):
        state_NDE = state_NDE * g_N.exp()[:, None, None]
        correction_NE = (v_NE - torch.einsum("nde,nd->ne", state_NDE, k_ND)) * beta_N[:, None]
        state_NDE = state_NDE + k_ND[:, :, None] * correction_NE[:, None]
        outputs_NE.append(torch.einsum("nde,nd->ne", state_NDE, q_ND))
    return torch.stack(outputs_NE).to(v_TNE.dtype), state_NDE


def _normalized(q_TKD: Tensor, k_TKD: Tensor) -> tuple[Tensor, Tensor]:
    q_TKD, k_TKD = (wide(x) * (wide(x).square().sum(-1, keepdim=True) + _L2_EPS).rsqrt() for x in (q_TKD, k_TKD))
    return q_TKD * q_TKD.shape[-1] ** -0.5, k_TKD


def wide(x: Tensor) -> Tensor:
    """Returns x in fp32, or in fp64 if it is of that type, as in tests."""
    return x if x.dtype == torch.float64 else x.float()


class Chunks:
    """The division of a batch's documents, which may be empty, into chunks of C tokens, the last ones with padding.

    Documents are ordered by their number of chunks, the longest first, and their chunks by their number in the
    document, so the chunks of one step of the recurrence, and the states that go on, are always the first ones:

        documents of 2, 9 and 5 tokens, C = 4    chunks of step 0: 9 5 2 | step 1: 9 5 | step 2: 9
    """

    def __init__(self, cu_seqlens: Tensor, chunk_size: int, device: torch.device) -> None:
        self.chunk_size, self.device = chunk_size, device
        cu_seqlens = cu_seqlens.cpu().long()
        starts, lengths = cu_seqlens[:-1], cu_seqlens.diff()
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
        self._rows_by_heads: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    @cached_property
    def _slots(self) -> Tensor:
        """The position of each token in the flattened chunks, [T]."""
        tokens = self._tokens_MC.flatten()
        slots_T = torch.empty(self._num_tokens, dtype=torch.long)
        (filled,) = torch.nonzero(tokens >= 0, as_tuple=True)
        slots_T[tokens[filled]] = filled
        return slots_T

    def _indices(self, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the rows of [T * heads, ...] for [M, heads, C, ...], those of the latter for the former, and the rows
        of the latter that are padding; the same tensors at each call."""
        if num_heads not in self._rows_by_heads:
            self._rows_by_heads[num_heads] = self._make_indices(num_heads)
        return self._rows_by_heads[num_heads]

    def _make_indices(self, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        heads = torch.arange(num_heads)
        tokens_MC, slots_T, size = self._tokens_MC, self._slots, self.chunk_size
        into = torch.where(tokens_MC >= 0, tokens_MC * num_heads, -1)[:, None] + heads[:, None]
        into = torch.where((tokens_MC >= 0)[:, None], into, -1).flatten()
        out = ((slots_T // size)[:, None] * num_heads + heads) * size + (slots_T % size)[:, None]
        (holes,) = torch.nonzero(into < 0, as_tuple=True)
        return self._moved(into.clamp_min(0)), self._moved(out.flatten()), self._moved(holes)

    def _moved(self, rows: Tensor) -> Tensor:
        """Returns the rows on the device, without waiting for it."""
        return (rows.pin_memory() if is_gpu(self.device) else rows).to(self.device, non_blocking=True)

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
        """Returns the outputs of `rule_and_state` for its tensors."""
        return self.rule_and_state(*tensors, with_state=False)[0]

    def rule_and_state(
        self, q_TKD: Tensor, k_TKD: Tensor, v_TNE: Tensor, g_TN: Tensor, beta_TN: Tensor, *, with_state: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Returns the outputs of the gated delta rule within each document, [T, N, E] in v's type, computed in fp32;
        and for a single document the state after its last token, [N, D, E] in fp32.

        The recurrence over chunks runs in all documents at once.

        Args:
            q_TKD, k_TKD: Queries and keys, normalized here to length 1 (and queries divided by the root of D).
            g_TN: The logarithm of the decay, at most 0.
            beta_TN: The learning rate, from 0 to 1.
        """
        # Padding has g = 0, beta = 0 and k = 0: it changes no state.
        q_MKCD, k_MKCD = (self._into_chunks(x) for x in _normalized(q_TKD, k_TKD))
        v_MNCE, g_MNC, beta_MNC = (self._into_chunks(wide(x)) for x in (v_TNE, g_TN, beta_TN))
        num_served = v_TNE.shape[1] // q_TKD.shape[1]
        # The sums up to each token, by a product, because CUDA has no deterministic cumsum.
        until_CC = g_MNC.new_ones(self.chunk_size, self.chunk_size).triu()
        sums_MNC = torch.bmm(g_MNC, until_CC.expand(len(g_MNC), -1, -1))
        is_later = until_CC.mT == 0
        decay_MNCC = (sums_MNC[..., None] - sums_MNC[..., None, :]).masked_fill(is_later, -torch.inf).exp()
        scores_MNCC = _for_values(q_MKCD @ k_MKCD.mT, num_served) * decay_MNCC
        system_MNCC = _for_values(k_MKCD @ k_MKCD.mT, num_served) * decay_MNCC * beta_MNC[..., None]
        q_MNCD, k_MNCD = (_for_values(x, num_served) for x in (q_MKCD, k_MKCD))
        wanted = torch.cat([v_MNCE, k_MNCD * sums_MNC.exp()[..., None]], dim=-1) * beta_MNC[..., None]
        # Only the strictly lower triangle of the system is read.
        solved = torch.linalg.solve_triangular(system_MNCC, wanted, upper=False, unitriangular=True)
        u_MNCE, w_MNCD = solved.split([v_TNE.shape[-1], k_TKD.shape[-1]], dim=-1)
        last_MN1 = sums_MNC[..., -1:]
        states_MNDE, corrections_MNCE, final_NDE = self._scan(
            u_MNCE, w_MNCD, k_MNCD * (last_MN1 - sums_MNC).exp()[..., None], last_MN1.exp()[..., None], with_state
        )
        read_MNCE = (q_MNCD * sums_MNC.exp()[..., None]) @ states_MNDE
        return self._out_of_chunks(read_MNCE + scores_MNCC @ corrections_MNCE).to(v_TNE.dtype), final_NDE

    def _scan(
        self, u_MNCE: Tensor, w_MNCD: Tensor, k_MNCD: Tensor, decay_MN11: Tensor, with_state: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the states before all chunks, the corrections in them and, for one document, the state at its end."""
        num_heads, size = u_MNCE.shape[1], u_MNCE.shape[-1]
        state = u_MNCE.new_zeros(self.num_documents[0] * num_heads, w_MNCD.shape[-1], size)
        # The heads of all documents are one dimension, and the chunks of a step a part of it. They are not slices,
        # whose gradients would each be padded with zeros to all M chunks.
        counts = [num * num_heads for num in self.num_documents]
        steps = zip(*(x.flatten(0, 1).split(counts) for x in (u_MNCE, w_MNCD, k_MNCD, decay_MN11)), strict=True)
        going_on = [*counts[1:], num_heads if with_state else 0]
        states, corrections = [], []
        for num_going_on, (u, w, k, decay) in zip(going_on, steps, strict=True):
            states.append(state)
            corrections.append(torch.baddbmm(u, w, state, alpha=-1))
            if num_going_on:
                rows = slice(num_going_on)
                state = torch.baddbmm(state[rows] * decay[rows], k[rows].mT, corrections[-1][rows])
        shape = (-1, num_heads)
        return torch.cat(states).unflatten(0, shape), torch.cat(corrections).unflatten(0, shape), state


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
    return is_gpu(device) and dtype in (torch.bfloat16, torch.float16) and find_spec("fla") is not None


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


def fla_rule(q_TKD: Tensor, k_TKD: Tensor, v_TNE: Tensor, g_TN: Tensor, beta_TN: Tensor, cu_seqlens: Tensor) -> Tensor:
    # Older versions have one key head for each value head. It finds its chunks once for one object cu_seqlens.
    q_TKD, k_TKD = (_for_values(x, v_TNE.shape[1] // q_TKD.shape[1]) for x in (q_TKD, k_TKD))
    tensors = {"q": q_TKD, "k": k_TKD, "v": v_TNE, "g": g_TN.float(), "beta": beta_TN}
    batch = {name: x[None] for name, x in tensors.items()}
    return _fla_function()(**batch, use_qk_l2norm_in_kernel=True, cu_seqlens=cu_seqlens)[0][0]
