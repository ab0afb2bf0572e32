"""torch's varlen attention on a CPU, where it has no kernel. Everything around the kernel is the real one."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from sftron.models.attention import SdpaAttention
from sftron.models.attention_kernels import Scores


def _sdpa(cu_seqlens: torch.Tensor) -> SdpaAttention:
    return SdpaAttention(tuple(cu_seqlens.diff().tolist()))


def _num_tokens(window: list[int]) -> int | None:
    """Returns the window from the numbers of tokens before and after a token."""
    assert window[1] == 0
    return None if window[0] == -1 else window[0] + 1


def forward(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, *rest: Any) -> Any:
    is_causal, scale, window = rest[:3]
    assert is_causal == (window == [-1, 0])
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert cu_q.equal(cu_k)
    assert max_q == max_k >= int(cu_q.diff().max())
    with torch.no_grad():
        out = _sdpa(cu_q)(q, k, v, Scores(_num_tokens(window), scale)).clone()
    return out, torch.zeros(q.shape[1], len(q)), torch.zeros(2, dtype=torch.uint64)


def backward(grad_out: Any, q: Any, k: Any, v: Any, _out: Any, _lse: Any, cu_q: Any, *rest: Any) -> Any:
    scale, window = rest[-2:]

    def gradients() -> tuple[torch.Tensor, ...]:
        inputs = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(_sdpa(cu_q)(*inputs, Scores(_num_tokens(window), scale)), inputs, grad_out.clone())

    # A kernel runs below autograd; a thread of its own does not.
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(gradients).result()
