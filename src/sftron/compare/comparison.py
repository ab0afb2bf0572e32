"""The comparison of several runs as text, JSON, an HTML page with charts, and images."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from sftron.compare.figures import (
    ANSWERS_LOSS,
    Effect,
    Figure,
    Group,
    effects,
    figures_for,
    group_runs,
    metric_of,
    short_names,
)
from sftron.compare.recorded_run import ByStep, RecordedRun, value_text
from sftron.errors import without_secrets
from sftron.report.charts import (
    Chart,
    Line,
    Point,
    chart_images,
    line_color,
    line_dashes,
    mean_point,
    thinned,
    write_images,
)
from sftron.report.html import render

MOST_POINTS = 200
"""The maximum number of points in a line; longer runs are averaged over this many spans of steps."""

Series = Callable[[RecordedRun], ByStep]


_CHART_FUNCTIONS = {each.__name__: each for each in (chart_images, line_color, line_dashes)}
"""The page's template calls it."""


@dataclass(frozen=True, slots=True)
class Metric:
    """The metric by which runs are sorted, by its name in wandb."""

    name: str
    goal: Literal["minimize", "maximize"] = "minimize"


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison of one or more runs. It lists all runs, but figures and effects cover only completed ones."""

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
        """The best run (`run-a has the lowest eval/held_out/loss, 0.8123`); "" if no completed run has the metric."""
        if self.metric is None or (value := metric_of(self.runs[0], self.metric.name)) is None:
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
        content = {
            "title": self.title,
            "metric": self.metric and asdict(self.metric),
            "groups": [
                {
                    "letter": group.letter,
                    "settings": dict(group.settings),
                    "runs": [str(run.folder) for run in group.runs],
                    "figures": {
                        figure.key: (spread := group.spread(figure)) and asdict(spread) for figure in self.figures
                    },
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
        return json.dumps(without_secrets(content), indent=1) + "\n"

    def as_html(self) -> str:
        return render("comparison.html.jinja", comparison=self, **_CHART_FUNCTIONS)

    def write(self, folder: Path) -> Path:
        """Writes report.html, report.json and plots/*.png. Returns the path of the page."""
        folder.mkdir(parents=True, exist_ok=True)
        page = folder / "report.html"
        page.write_text(self.as_html(), encoding="utf-8")
        (folder / "report.json").write_text(self.as_json(), encoding="utf-8")
        write_images(self.charts, folder / "plots", names=[f"{group.letter}  {group.words}" for group in self.groups])
        return page


def compare(
    title: str, runs: Sequence[RecordedRun], num_expected: int | None = None, metric: Metric | None = None
) -> Comparison:
    references = group_runs(runs)  # the first value of a setting is the reference
    if metric is not None:
        sign = 1 if metric.goal == "minimize" else -1
        values = [metric_of(run, metric.name) for run in runs]
        order = sorted(range(len(runs)), key=lambda n: math.inf if (value := values[n]) is None else sign * value)
        runs = [runs[n] for n in order]
    groups, figures = group_runs(runs), figures_for(runs)
    return Comparison(
        title=title,
        runs=tuple(runs),
        groups=tuple(groups),
        figures=tuple(figures),
        effects=tuple(effects(references, figures)),
        charts=tuple(chart for chart in _charts(groups) if chart.points),
        num_expected=len(runs) if num_expected is None else num_expected,
        metric=metric,
    )


# --- Charts: for each group a line for its mean, and a faint line for each of its runs ---


def _charts(groups: Sequence[Group]) -> Iterator[Chart]:
    """Yields all charts, those with comparable values first; some may have no points."""
    runs = [run for group in groups for run in group.runs]

    def chart(name: str, title: str, x: str, y: str, series: Series, note: str = "", *, zero: bool = False) -> Chart:
        lines = [line for style, group in enumerate(groups) for line in _lines(group, style, _X_AXES[x], series)]
        return Chart(name, title, x, y, tuple(lines), from_zero=zero, note=note)

    for number, name in enumerate(dict.fromkeys(name for run in runs for name in run.sets), start=1):
        note = _comparable([(run.fingerprints.get("evaluation") or {}).get(name) for run in runs])
        title = f"Evaluation loss, answers of {name}"
        yield chart(
            f"evaluation_{number}_tokens", title, "tokens seen", "loss", lambda run, n=name: run.evaluated(n), note
        )
    names = dict.fromkeys(name for run in runs for step in list(run.steps.values())[:50] for name in step)
    losses = [name for name in names if name.startswith("roles/") and name.endswith("/loss")]
    for name in sorted(losses, key=lambda name: name != ANSWERS_LOSS):
        role, series = name.split("/")[1], _recorded(name)
        if name != ANSWERS_LOSS:
            yield chart(f"{role}_loss_tokens", f"Training loss of {role} tokens", "tokens seen", "loss", series)
            continue
        title, note = "Training loss of the answers", _comparable([run.fingerprints.get("training") for run in runs])
        yield chart(f"{role}_loss_tokens", title, "tokens seen", "loss", series, note)
        yield chart(f"{role}_loss_time", f"{title}, against time", "minutes in steps", "loss", series)
    note = "Over the tokens that each run trains: runs that train different tokens are not comparable here"
    yield chart("loss_tokens", "Training loss, as trained", "tokens seen", "loss", _recorded("loss"), note)
    yield chart("loss_time", "Training loss, against time", "minutes in steps", "loss", _recorded("loss"), note)
    yield chart("tokens_per_second", "Speed", "step", "tokens/s", _recorded("tokens_per_second"), zero=True)
    yield chart("tflops", "Compute", "step", "TFLOP/s a device", _recorded("tflops"), zero=True)
    yield chart("peak_memory_gb", "Peak memory", "step", "GB", _recorded("peak_memory_gb"), zero=True)


def _recorded(name: str) -> Series:
    return lambda run: run.by_step(name)


_X_AXES: dict[str, Series] = {
    "tokens seen": _recorded("total_tokens"),
    "minutes in steps": RecordedRun.minutes,
    "step": lambda run: {step: float(step) for step in run.steps},
}


def _comparable(fingerprints: Sequence[str | None]) -> str:
    """Returns a note on whether losses are comparable, by the fingerprints of the data; empty if any run lacks one."""
    if None in fingerprints:
        return ""
    if (num_different := len(set(fingerprints))) == 1:
        return "The same tokens: comparable"
    return f"{num_different} different data sets, tokenizers or templates: not comparable"


def _lines(group: Group, style: int, x: Series, y: Series) -> list[Line]:
    every = [points for run in group.runs if (points := _points(run, x, y))]
    whole = [points for run in group.completed if (points := _points(run, x, y))] or every
    # Only steps that all runs have: a mean over fewer runs would jump where one ends.
    steps = [step for step in whole[0] if all(step in points for points in whole)] if whole else []
    mean = [mean_point([points[step] for points in whole]) for step in steps]
    singles = every if len(every) > 1 else []
    faint = [Line(thinned([*points.values()], MOST_POINTS), style, is_faint=True) for points in singles]
    return [*faint, Line(thinned(mean, MOST_POINTS), style, letter=group.letter)]


def _points(run: RecordedRun, x_of: Series, y_of: Series) -> dict[int, Point]:
    x, y = {0: 0.0} | x_of(run), y_of(run)  # an evaluation before the first step has x = 0
    return {step: (x[step], y[step]) for step in sorted(y) if step in x}
