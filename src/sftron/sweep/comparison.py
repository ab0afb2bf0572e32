"""Runs compared: who belongs together, what came out, what each setting changed, and the charts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sftron.report.charts import Chart
from sftron.sweep.curves import charts_for
from sftron.sweep.effects import Effect, effects
from sftron.sweep.figures import Figure, Group, Spread, figures_for, group_runs, metric_of, spread
from sftron.sweep.recorded_run import RecordedRun
from sftron.sweep.settings import short_names, words
from sftron.sweep.sweep_file import Metric
from sftron.sweep.wording import effect_words, spread_words


@dataclass(frozen=True, slots=True)
class Comparison:
    """runs: all of them, whatever became of them; figures and effects are of the completed ones. num_expected: runs
    that there should be, as far as that is known. metric: what the runs are sorted by, the best first; None: they stay
    in the order in which they were given."""

    title: str
    runs: tuple[RecordedRun, ...]
    groups: tuple[Group, ...]
    figures: tuple[Figure, ...]
    effects: tuple[Effect, ...]
    charts: tuple[Chart, ...]
    num_expected: int
    metric: Metric | None = None

    @property
    def best_words(self) -> str:
        """`run-a has the lowest eval/held_out/loss, 0.8123`; empty where no completed run has the metric."""
        if self.metric is None or not self.runs or (value := _metric_of(self.runs[0], self.metric)) is None:
            return ""
        most = "lowest" if self.metric.goal == "minimize" else "highest"
        return f"{self.runs[0].name} has the {most} {self.metric.name}, {value:.4f}"

    def spread_of(self, group: Group, figure: Figure) -> Spread | None:
        return spread([number for run in group.completed if (number := figure.of(run)) is not None])

    def setting_words(self, effect: Effect) -> str:
        """`remove_cross_attention true against false`."""
        name = short_names(list(self.groups[0].settings))[effect.key]
        return f"{name} {words(effect.value)} against {words(effect.reference)}"


def _metric_of(run: RecordedRun, metric: Metric) -> float | None:
    return metric_of(run, metric.name) if run.status == "completed" else None


def _sorted(runs: Sequence[RecordedRun], metric: Metric) -> list[RecordedRun]:
    """The best first; those without the metric last."""
    sign = 1 if metric.goal == "minimize" else -1
    values = {id(run): _metric_of(run, metric) for run in runs}
    return sorted(runs, key=lambda run: math.inf if (value := values[id(run)]) is None else sign * value)


def compare(
    title: str, runs: Sequence[RecordedRun], num_expected: int | None = None, metric: Metric | None = None
) -> Comparison:
    references = group_runs(runs)  # what a setting changed is told against the value that was given first
    runs = runs if metric is None else _sorted(runs, metric)
    groups = group_runs(runs)
    figures = figures_for(runs)
    return Comparison(
        title=title,
        runs=tuple(runs),
        groups=tuple(groups),
        figures=tuple(figures),
        effects=tuple(effects(references, figures)),
        charts=tuple(charts_for(groups)),
        num_expected=len(runs) if num_expected is None else num_expected,
        metric=metric,
    )


def as_json(comparison: Comparison) -> dict[str, Any]:
    def spreads(group: Group) -> dict[str, Any]:
        found = {figure.key: comparison.spread_of(group, figure) for figure in comparison.figures}
        return {key: each and asdict(each) for key, each in found.items()}

    return {
        "title": comparison.title,
        "metric": comparison.metric and asdict(comparison.metric),
        "groups": [
            {
                "letter": group.letter,
                "settings": dict(group.settings),
                "runs": [str(run.folder) for run in group.runs],
                "figures": spreads(group),
            }
            for group in comparison.groups
        ],
        "effects": [
            {
                "key": effect.key,
                "value": effect.value,
                "reference": effect.reference,
                "figure": effect.figure.key,
                "kind": "ratio" if effect.is_ratio else "difference",
                **asdict(effect.change),
            }
            for effect in comparison.effects
        ],
        "runs": [
            {
                "name": run.name,
                "folder": str(run.folder),
                "status": run.status,
                "error": run.error,
                "seed": run.seed,
                "figures": {figure.key: figure.of(run) for figure in comparison.figures},
            }
            for run in comparison.runs
        ],
    }


def as_text(comparison: Comparison) -> str:
    """The groups' figures and what each setting changed, for a terminal."""
    lines = [f"best {comparison.best_words}"] if comparison.best_words else []
    for group in comparison.groups:
        lines.append(f"{group.letter}  {group.words}")
        for figure in comparison.figures:
            found = comparison.spread_of(group, figure)
            if found is not None:
                lines.append(f"     {figure.title:<36} {spread_words(found, figure)}")
    changed = [
        f"{comparison.setting_words(effect)}: {effect.figure.title} {effect_words(effect)}"
        for effect in comparison.effects
    ]
    return "\n".join([*lines, *changed])
