"""The budget for forgetting: how far the losses of the sets of evaluation.keep have risen, and which exceed a limit.

The loss before the first step is part of a run's state, so a resume goes on with it, on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import nan
from typing import Any

from sftron.train.run import EvaluationSet

WITHIN_LIMITS = "evaluation.keep"
"""The metric of the best checkpoint if no other is configured: its step, as long as no limit that stops is exceeded."""


@dataclass(frozen=True, slots=True)
class KeptLoss:
    """The loss of a kept set, before training and now."""

    before: float
    """The loss before the first step."""
    loss: float
    """The loss of the last evaluation; not a number if it was not finite."""
    of: str
    """The fingerprint of the set; losses of other rows are not comparable."""
    exceeded_at: int | None = None
    """The step of the first evaluation above the limit that was then in force."""

    @property
    def rise(self) -> float:
        return self.loss - self.before


def after(kept: KeptLoss | None, found: EvaluationSet, loss: float | None, step: int) -> KeptLoss:
    """Returns the loss of a kept set after an evaluation of it; the first one is the loss before training."""
    now = nan if loss is None else loss
    kept = KeptLoss(now, now, found.fingerprint) if kept is None else replace(kept, loss=now)
    return replace(kept, exceeded_at=step) if kept.exceeded_at is None and problem_of(found, kept) else kept


def facts_of(found: EvaluationSet, kept: KeptLoss) -> dict[str, float]:
    """Returns the loss before training, the rise since and its limit, in nats, for records."""
    assert found.limit is not None
    return {"before": kept.before, "rise": kept.rise, "max_rise": found.limit.allowed_rise(kept.before)}


def problem_of(found: EvaluationSet, kept: KeptLoss) -> str:
    """Returns how the loss exceeds the limit that is in force now; empty if it does not."""
    assert found.limit is not None
    limit, max_rise = found.limit, found.limit.allowed_rise(kept.before)
    if kept.rise <= max_rise:
        return ""
    share = "" if limit.max_rise_percent is None else f", {limit.max_rise_percent:g} % of it"
    return (
        f"evaluation.keep: the loss of {found.name} has risen by {kept.rise:.4f}, from {kept.before:.4f} to "
        f"{kept.loss:.4f}; at most {max_rise:.4f} is allowed{share}"
    )


def problems(sets: Sequence[EvaluationSet], kept: Mapping[str, KeptLoss], on_exceeded: str) -> list[str]:
    """Returns how each set with this `on_exceeded` exceeds its limit, at its last evaluation."""
    own = [each for each in sets if each.limit is not None and each.limit.on_exceeded == on_exceeded]
    return [problem for each in own if each.name in kept and (problem := problem_of(each, kept[each.name]))]


def comparable(sets: Sequence[EvaluationSet], state: Mapping[str, Any]) -> dict[str, KeptLoss]:
    """Returns the losses in the state of a checkpoint, by set, without those of other rows."""
    saved = {name: KeptLoss(**each) for name, each in state.get("kept", {}).items()}
    now = {each.name: each.fingerprint for each in sets if each.limit is not None}
    return {name: each for name, each in saved.items() if now.get(name) == each.of}
