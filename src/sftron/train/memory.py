"""The memory of a training step, predicted before any weight is loaded, in bytes of tensors.

Parameters, gradients and moments follow from their shapes. Activations are those of a step on the meta device, where
tensors have shapes but no values. docs/benchmarks/memory.md compares predictions with published peaks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from sftron.kernels.device import is_gpu
from sftron.models.adapters import LoraSpec, add_adapters, is_adapter
from sftron.models.architecture import LlamaConfig
from sftron.models.block import Documents, LlamaBlock
from sftron.models.llama import LlamaForSFT
from sftron.models.loss import weighted_loss_sum
from sftron.models.quantization import NF4, store_frozen_in
from sftron.models.weight_stream import WeightStream
from sftron.train.attention_memory import MetaAttention, lengths_of
from sftron.train.build_data import longest_document
from sftron.train.measured_memory import LiveMemory
from sftron.train.optimizer import state_bytes
from sftron.train.run import Setup

_LONGEST_RECURRENCE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """The bytes of tensors in a training step of one rank."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    """What one micro-batch keeps for its backward pass."""
    peak: int
    streams: bool = False
    """Whether frozen matrices are streamed."""
    streaming_saves: int = 0
    """How much less memory a streamed base takes than a resident one; 0 without adapters."""
    streaming_reads: int = 0
    """What a micro-batch reads of a streamed base."""

    def with_base(self, *, streams: bool) -> StepMemory:
        """Returns the memory with a frozen base that is streamed or not."""
        saved = self.streaming_saves * (streams - self.streams)
        return replace(self, streams=streams, weights=self.weights - saved, peak=self.peak - saved)


def with_reserve(peak: float, *, on_gpu: bool) -> float:
    """Returns the bytes of memory that a device should have for a step with this peak of tensors.

    On a GPU, 15 % is for the allocator, and 1.5 GB for the CUDA context and NCCL, which lie outside of it.
    """
    return 1.15 * peak + 1.5e9 if on_gpu else 1.5 * peak


def make_unloaded(
    config: LlamaConfig, spec: LoraSpec | None, frozen: torch.dtype, compute_dtype: torch.dtype, mode: str
) -> LlamaForSFT:
    """Returns a model on the meta device, with the adapters and types of a run, and `mode` of activation checkpointing.

    Raises ValueError if the matrices cannot be stored in `frozen`.
    """
    with torch.device("meta"):
        model = LlamaForSFT(config, compute_dtype=compute_dtype, activation_checkpointing=mode)
    if spec is not None:
        add_adapters(model, config, spec)
        store_frozen_in(model, frozen, compute_dtype)
    return model


def predict_run(setup: Setup, spec: LoraSpec | None, frozen: torch.dtype) -> StepMemory:
    """Returns the memory of a step of the run on one rank of its layout, with these adapters and type of frozen
    matrices. Raises ValueError if the matrices cannot be stored in NF4."""
    config, model, dimensions = setup.config, setup.model, setup.ranks.dimensions
    mode = config.model.activation_checkpointing
    return predict(
        make_unloaded(model.architecture, spec, frozen, model.compute_dtype, mode),
        attention=model.attention,
        num_tokens=setup.data.dataset.token_budget,
        longest_document=longest_document(config),
        num_documents=round(setup.data.projection.conversations_per_pack) if config.data.remove_cross_attention else 1,
        optimizer=config.optimizer.name,
        accumulates=config.tokens.batch_accumulation_per_replica > 1,
        num_shards=dimensions.num_shards,
        num_sharing=dimensions.context,
        on_gpu=is_gpu(setup.ranks.device),
    ).with_base(streams=spec is not None and config.model.frozen_base == "stream")


def predict(
    model: LlamaForSFT,
    *,
    attention: Sequence[str],
    num_tokens: int,
    longest_document: int,
    optimizer: str,
    accumulates: bool,
    num_documents: int = 1,
    num_shards: int = 1,
    num_sharing: int = 1,
    on_gpu: bool = False,
) -> StepMemory:
    """Returns the memory of a training step, other than the first, on a micro-batch without padding, with a resident
    base.

    Args:
        model: A model from `make_unloaded`, which is changed.
        attention: The attention backend of each layer; of a layer without attention it is not used.
        num_tokens: The tokens of a micro-batch, each with a label.
        num_documents: The documents of a micro-batch, if they are more than it has at `longest_document` tokens.
        accumulates: Whether a step has several micro-batches, so that gradients remain while the next one runs.
        num_shards: The number of ranks that share a copy of the model.
        num_sharing: The number of ranks that share each micro-batch. The result is the memory of the rank with the most
            heads; what layers without attention exchange is not counted.
    """
    named = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    trained = [each for _, each in named]
    stream = WeightStream(model) if any(is_adapter(name) for name, _ in model.named_parameters()) else None
    weights = _bytes_of(model.parameters()) // num_shards
    gradients = sum(each.nbytes for each in trained) // num_shards
    moments = sum(state_bytes(*each, optimizer) for each in named) // num_shards
    streamed = list(stream.parameters()) if stream else []
    saves = _bytes_of(streamed) // num_shards
    held = weights + moments
    if num_shards > 1:
        _shard(model, num_shards)
        held += (gathered := _gathered(model))
        saves += gathered - _gathered(model, streamed)

    num_own = -(-num_tokens // num_sharing)
    with torch.device("meta"):
        ids, loss_weights = torch.zeros(num_own, dtype=torch.int64), torch.ones(num_own)
    # A recurrence needs the same memory for any length of documents; for a long one, its loop would take minutes.
    bounds = torch.tensor([0, *lengths_of(num_own, min(longest_document, _LONGEST_RECURRENCE))]).cumsum(0)
    documents = Documents(bounds, bounds.to("meta"), longest_document, num_own, model.recomputes)
    num_documents = max(num_documents, -(-num_tokens // longest_document))
    mixes = [
        MetaAttention(backend, num_tokens, longest_document, num_documents, num_sharing, on_gpu)
        if isinstance(block, LlamaBlock)
        else block.within(documents)
        for backend, block in zip(attention, model.blocks, strict=True)
    ]
    activations = 0
    with LiveMemory() as memory:
        for _ in range(2 if accumulates else 1):
            hidden_TH = model.model(ids, model.rope_tables.at(ids), mixes, model.compute_dtype)
            activations = activations or memory.live()
            loss, _ = weighted_loss_sum(hidden_TH, model.head, ids, ids, loss_weights)
            del hidden_TH
            loss.backward()
    update = gradients
    if optimizer == "adamw_8bit" and not on_gpu:
        # The operation's temporary memory, which is not visible, fitted to one measurement.
        update += max((12 * each.numel() for each in trained), default=0) // num_shards
    peak = held + max(memory.peak, update)
    return StepMemory(
        weights=weights,
        gradients=gradients,
        optimizer=moments,
        activations=activations,
        peak=peak,
        streaming_saves=saves - stream.buffer_bytes if stream else 0,
        streaming_reads=stream.bytes_per_pass + num_own * stream.bytes_of_token if stream else 0,
    )


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(each.nbytes for each in tensors)


# --- Sharded weights ---


def _shard(model: LlamaForSFT, num_shards: int) -> None:
    """Gives the weights the type in which FSDP gathers them, and has their gradients reduced as FSDP does."""
    for each in model.parameters():
        if each.dtype != NF4:
            each.data = each.data.to(model.compute_dtype)
    _reduce_gradients(*_groups(model), num_shards)


def _groups(model: LlamaForSFT) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Returns the parameters of each block, and those outside of blocks."""
    blocks: list[list[Tensor]] = [list(block.parameters()) for block in model.model.layers]
    return blocks, list(set(model.parameters()).difference(*blocks))


def _gathered(model: LlamaForSFT, streamed: Collection[Tensor] = ()) -> int:
    """Returns the bytes of the weights that are gathered at a time: two blocks, and all that is outside of blocks."""
    left_out = {id(each) for each in streamed}
    blocks, outside = _groups(model)
    *sizes, size_outside = (_bytes_of(p for p in group if id(p) not in left_out) for group in (*blocks, outside))
    return size_outside + 2 * max(sizes)


def _reduce_gradients(blocks: Sequence[Sequence[Tensor]], outside: Sequence[Tensor], num_shards: int) -> None:
    """Replaces the gradients of a block, once other ones are made, by this rank's fp32 shards, and those outside of
    blocks at the end. What is sent is one fp32 tensor, which exists until the next one."""
    shards, sent, unsent = dict[Tensor, Tensor](), list[Tensor](), list[Sequence[Tensor]]()

    def reduce(group: Sequence[Tensor]) -> None:
        made = [each for each in group if each.grad is not None]
        sent.clear()
        sent.append(torch.empty(sum(each.numel() for each in made), device="meta"))
        for each in made:
            each.grad = None
            shards[each] = torch.empty(-(-each.numel() // num_shards), device="meta")

    def add(group: Sequence[Tensor], _: Tensor) -> None:
        if unsent and unsent[0] is not group:
            reduce(unsent.pop())
        if group is not outside:
            unsent[:] = [group]
        elif all(each.grad is not None for each in group if each.requires_grad):
            reduce(group)

    for group in (*blocks, outside):
        for each in group:
            if each.requires_grad:
                each.register_post_accumulate_grad_hook(partial(add, group))
