"""The decoder model: it maps a flat row of packed documents to hidden states.

    shape suffixes: T tokens of the packed row, H hidden_size, F intermediate_size, V vocab_size, W = (N + 2K) * D,
    N num_attention_heads, K num_key_value_heads, D head_dim, P positions of the RoPE table

Parameters are fp32 master weights; each linear layer casts its weight to the type of its input. Fused weights are plain
concatenations in Hugging Face's RoPE layout: qkv_proj = cat([q, k, v]), gate_up_proj = cat([gate, up]). Each `Layer` in
architecture.py selects the classes of its block from the tables BLOCKS, ATTENTIONS and MLPS.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from itertools import islice, repeat
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sftron.kernels.rms_norm import rms_norm
from sftron.kernels.rope import Heads, rotate_heads, split_heads
from sftron.kernels.table import RopeTables, Rotations
from sftron.models.adapters import Adapter, magnitude_factors
from sftron.models.architecture import Layer, LlamaConfig
from sftron.models.attention import BACKENDS, Attend, attend_documents
from sftron.models.linear import gated_linear, linear, normed_linear


class Linear(nn.Linear):
    """A linear layer that computes in the type of its input, whatever the type of its parameters.

    With `recompute` it saves less for the backward pass; see models/linear.py. Its `adapters`, by the name of the
    projection, are empty unless models/adapters.py adds some.
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, initializer_range: float, recompute: bool = False
    ) -> None:
        self.initializer_range, self.recompute = initializer_range, recompute
        super().__init__(in_features, out_features, bias=bias)
        self.adapters = nn.ModuleDict()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.initializer_range)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        return self._apply_with_adapters(linear, input)

    def _apply_with_adapters(self, layer: Callable[..., Tensor], *inputs: Any) -> Tensor:
        adapters: Sequence[Adapter] = list(self.adapters.values())  # pyright: ignore[reportAssignmentType]
        has_magnitudes = any(each.lora_magnitude_vector is not None for each in adapters)
        bias = None if has_magnitudes else self.bias
        low_rank = [each.low_rank() for each in adapters]
        output = layer(*inputs, self.weight, bias, recompute=self.recompute, adapters=low_rank)
        if not has_magnitudes:
            return output
        output = output * magnitude_factors(self.weight, adapters).to(output.dtype)
        return output if self.bias is None else output + self.bias.to(output.dtype)


class RMSNorm(nn.Module):
    """Root mean square normalization, computed in fp32 and rounded once (arXiv 1910.07467)."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x_TH: Tensor) -> Tensor:
        return rms_norm(x_TH, self.weight, self.eps)


class NormedLinear(Linear):
    """A norm followed by a linear layer, computed as one function."""

    def forward(self, x_TH: Tensor, norm: RMSNorm) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._apply_with_adapters(normed_linear, x_TH, norm.weight, norm.eps)


class GatedLinear(Linear):
    """SwiGLU followed by a linear layer, computed as one function."""

    def forward(self, gate_up_T2F: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._apply_with_adapters(gated_linear, gate_up_T2F)


class LlamaAttention(nn.Module):
    """The projections before and after attention, with a rotary embedding on every query and key head."""

    def __init__(self, config: LlamaConfig, layer: Layer, recompute: bool) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        width = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        o_width, initializer_range = self.num_heads * self.head_dim, config.initializer_range
        options = {"initializer_range": initializer_range, "recompute": recompute}
        self.qkv_proj = NormedLinear(config.hidden_size, width, bias=config.qkv_bias, **options)
        self.o_proj = Linear(o_width, config.hidden_size, bias=config.o_bias, **options)

    def heads(self, x_TH: Tensor, norm: RMSNorm, position_ids: Tensor, table_PD: Tensor | None) -> Heads:
        """Returns q_TND, k_TKD and v_TKD, computed from the normalized x."""
        qkv_TW = self.qkv_proj(x_TH, norm)
        return rotate_heads(qkv_TW, position_ids, table_PD, self.num_heads, self.num_kv_heads)


class NormedHeadsAttention(LlamaAttention):
    """The attention projections of Qwen 3: each query and key head is normalized before rotation (arXiv 2505.09388)."""

    def __init__(self, config: LlamaConfig, layer: Layer, recompute: bool) -> None:
        super().__init__(config, layer, recompute)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def heads(self, x_TH: Tensor, norm: RMSNorm, position_ids: Tensor, table_PD: Tensor | None) -> Heads:
        q_TND, k_TKD, v_TKD = split_heads(self.qkv_proj(x_TH, norm), self.num_heads, self.num_kv_heads)
        heads = (self.q_norm(q_TND), self.k_norm(k_TKD), v_TKD)
        qkv_TW = torch.cat([x_THD.flatten(1) for x_THD in heads], dim=1)
        return rotate_heads(qkv_TW, position_ids, table_PD, self.num_heads, self.num_kv_heads)


class LlamaMLP(nn.Module):
    """The feed-forward network with a SwiGLU gate."""

    def __init__(self, config: LlamaConfig, recompute: bool) -> None:
        super().__init__()
        options = {"initializer_range": config.initializer_range, "recompute": recompute, "bias": config.mlp_bias}
        self.gate_up_proj = NormedLinear(config.hidden_size, 2 * config.intermediate_size, **options)
        self.down_proj = GatedLinear(config.intermediate_size, config.hidden_size, **options)

    def forward(self, x_TH: Tensor, norm: RMSNorm) -> Tensor:
        return self.down_proj(self.gate_up_proj(x_TH, norm))


class LlamaBlock(nn.Module):
    """A pre-norm transformer block: attention and MLP, each with a norm before it and a residual connection.

    With `recompute`, the backward pass recomputes norms, SwiGLU and casts of weights, but no matrix product.
    """

    def __init__(self, config: LlamaConfig, layer: Layer, *, recompute: bool = False) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = ATTENTIONS[layer.attention](config, layer, recompute)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLPS[layer.mlp](config, recompute)

    def forward(self, x_TH: Tensor, position_ids: Tensor, table_PD: Tensor | None, attend: Attend) -> Tensor:
        q_TND, k_TKD, v_TKD = self.before_attention(x_TH, position_ids, table_PD)
        return self.after_attention(x_TH, attend(q_TND, k_TKD, v_TKD))

    def before_attention(self, x_TH: Tensor, position_ids: Tensor, table_PD: Tensor | None) -> Heads:
        return self.self_attn.heads(x_TH, self.input_layernorm, position_ids, table_PD)

    def after_attention(self, x_TH: Tensor, attended_TND: Tensor) -> Tensor:
        x_TH = x_TH + self.self_attn.o_proj(attended_TND.flatten(1))
        return x_TH + self.mlp(x_TH, self.post_attention_layernorm)

    def compile(self, **options: Any) -> None:
        """Compiles what is before and after attention with these options of torch.compile; attention is one kernel."""
        # Bound methods, not closures, with which a copy of the block would use the weights of the original.
        self.before_attention = MethodType(_compiled(type(self).before_attention, **options), self)
        self.after_attention = MethodType(_compiled(type(self).after_attention, **options), self)


def _compiled(method: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Returns a method that is compiled only if gradients are enabled; in generation the row grows at each step."""
    compiled = torch.compile(method, fullgraph=True, **options)

    @wraps(method)
    def call(block: LlamaBlock, *arguments: Tensor) -> Any:
        return (compiled if torch.is_grad_enabled() else method)(block, *arguments)

    return call


BLOCKS: dict[str, type[LlamaBlock]] = {"norm_before": LlamaBlock}
ATTENTIONS: dict[str, type[LlamaAttention]] = {"rotary": LlamaAttention, "normed_rotary": NormedHeadsAttention}
MLPS: dict[str, type[LlamaMLP]] = {"gated": LlamaMLP}

ACTIVATION_CHECKPOINTING = ("none", "selective", "full")
"""The options for what a block saves for the backward pass. The memory per token, in units of 2 B x hidden_size and for
the proportions of an 8B model, is 17 for "none", 11.5 for "selective" and 1 for "full"."""


def make_block(config: LlamaConfig, layer: Layer, activation_checkpointing: str = "none") -> LlamaBlock:
    """Returns the block of a layer; activation_checkpointing is one of ACTIVATION_CHECKPOINTING."""
    block = BLOCKS[layer.block](config, layer, recompute=activation_checkpointing == "selective")
    if activation_checkpointing == "full":
        # A block uses no random numbers, so the state of the generators need not be preserved.
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
    return block


class LlamaModel(nn.Module):
    """The embeddings, the blocks and the final norm; the caller provides the attention function of each block."""

    def __init__(self, config: LlamaConfig, activation_checkpointing: str) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=config.initializer_range)
        self.layers = nn.ModuleList(make_block(config, layer, activation_checkpointing) for layer in config.layers)
        self.rope_of_layer = [layer.rope for layer in config.layers]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: Tensor, rotations: Rotations, attends: Iterable[Attend], dtype: torch.dtype) -> Tensor:
        x_TH = self.embed_tokens(input_ids).to(dtype)
        attends = islice(attends, len(self.layers))
        for block, rope, attend in zip(self.layers, self.rope_of_layer, attends, strict=True):
            x_TH = block(x_TH, *rotations[rope], attend)
        return self.norm(x_TH)


class LlamaForSFT(nn.Module):
    """A causal decoder whose batch is one packed row. Weights are random until loaded (see checkpoint/hf_weights.py).

    With tied embeddings there is no module `lm_head`, so `to_empty`, sharding and loading cannot untie the two.

    Args:
        attention: A backend returned by `resolve_attention`.
        compute_dtype: The type of activations; parameters remain fp32.
        num_positions: The number of rows of the RoPE table, by default config.max_position_embeddings. A batch with a
            longer document or longer padding is an error, so this should be at least the token budget.
        activation_checkpointing: One of ACTIVATION_CHECKPOINTING. In the backward pass, "selective" recomputes norms
            and SwiGLU, and "full" recomputes whole blocks. The gradients are bitwise equal.
        longest_document: The largest number of tokens in a document whose hidden states are used, by default each
            batch's max_seqlen; padding may be longer. With a sliding window, a longer document than it is an error.

    Raises:
        ValueError: An option is unknown, or longest_document exceeds the RoPE table or the sliding window.
    """

    def __init__(
        self,
        config: LlamaConfig,
        attention: str = "sdpa",
        compute_dtype: torch.dtype = torch.bfloat16,
        num_positions: int | None = None,
        activation_checkpointing: str = "none",
        longest_document: int | None = None,
    ) -> None:
        super().__init__()
        if attention not in BACKENDS:
            raise ValueError(f"attention: {attention!r} is not one of {', '.join(BACKENDS)}; see resolve_attention.")
        if activation_checkpointing not in ACTIVATION_CHECKPOINTING:
            names = ", ".join(ACTIVATION_CHECKPOINTING)
            raise ValueError(f"activation_checkpointing: {activation_checkpointing!r} is not one of {names}.")
        self.config = config
        self.attention = attention
        self.compute_dtype = compute_dtype
        self.longest_document = longest_document
        num_positions = num_positions or config.max_position_embeddings
        self.rope_tables = RopeTables(num_positions, config.ropes)
        self.check_positions(longest_document or 0)
        self.model = LlamaModel(config, activation_checkpointing)
        if not config.tie_word_embeddings:
            options = {"bias": False, "initializer_range": config.initializer_range}
            self.lm_head = Linear(config.hidden_size, config.vocab_size, **options)

    @property
    def head_weight(self) -> Tensor:
        """The weight of the output projection, [V, H]; with tied embeddings, the embeddings themselves."""
        return self.model.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight

    def forward(self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        """Returns the hidden states [T, H] after the final norm, in compute_dtype.

        Args:
            input_ids, position_ids: int [T]. Positions restart at each document or more often, so all are below
                max_seqlen.
            cu_seqlens: The document boundaries, int32 [documents + 1]; on the CPU for the backend "sdpa".
            max_seqlen: An upper bound of the document lengths; an int, so that reading it does not synchronize with the
                device.

        Raises:
            ValueError: max_seqlen exceeds the RoPE table, or a document whose hidden states are used may exceed the
                sliding window.
        """
        self.check_positions(max_seqlen, self.longest_document)
        attend = attend_documents(self.attention, cu_seqlens, max_seqlen, len(input_ids))
        return self._hidden_states(repeat(attend), input_ids, position_ids, self.compute_dtype)

    def attend_with(
        self, attends: Iterable[Attend], input_ids: Tensor, position_ids: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Computes the same as `forward`, but in `dtype` and with one attention function per layer, e.g. with a cache.

        It is a separate method because sharding registers it with FSDP as a second forward pass.
        """
        return self._hidden_states(attends, input_ids, position_ids, dtype)

    def _hidden_states(
        self, attends: Iterable[Attend], input_ids: Tensor, position_ids: Tensor, dtype: torch.dtype
    ) -> Tensor:
        rotations = self.rope_tables.at(position_ids)
        with torch.autocast(input_ids.device.type, enabled=False):
            return self.model(input_ids, rotations, attends, dtype)

    def check_positions(self, num_positions: int, longest_document: int | None = None) -> None:
        """Raises ValueError if num_positions exceed the RoPE table, or longest_document (by default num_positions) the
        sliding window."""
        if num_positions > self.rope_tables.num_positions:
            raise ValueError(
                f"A document of {num_positions} tokens does not fit the RoPE table of {self.rope_tables.num_positions} "
                f"positions (max_position_embeddings is {self.config.max_position_embeddings}). Shorten the documents, "
                "or build LlamaForSFT with a larger num_positions."
            )
        num_tokens, window = longest_document or num_positions, self.config.sliding_window
        if window is not None and num_tokens > window:
            raise ValueError(
                f"A document of {num_tokens} tokens exceeds the model's sliding window of {window} tokens "
                "(sliding_window), beyond which attention is not implemented. Shorten the documents; if only the "
                "padding is as long, build LlamaForSFT with longest_document."
            )
