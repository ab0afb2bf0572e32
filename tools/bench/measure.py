"""Steps timed by turns, and what is said of them: medians, quartiles, real tokens only."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

import torch

from tools.bench.conversations import Row
from tools.bench.ways import StepBatch, Way

LARGEST_DIFFERENCE = 0.08
"""Of token losses between two ways, as a share of how much they vary. bf16 rounding gives 0.005 (2 layers) to 0.04
(SmolLM2's 30); documents that see each other 0.1 with random weights, whose mean loss shows nothing, and 1.0 with
SmolLM2's."""


class DifferentLossesError(Exception):
    """Two ways do not compute the same."""


@dataclass(slots=True)
class Timed:
    """Steps of one way. seconds: from asking for the batch to the updated weights. peak_bytes: on a GPU, what a step
    took beyond what was held before it."""

    seconds: list[float] = field(default_factory=list)
    batches: list[StepBatch] = field(default_factory=list)
    peak_bytes: int = 0

    def add(self, seconds: float, batch: StepBatch) -> None:
        self.seconds.append(seconds)
        self.batches.append(batch)


def take_turns(
    ways: Sequence[Way],
    rows: Sequence[Row],
    num_rounds: int,
    device: torch.device,
    warm_up: Sequence[Sequence[Row]],
    between: Callable[[], object] = lambda: None,
) -> dict[str, Timed]:
    """Every way a step, then every way its next one: A B C A B C ..., all over the same rows in the same order.

    warm_up: rows of steps made before, untimed. between: called once a round.
    """
    for way in ways:
        for early in warm_up:
            for batch in way.batches(early):
                way.step(batch)
    timed = {way.name: Timed() for way in ways}
    streams = [(way, way.batches(itertools.cycle(rows))) for way in ways]
    for _ in range(num_rounds):
        between()
        for way, batches in streams:
            held = _start_counting(device)
            started = time.perf_counter()
            batch = next(batches)
            way.step(batch)
            wait_for(device)
            timed[way.name].add(time.perf_counter() - started, batch)
            if device.type == "cuda":
                peak = torch.cuda.max_memory_allocated(device) - held
                timed[way.name].peak_bytes = max(timed[way.name].peak_bytes, peak)
    return timed


def _start_counting(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    wait_for(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def wait_for(device: torch.device) -> None:
    """Until the device has done all it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def summary(timed: Timed) -> dict[str, Any]:
    """tokens/s: all real tokens / all seconds; the rest is of the steps' own rates and seconds."""
    tokens = [batch.num_tokens for batch in timed.batches]
    rates = sorted(count / seconds for count, seconds in zip(tokens, timed.seconds, strict=True))
    low, high = _quartiles(rates)
    return {
        "tokens/s": sum(tokens) / sum(timed.seconds),
        "median": median(rates),
        "lowest": rates[0],
        "quartiles": [low, high],
        "s/step": median(timed.seconds),
        "tokens/step": sum(tokens) / len(tokens),
        "computed/real": sum(batch.num_positions for batch in timed.batches) / sum(tokens),
        "steps": len(tokens),
    }


def _quartiles(values: list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, high


def differences(ways: Sequence[Way], rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Token losses of every way on the same conversations, against the first way's: the mean loss, and the root mean
    square of the differences as a share of the losses' own standard deviation."""
    reference = None
    found = {}
    for way in ways:
        losses = way.token_losses(rows).cpu()
        if reference is None:
            reference = losses
        if losses.shape != reference.shape:
            raise DifferentLossesError(
                f"{way.name} trains {len(losses)} tokens of these conversations, not {len(reference)}"
            )
        share = ((losses - reference).square().mean().sqrt() / reference.std()).item()
        found[way.name] = {"loss": losses.mean().item(), "difference": share}
    return found


def require_same_losses(ways: Sequence[Way], rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """`differences`; raises DifferentLossesError where two ways do not compute the same, as times then say nothing."""
    found = differences(ways, rows)
    for name, each in found.items():
        if not each["difference"] < LARGEST_DIFFERENCE:
            raise DifferentLossesError(
                f"{name} does not compute what {ways[0].name} does: its token losses differ by "
                f"{each['difference']:.2f} of their spread, and bf16 rounding explains less than {LARGEST_DIFFERENCE}; "
                "nothing was timed"
            )
    return found
