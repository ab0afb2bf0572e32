"""Checks of a trainer's ranks: their rows, their loss, their gradients, and the parts of rows that they share.

Each of them is a collective; on_ranks.py says what a pass proves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sftcheck.faults import Fault
from sftcheck.gradients import GradientDifference
from sftcheck.ranks.rank_batches import digest
from sftcheck.ranks.rank_model import whole
from sftcheck.ranks.rank_subject import RankSubject
from sftcheck.tolerances import FACTOR, GRADIENT_OF_RANKS, LOSS
from sftron.checks.report import Finding, NotMeasuredError

_MOST_NAMED = 3


# -- denominators, loss and gradients --------------------------------------------------------------------------------


def _are_right(subject: RankSubject) -> bool:
    return all(each.is_right(GRADIENT_OF_RANKS.limit_of(subject.model)) for each in _differences(subject))


def _differences(subject: RankSubject) -> tuple[GradientDifference, ...]:
    if not (found := subject.on_ranks.measure().differences):
        raise NotMeasuredError("the reference has no gradient")
    return found


def _named_factor(factor: float, world_size: int, declared: int) -> str:
    names = {world_size: "the number of ranks", declared: "the number of ranks that share a row"}
    for size, name in names.items():
        if size > 1 and abs(factor / size - 1) < FACTOR:
            return f"{factor:.4g} times the reference: {name}"
        if size > 1 and abs(factor * size - 1) < FACTOR:
            return f"{factor:.4g} of the reference: 1 by {name}"
    return f"{factor:.4g} times the reference"


def gradients(subject: RankSubject) -> Finding:
    tolerance, world_size = GRADIENT_OF_RANKS.limit_of(subject.model), subject.exchange.world_size
    found, names = _differences(subject), subject.on_ranks.measure().gradients
    worst_rank = max(range(world_size), key=lambda rank: found[rank].worst_apart)
    worst = found[worst_rank]
    detail = tuple(
        f"rank {rank}: {each.apart:.2g} apart, factor {each.factor:.4g}; worst {each.worst} "
        f"({each.worst_apart:.2g} apart, factor {each.worst_factor:.4g})"
        for rank, each in enumerate(found)
    )
    allowed = f"<= {tolerance:.0e}, relative"
    if worst.is_right(tolerance):
        measured = f"{worst.worst_apart:.1e} from one process at most, in {len(names):,} tensors"
        return Finding(True, measured, allowed, detail)
    size = max(len(micro.group_of(subject.rank)) for micro in subject.computed_micro_batches)
    factors = [each.factor for each in found]
    is_constant = all(each.apart_from_factor <= tolerance for each in found)
    if not math.isfinite(worst.apart):
        measured, fault = f"rank {worst_rank}: the gradients are not finite", Fault.RANK_NOT_FINITE
    elif is_constant and max(factors) - min(factors) <= tolerance * max(map(abs, factors)):
        measured, fault = _named_factor(worst.factor, world_size, size), Fault.GRADIENT_FACTOR
    elif (
        max(each.apart for each in found) - min(each.apart for each in found) > tolerance or len(_digests(subject)) > 1
    ):
        measured = f"the ranks have different gradients: {', '.join(f'{each.apart:.2g}' for each in found)} apart"
        fault = Fault.GRADIENTS_NOT_SUMMED
    else:
        measured = f"{worst.apart:.2g} from one process; worst {worst.worst} ({worst.worst_apart:.2g})"
        fault = Fault.GRADIENTS_OF_RANKS
    return Finding(False, measured, allowed, detail, (fault,))


def _digests(subject: RankSubject) -> set[str]:
    """Returns the different gradients of the ranks."""
    own = [None if each is None else _content(each) for each in subject.on_ranks.measure().gradients.values()]
    return set(subject.exchange.gather("the digests of gradients", digest(own)))


def loss(subject: RankSubject) -> Finding:
    returned, reference = subject.on_ranks.measure().returned, subject.on_ranks.reference()
    totals = [sum(each) for each in returned]
    total, ratio = sum(totals) / len(totals), reference.loss
    tolerance = LOSS.limit_of(subject.model)
    allowed = f"<= {tolerance:.0e}, relative"
    detail = (
        f"the ranks return {', '.join(f'{each:.6g}' for each in totals)}; the ratio is {ratio:.6g}",
        f"{reference.num_labels:,} labels of {len(returned[0])} micro-batches on {len(returned)} ranks",
    )
    if not math.isfinite(total + ratio):
        measured = f"the ranks return {', '.join(f'{each:.4g}' for each in totals)}"
        return Finding(False, measured, "finite", detail, (Fault.RANK_NOT_FINITE,))
    apart = abs(total - ratio) / ratio
    if apart <= tolerance:
        return Finding(True, f"{apart:.1e} from the ratio of {reference.num_labels:,} labels", allowed, detail)
    if _are_right(subject):
        measured = f"the gradients are right; the returned and logged loss is {apart:.2g} from the ratio"
        return Finding(True, measured, allowed, detail)
    return Finding(False, f"{apart:.2g} from the ratio", allowed, detail, (Fault.MEAN_OF_RANKS,))


def _rounded_down(count: int, world_size: int) -> tuple[int, int]:
    """Returns a count by the number of ranks in whole numbers, and that quotient times the number."""
    return count // world_size, count // world_size * world_size


def denominators(subject: RankSubject) -> Finding:
    own = subject.step.num_items
    counts = subject.exchange.gather("the denominators", None if own is None else float(own))
    num_own = sum(batch.num_trained for batch in subject.step.batches)
    labels = subject.exchange.gather("the labels", num_own)
    expected, world_size = subject.on_ranks.reference().num_labels, subject.exchange.world_size
    given = [count for count in counts if count is not None]
    if not given:
        raise NotMeasuredError("the trainer counts nothing; see gradients")
    shown = ", ".join("none" if count is None else f"{count:,.10g}" for count in counts)
    detail = (f"num_items_in_batch by rank: {shown}; labels of each rank: {', '.join(map(str, labels))}",)
    if set(counts) == {float(expected)}:
        return Finding(True, f"{expected:,} on each of {world_size} ranks", f"{expected:,}", detail)
    if _are_right(subject):
        measured = f"num_items_in_batch is {shown}; the gradients show that the trainer divides by another number"
        return Finding(True, measured, f"{expected:,}", detail)
    kind = ""
    if set(counts) == {float(expected * world_size)}:
        kind = ": the labels times the number of ranks"
    elif given == [float(count) for count in labels]:
        kind = ": each rank counts its own labels"
    elif expected % world_size and set(counts) < {float(each) for each in _rounded_down(expected, world_size)}:
        kind = ": a quotient that is rounded down"
    measured = f"num_items_in_batch is {shown}{kind}"
    return Finding(False, measured, f"{expected:,}", detail, (Fault.OTHER_DENOMINATOR,))


# -- replicas --------------------------------------------------------------------------------------------------------


def _content(tensor: Tensor) -> bytes:
    return (
        whole(tensor).contiguous().view(torch.uint8).numpy().tobytes() if tensor.ndim else bytes(str(tensor), "ascii")
    )


def replicas(subject: RankSubject) -> Finding:
    before = _differing(subject, "before", _tensors(subject))
    subject.on_ranks.measure()  # leaves its gradients for the optimizer
    optimizer: Any = subject.wrapped.optimizer
    for group in optimizer.param_groups:  # a warm-up begins with a rate of 0
        group["lr"] = group.get("initial_lr", group["lr"])
    optimizer.step()
    optimizer.state.clear()  # twice the weights in size
    after = _differing(subject, "after", _tensors(subject))
    num_tensors = len(_tensors(subject))
    if not before and not after:
        measured = f"{num_tensors:,} tensors are equal on {subject.exchange.world_size} ranks, also after a step"
        return Finding(True, measured, "equal")
    words = "before the first step" if before else "after the first step"
    names = before or after
    measured = f"{len(names):,} of {num_tensors:,} tensors differ between the ranks {words}"
    fault = Fault.REPLICAS_DIFFER if before else Fault.REPLICAS_DRIFT
    return Finding(False, measured, "equal", (", ".join(names[:_MOST_NAMED]),), (fault,))


def _tensors(subject: RankSubject) -> dict[str, Tensor]:
    return dict(subject.wrapped.named)


def _differing(subject: RankSubject, name: str, tensors: Mapping[str, Tensor]) -> list[str]:
    """Returns the names of the tensors that are not the same on all ranks."""
    own = {key: digest(_content(each)) for key, each in tensors.items()}
    found = subject.exchange.gather(f"the tensors {name} a step", own)
    return [key for key in own if len({each.get(key) for each in found}) > 1]
