"""A sweep file, which `wandb sweep` takes as well. Its grid is run here; what only wandb can do is refused by name."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from sftron.regular_file import read_regular

_MAX_FILE_BYTES = 256 * 2**10
_KEYS_OF_THE_SERVER = {"name", "description", "project", "entity"}
_KEYS = {"method", "metric", "parameters", "command", "program", "run_cap", *_KEYS_OF_THE_SERVER}
_DEFAULT_COMMAND = ["${env}", "${interpreter}", "${program}", "${args}"]

Settings = dict[str, Any]
"""A value for each parameter, by dotted key of the configuration, in the file's order."""


class SweepError(ValueError):
    """Problems of a sweep in words for the user, one a line."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A number by the name that wandb has for it, and whether to "minimize" or to "maximize" it."""

    name: str
    goal: str


@dataclass(frozen=True, slots=True)
class SweepFile:
    """The grid over `parameters`, at most `run_cap` runs of it.

    `command` holds wandb's macros, `${args}` among them. `metric` sorts the runs of the report.
    """

    path: Path
    name: str
    parameters: Mapping[str, tuple[Any, ...]]
    command: tuple[str, ...]
    program: str
    run_cap: int | None
    metric: Metric | None = None

    def grid(self) -> list[Settings]:
        """Returns the settings of each run; the file's last parameter changes fastest."""
        combinations = itertools.product(*self.parameters.values())
        return [
            dict(zip(self.parameters, values, strict=True)) for values in itertools.islice(combinations, self.run_cap)
        ]


def read_sweep_file(path: Path) -> SweepFile:
    """Raises SweepError with every problem of the file, one a line."""
    try:
        # With wandb's YAML reader, so that both have the same values.
        tree = yaml.safe_load(read_regular(path, _MAX_FILE_BYTES).decode("utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise SweepError(f"{path}: cannot be read: {error}") from error
    if not isinstance(tree, dict):
        raise SweepError(f"{path}: wanted a mapping with the keys method, parameters and command")
    if problems := list(_problems(tree)):
        raise SweepError("\n".join(f"{path}: {problem}" for problem in problems))
    return SweepFile(
        path=path,
        name=str(tree.get("name") or path.stem),
        parameters={str(key): tuple(_values(options)) for key, options in tree["parameters"].items()},
        command=tuple(map(str, tree.get("command", _DEFAULT_COMMAND))),
        program=str(tree.get("program") or "run_train.py"),
        run_cap=tree.get("run_cap"),
        metric=Metric(tree["metric"]["name"], tree["metric"].get("goal", "minimize")) if "metric" in tree else None,
    )


def _problems(tree: Mapping[str, Any]) -> Iterator[str]:
    if (method := tree.get("method")) != "grid":
        yield f"method: found {method!r}, and a grid is all that is run here: use `wandb sweep`, or method: grid"
    for key in tree:
        if key == "early_terminate":
            yield "early_terminate: needs wandb's server: use `wandb sweep`, or leave it out"
        elif key not in _KEYS:
            yield f"{key}: not known here; the keys are {', '.join(sorted(_KEYS))}"
    parameters = tree.get("parameters")
    if not isinstance(parameters, dict) or not parameters:
        yield "parameters: wanted a mapping of dotted configuration keys, as data.remove_cross_attention"
    else:
        yield from (f"parameters.{key}: {problem}" for key, each in parameters.items() if (problem := _problem(each)))
    metric = tree.get("metric", {"name": "loss"})
    if not isinstance(metric, dict) or not isinstance(metric.get("name"), str):
        yield f"metric: found {metric!r}; wanted a mapping with name, as eval/held_out/loss, and goal"
    elif metric.get("goal", "minimize") not in ("minimize", "maximize"):
        yield f"metric.goal: found {metric['goal']!r}; wanted minimize or maximize"
    run_cap = tree.get("run_cap", 1)
    if type(run_cap) is not int or run_cap < 1:
        yield f"run_cap: found {run_cap!r}; wanted a whole number above 0"
    command = tree.get("command", _DEFAULT_COMMAND)
    if not isinstance(command, list) or not command:
        yield "command: wanted a list of words, one an item"


def _problem(options: Any) -> str:
    """Returns what is wrong with a parameter, or nothing."""
    if not isinstance(options, dict) or len(options) != 1 or not options.keys() <= {"value", "values"}:
        return f"found {options!r}; wanted value or values alone, and dotted keys in place of nested ones"
    values = _values(options)
    if not isinstance(values, list) or not values:
        return f"values: found {values!r}; wanted a list"
    if None in values:
        return "wandb writes null as None, which a run reads as text: give the value itself"
    if repeated := [value for number, value in enumerate(values) if repr(value) in map(repr, values[:number])]:
        return f"values: {repeated[0]!r} is given twice, and would be the same run twice: keep one"
    return ""


def _values(options: Mapping[str, Any]) -> Any:
    return options["values"] if "values" in options else [options["value"]]
