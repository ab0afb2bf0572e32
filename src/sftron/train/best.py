"""The best checkpoint of a run by a metric of its evaluations, and the patience after which a run ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

from sftron.config import Config
from sftron.data.types import Role
from sftron.train.run import EvaluationSet, Setup


@dataclass(frozen=True, slots=True)
class Best:
    """The best value so far of a metric, of those that checkpoints.keep_best and evaluation.patience name."""

    metric: str
    value: float
    step: int
    of: str
    """The fingerprints of the evaluation sets; values measured on other rows are not comparable."""
    num_worse: int = 0
    """The number of evaluations since this one."""

    def after(self, value: float | None, step: int) -> Best:
        """Returns the best after one more evaluation.

        A value has to be strictly better; one that is missing or not finite is not.
        """
        is_better = value is not None and (value < self.value if self.metric.endswith("/loss") else value > self.value)
        if is_better:
            return replace(self, value=value, step=step, num_worse=0)
        return replace(self, num_worse=self.num_worse + 1)

    def reason(self) -> str:
        """Returns why the run ends."""
        best = f"{self.value:.4f}, of step {self.step}"
        return f"{self.metric} has had no better value than {best}, in {self.num_worse} evaluations"


def metric_of(metrics: Mapping[str, Any], name: str) -> float | None:
    """Returns the metric with a name such as "eval/held_out/loss"; None if it is missing or not finite."""
    value: Any = metrics
    for part in name.split("/"):
        value = value.get(part) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, (int, float)) and isfinite(value) else None


def watched_metric(config: Config, sets: Sequence[EvaluationSet]) -> str:
    """Returns the metric that evaluation.patience watches. Raises ValueError if none is given and no set has a loss."""
    if name := config.evaluation.metric or config.checkpoints.keep_best:
        return name
    if not sets:
        raise ValueError("evaluation.metric: is null, but there is no set that has a loss; set it to eval/stop_rate")
    return f"eval/{sets[0].name}/loss"


def require_metric(key: str, name: str, sets: Sequence[EvaluationSet], *, has_prompts: bool) -> None:
    """Raises ValueError if the run does not measure the metric `name`, which the configuration's `key` gives."""
    known = ["eval/stop_rate"] if has_prompts else []
    for each in sets:
        roles = {int(role) for conversation in each.conversations for role in set(conversation.role_ids[1:].tolist())}
        measures = ["loss", "token_accuracy", *(f"roles/{Role(role).name.lower()}/loss" for role in sorted(roles))]
        known += [f"eval/{each.name}/{measure}" for measure in measures]
    if name not in known:
        raise ValueError(f"{key}: {name} is no metric of this run; give one of {', '.join(known)}")


def is_patience_over(setup: Setup, watched: Best | None) -> bool:
    """Returns whether evaluation.patience ends the run: too many evaluations without a better value of its metric."""
    patience = setup.config.evaluation.patience
    if patience is None or watched is None or watched.num_worse < patience:
        return False
    return watched.metric == watched_metric(setup.config, setup.data.evaluation_sets)
