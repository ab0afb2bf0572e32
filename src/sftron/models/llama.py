"""The decoder model: it maps a flat row of packed documents to hidden states.

    shape suffixes: T tokens of the packed row, H hidden_size, V vocab_size, N num_attention_heads,
    K num_key_value_heads, D head_dim, P positions of the RoPE table

Parameters are fp32 master weights; each linear layer casts its weight to the type of its input. Fused weights are plain
concatenations in Hugging Face's RoPE layout: qkv_proj = cat([q, k, v]), gate_up_proj = cat([gate, up]). Each `Layer` in
architecture.py selects the classes of its block from the tables BLOCKS, ATTENTIONS (projections.py) and MLPS
(feed_forward.py). All that depends on the kind of a block is in its class; see `Block` in block.py.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sftron.kernels.table import RopeTables, Rotations
from sftron.models.architecture import Layer, LlamaConfig
from sftron.models.attention import BACKENDS, print_error, resolve_attention
from sftron.models.block import Block, Documents, LlamaBlock, NormAfterBlock, NormAroundBlock, OnHost, ParallelBlock
from sftron.models.context import Context
from sftron.models.delta_layer import DeltaBlock
from sftron.models.gemma4 import Gemma4Block, add_layer_inputs, layer_inputs
from sftron.models.head import Head
from sftron.models.layers import Linear
from sftron.models.projections import make_norm
from sftron.models.short_convolution import ShortConvolutionBlock
from sftron.models.weight_stream import WeightStream

AnyBlock = LlamaBlock | DeltaBlock | ShortConvolutionBlock
BLOCKS: dict[str, type[AnyBlock]] = {
    "norm_before": LlamaBlock,
    "norm_after": NormAfterBlock,
    "norm_around": NormAroundBlock,
    "parallel": ParallelBlock,
    "delta": DeltaBlock,
    "gemma4": Gemma4Block,
    "short_convolution": ShortConvolutionBlock,
}

ACTIVATION_CHECKPOINTING = ("none", "selective", "full")
"""The options for what a block saves for the backward pass. The memory per token, in units of 2 B x hidden_size and for
the proportions of an 8B model, is 17 for "none", 11.5 for "selective" and 1 for "full"."""


def make_block(config: LlamaConfig, layer: Layer, activation_checkpointing: str = "none") -> AnyBlock:
    """Returns the block of a layer; activation_checkpointing is one of ACTIVATION_CHECKPOINTING."""
    block = BLOCKS[layer.block](config.of_layer(layer), layer, recompute=activation_checkpointing == "selective")
    if activation_checkpointing == "full":
        # A block uses no random numbers, so the state of the generators need not be preserved.
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
    return block


def attention_of_layers(
    name: str,
    config: LlamaConfig,
    device: torch.device,
    dtype: torch.dtype,
    report: Callable[[str], object] = print_error,
) -> tuple[str, ...]:
    """Returns the attention backend of each layer for `name`, one of CHOICES; "" for a layer without attention.

    Raises ValueError as `resolve_attention` does, and calls `report` once with each of its lines.
    """
    report = cache(report)
    backends = {
        layer: resolve_attention(name, device, dtype, config.of_layer(layer).head_dim, layer, report)
        if issubclass(BLOCKS[layer.block], LlamaBlock)
        else ""
        for layer in dict.fromkeys(config.layers)
    }
    return tuple(backends[layer] for layer in config.layers)


@cache
def blocks_without_weights(config: LlamaConfig) -> tuple[Block, ...]:
    """Returns the blocks of a model on the meta device, of which equal layers share one."""
    with torch.device("meta"):
        blocks = {layer: make_block(config, layer) for layer in config.layers}
    return tuple(blocks[layer] for layer in config.layers)


class LlamaModel(nn.Module):
    """The embeddings, the blocks and the final norm; the caller provides the function by which each block mixes."""

    def __init__(self, config: LlamaConfig, activation_checkpointing: str) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=config.initializer_range)
        self.layers = nn.ModuleList(make_block(config, layer, activation_checkpointing) for layer in config.layers)
        self.norm = make_norm(config, config.hidden_size)
        self.rope_of_layer = [layer.rope for layer in config.layers]
        self.multipliers = config.embedding_multiplier, config.logit_scale
        self.config = config
        add_layer_inputs(self, config)

    def forward(self, input_ids: Tensor, rotations: Rotations, mixes: Iterable[Any], dtype: torch.dtype) -> Tensor:
        embedding_multiplier, logit_scale = self.multipliers
        x_TH = _times(self.embed_tokens(input_ids).to(dtype), embedding_multiplier)
        mixes = islice(mixes, len(self.layers))
        inputs = [()] * len(self.layers)
        if self.config.per_layer_input_size is not None:
            inputs = [(each,) for each in layer_inputs(self, self.config, input_ids, x_TH)]
        for block, rope, mix, given in zip(self.layers, self.rope_of_layer, mixes, inputs, strict=True):
            x_TH = block(x_TH, *rotations[rope], mix, *given)
        return _times(self.norm(x_TH), logit_scale)


def _times(x: Tensor, factor: float) -> Tensor:
    """Returns x times the factor, which is rounded to x's type, as in Gemma (arXiv 2403.08295)."""
    return x if factor == 1 else x * torch.tensor(factor, dtype=x.dtype).item()


class LlamaForSFT(nn.Module):
    """A causal decoder whose batch is one packed row. Weights are random until loaded (see checkpoint/hf_weights.py).

    With tied embeddings there is no module `lm_head`, so `to_empty`, sharding and loading cannot untie the two.

    Args:
        attention: The backend of each layer from `attention_of_layers`, or one of BACKENDS for all.
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
        attention: str | Sequence[str] = "sdpa",
        compute_dtype: torch.dtype = torch.bfloat16,
        num_positions: int | None = None,
        activation_checkpointing: str = "none",
    ) -> None:
        super().__init__()
        if activation_checkpointing not in ACTIVATION_CHECKPOINTING:
            names = ", ".join(ACTIVATION_CHECKPOINTING)
            raise ValueError(f"activation_checkpointing: {activation_checkpointing!r} is not one of {names}.")
        self.config = config
        self.compute_dtype = compute_dtype
        self.recomputes = activation_checkpointing == "selective"
        self.context_group: dist.ProcessGroup | None = None
        """The ranks that share each row; None if this rank has whole rows."""
        self.stream: WeightStream | None = None
        """What fetches frozen matrices that are not kept in memory; None if all are."""
        num_positions = num_positions or config.max_position_embeddings
        self.rope_tables = RopeTables(num_positions, config.ropes)
        self.model = LlamaModel(config, activation_checkpointing)
        if not config.tie_word_embeddings:
            options = {"bias": config.head_bias, "initializer_range": config.initializer_range}
            self.lm_head = Linear(config.hidden_size, config.vocab_size, **options)
        self.attention = attention

    @property
    def attention(self) -> tuple[str, ...]:
        """The attention backend of each layer; "" for a layer without attention."""
        return tuple(block.attention if isinstance(block, LlamaBlock) else "" for block in self.blocks)

    @attention.setter
    def attention(self, backends: str | Sequence[str]) -> None:
        backends = [backends] * len(self.blocks) if isinstance(backends, str) else backends
        for block, backend in zip(self.blocks, backends, strict=True):
            if isinstance(block, LlamaBlock):
                if backend not in BACKENDS:
                    names = ", ".join(BACKENDS)
                    raise ValueError(f"attention: {backend!r} is not one of {names}; see resolve_attention.")
                block.attention = backend

    @property
    def blocks(self) -> Sequence[Block]:
        return list(self.model.layers)  # pyright: ignore[reportReturnType]

    @property
    def head_weight(self) -> Tensor:
        """The weight of the output projection, [V, H]; with tied embeddings, the embeddings themselves."""
        return self.model.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight

    @property
    def head(self) -> Head:
        """The output projection; `head.logits(hidden)` gives the logits."""
        bias_V = self.lm_head.bias if self.config.head_bias else None
        return Head(self.head_weight, bias_V, self.config.logit_softcap)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor | OnHost,
        max_seqlen: int,
        counts: Sequence[int] = (),
    ) -> Tensor:
        """Returns the hidden states [T, H] after the final norm, times logit_scale, in compute_dtype.

        The ranks of `context_group` share the row: input_ids and the result are those of this rank's tokens, and all
        other arguments those of the whole row. The gradients of a rank are its part of a sum over these ranks.

        Args:
            input_ids: int [T].
            position_ids: int [T]. Positions restart at each document or more often, so all are below max_seqlen.
            cu_seqlens: The document boundaries, int32 [documents + 1], on the CPU, where some layers read them ("sdpa"
                and the delta rule); on the device, these wait for it. FSDP moves a tensor there, but not an OnHost.
            max_seqlen: An upper bound of the document lengths; an int, so that reading it does not synchronize with the
                device.
            counts: The number of tokens of each rank of `context_group`. Without a group there is one, which need not
                be given; with one, a whole row can be given to all ranks alike if no gradient is needed.

        Raises:
            ValueError: max_seqlen exceeds the RoPE table, or counts are not those of `context_group`.
        """
        self.check_positions(max_seqlen)
        context = self._context(input_ids, position_ids, tuple(counts))
        cu_seqlens = cu_seqlens.tensor if isinstance(cu_seqlens, OnHost) else cu_seqlens
        on_device = cu_seqlens.to(input_ids.device, non_blocking=True)
        documents = Documents(cu_seqlens, on_device, max_seqlen, len(position_ids), self.recomputes, context)
        mixes = [block.within(documents) for block in self.blocks]
        tokens = slice(None) if context is None else context.tokens
        return self._hidden_states(mixes, input_ids, position_ids, self.compute_dtype, tokens)

    def _context(self, input_ids: Tensor, position_ids: Tensor, counts: tuple[int, ...]) -> Context | None:
        group = self.context_group
        if group is not None and not counts and not torch.is_grad_enabled():
            return None  # every rank computes the whole row; their gradients would count it several times
        num_ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
        counts = counts or (len(input_ids),)
        if len(counts) != num_ranks or counts[rank] != len(input_ids) or sum(counts) != len(position_ids):
            raise ValueError(
                f"counts are {counts}, but rank {rank} of {num_ranks} that share a row has {len(input_ids)} of its "
                f"{len(position_ids)} tokens. Cut the row for as many ranks as context_group has."
            )
        return None if group is None or num_ranks == 1 else Context(counts, group)

    def attend_with(self, mixes: Iterable[Any], input_ids: Tensor, position_ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Computes the same as `forward`, but in `dtype` and with one function per layer, e.g. with a cache.

        It is a separate method because sharding registers it with FSDP as a second forward pass.
        """
        return self._hidden_states(mixes, input_ids, position_ids, dtype)

    def _hidden_states(
        self,
        mixes: Iterable[Any],
        input_ids: Tensor,
        position_ids: Tensor,
        dtype: torch.dtype,
        tokens: slice = slice(None),
    ) -> Tensor:
        # Of the whole row, because some rotations depend on the length of a document.
        whole = self.rope_tables.at(position_ids)
        rotations = {rope: (rows[tokens], table_PD) for rope, (rows, table_PD) in whole.items()}
        with torch.autocast(input_ids.device.type, enabled=False):
            return self.model(input_ids, rotations, mixes, dtype)

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
