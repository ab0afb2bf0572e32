"""The grid of a sweep file, which `wandb sweep` takes too: the command and the configuration of each run."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sftron.compare.comparison import Metric
from sftron.compare.recorded_run import decides_training, flat_config, value_text
from sftron.config import Config, ConfigError, load_config
from sftron.config.help import describe_value, dotted
from sftron.config.load import split_arguments
from sftron.regular_file import read_regular
from sftron.train.places import pin, read_commits
from sftron.train.run_directory import read_result

_MAX_FILE_BYTES = 256 * 2**10
_LOGGING = "--logging.wandb.mode="
_PLAIN = bool | int | float | str


class _Plain(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Value(_Plain):
    value: _PLAIN

    @property
    def values(self) -> list[_PLAIN]:
        return [self.value]


class _Values(_Plain):
    values: Annotated[list[_PLAIN], Field(min_length=1)]


class SweepFile(_Plain):
    """A grid over dotted keys of the configuration. It refuses anything else that `wandb sweep` reads."""

    method: Literal["grid"]
    parameters: Annotated[dict[str, _Value | _Values], Field(min_length=1)]
    command: Annotated[list[str], Field(min_length=1)]
    name: str = "sweep"
    metric: Metric | None = None
    project: str | None = None
    entity: str | None = None
    description: str | None = None

    def grid(self) -> list[dict[str, _PLAIN]]:
        """Returns the values of each run by key; the last parameter of the file changes fastest."""
        combinations = itertools.product(*(each.values for each in self.parameters.values()))
        return [dict(zip(self.parameters, values, strict=True)) for values in combinations]

    def command_of(self, settings: dict[str, _PLAIN]) -> list[str]:
        """Returns the command as wandb's agent writes it, but without wandb. Raises ValueError for another macro."""
        macros = {
            "${env}": ["/usr/bin/env"],
            "${interpreter}": [sys.executable],
            "${args}": [f"--{key}={value}" for key, value in settings.items()],
        }
        words = [word for word in self.command if not word.startswith(_LOGGING)]
        if unknown := [word for word in words if "${" in word and word not in macros]:
            raise ValueError(f"command: {unknown[0]} works only in `wandb agent`; choose from {', '.join(macros)}")
        if "${args}" not in words:
            raise ValueError("command: add ${args}, without which no run gets its parameters")
        return [*itertools.chain(*(macros.get(word, [word]) for word in words)), f"{_LOGGING}disabled"]


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A run of the grid: its command and its complete configuration."""

    command: tuple[str, ...]
    config: Config

    @property
    def folder(self) -> Path:
        return self.config.run_dir

    @property
    def name(self) -> str:
        return self.config.general.run_name

    def state(self) -> Literal["new", "begun", "completed"]:
        """Returns the run's state; a begun run continues from its own checkpoints.

        Raises:
            ValueError: The folder holds a run with another configuration, so it can neither be skipped nor continued.
        """
        if not (self.folder / "config.yaml").exists():
            return "new"
        recorded = flat_config(load_config(self.folder / "config.yaml"))
        planned = flat_config(pin(self.config, read_commits(self.folder)))
        changed = [
            f"{key} is {value_text(recorded.get(key))} there but {value_text(planned.get(key))} in the sweep"
            for key in recorded | planned
            if recorded.get(key) != planned.get(key) and decides_training(key)
        ]
        if changed:
            problem = f"{self.folder} holds a run with another configuration: {'; '.join(changed)}"
            raise ValueError(f"{problem}; choose another general.output_dir, or remove the folder")
        return "completed" if read_result(self.folder).get("status") == "completed" else "begun"


_COMMAND = "write command: [${interpreter}, -m, sftron, train, --config, FILE, ${args}]"
_REMEDIES = {
    "": "write the keys method, parameters and command",
    "method": "write method: grid",
    "program": f"programs cannot be started by name: {_COMMAND}",
    "command": _COMMAND,
    "parameters": "write dotted keys and their values, as in optimizer.learning_rate: {values: [1e-5, 1e-4]}",
    "metric": "write metric: {name: eval/held_out/loss, goal: minimize}",
}
"""What to write, by the key of a sweep file. Other unknown keys should be removed."""


def read_sweep_file(path: Path) -> SweepFile:
    """Reads a sweep file. Raises ValueError with a line for each problem: the line and the key, and what to write."""
    try:
        loader = yaml.SafeLoader(read_regular(path, _MAX_FILE_BYTES).decode("utf-8"))
        # wandb's YAML reader, so that both programs read equal values.
        tree = None if (node := loader.get_single_node()) is None else loader.construct_document(node)
        return SweepFile.model_validate(tree)
    except ValidationError as error:
        # After a parameter's name, pydantic adds the branches of a union.
        found = {problem["loc"][:2]: problem for problem in error.errors()}
        problems = sorted(
            (_line_of(node, keys), ": ".join([*filter(None, [dotted(keys)]), _problem(tree, keys, problem)]))
            for keys, problem in found.items()
        )
        lines = [f"{path}:{line}: {problem}" for line, problem in problems]
        remedy = "`sftron sweep` runs grids of plain values; use `wandb sweep` and `wandb agent` for anything else"
        raise ValueError("\n".join([*lines, remedy])) from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ValueError(f"{path}:{line}: is not YAML: {error.problem}") from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error


def _line_of(node: yaml.Node | None, keys: Sequence[Any]) -> int:
    """Returns the number of the line of a key, or of the last of the `keys` that the file has."""
    line = 1
    for key in keys:
        pairs = node.value if isinstance(node, yaml.MappingNode) else ()
        name, node = next((pair for pair in pairs if pair[0].value == str(key)), (None, None))
        line = line if name is None else name.start_mark.line + 1
    return line


def _problem(tree: Any, keys: Sequence[Any], problem: Mapping[str, Any]) -> str:
    """Returns a problem that pydantic found at `keys`, and what to write instead."""
    remedy = _REMEDIES.get(str(keys[0]) if keys else "")
    if problem["type"] == "missing":
        return f"is missing: {remedy}"
    value = tree
    for key in keys:
        value = value[key]
    found = f"found {describe_value(value)}"
    if keys[:1] != ("parameters",) or len(keys) == 1:
        if problem["type"] == "extra_forbidden" and not remedy:
            return f"{found}, which `sftron sweep` does not read; remove the key"
        return f"{found}; {remedy or 'write a text'}"
    if isinstance(value, dict) and isinstance(inner := value.get("parameters"), dict):
        return f"{found}; write dotted keys, as in {keys[1]}.{next(iter(inner), 'key')}: {{values: [...]}}"
    if isinstance(value, dict) or value in (None, []):
        return f"{found}; a grid needs explicit values: write {{values: [...]}} with numbers, texts, true or false"
    return f"{found}; write {{values: {json.dumps(value if isinstance(value, list) else [value], default=str)}}}"


def plan_runs(path: Path, sweep: SweepFile) -> list[PlannedRun]:
    """Returns the runs of the grid.

    Raises:
        ValueError: Configurations have problems (the message lists all), or runs would share a directory.
    """
    runs: dict[Path, PlannedRun] = {}
    problems: dict[str, None] = {}
    for settings in sweep.grid():
        try:
            command = sweep.command_of(settings)
            run = PlannedRun(tuple(command), load_config(*config_and_overrides(command)))
        except ValueError as error:
            problems |= dict.fromkeys(str(error).splitlines())
            continue
        if run.folder in runs:
            name = "-".join([run.name, *(f"{{{key}}}" for key in settings)])
            problems[f"two runs would share {run.folder}; add --general.run_name={name} to the command"] = None
        runs[run.folder] = run
    if problems:
        raise ValueError("\n".join(f"{path}: {problem}" for problem in problems))
    return list(runs.values())


def config_and_overrides(command: Sequence[str]) -> tuple[str, list[str]]:
    """Returns the configuration file and the overrides of a command. Raises ConfigError if it does not train."""
    starts = [number for number, word in enumerate(command) if word == "train" or word.endswith(".py")]
    if not starts:
        raise ConfigError([f"command: give `sftron train` or run_train.py in place of {' '.join(command)}"])
    return split_arguments(command[starts[0] + 1 :])
