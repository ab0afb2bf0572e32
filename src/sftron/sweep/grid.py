"""Sweep files in the format of `wandb sweep`: the command, configuration and directory of each run of their grid."""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from sftron.config import Config, ConfigError, load_config
from sftron.config.load import split_arguments
from sftron.regular_file import read_regular
from sftron.sweep.recorded_run import decides_training, flat_config, value_text
from sftron.train.run_directory import read_result
from sftron.train.start.revisions import pin, read_commits

_MAX_FILE_BYTES = 256 * 2**10
_KEYS = ("name", "method", "metric", "parameters", "command", "program", "run_cap", "description", "project", "entity")
_ENVIRONMENT = re.compile(r"\$\{envvar:([A-Z0-9_]*)\}")
_WANDB_MODE = "--logging.wandb.mode="

Settings = dict[str, Any]
"""The value of each parameter, by dotted key of the configuration, in the order of the file."""


class SweepError(ValueError):
    """Problems with a sweep, described for the user, one per line."""


@dataclass(frozen=True, slots=True)
class Metric:
    """The metric by which runs are sorted: its name in wandb, and the goal "minimize" or "maximize"."""

    name: str
    goal: str


@dataclass(frozen=True, slots=True)
class SweepFile:
    """A grid over `parameters` with at most `run_cap` runs; `command` may contain wandb's macros."""

    path: Path
    name: str
    parameters: Mapping[str, tuple[Any, ...]]
    command: tuple[str, ...]
    program: str
    run_cap: int | None
    metric: Metric | None = None

    def grid(self) -> list[Settings]:
        """Returns the settings of each run; the last parameter of the file changes fastest."""
        combinations = itertools.islice(itertools.product(*self.parameters.values()), self.run_cap)
        return [dict(zip(self.parameters, values, strict=True)) for values in combinations]


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A run of the sweep with its settings, its command, and its complete configuration."""

    settings: Settings
    command: tuple[str, ...]
    config: Config

    @property
    def folder(self) -> Path:
        return self.config.run_dir

    @property
    def name(self) -> str:
        return self.config.general.run_name

    def state(self) -> Literal["new", "begun", "completed"]:
        """Returns the progress of the run; one that has begun continues from its own checkpoints.

        Raises:
            SweepError: The folder contains a run with another configuration, which must neither be skipped nor
                continued.
        """
        if not (self.folder / "config.yaml").exists():
            return "new"
        try:
            recorded = flat_config(load_config(self.folder / "config.yaml"))
            planned = flat_config(pin(self.config, read_commits(self.folder)))
        except ValueError as error:
            raise SweepError(f"the configuration of the run in {self.folder} cannot be read: {error}") from error
        changed = [
            f"{key} is {value_text(recorded.get(key))} there and {value_text(planned.get(key))} in the sweep"
            for key in recorded | planned
            if recorded.get(key) != planned.get(key) and decides_training(key)
        ]
        if changed:
            raise SweepError(
                f"{self.folder} holds a run with another configuration: {'; '.join(changed)}; choose another "
                "general.output_dir, or remove that folder"
            )
        return "completed" if read_result(self.folder).get("status") == "completed" else "begun"


def read_sweep_file(path: Path) -> SweepFile:
    """Reads a sweep file.

    Raises:
        SweepError: The file has problems; the message lists all of them, one per line.
    """
    try:
        # wandb's YAML reader, so that both programs read equal values.
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
        command=tuple(map(str, tree["command"])),
        program=str(tree.get("program") or "run_train.py"),
        run_cap=tree.get("run_cap"),
        metric=Metric(tree["metric"]["name"], tree["metric"].get("goal", "minimize")) if "metric" in tree else None,
    )


def _problems(tree: Mapping[str, Any]) -> Iterator[str]:
    if (method := tree.get("method")) != "grid":
        yield f"method: found {method!r}; only grid runs here: use `wandb sweep` for other methods"
    if unknown := [key for key in tree if key not in _KEYS]:
        yield f"{', '.join(unknown)}: unknown, or only for `wandb sweep`; the keys are {', '.join(_KEYS)}"
    parameters = tree.get("parameters")
    if not isinstance(parameters, dict) or not parameters:
        yield "parameters: wanted a mapping of dotted configuration keys, such as data.remove_cross_attention"
    else:
        yield from (f"parameters.{key}: {problem}" for key, each in parameters.items() if (problem := _problem(each)))
    metric = tree.get("metric", {"name": "loss"})
    if not isinstance(metric, dict) or not isinstance(metric.get("name"), str):
        yield f"metric: found {metric!r}; wanted a mapping with a name, such as eval/held_out/loss, and a goal"
    elif metric.get("goal", "minimize") not in ("minimize", "maximize"):
        yield f"metric.goal: found {metric['goal']!r}; wanted minimize or maximize"
    run_cap = tree.get("run_cap", 1)
    if type(run_cap) is not int or run_cap < 1:
        yield f"run_cap: found {run_cap!r}; wanted a whole number above 0"
    if not isinstance(command := tree.get("command"), list) or not command:
        yield f"command: found {command!r}; wanted a list of words"


def _problem(options: Any) -> str:
    """Returns the problem with a parameter, or an empty string."""
    if not isinstance(options, dict) or len(options) != 1 or not options.keys() <= {"value", "values"}:
        return f"found {options!r}; wanted only value or values, and a dotted key instead of nested parameters"
    values = _values(options)
    if not isinstance(values, list) or not values:
        return f"values: found {values!r}; wanted a list"
    if None in values:
        return "null is passed on as the text None; give a value"
    if len(set(map(repr, values))) < len(values):
        return f"values: found {values!r}, where one is given twice: keep one"
    return ""


def _values(options: Mapping[str, Any]) -> Any:
    return options["values"] if "values" in options else [options["value"]]


def plan_runs(sweep: SweepFile, *, wandb_mode: str) -> list[PlannedRun]:
    """Returns the runs of the grid.

    Raises:
        SweepError: A configuration has problems, or runs would share a directory. The message lists all problems.
    """
    problems: dict[str, None] = {}
    by_folder: dict[Path, list[PlannedRun]] = {}
    for settings in sweep.grid():
        try:
            command = command_for(sweep, settings, wandb_mode=wandb_mode)
            run = PlannedRun(settings, command, load_config(*config_and_overrides(command)))
            by_folder.setdefault(run.folder, []).append(run)
        except (SweepError, ConfigError) as error:
            problems |= dict.fromkeys(str(error).splitlines())
    for folder, sharing in by_folder.items():
        if len(sharing) > 1:
            changing = [key for key in sharing[0].settings if len({repr(run.settings[key]) for run in sharing}) > 1]
            name = "-".join([sharing[0].name, *(f"{{{key}}}" for key in changing)])
            problems[f"{len(sharing)} runs would share {folder}; put --general.run_name={name} into the command"] = None
    if problems:
        raise SweepError("\n".join(f"{sweep.path}: {problem}" for problem in problems))
    return [run for runs in by_folder.values() for run in runs]


def command_for(sweep: SweepFile, settings: Settings, *, wandb_mode: str) -> tuple[str, ...]:
    """Returns the command in the form that wandb's agent writes, except for the mode of wandb.

    Raises:
        SweepError: A macro writes arguments that a run does not accept.
    """
    macros = {
        "${env}": ["/usr/bin/env"],
        "${interpreter}": [sys.executable],
        "${program}": [sweep.program],
        "${args}": [f"--{key}={value}" for key, value in settings.items()],
    }
    words: list[str] = []
    for item in sweep.command:
        if item in macros:
            words += macros[item]
        elif item == "${args_no_boolean_flags}":
            raise SweepError("command: ${args_no_boolean_flags} omits false values: use ${args}")
        elif item.startswith("${args"):
            raise SweepError(f"command: a run cannot read the arguments of {item}: use ${{args}}")
        elif not item.startswith(_WANDB_MODE):
            words.append(_ENVIRONMENT.sub(lambda match: os.environ.get(match[1], match[1]), item))
    if "${args}" not in sweep.command:
        raise SweepError("command: ${args} is missing, so no run would get its parameters: add it")
    return (*words, f"{_WANDB_MODE}{wandb_mode}")


def config_and_overrides(command: Sequence[str]) -> tuple[str, list[str]]:
    """Returns the configuration file and the overrides of a command.

    Raises:
        SweepError: The command does not train.
        ConfigError: The command does not have exactly one configuration.
    """
    starts = [number for number, word in enumerate(command) if word == "train" or word.endswith(".py")]
    if not starts:
        raise SweepError(f"command: wanted `sftron train` or run_train.py in {' '.join(command)}")
    return split_arguments(command[starts[0] + 1 :])
