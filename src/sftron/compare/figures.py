"""Final figures of runs, and the effect of a setting on them in pairs of runs that differ only in that setting."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from sftron.compare.recorded_run import ByStep, RecordedRun, decides_training, value_text

ANSWERS_LOSS = "roles/assistant/loss"
"""The loss of one role's tokens, which all runs measure, even if they train on different tokens."""
_NAMES_AND_SEED = ("general.run_name", "general.output_dir", "general.seed")


@dataclass(frozen=True, slots=True)
class Spread:
    """The mean of `n` numbers; std is the sample standard deviation, or None for a single number."""

    mean: float
    std: float | None
    n: int

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Spread | None:
        """Returns the spread of the numbers; None without numbers."""
        std = statistics.stdev(numbers) if len(numbers) > 1 else None
        return cls(statistics.fmean(numbers), std, len(numbers)) if numbers else None

    def text(self, decimals: int) -> str:
        """Returns "0.8123 ± 0.0045", or the mean alone."""
        mean = f"{self.mean:,.{decimals}f}"
        return mean if self.std is None else f"{mean} ± {self.std:,.{decimals}f}"


@dataclass(frozen=True, slots=True)
class Figure:
    """A number that is computed for each run."""

    key: str
    title: str
    of: Callable[[RecordedRun], float | None]
    """A function that returns the number of a run, or None if the run has not recorded it."""
    comparison: Literal["", "ratio", "ratio of each step", "difference"] = ""
    """The kind of comparison within a pair of runs; "" means none."""
    decimals: int = 4
    unit: str = ""

    def text(self, spread: Spread) -> str:
        """Returns "0.8123 ± 0.0045 (3)": mean, standard deviation and number of runs; two digits or more below 1."""
        size = max(abs(spread.mean), spread.std or 0.0)
        digits = 1 - math.floor(math.log10(size)) if 0 < size < 1 else 0
        return f"{spread.text(max(self.decimals, digits))}{f' {self.unit}' if self.unit else ''} ({spread.n})"


@dataclass(frozen=True, slots=True)
class Group:
    """The runs that differ only in the seed, with the letter of their line and the settings that distinguish them.

    The number of ranks is one of the settings: with the same configuration, more ranks train more tokens in a step.
    """

    letter: str
    settings: Mapping[str, Any]
    words: str
    runs: tuple[RecordedRun, ...]

    @property
    def completed(self) -> tuple[RecordedRun, ...]:
        return tuple(run for run in self.runs if run.status == "completed")

    def spread(self, figure: Figure) -> Spread | None:
        """Returns the spread of a figure over the seeds of the completed runs, or None; equal seeds count once."""
        by_seed: dict[int, list[float]] = {}
        for run in self.completed:
            if (number := figure.of(run)) is not None:
                by_seed.setdefault(run.seed, []).append(number)
        return Spread.of([statistics.fmean(numbers) for numbers in by_seed.values()])


@dataclass(frozen=True, slots=True)
class Effect:
    """The effect of replacing the value `reference` of `key` by `value`, over pairs of otherwise equal runs."""

    key: str
    value: Any
    reference: Any
    figure: Figure
    change: Spread

    @property
    def is_ratio(self) -> bool:
        return self.figure.comparison != "difference"

    @property
    def text(self) -> str:
        """`× 1.210 ± 0.030 (4 pairs)`, or `+0.0120 ± 0.0010 (4 pairs)`."""
        pairs = f"({self.change.n} pair{'' if self.change.n == 1 else 's'})"
        if self.is_ratio:
            return f"× {self.change.text(3)} {pairs}"
        size = Spread(abs(self.change.mean), self.change.std, self.change.n)
        return f"{'+' if self.change.mean >= 0 else '−'}{size.text(self.figure.decimals)} {pairs}"


def group_runs(runs: Sequence[RecordedRun]) -> list[Group]:
    """Returns the groups in the order of their first runs."""
    settings = _settings(runs)
    names = short_names(list(settings[0])) if settings else {}
    by_settings: dict[str, list[int]] = {}
    for number, values_of_run in enumerate(settings):
        by_settings.setdefault(repr(values_of_run), []).append(number)
    groups = []
    for number, (first, *more) in enumerate(by_settings.values()):
        values = settings[first]
        given = {key: value for key, value in values.items() if value is not None} or values
        words = ", ".join(f"{names[key]} {value_text(value)}" for key, value in given.items())
        if not more:
            words = f"{runs[first].name}: {words}" if words else runs[first].name
        letter = chr(ord("A") + number % 26) + ("" if number < 26 else str(number // 26))
        groups.append(Group(letter, values, words or "all runs", tuple(runs[n] for n in (first, *more))))
    return groups


def _settings(runs: Sequence[RecordedRun]) -> list[dict[str, Any]]:
    """Returns, for each run, the values of the keys in which the runs differ and that decide their training.

    A section that some runs leave out (`lora: null`) is false for these and true for the others, and its keys differ
    only if they differ between runs that have it. A list of mappings has a list of values for each key of the mappings:
    `data.datasets.path`. A run without a step counts as one with the number of ranks of the first run that has any.
    """
    known = next((run.ranks for run in runs if run.ranks is not None), None)
    tables = [{**dict(_by_key(run.config)), "ranks": known if run.ranks is None else run.ranks} for run in runs]
    keys = list(dict.fromkeys(key for table in tables for key in table))
    optional = {key for key in keys if any(other.startswith(f"{key}.") for other in keys)}
    for table, key in itertools.product(tables, optional):
        table[key] = key not in table
    differing = []
    for key in keys:
        if key in _NAMES_AND_SEED or not decides_training(key):
            continue
        section = key.rpartition(".")[0]
        values = [table.get(key) for table in tables if section not in optional or table[section]]
        if len({json.dumps(value) for value in values}) > 1 and not _repeats_one_value(key, values):
            differing.append(key)
    return [{key: table.get(key) for key in differing} for table in tables]


def _by_key(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            yield from ((f"{key}.{name}", [item.get(name) for item in value]) for name in value[0])
        else:
            yield key, value


def _repeats_one_value(key: str, values: Sequence[Any]) -> bool:
    """Returns whether lists of data sets differ in this key by their lengths alone, which the paths show."""
    is_of_data_sets = ".datasets." in key and not key.endswith(".path")
    return is_of_data_sets and len({json.dumps(item) for value in values for item in value or ()}) == 1


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Returns the last part of each key, or the whole key if another one has it too, or it is a key of data sets."""
    last = [key if ".datasets." in key else key.rsplit(".", 1)[-1] for key in keys]
    return {key: name if last.count(name) == 1 else key for key, name in zip(keys, last, strict=True)}


def figures_for(runs: Sequence[RecordedRun]) -> list[Figure]:
    """Returns the figures that at least one of the runs has recorded."""
    figures = [
        Figure(f"evaluation.{name}", f"evaluation loss, answers of {name}", partial(_last_loss, name), "difference")
        for name in dict.fromkeys(name for run in runs for name in run.sets)
    ]
    figures += [
        Figure(f"kept.{name}", f"rise of the loss of {name}, kept", partial(_last_rise, name), "difference")
        for name in dict.fromkeys(name for run in runs for name in run.sets)
    ]
    figures += [
        Figure("answers_loss", "training loss of the answers", partial(mean_at_end, name=ANSWERS_LOSS), "difference"),
        Figure("loss", "training loss as trained", partial(mean_at_end, name="loss")),
        Figure("tokens_per_second", "tokens/s", partial(_median, name="tokens_per_second"), "ratio of each step", 0),
        Figure("tflops", "TFLOP/s a device", partial(_median, name="tflops"), decimals=3),
        Figure("peak_memory_gb", "peak memory", partial(_highest, "peak_memory_gb"), "ratio", 2, "GB"),
        Figure("steps", "steps", lambda run: float(run.last_step) or None, decimals=0),
        Figure("tokens", "tokens", lambda run: _last(run.by_step("total_tokens")), decimals=0),
        Figure("minutes", "time in steps", lambda run: _last(run.minutes()), decimals=1, unit="min"),
    ]
    return [figure for figure in figures if any(figure.of(run) is not None for run in runs)]


def _last(series: ByStep) -> float | None:
    return series[max(series)] if series else None


def _last_loss(set_name: str, run: RecordedRun) -> float | None:
    return _last(run.evaluated(set_name))


def _last_rise(set_name: str, run: RecordedRun) -> float | None:
    """Returns how far the loss of a set of evaluation.keep has risen at the last evaluation.

    None for other sets, and if the loss was not finite: the rise of an earlier evaluation would hide that.
    """
    return run.evaluations[max(run.evaluations)].get(f"{set_name}/kept/rise") if run.evaluations else None


def _highest(name: str, run: RecordedRun) -> float | None:
    return max(run.by_step(name).values(), default=None)


def _median(run: RecordedRun, name: str) -> float | None:
    """Returns the median over all steps except the first one, which is a warm-up."""
    numbers = list(run.by_step(name).values())
    return statistics.median(numbers[1:] or numbers) if numbers else None


def mean_at_end(run: RecordedRun, name: str) -> float | None:
    """Returns the mean over the tokens of the last tenth of the steps, at least five, as single steps vary."""
    weight = "roles/assistant/tokens" if name == ANSWERS_LOSS else "trained_tokens"
    steps = list(run.steps.values())[-max(5, math.ceil(len(run.steps) / 10)) :]
    weighted = [(numbers[name], numbers.get(weight, 1.0)) for numbers in steps if name in numbers]
    total = sum(tokens for _, tokens in weighted)
    return sum(number * tokens for number, tokens in weighted) / total if total else None


def metric_of(run: RecordedRun, name: str) -> float | None:
    """Returns a metric of a completed run by its name in wandb; None if it has not recorded it.

    An evaluation metric (`eval/held_out/loss`) comes from the last evaluation; a step metric (`roles/assistant/loss`)
    is the mean at the end of the run.
    """
    if run.status != "completed":
        return None
    if not name.startswith("eval/"):
        return mean_at_end(run, name)
    name = name.removeprefix("eval/")
    return _last({step: numbers[name] for step, numbers in run.evaluations.items() if name in numbers})


def effects(groups: Sequence[Group], figures: Sequence[Figure]) -> list[Effect]:
    """Returns the effect of each value of each setting relative to the first one; for a toggle, relative to false."""
    runs = [(group.settings, run) for group in groups for run in group.completed]
    keys = list(groups[0].settings)
    found = []
    for key in keys:
        values = {json.dumps(settings[key]): settings[key] for settings, _ in runs}
        reference, *others = sorted(values, key=lambda text: text != "false") or [""]
        by_rest: dict[str, dict[str, RecordedRun]] = {}
        for settings, run in runs:
            rest = json.dumps([*(settings[other] for other in keys if other != key), run.seed])
            by_rest.setdefault(rest, {})[json.dumps(settings[key])] = run
        for other in others:
            pairs = [(same[other], same[reference]) for same in by_rest.values() if {other, reference} <= same.keys()]
            for figure in figures:
                changes = [change for pair in pairs if (change := _change(figure, *pair)) is not None]
                if change := Spread.of(changes):
                    found.append(Effect(key, values[other], values[reference], figure, change))
    return found


def _change(figure: Figure, run: RecordedRun, reference: RecordedRun) -> float | None:
    """Returns the change of a figure in a pair of runs, or None if it cannot be compared."""
    if figure.comparison == "ratio of each step":
        # A toggle does not change packs, so equal steps have equal tokens; the median ignores temporary slowdowns.
        speeds, others = run.by_step(figure.key), reference.by_step(figure.key)
        ratios = [speeds[step] / others[step] for step in sorted(speeds) if others.get(step)]
        return statistics.median(ratios[1:] or ratios) if ratios else None
    number, other = figure.of(run), figure.of(reference)
    if not figure.comparison or number is None or other is None or run.last_step != reference.last_step:
        return None
    if figure.comparison == "difference":
        return number - other
    return number / other if other else None
