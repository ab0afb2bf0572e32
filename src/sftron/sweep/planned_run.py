"""The runs of a sweep: their commands, as wandb's agent makes them, and their checked configurations."""

from __future__ import annotations

import os
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sftron.config import Config, ConfigError, load_config
from sftron.sweep.settings import differences
from sftron.sweep.sweep_file import Settings, SweepError, SweepFile
from sftron.train.run_directory import read_result

_ENVIRONMENT = re.compile(r"\$\{envvar:([A-Z0-9_]*)\}")
_WANDB_MODE = "--logging.wandb.mode="
State = Literal["new", "begun", "completed"]


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A run with the values that the sweep gives it, the command that starts it, and its whole configuration."""

    settings: Settings
    command: tuple[str, ...]
    config: Config

    @property
    def folder(self) -> Path:
        return self.config.run_dir

    @property
    def name(self) -> str:
        return self.config.general.run_name

    def state(self) -> State:
        """Returns how far the run is; one that has begun continues from its own checkpoints.

        Raises SweepError where the folder holds a run of another configuration, which must neither be skipped as done
        nor be continued.
        """
        if not (self.folder / "config.yaml").exists():
            return "new"
        try:
            recorded = load_config(self.folder / "config.yaml")
        except ConfigError as error:
            raise SweepError(f"{self.folder} holds a run whose configuration cannot be read: {error}") from error
        if changed := differences(recorded, self.config):
            raise SweepError(
                f"{self.folder} holds a run of another configuration: {'; '.join(changed)}. Choose another "
                "general.output_dir, or remove it"
            )
        return "completed" if read_result(self.folder).get("status") == "completed" else "begun"


def plan_runs(sweep: SweepFile, *, wandb_mode: str) -> list[PlannedRun]:
    """Raises SweepError with every problem of a configuration, and of runs that would share a directory."""
    problems: dict[str, None] = {}
    runs = []
    for settings in sweep.grid():
        try:
            command = command_for(sweep, settings, wandb_mode=wandb_mode)
            runs.append(PlannedRun(settings, command, load_config(*config_and_overrides(command))))
        except (SweepError, ConfigError) as error:
            problems |= dict.fromkeys(f"{sweep.path}: {line}" for line in str(error).splitlines())
    by_folder: dict[Path, list[PlannedRun]] = defaultdict(list)
    for run in runs:
        by_folder[run.folder].append(run)
    for folder, sharing in by_folder.items():
        if len(sharing) > 1:
            changing = [key for key in sharing[0].settings if len({repr(run.settings[key]) for run in sharing}) > 1]
            holes = "-".join(f"{{{key}}}" for key in changing)
            name = f"--general.run_name={sharing[0].name}-{holes}"
            problems[f"{sweep.path}: {len(sharing)} runs would share {folder}; put {name} into the command"] = None
    if problems:
        raise SweepError("\n".join(problems))
    return runs


def command_for(sweep: SweepFile, settings: Settings, *, wandb_mode: str) -> tuple[str, ...]:
    """Returns the command as wandb's agent writes it, but for the mode of wandb.

    Raises SweepError at a macro whose arguments a run does not read.
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
            raise SweepError("command: ${args_no_boolean_flags} leaves out whatever is False: write ${args}")
        elif item.startswith("${args"):
            raise SweepError(f"command: a run does not read what {item} writes: write ${{args}}")
        else:
            words.append(_ENVIRONMENT.sub(lambda match: os.environ.get(match[1], match[1]), item))
    if "${args}" not in sweep.command:
        raise SweepError("command: ${args} is missing, so no run would get its parameters")
    words = [word for word in words if not word.startswith(_WANDB_MODE)]
    return (*words, f"{_WANDB_MODE}{wandb_mode}")


def config_and_overrides(command: Sequence[str]) -> tuple[str, list[str]]:
    """Returns the configuration file and the overrides of a command.

    Raises SweepError where the command starts no script, or names no configuration.
    """
    script = next((number for number, word in enumerate(command) if word.endswith(".py")), None)
    if script is None:
        raise SweepError(f"command: wanted run_train.py in {' '.join(command)}")
    paths, overrides, rest = [], [], iter(command[script + 1 :])
    for word in rest:
        if word == "--config":
            paths.append(next(rest, ""))
        elif word.startswith("--config="):
            paths.append(word.removeprefix("--config="))
        else:
            overrides.append(word)
    if len(paths) != 1:
        raise SweepError(f"command: wanted one --config FILE after the script, found {len(paths)}")
    return paths[0], overrides
