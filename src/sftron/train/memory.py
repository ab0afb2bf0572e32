"""The memory of a training step, predicted before any weight is loaded, in bytes of tensors.

The step runs on the meta device, where tensors have shapes but no values.

    shape suffixes: T tokens of the packed row, N query heads, K key-value heads, D head size
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sftron.checkpoint.adapter import model_projections
from sftron.data.types import ContextRank
from sftron.kernels.device import is_gpu
from sftron.models.adapters import LoraSpec, add_adapters
from sftron.models.architecture import LlamaConfig
from sftron.models.attention_kernels import PLAIN, Scores
from sftron.models.block import Documents, LlamaBlock
from sftron.models.context import Context, ContextAttention, share_heads
from sftron.models.llama import LlamaForSFT, blocks_without_weights
from sftron.models.loss import weighted_loss_sum
from sftron.models.quantization import NF4, store_frozen_in
from sftron.models.sdpa_attention import LONGEST_IN_FP32
from sftron.train.build_data import longest_document
from sftron.train.build_model import ALPHA_OF_RANK, DEFAULT_RANK
from sftron.train.measured_memory import LiveMemory
from sftron.train.optimizer import state_bytes
from sftron.train.run import Setup, frozen_dtype

WAYS = ("full", "LoRA", "QLoRA (nf4)")
MEMORY_PARTS = ("weights", "gradients", "optimizer", "activations")
GROWTH_OF_TENSORS = 1.13
"""The growth of a process on a CPU for each byte of tensors; the C library keeps freed memory (SmolLM2)."""
RESERVE_OF = {"cpu": 1.5, "cuda": 1.15}
"""The memory that a device should have for each byte of tensors, for its allocator and, on a CPU, the process."""

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


def make_unloaded(
    config: LlamaConfig,
    spec: LoraSpec | None,
    frozen_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    activation_checkpointing: str,
) -> LlamaForSFT:
    """Returns a model on the meta device, with adapters and the types of a run.

    Raises:
        ValueError: The matrices cannot be stored in frozen_dtype.
    """
    with torch.device("meta"):
        model = LlamaForSFT(config, compute_dtype=compute_dtype, activation_checkpointing=activation_checkpointing)
    if spec is not None:
        add_adapters(model, config, spec)
        store_frozen_in(model, frozen_dtype, compute_dtype)
    return model


def default_spec(config: LlamaConfig) -> LoraSpec:
    """Returns adapters of the default rank on all linear layers of the blocks."""
    names = model_projections(config)
    return LoraSpec(
        ranks=dict.fromkeys(names, DEFAULT_RANK), alphas=dict.fromkeys(names, float(ALPHA_OF_RANK * DEFAULT_RANK))
    )


def predictions_of(setup: Setup) -> tuple[str, dict[str, StepMemory | str]]:
    """Returns the run's own way to train, and for each way the prediction or the reason why it is impossible."""
    found: dict[str, StepMemory | str] = {}
    dimensions = setup.ranks.dimensions
    for way in WAYS:
        try:
            found[way] = _predicted(setup, way, dimensions.context, dimensions.num_shards)
        except ValueError as error:
            found[way] = str(error)
    if setup.model.adapters is None:
        return "full", found
    return "QLoRA (nf4)" if frozen_dtype(setup.config) == NF4 else "LoRA", found


def fewest_sharing_ranks(setup: Setup, way: str, most_bytes: float) -> tuple[int, int] | None:
    """Returns the smallest power of 2 as parallelism.context with which a step fits into this memory of each rank, and
    the number of ranks that it needs; None if none does. Beyond the number of heads, ranks cannot share packs.

    A copy of the model stays on as many ranks as in the run's layout, unless that many cannot be grouped by the size.
    """
    architecture, dimensions = setup.model.architecture, setup.ranks.dimensions
    most = min(setup.data.dataset.token_budget, *(block.num_heads for block in blocks_without_weights(architecture)))
    for size in takewhile(lambda size: size <= most, (2**power for power in count(1))):
        num_shards = math.lcm(dimensions.num_shards, size)
        if _predicted(setup, way, size, num_shards).peak <= most_bytes:
            return size, dimensions.replicate * num_shards
    return None


def _predicted(setup: Setup, way: str, num_sharing: int, num_shards: int) -> StepMemory:
    """Returns the memory of a step by one of WAYS. Raises ValueError if the matrices cannot be stored in NF4."""
    config, model, ranks = setup.config, setup.model, setup.ranks
    spec = default_spec(model.architecture) if model.adapters is None else model.adapters.start.spec
    frozen = frozen_dtype(config)
    dense = model.compute_dtype if frozen == NF4 else frozen
    adapters, dtype = {"full": (None, dense), "LoRA": (spec, dense), "QLoRA (nf4)": (spec, NF4)}[way]
    mode = config.model.activation_checkpointing
    return predict(
        make_unloaded(model.architecture, adapters, dtype, model.compute_dtype, mode),
        num_tokens=setup.data.dataset.token_budget,
        longest_document=longest_document(config),
        optimizer_state=config.optimizer.state,
        accumulates=config.tokens.batch_accumulation_per_replica > 1,
        num_shards=num_shards,
        num_sharing=num_sharing,
        on_gpu=is_gpu(ranks.device),
    )


def predict(
    model: LlamaForSFT,
    *,
    num_tokens: int,
    longest_document: int,
    optimizer_state: str,
    accumulates: bool,
    num_shards: int = 1,
    num_sharing: int = 1,
    on_gpu: bool = False,
) -> StepMemory:
    """Returns the memory of a training step, other than the first, on a micro-batch without padding.

    Args:
        model: A model from `make_unloaded`.
        num_tokens: The tokens of a micro-batch, each with a label.
        accumulates: Whether a step has several micro-batches, so that gradients remain while the next one runs.
        num_shards: The number of ranks that share a copy of the model.
        num_sharing: The number of ranks that share each micro-batch. The result is the memory of the rank with the most
            heads; see `share_heads`.
    """
    trained = [each for each in model.parameters() if each.requires_grad]
    weights = sum(each.nbytes for each in model.parameters()) // num_shards
    gradients = sum(each.nbytes for each in trained) // num_shards
    optimizer = sum(state_bytes(each, optimizer_state) for each in trained) // num_shards
    held = weights + optimizer
    if num_shards > 1:
        held += _gather(model)
        _shard_gradients(trained, num_shards)

    lengths = _lengths(num_tokens, longest_document)
    context = None if num_sharing == 1 else _BusiestRank.of(model.config, num_tokens, num_sharing)
    num_own = num_tokens if context is None else context.counts[context.rank]
    with torch.device("meta"):
        ids, loss_weights = torch.zeros(num_own, dtype=torch.int64), torch.ones(num_own)
    # The memory of a recurrence is that of its tokens; on a long document, its loop over chunks would take minutes.
    bounds = torch.tensor([0, *_lengths(num_tokens, min(longest_document, _LONGEST_RECURRENCE))]).cumsum(0)
    documents = Documents("sdpa", bounds, longest_document, num_tokens, model.recomputes, context)
    attention: Any = _Attention(lengths, on_gpu=on_gpu)
    if context is not None:
        attention = ContextAttention(attention, context)
    mixes = [attention if isinstance(block, LlamaBlock) else block.within(documents) for block in model.blocks]
    activations = 0
    with LiveMemory() as memory:
        for _ in range(2 if accumulates else 1):
            hidden_TH = model.model(ids, model.rope_tables.at(ids), mixes, model.compute_dtype)
            activations = activations or memory.live()
            loss, _ = weighted_loss_sum(hidden_TH, model.head, ids, ids, loss_weights)
            del hidden_TH
            loss.backward()
    update = gradients
    if optimizer_state == "8bit" and not on_gpu:
        # The operation's temporary memory, which is not visible, fitted to one measurement.
        update += max((12 * each.numel() for each in trained), default=0) // num_shards
    return StepMemory(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        peak=held + max(memory.peak, update),
    )


def _lengths(num_tokens: int, longest: int) -> list[int]:
    return [min(longest, num_tokens - start) for start in range(0, num_tokens, longest)]


def _gather(model: LlamaForSFT) -> int:
    """Gives the weights the type in which FSDP gathers them, and returns the bytes of those that are gathered at a
    time: two blocks, and all that is outside of blocks."""
    for each in model.parameters():
        if each.dtype != NF4:
            each.data = each.data.to(model.compute_dtype)
    blocks = [sum(each.nbytes for each in block.parameters()) for block in model.model.layers]
    return sum(each.nbytes for each in model.parameters()) - sum(blocks) + 2 * max(blocks)


def _shard_gradients(parameters: Sequence[nn.Parameter], num_shards: int) -> None:
    """Replaces each gradient, once it is made, by this rank's fp32 shard of it."""
    shards: dict[Tensor, Tensor] = {}

    def reduce(parameter: Tensor) -> None:
        parameter.grad = None
        shards[parameter] = torch.empty(-(-parameter.numel() // num_shards), device="meta")

    for each in parameters:
        each.register_post_accumulate_grad_hook(reduce)


@dataclass(frozen=True, slots=True)
class _BusiestRank(Context):
    """The rank with the most heads of those that share a row, whose exchanges give tensors of other shapes on the meta
    device."""

    number: int = 0

    @classmethod
    def of(cls, config: LlamaConfig, num_tokens: int, num_sharing: int) -> _BusiestRank:
        shares = share_heads(config.num_attention_heads, config.num_key_value_heads, num_sharing)
        widths = [queries + 2 * keys for queries, keys in zip(shares.queries, shares.keys, strict=True)]
        return cls(ContextRank(size=num_sharing).part_of(num_tokens).counts, number=widths.index(max(widths)))

    @property
    def rank(self) -> int:
        return self.number

    def to_heads(self, x_TV: Tensor, widths: Sequence[int]) -> Tensor:
        return _Exchanged.apply(x_TV, (sum(self.counts), widths[self.rank]))  # pyright: ignore[reportReturnType]

    def to_tokens(self, x_SW: Tensor, widths: Sequence[int]) -> Tensor:
        return _Exchanged.apply(x_SW, (self.counts[self.rank], sum(widths)))  # pyright: ignore[reportReturnType]


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, int]) -> Tensor:
        ctx.shape = x.shape
        sent = torch.empty_like(x)  # what is sent and received exist at the same time
        return sent.new_empty(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        sent = torch.empty_like(grad)
        return sent.new_empty(ctx.shape), None


class _Attention:
    """Attention within documents, as far as memory goes: it keeps its inputs and its output.

    torch's own function would keep all scores on the meta device.
    """

    def __init__(self, lengths: Sequence[int], *, on_gpu: bool) -> None:
        self._lengths, self._on_gpu = list(lengths), on_gpu

    def __call__(self, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, _scores: Scores = PLAIN) -> Tensor:
        heads, dtype = (q_TND, k_TKD, v_TKD), q_TND.dtype
        if self._on_gpu:
            return _KeptAttention.apply(*heads)  # pyright: ignore[reportReturnType]
        # On a CPU, one document after the other, and short ones in fp32.
        wide = torch.float32 if max(self._lengths) <= LONGEST_IN_FP32 else dtype
        documents = zip(*(x.split(self._lengths) for x in heads), strict=True)
        return torch.cat([_KeptAttention.apply(*(x.to(wide) for x in each)).to(dtype) for each in documents])


class _KeptAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        out_TND, lse_TN = torch.empty_like(q_TND), q_TND.new_empty(q_TND.shape[:2], dtype=torch.float32)
        ctx.save_for_backward(q_TND, k_TKD, v_TKD, out_TND, lse_TN)
        return out_TND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TND: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tuple(torch.empty_like(each) for each in ctx.saved_tensors[:3])
