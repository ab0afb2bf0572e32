"""The layer of Gated DeltaNet (arXiv 2412.06464) as in Qwen 3.5 and Qwen3-Next: projections, convolution, delta rule,
gated norm.

shape suffixes: T tokens of the packed row, N value heads, K key heads, D size of a key, E size of a value,
W channels of the convolution: K * D queries, K * D keys, N * E values
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sftron.models.architecture import Layer, LlamaConfig
from sftron.models.block import Documents, Flops, ResidualBlock
from sftron.models.causal_convolution import Taps
from sftron.models.context import ContextDelta
from sftron.models.delta import CachedRecur, ConvolvedRecur, DeltaSizes, MixDelta, RecurInDocuments
from sftron.models.feed_forward import MLPS
from sftron.models.layers import GatedLinear, Norm, NormedLinear, RMSNorm
from sftron.models.projections import make_norm

Mixed = tuple[Tensor, Tensor, Tensor, Tensor]
"""The channels of the convolution, the logarithm of the decay, the learning rate, and the output gate."""


class GatedDeltaNet(nn.Module):
    """The projections before and after the delta rule, and its parameters. Heads have no positions."""

    def __init__(self, config: LlamaConfig, recompute: bool) -> None:
        super().__init__()
        sizes, hidden_size = config.delta, config.hidden_size
        assert sizes is not None
        self.sizes = sizes
        options = {"bias": False, "initializer_range": config.initializer_range, "recompute": recompute}
        self.in_proj = NormedLinear(hidden_size, sum(sizes.rows), parts=self.parts(sizes), **options)
        self.conv1d = Taps(sizes.rows[0], sizes.num_taps, config.initializer_range)
        self.A_log = nn.Parameter(torch.zeros(sizes.num_value_heads))
        self.dt_bias = nn.Parameter(torch.ones(sizes.num_value_heads))
        self.norm = RMSNorm(sizes.value_dim, config.norm_eps)
        self.out_proj = GatedLinear(sizes.rows[1], hidden_size, activation="silu", **options)

    @staticmethod
    def parts(sizes: DeltaSizes) -> dict[str, int]:
        """Returns the projections of the files whose rows those of in_proj are, in order."""
        return {f"in_proj_{part}": rows for part, rows in zip(("qkv", "z", "b", "a"), sizes.rows, strict=True)}

    def split(self, projected: Tensor) -> Sequence[Tensor]:
        """Returns the channels of the convolution, the output gate, and the numbers of rate and decay of each head."""
        return projected.split(self.sizes.rows, dim=1)

    def mixer_inputs(self, x_TH: Tensor, norm: Norm | None) -> Mixed:
        """Returns what the function that mixes tokens and `output` take, computed from the normalized x."""
        qkv_TW, z, b_TN, a_TN = self.split(self.in_proj(x_TH, norm))
        g_TN = -self.A_log.float().exp() * F.softplus(a_TN.float() + self.dt_bias.float())
        return qkv_TW, g_TN, b_TN.sigmoid(), z

    def output(self, read_TNE: Tensor, z: Tensor) -> Tensor:
        """Returns the projection of silu(z) times the normalized heads, [T, H]."""
        return self.out_proj(torch.cat([z, self.norm(read_TNE).flatten(1)], dim=1))


class GroupedDeltaNet(GatedDeltaNet):
    """The projections of Qwen3-Next, in whose files all rows of a key head are adjacent. With two value heads each:

        in_proj_qkvz   q0 k0 v0 v1 z0 z1   q1 k1 v2 v3 z2 z3   ...
        in_proj_ba     b0 b1 a0 a1         b2 b3 a2 a3         ...

    The weights keep this order, and what they compute is put into the usual one.
    """

    @staticmethod
    def parts(sizes: DeltaSizes) -> dict[str, int]:
        return {"in_proj_qkvz": sum(sizes.rows[:2]), "in_proj_ba": sum(sizes.rows[2:])}

    def split(self, projected: Tensor) -> Sequence[Tensor]:
        sizes = self.sizes
        by_key_head = (sizes.num_key_heads, -1)
        num_values = sizes.num_value_heads // sizes.num_key_heads * sizes.value_dim
        qkvz, ba = projected.split(list(self.parts(sizes).values()), dim=1)
        q, k, v, z = qkvz.unflatten(1, by_key_head).split([sizes.key_dim] * 2 + [num_values] * 2, dim=2)
        b, a = ba.unflatten(1, by_key_head).chunk(2, dim=2)
        return torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], dim=1), z.flatten(1), b.flatten(1), a.flatten(1)


DELTA_NETS: dict[str, type[GatedDeltaNet]] = {"delta": GatedDeltaNet, "grouped_delta": GroupedDeltaNet}


class DeltaBlock(ResidualBlock):
    """A pre-norm block with a state in place of attention (arXiv 2412.06464); heads have no positions."""

    def __init__(self, config: LlamaConfig, layer: Layer, *, recompute: bool = False) -> None:
        super().__init__(config)
        self.input_layernorm = make_norm(config, config.hidden_size)
        self.linear_attn = DELTA_NETS[layer.attention](config, recompute)
        self.post_attention_layernorm = make_norm(config, config.hidden_size)
        self.mlp = MLPS[layer.mlp](config, recompute)

    def forward(self, x_TH: Tensor, position_ids: Tensor, table_PD: Tensor | None, mix: MixDelta) -> Tensor:
        qkv_TW, g_TN, beta_TN, gate = self.before_attention(x_TH)
        read_TNE = mix(self.linear_attn.sizes, qkv_TW, self.linear_attn.conv1d.weight.squeeze(1), g_TN, beta_TN)
        return self.after_attention(x_TH, read_TNE, gate)

    def before_attention(self, x_TH: Tensor) -> Mixed:
        return self.linear_attn.mixer_inputs(x_TH, self.input_layernorm)

    def after_attention(self, x_TH: Tensor, read_TNE: Tensor, gate: Tensor) -> Tensor:
        x_TH = self.add(x_TH, self.linear_attn.output(read_TNE, gate))
        return self.add(x_TH, self.mlp(x_TH, self.post_attention_layernorm))

    @property
    def num_heads(self) -> int:
        return self.linear_attn.sizes.num_value_heads

    def within(self, documents: Documents) -> MixDelta:
        return documents.once(_recur_within)

    def cache(self, capacity: int) -> MixDelta:
        return ConvolvedRecur(CachedRecur())

    def flops(self, lengths: Sequence[int]) -> Flops:
        """In each head, a token reads the state for its key, corrects it, and reads it for its query, 2 D E FLOPs each.
        Each channel of a convolution of J taps takes 2 J. What a computation in chunks needs beyond that is not
        counted."""
        sizes, num_tokens = self.linear_attn.sizes, sum(lengths)
        state = 6 * sizes.num_value_heads * sizes.key_dim * sizes.value_dim
        convolution = 2 * sizes.num_taps * sum(sizes.widths)
        return Flops(self.flops_of_weights(num_tokens), (state + convolution) * num_tokens)


def _recur_within(documents: Documents) -> MixDelta:
    mix = ConvolvedRecur(RecurInDocuments(documents.cu_seqlens, documents.on_device, recompute=documents.recompute))
    return mix if documents.context is None else ContextDelta(mix, documents.context)
