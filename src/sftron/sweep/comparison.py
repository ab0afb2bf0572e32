"""The comparison of several runs as text, JSON, an HTML page and images."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sftron.report.charts import Chart, write_images
from sftron.report.page import render
from sftron.sweep.curves import charts_for
from sftron.sweep.figures import Effect, Figure, Group, effects, figures_for, group_runs, metric_of, short_names
from sftron.sweep.grid import Metric
from sftron.sweep.recorded_run import RecordedRun, value_text


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison of runs. It lists all runs, but figures and effects cover only completed ones."""

    title: str
    runs: tuple[RecordedRun, ...]
    groups: tuple[Group, ...]
    figures: tuple[Figure, ...]
    effects: tuple[Effect, ...]
    charts: tuple[Chart, ...]
    num_expected: int
    """The number of runs that the sweep plans, if it is known."""
    metric: Metric | None = None
    """The metric by which the runs are sorted, the best first; None keeps their given order."""

    @property
    def best_words(self) -> str:
        """The best run in one sentence: `run-a has the lowest eval/held_out/loss, 0.8123`; empty if no completed run
        has the metric."""
        if self.metric is None or not self.runs or (value := _metric_of(self.runs[0], self.metric)) is None:
            return ""
        most = "lowest" if self.metric.goal == "minimize" else "highest"
        return f"{self.runs[0].name} has the {most} {self.metric.name}, {value:.4f}"

    def setting_words(self, effect: Effect) -> str:
        """Returns the setting and its values: `remove_cross_attention true against false`."""
        name = short_names(list(self.groups[0].settings))[effect.key]
        return f"{name} {value_text(effect.value)} against {value_text(effect.reference)}"

    def as_text(self) -> str:
        """Returns the figures of the groups and the effect of each setting, for a terminal."""
        lines = [f"best {self.best_words}"] if self.best_words else []
        for group in self.groups:
            lines.append(f"{group.letter}  {group.words}")
            spreads = [(figure, spread) for figure in self.figures if (spread := group.spread(figure))]
            lines += [f"     {figure.title:<36} {figure.text(spread)}" for figure, spread in spreads]
        lines += [f"{self.setting_words(each)}: {each.figure.title} {each.text}" for each in self.effects]
        return "\n".join(lines)

    def as_json(self) -> str:
        def figures(group: Group) -> dict[str, Any]:
            spreads = {figure.key: group.spread(figure) for figure in self.figures}
            return {key: spread and asdict(spread) for key, spread in spreads.items()}

        content = {
            "title": self.title,
            "metric": self.metric and asdict(self.metric),
            "groups": [
                {
                    "letter": group.letter,
                    "settings": dict(group.settings),
                    "runs": [str(run.folder) for run in group.runs],
                    "figures": figures(group),
                }
                for group in self.groups
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
                for effect in self.effects
            ],
            "runs": [
                {
                    "name": run.name,
                    "folder": str(run.folder),
                    "status": run.status,
                    "error": run.error,
                    "seed": run.seed,
                    "figures": {figure.key: figure.of(run) for figure in self.figures},
                }
                for run in self.runs
            ],
        }
        return json.dumps(content, indent=1) + "\n"

    def as_html(self) -> str:
        return render("comparison.html.jinja", comparison=self)

    def write(self, folder: Path, *, json_copy: Path | None = None) -> Path:
        """Writes report.html, report.json and plots/*.png. Returns the path of the page."""
        folder.mkdir(parents=True, exist_ok=True)
        page = folder / "report.html"
        page.write_text(self.as_html(), encoding="utf-8")
        for path in filter(None, (folder / "report.json", json_copy)):
            path.write_text(self.as_json(), encoding="utf-8")
        write_images(self.charts, folder / "plots", names=[f"{group.letter}  {group.words}" for group in self.groups])
        return page


def compare(
    title: str, runs: Sequence[RecordedRun], num_expected: int | None = None, metric: Metric | None = None
) -> Comparison:
    references = group_runs(runs)  # the first value of a setting is the reference
    if metric is not None:
        runs = _best_first(runs, metric)
    groups, figures = group_runs(runs), figures_for(runs)
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


def _best_first(runs: Sequence[RecordedRun], metric: Metric) -> list[RecordedRun]:
    """Returns the runs sorted by the metric, with those that lack it last."""
    sign = 1 if metric.goal == "minimize" else -1
    return sorted(runs, key=lambda run: math.inf if (value := _metric_of(run, metric)) is None else sign * value)


def _metric_of(run: RecordedRun, metric: Metric) -> float | None:
    return metric_of(run, metric.name) if run.status == "completed" else None
