"""The best checkpoint of a run, by a metric of its evaluations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from sftron.data.types import Role
from sftron.train.run_data import EvaluationSet

STOP_RATE = "eval/stop_rate"


@dataclass(frozen=True, slots=True)
class Best:
    """The value of a metric after `step`; of: what it was measured on. Raises TypeError for other types."""

    metric: str
    value: float
    step: int
    of: str

    def __post_init__(self) -> None:
        types = (type(self.metric), type(self.value), type(self.step), type(self.of))
        if types != (str, float, int, str) or not isfinite(self.value) or self.step < 1:
            raise TypeError(self)

    def record(self) -> dict[str, Any]:
        """best.json."""
        record = {"metric": self.metric, "value": self.value, "step": self.step}
        return {**record, "checkpoint": f"checkpoints/step-{self.step}"}

    def is_beaten_by(self, value: float) -> bool:
        """Of equal ones the first is the best."""
        return value < self.value if self.metric.endswith("/loss") else value > self.value


def metric_of(metrics: Mapping[str, Any], name: str) -> float | None:
    """The number called "eval/held_out/loss"; None where it is none, or not finite."""
    value: Any = metrics
    for part in name.split("/"):
        value = value.get(part) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, (int, float)) and isfinite(value) else None


def require_metric(name: str, sets: Sequence[EvaluationSet], *, has_prompts: bool) -> None:
    """Raises ValueError where the run will not measure it."""
    known = [*_metrics_of(sets), *([STOP_RATE] if has_prompts else [])]
    if name not in known:
        raise ValueError(f"checkpoints.keep_best: {name} is no metric of this run; give one of {', '.join(known)}")


def _metrics_of(sets: Sequence[EvaluationSet]) -> Iterator[str]:
    for each in sets:
        yield f"eval/{each.name}/loss"
        yield f"eval/{each.name}/token_accuracy"
        said = {int(role) for conversation in each.conversations for role in set(conversation.role_ids[1:].tolist())}
        for role in sorted(said):
            yield f"eval/{each.name}/roles/{Role(role).name.lower()}/loss"
