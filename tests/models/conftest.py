"""torch's varlen attention on a CPU, where it has no kernel: everything around the kernel is the real one."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.nn.attention import varlen

from sftron.models.attention import SdpaAttention


def _sdpa(cu_seqlens: torch.Tensor) -> SdpaAttention:
    return SdpaAttention(tuple(cu_seqlens.diff().tolist()))


def _forward(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, *rest: Any) -> Any:
    is_causal, scale, window = rest[:3]
    assert (is_causal, scale, window) == (True, None, [-1, 0])
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert cu_q.equal(cu_k)
    assert max_q == max_k >= int(cu_q.diff().max())
    with torch.no_grad():
        out = _sdpa(cu_q)(q, k, v).clone()
    return out, torch.zeros(q.shape[1], len(q)), torch.zeros(2, dtype=torch.uint64)


def _backward(grad_out: Any, q: Any, k: Any, v: Any, _out: Any, _lse: Any, cu_q: Any, *_rest: Any) -> Any:
    def gradients() -> tuple[torch.Tensor, ...]:
        inputs = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(_sdpa(cu_q)(*inputs), inputs, grad_out.clone())

    # A kernel runs below autograd; a thread of its own does not.
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(gradients).result()


@pytest.fixture(scope="session")
def varlen_on_cpu() -> None:
    kernels: list[tuple[Any, Callable[..., Any]]] = [
        (varlen._varlen_attn, _forward),
        (varlen._varlen_attn_backward, _backward),
    ]
    for operator, kernel in kernels:
        operator.register_kernel("cpu")(kernel)
