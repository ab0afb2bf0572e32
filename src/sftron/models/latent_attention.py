"""The projections before and after latent attention (MLA, DeepSeek V2, arXiv 2405.04434), as DeepSeek V3 has them.

    q = [q_nope, rotate(q_rope)]   [q_nope, q_rope] = W_qb norm(c_q)   [c_q, c, k_rope] = W_a norm(x)
    k = [k_nope, rotate(k_rope)]   [k_nope, v] = W_kvb norm(c)

All heads share k_rope. Queries, keys and values are padded with zeros to one size, because every attention backend
takes heads of one size: zeros add nothing to a score, and what they add to a value is cut off again. So a backend has
to implement the larger of the two sizes, such as 192 for values of 128, and computes some products of zeros; the memory
of the keys and values of a cache, too, is that of whole heads, not of latents.

    shape suffixes: T tokens of the packed row, H hidden_size, N heads, D padded head size, E size of a value,
    P positions of the RoPE table
"""

import torch
from torch import Tensor, nn

from sftron.kernels.rope import Heads, rotate_heads
from sftron.models.architecture import Layer, LlamaConfig
from sftron.models.latent_sizes import LatentSizes
from sftron.models.layers import Linear, Norm, NormedLinear, RMSNorm

_EPS = 1e-6
"""The eps of the norms of latents, whatever rms_norm_eps is, as in transformers."""


class LatentAttention(nn.Module):
    """The projections of latents, queries, keys, values and the output."""

    sinks = None

    def __init__(self, config: LlamaConfig, layer: Layer, recompute: bool) -> None:
        super().__init__()
        assert isinstance(config.mixing, LatentSizes)
        assert layer.rope is not None
        self.sizes = sizes = config.mixing
        self.num_heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.interleaved = config.ropes[layer.rope].interleaved
        options = {"initializer_range": config.initializer_range, "recompute": recompute}
        width, rank = self.num_heads * sizes.qk_head_dim, sizes.q_lora_rank
        queries = {"q_proj": width} if rank is None else {"q_a_proj": rank}
        parts = queries | {"kv_a_proj_with_mqa": sizes.kv_lora_rank + sizes.qk_rope_head_dim}
        size = config.hidden_size
        self.qkv_a_proj = NormedLinear(size, sum(parts.values()), bias=config.qkv_bias, parts=parts, **options)
        if rank is not None:
            self.q_a_layernorm = RMSNorm(rank, _EPS)
            self.q_b_proj = NormedLinear(rank, width, bias=False, **options)
        self.kv_a_layernorm = RMSNorm(sizes.kv_lora_rank, _EPS)
        width = self.num_heads * (sizes.qk_nope_head_dim + sizes.v_head_dim)
        self.kv_b_proj = NormedLinear(sizes.kv_lora_rank, width, bias=False, **options)
        self.o_proj = Linear(self.num_heads * sizes.v_head_dim, size, bias=config.o_bias, **options)

    @property
    def flops_of_pair(self) -> int:
        """The FLOPs of a query and a key that it reads, in all heads, without those of padding."""
        return 2 * self.num_heads * (self.sizes.qk_head_dim + self.sizes.v_head_dim)

    def heads(self, x_TH: Tensor, norm: Norm | None, position_ids: Tensor, table_PD: Tensor | None) -> Heads:
        """Returns q_TND, k_TND and v_TND, computed from the normalized x."""
        sizes, num_heads = self.sizes, self.num_heads
        latents = self.qkv_a_proj(x_TH, norm)
        shared = [sizes.kv_lora_rank, sizes.qk_rope_head_dim]
        q, latent, k_rope = latents.split([latents.shape[1] - sum(shared), *shared], dim=1)
        if sizes.q_lora_rank is not None:
            q = self.q_b_proj(q, self.q_a_layernorm)
        q_nope, q_rope = q.unflatten(1, (num_heads, -1)).split([sizes.qk_nope_head_dim, sizes.qk_rope_head_dim], dim=2)
        kv = self.kv_b_proj(latent, self.kv_a_layernorm).unflatten(1, (num_heads, -1))
        k_nope, v_TNE = kv.split([sizes.qk_nope_head_dim, sizes.v_head_dim], dim=2)
        # rotate_heads takes as many value heads as key heads; the one that it returns is not used.
        rotated = torch.cat([q_rope.flatten(1), k_rope, k_rope], dim=1)
        q_rope, k_rope, _ = rotate_heads(rotated, position_ids, table_PD, num_heads, 1, self.interleaved)
        k_rope = k_rope.expand(-1, num_heads, -1)
        return self._padded(q_nope, q_rope), self._padded(k_nope, k_rope), self._padded(v_TNE)

    def _padded(self, *parts: Tensor) -> Tensor:
        """Returns heads of size D."""
        num_zeros = self.head_dim - sum(part.shape[2] for part in parts)
        return torch.cat([*parts, parts[0].new_zeros(*parts[0].shape[:2], num_zeros)], dim=2)

    def output(self, attended_TND: Tensor) -> Tensor:
        return self.o_proj(attended_TND[..., : self.sizes.v_head_dim].flatten(1))
