"""The charts of a comparison. Each group has one line for its mean and a faint line for each of its runs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from sftron.report.charts import Chart, Line, Point
from sftron.sweep.figures import ANSWERS_LOSS, Group
from sftron.sweep.recorded_run import ByStep, RecordedRun

MOST_POINTS = 200
"""The maximum number of points in a line; longer runs are averaged over this many spans of steps."""

Series = Callable[[RecordedRun], ByStep]


def charts_for(groups: Sequence[Group]) -> list[Chart]:
    """Returns the charts for which any run has data, those with comparable values first."""
    return [chart for chart in _all_charts(groups) if chart.points]


def _all_charts(groups: Sequence[Group]) -> Iterator[Chart]:
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
    note = "Over what each run trains: runs that train other tokens are not comparable here"
    yield chart("loss_tokens", "Training loss, as trained", "tokens seen", "loss", _recorded("loss"), note)
    yield chart("loss_time", "Training loss, against time", "minutes in steps", "loss", _recorded("loss"), note)
    yield chart("tokens_per_second", "Speed", "step", "tokens/s", _recorded("tokens_per_second"), zero=True)
    yield chart("tflops", "Compute", "step", "TFLOP/s a GPU", _recorded("tflops"), zero=True)
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
    # Only steps that all runs have: a mean over fewer runs would jump at the end of one.
    steps = [step for step in whole[0] if all(step in points for points in whole)] if whole else []
    mean = [_mean([points[step] for points in whole]) for step in steps]
    faint = [Line(_thinned([*points.values()]), style, is_faint=True) for points in every] if len(every) > 1 else []
    return [*faint, Line(_thinned(mean), style, letter=group.letter)]


def _points(run: RecordedRun, x_of: Series, y_of: Series) -> dict[int, Point]:
    x, y = {0: 0.0} | x_of(run), y_of(run)  # an evaluation before the first step has x = 0
    return {step: (x[step], y[step]) for step in sorted(y) if step in x}


def _thinned(points: Sequence[Point]) -> tuple[Point, ...]:
    if len(points) <= MOST_POINTS:
        return tuple(points)
    bounds = [number * len(points) // MOST_POINTS for number in range(MOST_POINTS + 1)]
    return tuple(_mean(points[start:end]) for start, end in pairwise(bounds))


def _mean(points: Sequence[Point]) -> Point:
    return statistics.fmean(x for x, _ in points), statistics.fmean(y for _, y in points)
