"""One training step: fetching the batches, forward and backward, one update, and the step's metrics."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sftron.data.digest import PackDigest, pack_digest
from sftron.data.prepare import Preparation
from sftron.data.types import Batch, DataError
from sftron.kernels.device import device_name, gpu_functions, is_gpu
from sftron.models.exact_sums import ExactSums, exact_norm
from sftron.models.llama import LlamaForSFT
from sftron.models.routing import Routing
from sftron.models.sharding import local_shard, sum_over_copies, whole
from sftron.train.flops import StepFlops
from sftron.train.metrics import ExpertLoad, StepMetrics, TokenLosses, TokenSums
from sftron.train.objective import Objective, TokenLoss, hidden_states
from sftron.train.progress import Progress, StepCounts
from sftron.train.ranks import Ranks

if TYPE_CHECKING:  # a step needs no package of the configuration
    from sftron.config import Config


@dataclass(frozen=True, slots=True)
class StepBatches:
    """This rank's micro-batches of a step, and statistics over the batches of all ranks. A pack that several ranks
    share counts once."""

    batches: list[Batch]
    counts: StepCounts
    """The counts summed over all ranks."""
    flops: StepFlops
    """The mean FLOPs per rank."""
    sum_squared_lengths_spread: float
    """The imbalance of attention work: the largest sum of squared document lengths of any rank, divided by the mean
    over ranks, minus 1. All ranks wait for the slowest one."""
    data_seconds: float
    """The longest time that any rank waited for its batches."""
    peak_memory_bytes: int
    """The peak memory of any rank before this step."""
    peak_reserved_bytes: int | None
    """The peak of what torch's allocator has reserved on any GPU before this step; None on CPUs."""
    packs: list[PackDigest]
    """The digests of the packs of all ranks."""
    denominator: float
    """The sum of the objective's denominators over the packs of all ranks."""


def next_step_batches(
    batches: Iterator[Batch],
    num_batches: int,
    *,
    ranks: Ranks,
    num_datasets: int,
    flops_of: Callable[[Sequence[Batch]], StepFlops],
    denominator_of: Callable[[Batch], float] | None = None,
) -> StepBatches:
    """Fetches this rank's next `num_batches` batches.

    Args:
        denominator_of: The objective's denominator of a micro-batch; by default, the sum of its weights.

    Raises DataError on all ranks if any rank has a bad row, or if ranks that share their packs have different ones.
    """
    started, problem = time.perf_counter(), None
    own: list[Batch] = []
    try:
        own = [next(batches) for _ in range(num_batches)]
    except DataError as error:
        problem = error
    data_seconds, flops = time.perf_counter() - started, flops_of(own)
    everyone = ranks.gather(
        {
            "problem": problem and str(problem),
            "counts": asdict(StepCounts.of(own, num_datasets)),
            "flops": [flops.model, flops.hardware],
            "data_seconds": data_seconds,
            "peak_memory_bytes": peak_memory_bytes(ranks.device),
            "peak_reserved_bytes": peak_reserved_bytes(ranks.device),
            "packs": [pack_digest(batch.pack) for batch in own],
            "denominator": 0.0 if denominator_of is None else math.fsum(map(denominator_of, own)),
        }
    )
    if problem is not None:
        raise problem
    for rank, facts in enumerate(everyone):
        if facts["problem"] is not None:
            raise DataError(f"rank {rank}: {facts['problem']}")
    num_sharing = ranks.context.size
    # Of the ranks that share their packs, the first one reports them.
    reports = everyone[::num_sharing]
    for rank, facts in enumerate(everyone):
        first = rank - rank % num_sharing
        if facts["packs"] != everyone[first]["packs"]:
            raise DataError(
                f"ranks {first} and {rank} share their packs (parallelism.context), but read {everyone[first]['packs']}"
                f" and {facts['packs']} (number and digests): give every node the same files"
            )
    counts = StepCounts.sum_of([facts["counts"] for facts in reports])
    own_sum = math.fsum(facts["denominator"] for facts in reports)
    model, hardware = (sum(facts["flops"][n] for facts in reports) // len(everyone) for n in (0, 1))
    squares = [facts["counts"]["sum_squared_lengths"] for facts in reports]
    return StepBatches(
        own,
        counts,
        StepFlops(model=model, hardware=hardware),
        sum_squared_lengths_spread=max(squares) * len(squares) / sum(squares) - 1 if any(squares) else 0.0,
        data_seconds=max(facts["data_seconds"] for facts in everyone),
        peak_memory_bytes=max(facts["peak_memory_bytes"] for facts in everyone),
        peak_reserved_bytes=_largest(facts["peak_reserved_bytes"] for facts in everyone),
        packs=[PackDigest(*digest) for facts in reports for digest in facts["packs"]],
        denominator=counts.weight_sum if denominator_of is None else own_sum,
    )


def peak_memory_bytes(device: torch.device) -> int:
    """Returns the peak memory so far: allocated on the GPU, or resident in this process if the device is the CPU."""
    if is_gpu(device):
        return gpu_functions(device).max_memory_allocated(device)
    # Linux gives kibibytes, macOS bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def peak_reserved_bytes(device: torch.device) -> int | None:
    """Returns the most GPU memory that torch's allocator has reserved so far, freed tensors and gaps included."""
    return gpu_functions(device).max_memory_reserved(device) if is_gpu(device) else None


def _largest(values: Iterable[int | None]) -> int | None:
    return max((each for each in values if each is not None), default=None)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The measurements of one optimizer step over all ranks."""

    loss: float | None
    """The weighted mean token loss of the step (law 8); None if the step has no target."""
    grad_norm: float | None
    """The norm of all gradients before clipping; None if the step has no target."""
    skipped: str | None
    """The reason why no update was made; None if the weights were updated."""
    is_finite: bool = True
    token_losses: TokenLosses | None = None
    """None if the step has no target."""
    expert_load: ExpertLoad | None = None
    """None if the step has no target, or the model no experts."""
    measures: Mapping[str, float] = field(default_factory=dict)
    """The objective's own measures, each divided by the step's denominator."""
    weights_seconds: float | None = None
    """The time for which this rank waited for weights; None if all are in memory."""


def _problem_of_sum(loss_sum: object) -> str:
    """Returns why a step cannot train this value of an objective's `loss_sum`; empty if it can."""
    if not isinstance(loss_sum, Tensor):
        return f"{type(loss_sum).__name__}; return the sum, a scalar tensor"
    if loss_sum.ndim:
        return f"shape {tuple(loss_sum.shape)}; return the sum, a scalar tensor"
    if not loss_sum.requires_grad:
        return "a sum without a gradient; compute it from the model's outputs, without no_grad, detach or item"
    return ""


def train_step(
    model: LlamaForSFT,
    optimizer: torch.optim.Optimizer | None,
    batches: Sequence[Batch],
    objective: Objective | None = None,
    *,
    max_grad_norm: float | None,
    denominator: float | None = None,
    num_datasets: int = 1,
    with_untrained: bool = False,
    router_aux_loss_coef: float = 0.0,
    sum_over_ranks: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    sums: ExactSums | None = None,
) -> StepResult:
    """Runs forward and backward over this rank's micro-batches, then makes one update.

    The loss is one ratio (law 8): the objective's sum over the whole step, divided once by its denominator over the
    whole step. A mean of the micro-batches' means would give more weight to tokens whose micro-batch has few targets.
    If the loss or a gradient is not finite on any rank, weights and optimizer state do not change.

    Args:
        optimizer: The optimizer; with None, losses and gradients are measured and no weight changes.
        objective: What is minimized; by default `TokenLoss`.
        denominator: The sum of the denominators of the packs of all ranks; by default, of `batches`. Gradients of a
            sharded model are summed over ranks in the backward pass, so a rank takes part even if its own batches have
            no target.
        num_datasets: The number of data sets whose losses are measured.
        with_untrained: Whether the losses of untrained tokens are measured too.
        router_aux_loss_coef: The factor of the auxiliary loss of routers, which is no part of the returned loss. Its
            gradient needs the loads of the whole step, so above 0, all micro-batches but the first are computed once
            more, without gradients; see `Routing`.
        sum_over_ranks: Sums a tensor over all ranks; those that share a pack have parts of its sums.
        sums: Sums gradients and losses to the same bits on any layout; None sums them as floats.
    """
    objective = objective or TokenLoss()
    if denominator is None:
        denominator = sum(objective.denominator(batch) for batch in batches)
    if denominator == 0:
        return StepResult(None, None, "no token to train on")
    waited = model.stream.waited if model.stream else 0.0
    loss = torch.zeros((), device=model.head_weight.device)
    measures = TokenSums(num_datasets, loss.device, objective.names, with_untrained=with_untrained)
    with Routing(model, router_aux_loss_coef) as routing:
        is_counted_ahead = routing.coefficient > 0
        for batch in batches[1:] if is_counted_ahead else ():
            with torch.no_grad(), routing.forward_pass(batch.num_real, counts=True):
                hidden_states(model, batch)
        for number, batch in enumerate(batches, start=1):
            sum_over_copies(model, wanted=number == len(batches))
            with routing.forward_pass(batch.num_real, counts=number == 1 or not is_counted_ahead):
                loss_sum = objective.loss_sum(model, batch, measures)
                if problem := _problem_of_sum(loss_sum):
                    raise TypeError(f"{type(objective).__name__}.loss_sum returned {problem}")
                share = loss_sum / denominator
            if number == 1:
                routing.before_backward(sum_over_ranks)
            is_last = number == len(batches)
            if sums is not None:
                sums.before_backward(share, is_last=is_last)
            share.backward()
            loss += share.detach()
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    if sums is None:
        norm = whole(nn.utils.get_total_norm(parameter.grad for parameter in parameters if parameter.grad is not None))
    else:
        loss, norm = sums.finish(), exact_norm(parameters, sums.num_copies)
    if max_grad_norm is not None:
        nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, norm)
    own = [loss.double().view(1), measures.table_G4.flatten(), measures.sums_N, routing.table_L2E.flatten()]
    loss_1, table, named, loads = sum_over_ranks(torch.cat(own)).split([len(each) for each in own])
    # One transfer brings all numbers of the step to the host, including those that decide whether to update.
    parts = [
        norm.double().view(1),
        loss_1,
        table,
        named / denominator,
        routing.measures(loads.view_as(routing.table_L2E)),
    ]
    on_host = torch.cat(parts).cpu().split([len(each) for each in parts])
    (norm_value,), (loss_value,), token_sums, named_means, load = (each.tolist() for each in on_host)
    is_finite = math.isfinite(loss_value) and math.isfinite(norm_value)
    if is_finite and optimizer is not None:
        optimizer.step()
    model.zero_grad(set_to_none=True)
    skipped = None if is_finite else "the loss or a gradient is not finite"
    expert_load = ExpertLoad(*load) if load else None
    own_means = dict(zip(measures.names, named_means, strict=True))
    weights_seconds = model.stream.waited - waited if model.stream else None
    losses = TokenLosses.of(token_sums)
    return StepResult(loss_value, norm_value, skipped, is_finite, losses, expert_load, own_means, weights_seconds)


def measure_step(
    progress: Progress,
    batches: StepBatches,
    result: StepResult,
    *,
    learning_rate: float,
    preparation: Preparation,
    step_seconds: float,
    checkpoint_seconds: float,
    evaluation_seconds: float,
    peak_tflops: float | None,
    ranks: Ranks,
    changed_settings: dict[str, list[Any]],
    rows: dict[str, Any],
) -> StepMetrics:
    """Returns the metrics of the last step; `progress` already includes it."""
    counts, losses = batches.counts, result.token_losses
    made, so_far = counts.total, progress.total
    tokens_per_second, trained_tokens_per_second = made.tokens / step_seconds, made.trained_tokens / step_seconds
    reserved_bytes = _largest([batches.peak_reserved_bytes, peak_reserved_bytes(ranks.device)])
    tflops, hardware_tflops = (flops / step_seconds / 1e12 for flops in (batches.flops.model, batches.flops.hardware))
    return StepMetrics(
        step=progress.step,
        loss=result.loss,
        roles={} if losses is None else {name: asdict(mean) for name, mean in losses.roles.items()},
        token_accuracy=losses and losses.token_accuracy,
        entropy=losses and losses.entropy,
        learning_rate=learning_rate,
        grad_norm=result.grad_norm,
        epoch=None if preparation.weights or preparation.num_rows is None else progress.epochs(preparation.num_rows),
        tokens=made.tokens,
        trained_tokens=made.trained_tokens,
        total_tokens=so_far.tokens,
        total_trained_tokens=so_far.trained_tokens,
        fill=made.tokens / counts.num_positions,
        trained_share=made.trained_tokens / max(1, made.tokens),
        conversations=made.conversations,
        conversations_per_pack=made.conversations / counts.num_packs,
        sum_squared_lengths=counts.sum_squared_lengths,
        sum_squared_lengths_spread=batches.sum_squared_lengths_spread,
        dropped=so_far.dropped,
        truncated=progress.truncated,
        tokens_per_second=tokens_per_second,
        tokens_per_second_per_gpu=tokens_per_second / ranks.world_size,
        trained_tokens_per_second=trained_tokens_per_second,
        trained_tokens_per_second_per_gpu=trained_tokens_per_second / ranks.world_size,
        step_seconds=step_seconds,
        data_seconds=batches.data_seconds,
        checkpoint_seconds=checkpoint_seconds,
        evaluation_seconds=evaluation_seconds,
        peak_memory_gb=max(batches.peak_memory_bytes, peak_memory_bytes(ranks.device)) / 1e9,
        peak_reserved_gb=None if reserved_bytes is None else reserved_bytes / 1e9,
        tflops=tflops,
        mfu=tflops / peak_tflops if peak_tflops else None,
        hfu=hardware_tflops / peak_tflops if peak_tflops else None,
        peak_tflops=peak_tflops,
        weights_seconds=result.weights_seconds,
        experts={} if result.expert_load is None else asdict(result.expert_load),
        skipped=result.skipped,
        measures=dict(result.measures),
        changed_settings=changed_settings,
        rows=rows,
        datasets=_measures_of_datasets(progress, losses, preparation),
    )


def _measures_of_datasets(
    progress: Progress, losses: TokenLosses | None, preparation: Preparation
) -> dict[str, dict[str, Any]]:
    return {
        dataset.name: {
            "loss": None if losses is None else losses.datasets[index].loss,
            "rows": count.rows,
            "conversations": count.conversations,
            "tokens": count.tokens,
            "trained_tokens": count.trained_tokens,
            "epoch": count.epochs(dataset.num_rows),
            "dropped": dict(count.dropped),
        }
        for index, (dataset, count) in enumerate(zip(preparation.datasets, progress.datasets, strict=True))
    }


# --- Finite weights ---


def require_finite(model: LlamaForSFT, ranks: Ranks, origin: str) -> None:
    """Raises ValueError on all ranks if a weight is not finite. The message names `origin`, the weights' source."""
    if bad := non_finite_tensors(model, ranks, reads_streamed=True):
        more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
        raise ValueError(
            f"{origin} holds weights that are not finite (NaN or infinity), in {', '.join(bad[:5])}{more}; nothing can "
            "be trained from them: use another copy of the model, or an earlier checkpoint"
        )


def non_finite_tensors(model: LlamaForSFT, ranks: Ranks, *, reads_streamed: bool = False) -> list[str]:
    """Returns the names of the parameters with NaN or infinity on any rank; waits for the device once.

    Args:
        reads_streamed: Whether to read those that are streamed too, all of which takes as long as half a step.
    """
    streamed = model.stream.names if model.stream else ()
    held = ((name, local_shard(each.detach())[0]) for name, each in model.named_parameters() if name not in streamed)
    is_bad: dict[str, Tensor] = {}
    for name, rows in chain(held, model.stream.stored() if model.stream and reads_streamed else ()):
        is_bad[name] = is_bad.get(name, False) | ~rows.isfinite().all()
    counts = ranks.sum(torch.stack([*is_bad.values()]).int()).tolist()
    return [name for name, number in zip(is_bad, counts, strict=True) if number]


# --- Out of memory ---


class OutOfMemory(RuntimeError):  # noqa: N818  (Out of memory is the error)
    """The GPU has too little memory for a step. The message states the memory, and what to change first."""


@contextmanager
def out_of_memory_explained(config: Config, device: torch.device, token_budget: int, doing: str) -> Iterator[None]:
    """Raises OutOfMemory in place of torch.OutOfMemoryError.

    Args:
        token_budget: The number of tokens of a pack.
        doing: What the body of the context does, such as "step 3".
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        remedies = "; ".join(f"({number}) {each}" for number, each in enumerate(_remedies(config), start=1))
        raise OutOfMemory(
            f"{doing} on packs of {token_budget:,} tokens does not fit"
            f"{_state_of(device)}. Change, in this order: {remedies}. "
            "`sftron train --config FILE --dry-run` predicts and measures the peak"
        ) from error


def _state_of(device: torch.device) -> str:
    if not is_gpu(device):
        return " in memory"
    functions = gpu_functions(device)
    allocated, reserved = functions.max_memory_allocated(device) / 1e9, functions.max_memory_reserved(device) / 1e9
    return (
        f" on {device_name(device)}: at most {allocated:.1f} GB were allocated and {reserved:.1f} GB reserved, of "
        f"{functions.get_device_properties(device).total_memory / 1e9:.1f} GB"
    )


def _remedies(config: Config) -> list[str]:
    """Returns what takes less memory and is not in use yet, in the order of docs/troubleshooting.md."""
    mode, tokens = config.model.activation_checkpointing, config.tokens
    modes = {"none": "selective, then full", "selective": "full"}
    found = [f"model.activation_checkpointing: {modes[mode]} (now {mode})"] if mode in modes else []
    if tokens.micro_batch_size > 1:
        found.append(
            f"a lower tokens.micro_batch_size (now {tokens.micro_batch_size}) with more "
            f"tokens.batch_accumulation_per_replica (now {tokens.batch_accumulation_per_replica})"
        )
    return [
        *found,
        "more ranks (parallelism.dp_shard)",
        f"ranks that share packs (parallelism.context, now {config.parallelism.context})",
        f"a lower tokens.sequence_length (now {tokens.sequence_length})",
    ]
