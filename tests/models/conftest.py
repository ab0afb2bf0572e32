"""Random packed documents and their attention in fp64."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch.nn.attention import varlen

from tests.models.varlen_on_cpu import backward, forward


@pytest.fixture(scope="session")
def varlen_on_cpu() -> None:
    """Everything around the kernel is the real one."""
    for operator, kernel in ((varlen._varlen_attn, forward), (varlen._varlen_attn_backward, backward)):
        kernels: Any = operator
        kernels.register_kernel("cpu")(kernel)


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
