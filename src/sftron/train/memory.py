"""The memory of a training step: measured, and predicted before any weight is loaded, in bytes of tensors.

Tensors are counted as torch.cuda.max_memory_allocated does; on a CPU, the resident memory of the process is measured
too. A predicted step runs on the meta device, where tensors have shapes but no values.

    shape suffixes: T tokens of the packed row, N query heads, K key-value heads, D head size
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sftron.checkpoint.adapter import model_projections
from sftron.data.types import ContextRank
from sftron.models.adapters import LoraSpec, add_adapters
from sftron.models.architecture import LlamaConfig
from sftron.models.attention_kernels import PLAIN, Scores
from sftron.models.block import Documents, LlamaBlock
from sftron.models.context import Context, ContextAttention
from sftron.models.llama import LlamaForSFT, blocks_without_weights
from sftron.models.loss import loss_function, weighted_loss_sum
from sftron.models.quantization import NF4, store_frozen_in
from sftron.models.sdpa_attention import LONGEST_IN_FP32
from sftron.train.build_data import longest_document, maximal_batch
from sftron.train.build_model import load_model, make_optimizer
from sftron.train.logs import console
from sftron.train.objective import loss_of
from sftron.train.optimizer import set_learning_rate, state_bytes
from sftron.train.preflight import require_finite
from sftron.train.run import Setup, frozen_dtype

DEFAULT_RANK = 16
WAYS = ("full", "LoRA", "QLoRA (nf4)")
MEMORY_PARTS = ("weights", "gradients", "optimizer", "activations")
GROWTH_OF_TENSORS = 1.13
"""The growth of a process on a CPU for each byte of tensors; the C library keeps freed memory (SmolLM2)."""
RESERVE_OF = {"cpu": 1.5, "cuda": 1.15}
"""The memory that a device should have for each byte of tensors, for its allocator and, on a CPU, the process."""

_LONGEST_RECURRENCE = 1024


# --- Measured ---


@dataclass(frozen=True, slots=True)
class MeasuredPeak:
    """The bytes of a step as measured; each is None where it is not known."""

    tensors: int | None
    resident: int | None = None
    """The growth of the process since before the model was made."""


class LiveMemory(TorchDispatchMode):
    """Records the tensors made in its `with` block; what an operation allocates and frees within itself is not seen.

    Attributes:
        peak: The most bytes at a time of storages made inside.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.sizes: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        made = func(*args, **kwargs)
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor) and _storage(leaf) not in given:
                self.sizes[_storage(leaf)] = leaf.untyped_storage().nbytes()
        self.peak = max(self.peak, self.live())
        return made

    def live(self) -> int:
        """Returns the bytes of the storages made inside that exist now."""
        self.sizes = {storage: size for storage, size in self.sizes.items() if not storage.expired()}
        return sum(self.sizes.values())


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


@contextmanager
def peak_of_step(
    model: nn.Module, device: torch.device, baseline: int | None = None
) -> Iterator[Callable[[], MeasuredPeak]]:
    """Yields a function that returns, after the `with` block, the peak of the block, weights included.

    The tensors of a sharded model on a CPU are not known, because its collectives are not operations of torch.

    Args:
        baseline: The `resident_memory` before the model was made, from which the growth of the process is measured.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield lambda: MeasuredPeak(torch.cuda.max_memory_allocated(device))
        return
    if baseline is not None:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets the peak

    def growth() -> int | None:
        return None if baseline is None else memory_status("VmHWM") - baseline

    if isinstance(model, FSDPModule):
        yield lambda: MeasuredPeak(None, growth())
        return
    weights = sum(each.nbytes for each in model.parameters())
    with LiveMemory() as memory:
        yield lambda: MeasuredPeak(weights + memory.peak, growth())


def resident_memory() -> int | None:
    """Returns the bytes of this process that are in memory; None on a system other than Linux."""
    return memory_status("VmRSS") if os.access("/proc/self/clear_refs", os.W_OK) else None


def memory_status(field: str) -> int:
    """Returns a memory field of /proc/self/status in bytes.

    getrusage is not used, because it returns the peak of the parent process if that is higher.
    """
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def total_memory(device: torch.device) -> int:
    """Returns the bytes of memory of the GPU, or of the machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# --- The dry run ---


def measure_step_memory(setup: Setup) -> MeasuredPeak:
    """Returns the peak memory of a training step on maximal batches. No weight changes.

    Raises ValueError if the weights give no finite loss.
    """
    ranks, baseline = setup.ranks, resident_memory()
    console.write("dry run    loading the weights")
    model = ranks.all_or_raise(lambda: load_model(setup))
    require_finite(model, ranks, f"model.path: {setup.model.folder}")
    optimizer, batch = make_optimizer(setup.config, model), maximal_batch(setup.config, ranks.context)
    set_learning_rate(optimizer, 0.0)
    tokens = f"{setup.data.dataset.token_budget:,} tokens"
    console.write(f"dry run    making a training step on two batches of {tokens}, to measure its memory")
    with peak_of_step(model, ranks.device, baseline) as peak:
        loss = loss_of(model, batch, loss_function(setup.model.loss))
        whole_loss = ranks.sum(loss.detach().clone())  # each rank may have a part of the batch
        if not torch.isfinite(whole_loss):
            problem = f"the loss of a batch of one token is {whole_loss.item()}"
            raise ValueError(f"{problem}: {setup.model.folder} holds broken weights")
        loss.backward()
        optimizer.step()
        if setup.config.tokens.batch_accumulation_per_replica == 1:
            model.zero_grad(set_to_none=True)
        # With the optimizer's state, which the first step has made.
        loss_of(model, batch, loss_function(setup.model.loss)).backward()
    return peak()


# --- Predicted ---


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
    """Returns adapters of rank 16 on all linear layers of the blocks."""
    names = model_projections(config)
    return LoraSpec(ranks=dict.fromkeys(names, DEFAULT_RANK), alphas=dict.fromkeys(names, 2.0 * DEFAULT_RANK))


def predictions_of(setup: Setup) -> tuple[str, dict[str, StepMemory | str]]:
    """Returns the run's own way to train, and for each way the prediction or the reason why it is impossible."""
    found: dict[str, StepMemory | str] = {}
    for way in WAYS:
        try:
            found[way] = _predicted(setup, way, setup.ranks.dimensions.context)
        except ValueError as error:
            found[way] = str(error)
    if setup.model.adapters is None:
        return "full", found
    return "QLoRA (nf4)" if frozen_dtype(setup.config) == NF4 else "LoRA", found


def fewest_sharing_ranks(setup: Setup, way: str, most_bytes: float) -> int | None:
    """Returns the smallest power of 2 as parallelism.context with which a step fits into this memory of each rank; None
    if none does. Beyond the number of heads, ranks cannot share packs."""
    architecture = setup.model.architecture
    most = min(setup.data.dataset.token_budget, *(block.num_heads for block in blocks_without_weights(architecture)))
    sizes = takewhile(lambda size: size <= most, (2**power for power in count(1)))
    return next((size for size in sizes if _predicted(setup, way, size).peak <= most_bytes), None)


def _predicted(setup: Setup, way: str, num_sharing: int) -> StepMemory:
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
        num_shards=ranks.dimensions.shard * num_sharing,
        num_sharing=num_sharing,
        on_gpu=ranks.device.type == "cuda",
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
        num_sharing: The number of ranks that share each micro-batch. The result is the memory of the first one, which
            has the most tokens and heads.
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
    counts = ContextRank(size=num_sharing).part_of(num_tokens).counts
    with torch.device("meta"):
        ids, loss_weights = torch.zeros(counts[0], dtype=torch.int64), torch.ones(counts[0])
    # The memory of a recurrence is that of its tokens; on a long document, its loop over chunks would take minutes.
    bounds = torch.tensor([0, *_lengths(num_tokens, min(longest_document, _LONGEST_RECURRENCE))]).cumsum(0)
    context = None if num_sharing == 1 else _FirstOfRanks(counts)
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
class _FirstOfRanks(Context):
    """The first of the ranks that share a row, whose exchanges give tensors of other shapes on the meta device."""

    @property
    def rank(self) -> int:
        return 0

    def to_heads(self, x_TV: Tensor, widths: Sequence[int]) -> Tensor:
        return _Exchanged.apply(x_TV, (sum(self.counts), widths[0]))  # pyright: ignore[reportReturnType]

    def to_tokens(self, x_SW: Tensor, widths: Sequence[int]) -> Tensor:
        return _Exchanged.apply(x_SW, (self.counts[0], sum(widths)))  # pyright: ignore[reportReturnType]


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
