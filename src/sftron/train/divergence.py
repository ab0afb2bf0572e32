"""The verdict on a run's losses: whether training has made the model worse than it was."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import Any

_LEAST_STEPS, _SHARE = 5, 10
"""The number of steps that are compared: a tenth of the run, and five at least."""
_ERRORS = 4.0
"""How many standard errors a difference has to exceed."""
_LARGEST = 1e100
"""A loss from which on a record is damaged; its square must be finite."""
_MARGIN = 0.1
"""The share of the loss of a uniform guess that a difference has to exceed."""


def divergence(records: Iterable[Mapping[str, Any]], vocab_size: int) -> str | None:
    """Returns a sentence on how the losses of a run diverged; None if they did not, or if there are too few steps.

    Of the n losses, E is the mean of the last tenth, and B that of as many first ones or, if it is lower, the first
    loss, since a rate that is far too high breaks the model in one step. ln V is the loss of a uniform guess. A run has
    diverged if one of these holds:

    - E is above B, by more than 0.1 ln V and by more than 4 standard errors; and on the way, the median of five steps
      in a row was above the middle of B and ln V. Without the second condition, a run whose rows become harder in the
      order of a stream would count: its loss rises, but the model still knows most of what it knew.
    - E, less 4 standard errors, is above both ln V and the first loss by a tenth of it.

    The noise of a step is half the mean squared difference of successive losses in the last tenth, which a trend does
    not add to. Means over steps are weighted by their trained tokens. docs/decisions.md has the measured error rates.

    Args:
        records: The records of metrics.jsonl, in order. Those without a finite loss are left out.
        vocab_size: V, the number of tokens that the model chooses from.
    """
    steps = [(float(record["loss"]), _weight(record)) for record in records if _is_finite(record.get("loss"))]
    num_last = max(_LEAST_STEPS, len(steps) // _SHARE)
    if len(steps) <= num_last:
        return None
    last, first_steps = steps[-num_last:], steps[: min(num_last, len(steps) - num_last)]
    end, first_loss, guess = _mean(last), steps[0][0], math.log(vocab_size)
    begin, num_first = min((_mean(first_steps), len(first_steps)), (first_loss, 1))
    noise = fmean((after - before) ** 2 for (before, _), (after, _) in pairwise(last)) / 2
    losses = [loss for loss, _ in steps]
    highest = max(median(losses[start : start + _LEAST_STEPS]) for start in range(len(steps) - _LEAST_STEPS + 1))
    error, error_of_end = math.sqrt(noise / num_last + noise / num_first), math.sqrt(noise / num_last)
    has_risen = end - begin > max(_MARGIN * guess, _ERRORS * error)
    was_broken = highest > max(begin, (begin + guess) / 2)
    is_worse_than_a_guess = end - _ERRORS * error_of_end > (1 + _MARGIN) * max(guess, first_loss)
    if not (has_risen and was_broken) and not is_worse_than_a_guess:
        return None
    return (
        f"the mean loss of the last {num_last} steps is {end:.4g}; it began at {begin:.4g}, and a uniform guess over "
        f"{vocab_size:,} tokens has {guess:.4g}"
    )


def _is_finite(loss: Any) -> bool:
    return type(loss) in (int, float) and abs(loss) < _LARGEST


def _weight(record: Mapping[str, Any]) -> int:
    """Returns the number of trained tokens of a step; 1 if the record does not state it."""
    tokens = record.get("trained_tokens")
    return tokens if type(tokens) is int and tokens > 0 else 1


def _mean(steps: Sequence[tuple[float, int]]) -> float:
    return fmean((loss for loss, _ in steps), (weight for _, weight in steps))
