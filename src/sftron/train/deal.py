"""What the ranks deal in one step, and how each of them knows it of all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from sftron.data.types import Batch, DataError
from sftron.train.flops import StepFlops
from sftron.train.progress import StepCounts
from sftron.train.ranks import Ranks, peak_memory_bytes


@dataclass(frozen=True, slots=True)
class Deal:
    """batches: this rank's micro-batches. counts: of all ranks' together. flops: of one rank, on average.

    sum_squared_lengths_spread: of the rank with the most / the mean of ranks - 1; the others wait for it.
    data_seconds: how long the slowest rank waited for its batches. peak_memory_bytes: of the rank that has held the
    most before this step.
    """

    batches: list[Batch]
    counts: StepCounts
    flops: StepFlops
    sum_squared_lengths_spread: float
    data_seconds: float
    peak_memory_bytes: int


def deal_step(
    batches: Iterator[Batch],
    num_batches: int,
    *,
    ranks: Ranks,
    num_datasets: int,
    flops_of: Callable[[Sequence[Batch]], StepFlops],
) -> Deal:
    """This rank's next `num_batches`, and the numbers of all. Raises DataError on all ranks for a bad row of one."""
    started, problem = time.perf_counter(), None
    own: list[Batch] = []
    try:
        own += (next(batches) for _ in range(num_batches))
    except DataError as error:
        problem = error
    data_seconds, flops = time.perf_counter() - started, flops_of(own)
    everyone = ranks.gather(
        {
            "problem": problem and str(problem),
            "counts": StepCounts.of(own, num_datasets).state(),
            "flops": [flops.model, flops.hardware],
            "data_seconds": data_seconds,
            "peak_memory_bytes": peak_memory_bytes(ranks.device),
        }
    )
    if problem is not None:
        raise problem
    for rank, facts in enumerate(everyone):
        if facts["problem"] is not None:
            raise DataError(f"rank {rank}: {facts['problem']}")
    model, hardware = (
        sum(column) // len(everyone) for column in zip(*(facts["flops"] for facts in everyone), strict=True)
    )
    return Deal(
        own,
        StepCounts.sum_of([facts["counts"] for facts in everyone]),
        StepFlops(model=model, hardware=hardware),
        _spread([facts["counts"]["sum_squared_lengths"] for facts in everyone]),
        max(facts["data_seconds"] for facts in everyone),
        max(facts["peak_memory_bytes"] for facts in everyone),
    )


def _spread(numbers: Sequence[int]) -> float:
    total = sum(numbers)
    return max(numbers) * len(numbers) / total - 1 if total else 0.0
