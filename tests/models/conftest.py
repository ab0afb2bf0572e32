"""Random packed documents and their attention in fp64; torch's varlen attention on a CPU, where it has no kernel."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch.nn.attention import varlen

from sftron.models.attention import SdpaAttention
from sftron.models.attention_kernels import Scores


def _sdpa(cu_seqlens: torch.Tensor) -> SdpaAttention:
    return SdpaAttention(tuple(cu_seqlens.diff().tolist()))


def _num_tokens(window: list[int]) -> int | None:
    """Returns the window from the numbers of tokens before and after a token."""
    assert window[1] == 0
    return None if window[0] == -1 else window[0] + 1


def _forward(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, *rest: Any) -> Any:
    is_causal, scale, window = rest[:3]
    assert is_causal == (window == [-1, 0])
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert cu_q.equal(cu_k)
    assert max_q == max_k >= int(cu_q.diff().max())
    with torch.no_grad():
        out = _sdpa(cu_q)(q, k, v, Scores(_num_tokens(window), scale)).clone()
    return out, torch.zeros(q.shape[1], len(q)), torch.zeros(2, dtype=torch.uint64)


def _backward(grad_out: Any, q: Any, k: Any, v: Any, _out: Any, _lse: Any, cu_q: Any, *rest: Any) -> Any:
    scale, window = rest[-2:]

    def gradients() -> tuple[torch.Tensor, ...]:
        inputs = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(_sdpa(cu_q)(*inputs, Scores(_num_tokens(window), scale)), inputs, grad_out.clone())

    # A kernel runs below autograd; a thread of its own does not.
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(gradients).result()


@pytest.fixture(scope="session")
def varlen_on_cpu() -> None:
    """Everything around the kernel is the real one."""
    kernels: list[tuple[Any, Callable[..., Any]]] = [
        (varlen._varlen_attn, _forward),
        (varlen._varlen_attn_backward, _backward),
    ]
    for operator, kernel in kernels:
        operator.register_kernel("cpu")(kernel)


def bounds(lengths: Sequence[int], device: str = "cpu") -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def random_heads(
    num_tokens: int,
    heads: tuple[int, int] = (6, 2),
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> list[torch.Tensor]:
    """Returns q, k and v: views of one fused row."""
    num_heads, num_kv_heads = heads
    generator = torch.Generator().manual_seed(num_tokens)
    fused = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, generator=generator).to(device, dtype)
    return [x.detach().requires_grad_() for x in fused.split([num_heads, num_kv_heads, num_kv_heads], dim=1)]


def softmax_attention(
    lengths: Sequence[int],
    *tensors: torch.Tensor,
    window: int | None = None,
    sinks_N: torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Computes attention by its definition, in fp64: every score, the invisible ones at minus infinity."""
    q, k, v = (x.double() for x in tensors)
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(q.device)
    token = torch.arange(len(q), device=q.device)
    visible = (document[:, None] == document) & (token[:, None] >= token)
    visible &= token[:, None] - token < (window or len(q))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("tnd,snd->nts", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks_N is not None:
        scores = torch.cat([scores, sinks_N.double()[:, None, None].expand(-1, len(q), 1)], dim=-1)
    return torch.einsum("nts,snd->tnd", scores.softmax(-1)[..., : len(q)], v)
