"""What one setting changed: runs that are alike in all else, the seed included, are compared in pairs."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sftron.sweep.figures import Figure, Group, Spread, spread
from sftron.sweep.recorded_run import RecordedRun

RATIOS = ("tokens_per_second", "peak_memory_gb")
DIFFERENCES = ("answers_loss",)


@dataclass(frozen=True, slots=True)
class Effect:
    """Of `key` being `value` instead of `reference`, on `figure`. is_ratio: value / reference, else value - reference.

    change: over the pairs, and so without what the seeds and the other settings do.
    """

    key: str
    value: Any
    reference: Any
    figure: Figure
    is_ratio: bool
    change: Spread


def effects(groups: Sequence[Group], figures: Sequence[Figure]) -> list[Effect]:
    """For each setting, each of its values against the first: for a toggle, true against false. Completed runs only."""
    runs = [(group.settings, run) for group in groups for run in group.completed]
    keys = list(groups[0].settings) if groups else []
    found = []
    for key in keys:
        others = [other for other in keys if other != key]
        values = {json.dumps(settings[key]): settings[key] for settings, _ in runs}
        reference, *changed = sorted(values, key=lambda text: text != "false") or [""]
        by_rest: dict[str, dict[str, RecordedRun]] = {}
        for settings, run in runs:
            rest = json.dumps([*(settings[other] for other in others), run.seed])
            by_rest.setdefault(rest, {})[json.dumps(settings[key])] = run
        for value in changed:
            pairs = [(same[value], same[reference]) for same in by_rest.values() if {value, reference} <= same.keys()]
            for figure in figures:
                change = _change(figure, pairs)
                if change is not None:
                    is_ratio = figure.key in RATIOS
                    found.append(Effect(key, values[value], values[reference], figure, is_ratio, change))
    return found


def _change(figure: Figure, pairs: Sequence[tuple[RecordedRun, RecordedRun]]) -> Spread | None:
    if figure.key == "tokens_per_second":
        return spread([ratio for pair in pairs if (ratio := _speed_ratio(figure.key, *pair)) is not None])
    if figure.key not in (*RATIOS, *DIFFERENCES) and not figure.key.startswith("evaluation."):
        return None
    changes = []
    for pair in pairs:
        ours, theirs = (figure.of(run) for run in pair)
        if ours is not None and theirs is not None and pair[0].last_step == pair[1].last_step:
            changes.append(ours / theirs if figure.key in RATIOS and theirs else ours - theirs)
    return spread(changes)


def _speed_ratio(key: str, ours: RecordedRun, theirs: RecordedRun) -> float | None:
    """The median over steps of each step's ratio: a toggle changes no pack, so a step has the same tokens in both."""
    here, there = ours.by_step(key), theirs.by_step(key)
    ratios = [here[step] / there[step] for step in sorted(here) if there.get(step)]
    return statistics.median(ratios[1:] or ratios) if ratios else None
