"""The block of LFM2 with a gated short convolution in place of attention (arXiv 2511.23404).

    x ──► norm ──► in_proj ──► B, C, z;   y = C * convolution(B * z) ──► out_proj

The convolution of a few taps is of each channel for itself, and starts again in each document.

    shape suffixes: T tokens of the packed row, H hidden_size and number of channels, J taps
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sftron.models.architecture import Layer, LlamaConfig
from sftron.models.block import Documents, Flops, ResidualBlock
from sftron.models.causal_convolution import CachedConvolve, ConvolutionSizes, Convolve, ConvolveInDocuments, Taps
from sftron.models.context import ContextConvolution
from sftron.models.feed_forward import MLPS
from sftron.models.layers import Linear, NormedLinear, recomputed
from sftron.models.projections import make_norm


class ShortConvolution(nn.Module):
    """The projections before and after the convolution, and its taps.

    With `recompute`, the input of out_proj is computed again, bit for bit, other than under torch.compile.
    """

    def __init__(self, config: LlamaConfig, recompute: bool) -> None:
        super().__init__()
        assert isinstance(config.mixing, ConvolutionSizes)
        size, bias = config.hidden_size, config.mixing.bias
        options = {"bias": bias, "initializer_range": config.initializer_range, "recompute": recompute}
        self.recompute = recompute
        self.in_proj = NormedLinear(size, 3 * size, **options)
        self.conv = Taps(size, config.mixing.num_taps, config.initializer_range, bias=bias)
        self.out_proj = Linear(size, size, **options)

    def output(self, convolved_TH: Tensor, gate_TH: Tensor) -> Tensor:
        """Returns the projection of the gate times the convolution with its bias."""

        def gated() -> Tensor:
            if self.conv.bias is None:
                return gate_TH * convolved_TH
            return gate_TH * (convolved_TH + self.conv.bias.to(convolved_TH.dtype))

        gated_TH = gated()
        if not self.recompute or torch.compiler.is_compiling():
            return self.out_proj(gated_TH)
        with recomputed(gated_TH, gated):
            return self.out_proj(gated_TH)


class ShortConvolutionBlock(ResidualBlock):
    """A pre-norm block with a gated short convolution in place of attention; channels have no positions."""

    def __init__(self, config: LlamaConfig, layer: Layer, *, recompute: bool = False) -> None:
        super().__init__(config)
        self.input_layernorm = make_norm(config, config.hidden_size)
        self.conv = ShortConvolution(config, recompute)
        self.post_attention_layernorm = make_norm(config, config.hidden_size)
        self.mlp = MLPS[layer.mlp](config, recompute)

    def forward(self, x_TH: Tensor, position_ids: Tensor, table_PD: Tensor | None, mix: Convolve) -> Tensor:
        input_TH, gate_TH = self.before_attention(x_TH)
        return self.after_attention(x_TH, mix(input_TH, self.conv.conv.weight.squeeze(1)), gate_TH)

    def before_attention(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the input of the convolution and the gate of its output."""
        b_TH, gate_TH, z_TH = self.conv.in_proj(x_TH, self.input_layernorm).chunk(3, dim=1)
        return b_TH * z_TH, gate_TH

    def after_attention(self, x_TH: Tensor, convolved_TH: Tensor, gate_TH: Tensor) -> Tensor:
        x_TH = self.add(x_TH, self.conv.output(convolved_TH, gate_TH))
        return self.add(x_TH, self.mlp(x_TH, self.post_attention_layernorm))

    @property
    def num_heads(self) -> int:
        """The number of channels: each is convolved for itself."""
        return len(self.conv.conv.weight)

    def within(self, documents: Documents) -> Convolve:
        return documents.once(_convolve_within)

    def cache(self, capacity: int) -> Convolve:
        return CachedConvolve(activates=False)

    def flops(self, lengths: Sequence[int]) -> Flops:
        """Each channel takes 2 J FLOPs a token; the gates are not counted."""
        num_tokens = sum(lengths)
        return Flops(self.flops_of_weights(num_tokens), 2 * self.conv.conv.weight.numel() * num_tokens)


def _convolve_within(documents: Documents) -> Convolve:
    convolve = ConvolveInDocuments(documents.on_device, activates=False)
    return convolve if documents.context is None else ContextConvolution(convolve, documents.context)
