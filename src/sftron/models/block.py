"""The blocks of a decoder: what each kind offers, and those with attention.

shape suffixes: T tokens of the packed row, H hidden_size, N num_attention_heads, K num_key_value_heads, D head_dim,
P positions of the RoPE table
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from types import MethodType
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from sftron.kernels.rope import Heads
from sftron.models.architecture import Layer, LlamaConfig
from sftron.models.attention import Attend, attend_documents
from sftron.models.attention_kernels import Scores
from sftron.models.context import Context, ContextAttention
from sftron.models.feed_forward import MLPS
from sftron.models.layers import Linear, Norm
from sftron.models.projections import ATTENTIONS, make_norm
from sftron.models.sdpa_attention import CachedAttention

Mix = TypeVar("Mix")
"""The type of the function by which a token of a kind of block reads others, such as `Attend`."""


@dataclass(frozen=True, slots=True)
class OnHost:
    """A tensor that stays on the CPU. FSDP would move it to the device of the model, wait for the copy, and let layers
    wait for the device to read it."""

    tensor: Tensor


@dataclass(frozen=True, slots=True)
class Documents:
    """The documents of a batch, for which each kind of block makes a function that its layers share."""

    cu_seqlens: Tensor
    """The document boundaries, int32 [documents + 1]. They came with the batch, so they are read on the CPU without
    waiting for the device."""
    on_device: Tensor
    """The document boundaries on the device of the tokens, for kernels."""
    max_seqlen: int
    num_tokens: int
    recompute: bool
    """Whether the backward pass computes again what it can without a matrix product."""
    context: Context | None = None
    """The ranks that share the row; None if this rank has all of it."""
    _made: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def once(self, make: Callable[..., Any], *arguments: str) -> Any:
        """Returns `make` of the documents and the arguments, the same object at each call."""
        key = (make, *arguments)
        if key not in self._made:
            self._made[key] = make(self, *arguments)
        return self._made[key]


class Flops(NamedTuple):
    """The FLOPs of a block's forward pass."""

    weights: int
    """Those of products of tokens with weights."""
    mixing: int
    """Those of products of tokens with each other, or with a state."""


class Block(Protocol[Mix]):
    """What the model, generation, checkpoints and the count of FLOPs need of a block."""

    def forward(self, x_TH: Tensor, position_ids: Tensor, table_PD: Tensor | None, mix: Mix) -> Tensor:
        """Returns the output, [T, H].

        Args:
            position_ids, table_PD: The rotations of the heads, from RopeTables.at.
            mix: The function by which a token reads others, from `within` or `cache`.
        """
        ...

    @property
    def num_heads(self) -> int:
        """The number of heads in which tokens read others; no more ranks than that can share a row."""
        ...

    def within(self, documents: Documents) -> Mix:
        """Returns the function by which a token reads others of its document in a batch."""
        ...

    def cache(self, capacity: int) -> Mix:
        """Returns the function for one document of at most `capacity` tokens, which are given in several calls."""
        ...

    def flops(self, lengths: Sequence[int]) -> Flops:
        """Returns the FLOPs of the forward pass for documents of these lengths."""
        ...

    def source_rows(self) -> Mapping[str, Mapping[str, int]]:
        """Returns the parts of each linear layer of the block that is several layers in Hugging Face's files, each
        with its number of rows, by the names in the block."""
        ...


class ResidualBlock(nn.Module):
    """A block of two steps, each with a residual connection: what tokens read of each other, and an MLP.

    A subclass has the methods `before_attention` and `after_attention`, which `compile` compiles.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.residual_multiplier = config.residual_multiplier

    def add(self, x_TH: Tensor, change_TH: Tensor) -> Tensor:
        """Returns the residual connection, x + residual_multiplier * change."""
        return torch.add(x_TH, change_TH, alpha=self.residual_multiplier)

    def flops_of_weights(self, num_tokens: int) -> int:
        """Returns 2 FLOPs for each weight that a token is multiplied by."""
        return 2 * num_tokens * sum(getattr(module, "weights_per_token", 0) for module in self.modules())

    def source_rows(self) -> dict[str, Mapping[str, int]]:
        linears = ((name, module) for name, module in self.named_modules() if isinstance(module, Linear))
        return {
            name: {f"{name.rpartition('.')[0]}.{part}": rows for part, rows in linear.parts.items()}
            for name, linear in linears
            if linear.parts
        }

    def compile(self, **options: Any) -> None:
        """Compiles what is before and after attention with these options of torch.compile; attention is one kernel."""
        # Bound methods, not closures, with which a copy of the block would use the weights of the original.
        for name in ("before_attention", "after_attention"):
            setattr(self, name, MethodType(_compiled(getattr(type(self), name), **options), self))


def _compiled(method: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Returns a method that is compiled only if gradients are enabled; in generation the row grows at each step."""
    compiled = torch.compile(method, fullgraph=True, **options)

    @wraps(method)
    def call(block: ResidualBlock, *arguments: Tensor) -> Any:
        return (compiled if torch.is_grad_enabled() else method)(block, *arguments)

    return call


class LlamaBlock(ResidualBlock):
    """A pre-norm transformer block: attention and MLP, each with a norm before it and a residual connection.

    With `recompute`, the backward pass recomputes RMS norms, activations and casts of weights, but no matrix product.
    """

    input_layernorm: Norm | None
    attention = "sdpa"
    """The attention backend, which LlamaForSFT chooses."""

    def __init__(self, config: LlamaConfig, layer: Layer, *, recompute: bool = False) -> None:
        super().__init__(config)
        self.scores = Scores(layer.window, layer.scale, layer.softcap)
        self.input_layernorm = make_norm(config, config.hidden_size)
        self.self_attn = ATTENTIONS[layer.attention](config, layer, recompute)
        self.post_attention_layernorm = make_norm(config, config.hidden_size)
        self.mlp = MLPS[layer.mlp](config, recompute)

    def forward(self, x_TH: Tensor, position_ids: Tensor, table_PD: Tensor | None, mix: Attend) -> Tensor:
        q_TND, k_TKD, v_TKD, *gate = self.before_attention(x_TH, position_ids, table_PD)
        attended_TND = mix(q_TND, k_TKD, v_TKD, self.scores._replace(sinks_N=self.self_attn.sinks))
        return self.after_attention(x_TH, attended_TND, *gate)

    def before_attention(self, x_TH: Tensor, position_ids: Tensor, table_PD: Tensor | None) -> Heads:
        return self.self_attn.heads(x_TH, self.input_layernorm, position_ids, table_PD)

    def after_attention(self, x_TH: Tensor, attended_TND: Tensor, *gate: Tensor) -> Tensor:
        x_TH = self.add(x_TH, self.self_attn.output(attended_TND, *gate))
        return self.add(x_TH, self.mlp(x_TH, self.post_attention_layernorm))

    @property
    def num_heads(self) -> int:
        return self.self_attn.num_heads

    def within(self, documents: Documents) -> Attend:
        return documents.once(_attend_within, self.attention)

    def cache(self, capacity: int) -> Attend:
        return CachedAttention(capacity)

    def flops(self, lengths: Sequence[int]) -> Flops:
        """Query i of a document attends to i keys, so l tokens have l (l + 1) / 2 pairs; through a window of w < l
        tokens, they have w (w + 1) / 2 + (l - w) w. The softmax is not counted."""
        pairs = 0
        for length in lengths:
            in_window = length if self.scores.window is None else min(length, self.scores.window)
            pairs += in_window * (in_window + 1) // 2 + (length - in_window) * in_window
        return Flops(self.flops_of_weights(sum(lengths)), self.self_attn.flops_of_pair * pairs)


def _attend_within(documents: Documents, backend: str) -> Attend:
    cu_seqlens = documents.cu_seqlens if backend == "sdpa" else documents.on_device
    attend = attend_documents(backend, cu_seqlens, documents.max_seqlen, documents.num_tokens)
    return attend if documents.context is None else ContextAttention(attend, documents.context)


class NormAroundBlock(LlamaBlock):
    """The block of Gemma 2: both what attention and MLP read and what they add is normalized (arXiv 2408.00118)."""

    pre_feedforward_layernorm: Norm | None

    def __init__(self, config: LlamaConfig, layer: Layer, *, recompute: bool = False) -> None:
        super().__init__(config, layer, recompute=recompute)
        self.pre_feedforward_layernorm = make_norm(config, config.hidden_size)
        self.post_feedforward_layernorm = make_norm(config, config.hidden_size)

    def after_attention(self, x_TH: Tensor, attended_TND: Tensor, *gate: Tensor) -> Tensor:
        x_TH = self.add(x_TH, self.post_attention_layernorm(self.self_attn.output(attended_TND, *gate)))
        return self.add(x_TH, self.post_feedforward_layernorm(self.mlp(x_TH, self.pre_feedforward_layernorm)))


class NormAfterBlock(NormAroundBlock):
    """The block of OLMo 2: not what attention and MLP read is normalized, but what they add (arXiv 2501.00656)."""

    def __init__(self, config: LlamaConfig, layer: Layer, *, recompute: bool = False) -> None:
        super().__init__(config, layer, recompute=recompute)
        self.input_layernorm = self.pre_feedforward_layernorm = None


class ParallelBlock(LlamaBlock):
    """A block whose attention and MLP both read the same normalized x (GPT-J, Phi, Cohere)."""

    def __init__(self, config: LlamaConfig, layer: Layer, *, recompute: bool = False) -> None:
        super().__init__(config, layer, recompute=recompute)
        del self.post_attention_layernorm

    def after_attention(self, x_TH: Tensor, attended_TND: Tensor) -> Tensor:
        # The norm is computed twice, because attention, which is not compiled, lies between.
        attended_TH, mlp_TH = self.self_attn.output(attended_TND), self.mlp(x_TH, self.input_layernorm)
        return self.add(self.add(x_TH, attended_TH), mlp_TH)
