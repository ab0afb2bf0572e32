"""Each run's final figures, and their spread over the runs that differ in nothing but the seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sftron.sweep.recorded_run import RecordedRun, number_at
from sftron.sweep.settings import short_names, varying_keys, words

ANSWERS = "roles.assistant"
"""What is compared over settings that train other tokens: the loss of one role's tokens, which all runs measure."""
_FIRST_STEPS = 1
"""Left out of speeds: they warm up."""


@dataclass(frozen=True, slots=True)
class Figure:
    """unit, decimals: how it is written. of: None where the run has not recorded it."""

    key: str
    title: str
    unit: str
    decimals: int
    of: Callable[[RecordedRun], float | None]


@dataclass(frozen=True, slots=True)
class Spread:
    """Over `n` runs; std is the sample's standard deviation, None for one run."""

    mean: float
    std: float | None
    n: int


def spread(numbers: Sequence[float]) -> Spread | None:
    if not numbers:
        return None
    return Spread(statistics.fmean(numbers), statistics.stdev(numbers) if len(numbers) > 1 else None, len(numbers))


@dataclass(frozen=True, slots=True)
class Group:
    """Runs that differ in nothing but the seed. letter: in charts and tables. settings: what tells the groups apart."""

    letter: str
    settings: Mapping[str, Any]
    words: str
    runs: tuple[RecordedRun, ...]

    @property
    def completed(self) -> tuple[RecordedRun, ...]:
        return tuple(run for run in self.runs if run.status == "completed")


def group_runs(runs: Sequence[RecordedRun]) -> list[Group]:
    """In the order in which the runs are given."""
    keys = varying_keys([run.config for run in runs])
    names = short_names(keys)
    by_settings: dict[str, list[RecordedRun]] = {}
    for run in runs:
        by_settings.setdefault(repr([run.config.get(key) for key in keys]), []).append(run)
    return [
        Group(
            letter=_letter(number),
            settings={key: members[0].config.get(key) for key in keys},
            words=_group_words(members, ", ".join(f"{names[key]} {words(members[0].config.get(key))}" for key in keys)),
            runs=tuple(members),
        )
        for number, members in enumerate(by_settings.values())
    ]


def _group_words(runs: Sequence[RecordedRun], settings: str) -> str:
    """A run that is alone by its name, several by what they have in common."""
    if len(runs) == 1:
        return f"{runs[0].name}: {settings}" if settings else runs[0].name
    return settings or "all runs"


def _letter(number: int) -> str:
    return chr(ord("A") + number % 26) + ("" if number < 26 else str(number // 26))


def figures_for(runs: Sequence[RecordedRun]) -> list[Figure]:
    """All that any of the runs has recorded."""
    sets = {name: None for run in runs for line in run.evaluations for name in line.get("sets", {})}
    figures = [
        Figure(
            f"evaluation.{name}", f"evaluation loss, answers of {name}", "", 4, lambda run, name=name: _last(run, name)
        )
        for name in sets
    ]
    figures += [
        Figure("answers_loss", "training loss of the answers", "", 4, answers_loss),
        Figure("loss", "training loss as trained", "", 4, lambda run: tail_mean(run, "loss", "trained_tokens")),
        Figure("tokens_per_second", "tokens/s", "", 0, lambda run: _median(run, "tokens_per_second")),
        Figure("tflops", "TFLOP/s a GPU", "", 3, lambda run: _median(run, "tflops")),
        Figure(
            "peak_memory_gb",
            "peak memory",
            "GB",
            2,
            lambda run: max(run.by_step("peak_memory_gb").values(), default=None),
        ),
        Figure("steps", "steps", "", 0, lambda run: float(run.last_step) or None),
        Figure("tokens", "tokens", "", 0, lambda run: _end(run.tokens())),
        Figure("minutes", "time in steps", "min", 1, lambda run: _end(run.minutes())),
    ]
    return [figure for figure in figures if any(figure.of(run) is not None for run in runs)]


def metric_of(run: RecordedRun, name: str) -> float | None:
    """A metric under the name that wandb has for it: of the last evaluation (`eval/held_out/loss`), or of the steps,
    the mean over the run's last tenth (`roles/assistant/loss`)."""
    key = name.replace("/", ".")
    if not name.startswith("eval/"):
        return tail_mean(run, key, f"{ANSWERS}.tokens" if key == f"{ANSWERS}.loss" else "trained_tokens")
    lines = [{"eval": {**line, **line.get("sets", {})}} for line in run.evaluations]
    found = [number for line in lines if (number := number_at(line, key)) is not None]
    return found[-1] if found else None


def answers_loss(run: RecordedRun) -> float | None:
    return tail_mean(run, f"{ANSWERS}.loss", f"{ANSWERS}.tokens")


def answers_loss_key(record: Mapping[str, Any]) -> float | None:
    """Of one set's results: the answers' own loss, else the set's."""
    found = number_at(record, f"{ANSWERS}.loss")
    return number_at(record, "loss") if found is None else found


def tail_mean(run: RecordedRun, key: str, weight_key: str) -> float | None:
    """The mean over the tokens of the run's last tenth, at least five steps: one step's loss is mostly its data's."""
    steps = run.steps[-max(5, math.ceil(len(run.steps) / 10)) :]
    known = [(number, number_at(step, weight_key)) for step in steps if (number := number_at(step, key)) is not None]
    weights = [1.0 if weight is None else weight for _, weight in known]
    if not sum(weights):
        return None
    return sum(number * weight for (number, _), weight in zip(known, weights, strict=True)) / sum(weights)


def _median(run: RecordedRun, key: str) -> float | None:
    numbers = list(run.by_step(key).values())
    return statistics.median(numbers[_FIRST_STEPS:] or numbers) if numbers else None


def _end(series: Mapping[int, float]) -> float | None:
    return series[max(series)] if series else None


def _last(run: RecordedRun, name: str) -> float | None:
    found = [answers_loss_key(line["sets"][name]) for line in run.evaluations if name in line.get("sets", {})]
    return found[-1] if found else None
