"""The charts of a comparison: one line a group, the mean of its runs, with each of them faint behind it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from sftron.report.charts import Chart, Line, Point
from sftron.sweep.figures import ANSWERS, Group, answers_loss_key
from sftron.sweep.recorded_run import RecordedRun

MOST_POINTS = 200
"""Of a line: longer runs are drawn as means of this many stretches."""

_ByStep = Mapping[int, float]
_Of = Callable[[RecordedRun], _ByStep]


def charts_for(groups: Sequence[Group]) -> list[Chart]:
    """Those that any run has numbers for, the comparable ones first."""
    runs = [run for group in groups for run in group.runs]
    roles = list(dict.fromkeys(name for run in runs for step in run.steps[:50] for name in step.get("roles") or {}))
    sets = list(dict.fromkeys(name for run in runs for line in run.evaluations for name in line.get("sets", {})))
    drawn = [
        _chart(
            groups,
            f"evaluation_{number}_tokens",
            f"Evaluation loss, answers of {name}",
            ("tokens seen", "loss"),
            (RecordedRun.tokens, lambda run, name=name: _evaluated(run, name)),
            note=_comparable(runs, lambda run, name=name: (run.fingerprints.get("evaluation") or {}).get(name)),
        )
        for number, name in enumerate(sets, start=1)
    ]
    by_tokens, by_time = ("tokens seen", "loss"), ("minutes in steps", "loss")
    for role in sorted(roles, key=lambda role: role != "assistant"):
        title = "Training loss of the answers" if role == "assistant" else f"Training loss of {role} tokens"
        of = _recorded(f"roles.{role}.loss")
        is_answers = f"roles.{role}" == ANSWERS
        note = _comparable(runs, lambda run: run.fingerprints.get("training")) if is_answers else ""
        drawn.append(_chart(groups, f"{role}_loss_tokens", title, by_tokens, (RecordedRun.tokens, of), note=note))
        if f"roles.{role}" == ANSWERS:
            drawn.append(
                _chart(groups, f"{role}_loss_time", f"{title}, against time", by_time, (RecordedRun.minutes, of))
            )
    loss = _recorded("loss")
    note = "Over what each run trains: runs that train other tokens are not comparable here"
    drawn += [
        _chart(groups, "loss_tokens", "Training loss, as trained", by_tokens, (RecordedRun.tokens, loss), note=note),
        _chart(groups, "loss_time", "Training loss, against time", by_time, (RecordedRun.minutes, loss), note=note),
    ]
    for key, title, unit in (
        ("tokens_per_second", "Speed", "tokens/s"),
        ("tflops", "Compute", "TFLOP/s a GPU"),
        ("peak_memory_gb", "Peak memory", "GB"),
    ):
        of = _recorded(key)
        drawn.append(_chart(groups, key, title, ("step", unit), (_steps, of), from_zero=True))
    return [chart for chart in drawn if any(line.points for line in chart.lines)]


def _comparable(runs: Sequence[RecordedRun], fingerprint_of: Callable[[RecordedRun], str | None]) -> str:
    """What the fingerprints of their data say of losses of runs; nothing where some run has not recorded it."""
    fingerprints = {fingerprint_of(run) for run in runs}
    if None in fingerprints:
        return ""
    if len(fingerprints) == 1:
        return "The same tokens: comparable"
    return f"{len(fingerprints)} different data sets, tokenizers or templates: not comparable"


def _recorded(key: str) -> _Of:
    return lambda run: run.by_step(key)


def _steps(run: RecordedRun) -> _ByStep:
    return {step["step"]: float(step["step"]) for step in run.steps}


def _evaluated(run: RecordedRun, name: str) -> _ByStep:
    found = ((line["step"], answers_loss_key(line["sets"].get(name, {}))) for line in run.evaluations if "sets" in line)
    return {step: number for step, number in found if number is not None}


def _chart(
    groups: Sequence[Group],
    name: str,
    title: str,
    labels: tuple[str, str],
    of: tuple[_Of, _Of],
    *,
    from_zero: bool = False,
    note: str = "",
) -> Chart:
    """labels, of: of x and y."""
    lines = [line for style, group in enumerate(groups) for line in _lines(group, style, *of)]
    return Chart(name, title, *labels, tuple(lines), from_zero=from_zero, note=note)


def _lines(group: Group, style: int, x_of: _Of, y_of: _Of) -> list[Line]:
    every = [points for run in group.runs if (points := _points(run, x_of, y_of))]
    whole = [points for run in group.completed if (points := _points(run, x_of, y_of))] or every
    # As far as all of them go: a mean over fewer runs would jump where one ends.
    steps = [step for step in whole[0] if all(step in points for points in whole)] if whole else []
    mean = [
        (statistics.fmean(points[step][0] for points in whole), statistics.fmean(points[step][1] for points in whole))
        for step in steps
    ]
    behind = [Line(_thinned([*points.values()]), style, is_faint=True) for points in every] if len(every) > 1 else []
    return [*behind, Line(_thinned(mean), style, letter=group.letter)]


def _points(run: RecordedRun, x_of: _Of, y_of: _Of) -> dict[int, Point]:
    # What was evaluated before the first step has no tokens behind it.
    x, y = {0: 0.0} | dict(x_of(run)), y_of(run)
    return {step: (x[step], y[step]) for step in sorted(y) if step in x}


def _thinned(points: Sequence[Point]) -> tuple[Point, ...]:
    if len(points) <= MOST_POINTS:
        return tuple(points)
    bounds = [number * len(points) // MOST_POINTS for number in range(MOST_POINTS + 1)]
    stretches = [points[start:end] for start, end in pairwise(bounds)]
    return tuple((statistics.fmean(x for x, _ in each), statistics.fmean(y for _, y in each)) for each in stretches)
