"""The budget for forgetting: how far the losses of the sets of evaluation.keep have risen, and which exceed a limit.

The loss before the first step is part of a run's state, so a resume goes on with it, on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

from sftron.data.types import DataError
from sftron.train.run import EvaluationSet, changes

WITHIN_LIMITS = "evaluation.keep"
"""The metric of the best checkpoint if no other is configured: its step, as long as no limit that stops is exceeded."""


@dataclass(frozen=True, slots=True)
class KeptLoss:
    """The loss of a kept set, before training and now."""

    before: float
    """The loss before the first step."""
    loss: float | None
    """The loss of the last evaluation; None if it was not finite."""
    fingerprint: str
    """The fingerprint of the set; losses of other tokens are not comparable."""
    made_of: Mapping[str, str]
    """What the set was made of, see `EvaluationSet.made_of`."""
    highest: tuple[tuple[int, float | None], ...]
    """The evaluations with a loss above all before, as (step, loss). The first one above any limit is among them, so
    it is known whatever limit a resume sets."""

    @property
    def since(self) -> int:
        """The step that `before` was measured after: 0, unless the checkpoint that was resumed does not tell it."""
        return self.highest[0][0]

    @property
    def rise(self) -> float | None:
        return None if self.loss is None else self.loss - self.before


def named_now(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Returns saved fields by their names of today: earlier checkpoints have the fingerprint as `of`."""
    return {"fingerprint" if key == "of" else key: value for key, value in saved.items()}


def kept_after(kept: KeptLoss | None, found: EvaluationSet, loss: float | None, step: int) -> KeptLoss:
    """Returns the loss of a kept set after an evaluation of it; the first one is the loss before training.

    Raises DataError if that is not finite.
    """
    now = loss if loss is not None and isfinite(loss) else None
    if kept is None:
        if now is None:
            problem = f"the loss of {found.name} after step {step} is not finite, so no rise can be measured from it"
            raise DataError(f"evaluation.keep: {problem}; check the weights and model.compute_dtype, or remove the set")
        return KeptLoss(now, now, found.fingerprint, found.made_of, ((step, now),))
    most = kept.highest[-1][1]
    is_higher = most is not None and (now is None or now > most)
    return replace(kept, loss=now, highest=(*kept.highest, (step, now)) if is_higher else kept.highest)


def facts_of(found: EvaluationSet, kept: KeptLoss) -> dict[str, float | None]:
    """Returns the loss before training, its step, the rise since and its limit, in nats, for records."""
    assert found.limit is not None
    max_rise = found.limit.allowed_rise(kept.before)
    return {"before": kept.before, "since": kept.since, "rise": kept.rise, "max_rise": max_rise}


def exceeded_at(found: EvaluationSet, kept: KeptLoss) -> int | None:
    """Returns the step of the first evaluation above the limit that is in force now."""
    return next((step for step, loss in kept.highest if problem_of(found, replace(kept, loss=loss))), None)


def problem_of(found: EvaluationSet, kept: KeptLoss) -> str:
    """Returns how the loss exceeds the limit that is in force now; empty if it does not."""
    assert found.limit is not None
    limit, max_rise = found.limit, found.limit.allowed_rise(kept.before)
    if kept.rise is None:
        return f"evaluation.keep: the loss of {found.name} was {kept.before:.4f} and is no longer finite"
    if kept.rise <= max_rise:
        return ""
    since = f" after step {kept.since}" if kept.since else ""
    share = "" if limit.max_rise_percent is None else f", {limit.max_rise_percent:g} % of it"
    return (
        f"evaluation.keep: the loss of {found.name} has risen by {kept.rise:.4f}, from {kept.before:.4f}{since} to "
        f"{kept.loss:.4f}; at most {max_rise:.4g} is allowed{share}"
    )


def problems(sets: Sequence[EvaluationSet], kept: Mapping[str, KeptLoss], on_exceeded: str) -> list[str]:
    """Returns how each set with this `on_exceeded` exceeds its limit, at its last evaluation."""
    own = [each for each in sets if each.limit is not None and each.limit.on_exceeded == on_exceeded]
    return [problem for each in own if each.name in kept and (problem := problem_of(each, kept[each.name]))]


def is_within(sets: Sequence[EvaluationSet], kept: Mapping[str, KeptLoss], losses: Mapping[str, float | None]) -> bool:
    """Returns whether the losses of an evaluation, by set, are known to be within all limits that end the run now."""
    own = [each for each in sets if each.limit is not None and each.limit.on_exceeded == "stop"]
    return all(
        each.name in kept and not problem_of(each, replace(kept[each.name], loss=losses.get(each.name))) for each in own
    )


def comparable_losses(sets: Sequence[EvaluationSet], state: Mapping[str, Any]) -> dict[str, KeptLoss]:
    """Returns the losses in the state of a checkpoint, by set, without those of other tokens."""
    saved = {
        name: KeptLoss(**named_now({**each, "highest": tuple(map(tuple, each["highest"]))}))
        for name, each in state.get("kept", {}).items()
    }
    now = {each.name: each.fingerprint for each in sets if each.limit is not None}
    return {name: each for name, each in saved.items() if now.get(name) == each.fingerprint}


def unknown_losses(sets: Sequence[EvaluationSet], state: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines that say why the checkpoint does not tell the loss of sets before the first step."""
    known, saved = comparable_losses(sets, state), state.get("kept", {})
    for each in sets:
        if each.limit is None or each.name in known:
            continue
        differences = [f"the checkpoint has the kept sets: {', '.join(saved) or 'none'}"]
        if each.name in saved:
            differences = changes(saved=saved[each.name]["made_of"], now=each.made_of)
        yield f"the loss of {each.name} before the first step is not known, so its rise counts from the next evaluation"
        yield from (f"  {difference}" for difference in differences)
