"""The block of Gemma 4, and what it reads besides the residual stream.

    x ──► attention ──► MLP ──► gate(x) * the layer's input ──► times the layer's scalar
              ▲                            ▲
      keys and values of an        an embedding of the token for this layer,
      earlier layer, in the        and a projection of the token's usual one
      last layers

A layer's input is all that it knows of a token beyond x (the models E2B and E4B). The last layers of these models have
no keys and values of their own: they read those of the last layer before them that has some, and the same window.

    shape suffixes: T tokens of the packed row, H hidden_size, L layers, P size of a layer's input,
    N num_attention_heads, K num_key_value_heads, D head_dim
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sftron.models.architecture import Layer, LlamaConfig
from sftron.models.attention import Attend
from sftron.models.block import NormAroundBlock
from sftron.models.layers import GatedLinear, Linear
from sftron.models.projections import make_norm

KeysAndValues = tuple[Tensor, Tensor]


class LayerInput:
    """What the block of one layer reads besides x.

    It is no tuple, dict or dataclass, which FSDP would take apart and hand on as a copy.
    """

    def __init__(self, last: dict[int | None, KeysAndValues], *per_layer_TP: Tensor) -> None:
        self.per_layer_TP = per_layer_TP
        """The layer's own input; empty in models without."""
        self.last = last
        """By the window, the keys and values of the last layer so far that has its own. All layers have this same dict.

        In the backward pass of `full` activation checkpointing, layers that read it are computed again before those
        that write it, so they find what they found in the forward pass.
        """


def add_layer_inputs(model: nn.Module, config: LlamaConfig) -> None:
    """Adds the modules from which the inputs of all layers are computed, if the model has some."""
    if not config.per_layer_input_size:
        return
    width, std = config.num_hidden_layers * config.per_layer_input_size, config.initializer_range
    model.embed_tokens_per_layer = nn.Embedding(config.vocab_size, width)
    nn.init.normal_(model.embed_tokens_per_layer.weight, std=std)
    model.per_layer_model_projection = Linear(config.hidden_size, width, bias=False, initializer_range=std)
    model.per_layer_projection_norm = make_norm(config, config.per_layer_input_size)


def layer_inputs(model: Any, config: LlamaConfig, input_ids: Tensor, x_TH: Tensor) -> list[LayerInput]:
    """Returns the input of each layer, given the scaled embeddings of the tokens."""
    last: dict[int | None, KeysAndValues] = {}
    num_layers, size = config.num_hidden_layers, config.per_layer_input_size
    if not size:
        return [LayerInput(last) for _ in range(num_layers)]
    embedded = model.embed_tokens_per_layer(input_ids).to(x_TH.dtype) * size**0.5
    projected = model.per_layer_model_projection(x_TH) * config.hidden_size**-0.5
    projected_TLP = model.per_layer_projection_norm(projected.unflatten(1, (num_layers, size)))
    inputs_TLP = (projected_TLP + embedded.view_as(projected_TLP)) * 2**-0.5
    return [LayerInput(last, each_TP) for each_TP in inputs_TLP.unbind(1)]


class Gemma4Block(NormAroundBlock):
    """The block of Gemma 2, with a layer's input, a scalar that is not trained, and keys that layers may share."""

    def __init__(self, config: LlamaConfig, layer: Layer, *, recompute: bool = False) -> None:
        super().__init__(config, layer, recompute=recompute)
        self.shares_keys, size = layer.shares_keys, config.per_layer_input_size
        # A buffer in transformers, which no optimizer changes.
        self.layer_scalar = nn.Parameter(torch.ones(1), requires_grad=False)
        if size:
            options: dict[str, Any] = {"bias": False, "initializer_range": config.initializer_range}
            options["recompute"] = recompute
            self.per_layer_input_gate = Linear(config.hidden_size, size, **options)
            self.per_layer_projection = GatedLinear(size, config.hidden_size, activation=config.activation, **options)
            self.post_per_layer_input_norm = make_norm(config, config.hidden_size)
            # Its part of per_layer_model_projection.
            self.weights_per_token = config.hidden_size * size

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x_TH: Tensor, position_ids: Tensor, table_PD: Tensor | None, mix: Attend, given: LayerInput
    ) -> Tensor:
        q_TND, *own = self.before_attention(x_TH, position_ids, table_PD)
        if not self.shares_keys:
            given.last[self.scores.window] = own[0], own[1]
        k_TKD, v_TKD = given.last[self.scores.window]
        return self.after_attention(x_TH, mix(q_TND, k_TKD, v_TKD, self.scores), *given.per_layer_TP)

    def after_attention(self, x_TH: Tensor, attended_TND: Tensor, *per_layer_TP: Tensor) -> Tensor:
        x_TH = super().after_attention(x_TH, attended_TND)
        for input_TP in per_layer_TP:
            gated = self.per_layer_projection(torch.cat([self.per_layer_input_gate(x_TH), input_TP], dim=1))
            x_TH = self.add(x_TH, self.post_per_layer_input_norm(gated))
        return x_TH * self.layer_scalar.to(x_TH.dtype)
