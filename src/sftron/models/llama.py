"""The decoder model: it maps a flat row of packed documents to hidden states.

    shape suffixes: T tokens of the packed row, H hidden_size, V vocab_size, N num_attention_heads,
    K num_key_value_heads, D head_dim, P positions of the RoPE table

Parameters are fp32 master weights; each linear layer casts its weight to the type of its input. Fused weights are plain
concatenations in Hugging Face's RoPE layout: qkv_proj = cat([q, k, v]), gate_up_proj = cat([gate, up]). Each `Layer` in
architecture.py selects the classes of its block from the tables BLOCKS, ATTENTIONS (projections.py) and MLPS
(feed_forward.py).
"""

from collections.abc import Callable, Iterable
from functools import partial, wraps
from itertools import islice
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sftron.kernels.rope import Heads
from sftron.kernels.table import RopeTables, Rotations
from sftron.models.architecture import Layer, LlamaConfig
from sftron.models.attention import BACKENDS, Attend, attend_documents
from sftron.models.attention_kernels import Scores
from sftron.models.delta import Recur, RecurInDocuments
from sftron.models.delta_layer import Mixed
from sftron.models.feed_forward import MLPS
from sftron.models.head import Head
from sftron.models.layers import Linear, Norm
from sftron.models.projections import ATTENTIONS, make_norm


class LlamaBlock(nn.Module):
    """A pre-norm transformer block: attention and MLP, each with a norm before it and a residual connection.

    With `recompute`, the backward pass recomputes RMS norms, activations and casts of weights, but no matrix product.
    """

    num_norms = (2, 0)
    """The numbers of norms that are computed before and after linear layers, for the prediction of memory."""
    input_layernorm: Norm | None

    def __init__(self, config: LlamaConfig, layer: Layer, *, recompute: bool = False) -> None:
        super().__init__()
        self.residual_multiplier = config.residual_multiplier
        self.scores = Scores(layer.window, layer.scale, layer.softcap)
        self.input_layernorm = make_norm(config, config.hidden_size)
        self.self_attn = ATTENTIONS[layer.attention](config, layer, recompute)
        self.post_attention_layernorm = make_norm(config, config.hidden_size)
        self.mlp = MLPS[layer.mlp](config, recompute)

    def forward(self, x_TH: Tensor, position_ids: Tensor, table_PD: Tensor | None, attend: Attend) -> Tensor:
        q_TND, k_TKD, v_TKD, *gate = self.before_attention(x_TH, position_ids, table_PD)
        attended_TND = attend(q_TND, k_TKD, v_TKD, self.scores._replace(sinks_N=self.self_attn.sinks))
        return self.after_attention(x_TH, attended_TND, *gate)

    def before_attention(self, x_TH: Tensor, position_ids: Tensor, table_PD: Tensor | None) -> Heads:
        return self.self_attn.heads(x_TH, self.input_layernorm, position_ids, table_PD)

    def after_attention(self, x_TH: Tensor, attended_TND: Tensor, *gate: Tensor) -> Tensor:
        x_TH = self.add(x_TH, self.self_attn.output(attended_TND, *gate))
        return self.add(x_TH, self.mlp(x_TH, self.post_attention_layernorm))

    def add(self, x_TH: Tensor, change_TH: Tensor) -> Tensor:
        """Returns the residual connection, x + residual_multiplier * change."""
        return torch.add(x_TH, change_TH, alpha=self.residual_multiplier)

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


class NormAroundBlock(LlamaBlock):
    """The block of Gemma 2: both what attention and MLP read and what they add is normalized (arXiv 2408.00118)."""

    num_norms = (2, 2)
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

    num_norms = (0, 2)

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


class DeltaBlock(LlamaBlock):
    """A pre-norm block with a state in place of attention (arXiv 2412.06464); heads have no positions."""

    def __init__(self, config: LlamaConfig, layer: Layer, *, recompute: bool = False) -> None:
        super().__init__(config, layer, recompute=recompute)
        self.linear_attn = self.self_attn
        del self.self_attn

    def forward(self, x_TH: Tensor, position_ids: Tensor, table_PD: Tensor | None, recur: Recur) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        *mixed, gate = self.before_attention(x_TH, position_ids, table_PD)
        return self.after_attention(x_TH, self.linear_attn.recur(recur, *mixed), gate)

    def before_attention(self, x_TH: Tensor, position_ids: Tensor, table_PD: Tensor | None) -> Mixed:
        return self.linear_attn.mixed(x_TH, self.input_layernorm)

    def after_attention(self, x_TH: Tensor, attended_TND: Tensor, *gate: Tensor) -> Tensor:
        x_TH = self.add(x_TH, self.linear_attn.output(attended_TND, *gate))
        return self.add(x_TH, self.mlp(x_TH, self.post_attention_layernorm))


BLOCKS: dict[str, type[LlamaBlock]] = {
    "norm_before": LlamaBlock,
    "norm_after": NormAfterBlock,
    "norm_around": NormAroundBlock,
    "parallel": ParallelBlock,
    "delta": DeltaBlock,
}

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
        self.norm = make_norm(config, config.hidden_size)
        self.rope_of_layer = [layer.rope for layer in config.layers]
        self.multipliers = config.embedding_multiplier, config.logit_scale

    def forward(
        self, input_ids: Tensor, rotations: Rotations, attends: Iterable[Attend | Recur], dtype: torch.dtype
    ) -> Tensor:
        embedding_multiplier, logit_scale = self.multipliers
        x_TH = _times(self.embed_tokens(input_ids).to(dtype), embedding_multiplier)
        attends = islice(attends, len(self.layers))
        for block, rope, attend in zip(self.layers, self.rope_of_layer, attends, strict=True):
            x_TH = block(x_TH, *rotations[rope], attend)
        return _times(self.norm(x_TH), logit_scale)


def _times(x: Tensor, factor: float) -> Tensor:
    """Returns x times the factor, which is rounded to x's type, as in Gemma (arXiv 2403.08295)."""
    return x if factor == 1 else x * torch.tensor(factor, dtype=x.dtype).item()


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

    Raises:
        ValueError: An option is unknown.
    """

    def __init__(
        self,
        config: LlamaConfig,
        attention: str = "sdpa",
        compute_dtype: torch.dtype = torch.bfloat16,
        num_positions: int | None = None,
        activation_checkpointing: str = "none",
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
        self.recomputes = activation_checkpointing == "selective"
        num_positions = num_positions or config.max_position_embeddings
        self.rope_tables = RopeTables(num_positions, config.ropes)
        self.model = LlamaModel(config, activation_checkpointing)
        if not config.tie_word_embeddings:
            options = {"bias": config.head_bias, "initializer_range": config.initializer_range}
            self.lm_head = Linear(config.hidden_size, config.vocab_size, **options)

    @property
    def head_weight(self) -> Tensor:
        """The weight of the output projection, [V, H]; with tied embeddings, the embeddings themselves."""
        return self.model.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight

    @property
    def head(self) -> Head:
        """The function from hidden states to logits."""
        bias_V = self.lm_head.bias if self.config.head_bias else None
        return Head(self.head_weight, bias_V, self.config.logit_softcap)

    def forward(self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        """Returns the hidden states [T, H] after the final norm, times logit_scale, in compute_dtype.

        Args:
            input_ids: int [T].
            position_ids: int [T]. Positions restart at each document or more often, so all are below max_seqlen.
            cu_seqlens: The document boundaries, int32 [documents + 1], on the device or on the CPU, where the backend
                "sdpa" reads them without waiting for the device.
            max_seqlen: An upper bound of the document lengths; an int, so that reading it does not synchronize with the
                device.

        Raises:
            ValueError: max_seqlen exceeds the RoPE table.
        """
        self.check_positions(max_seqlen)
        if self.attention != "sdpa":
            cu_seqlens = cu_seqlens.to(input_ids.device, non_blocking=True)
        attend = attend_documents(self.attention, cu_seqlens, max_seqlen, len(input_ids))
        recur = RecurInDocuments(cu_seqlens, recompute=self.recomputes)
        attends = [recur if layer.is_recurrent else attend for layer in self.config.layers]
        return self._hidden_states(attends, input_ids, position_ids, self.compute_dtype)

    def attend_with(
        self, attends: Iterable[Attend | Recur], input_ids: Tensor, position_ids: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Computes the same as `forward`, but in `dtype` and with one function per layer, e.g. with a cache.

        It is a separate method because sharding registers it with FSDP as a second forward pass.
        """
        return self._hidden_states(attends, input_ids, position_ids, dtype)

    def _hidden_states(
        self, attends: Iterable[Attend | Recur], input_ids: Tensor, position_ids: Tensor, dtype: torch.dtype
    ) -> Tensor:
        rotations = self.rope_tables.at(position_ids)
        with torch.autocast(input_ids.device.type, enabled=False):
            return self.model(input_ids, rotations, attends, dtype)

    def check_positions(self, num_positions: int, *, is_generated: bool = False) -> None:
        """Raises ValueError if num_positions exceed the RoPE table, or what can be generated with a cache."""
        if num_positions > self.rope_tables.num_positions:
            raise ValueError(
                f"A document of {num_positions} tokens does not fit the RoPE table of {self.rope_tables.num_positions} "
                f"positions (max_position_embeddings is {self.config.max_position_embeddings}). Shorten the documents, "
                "or build LlamaForSFT with a larger num_positions."
            )
        most = self.rope_tables.most_cached
        if is_generated and most is not None and num_positions > most:
            raise ValueError(
                f"{num_positions} tokens exceed the {most} positions (max_position_embeddings) up to which tokens are "
                "generated with rope_type 'dynamic', because keys in the cache would depend on the final length. "
                "Shorten the prompt, or generate fewer tokens."
            )
