"""What a run directory records of its run, however far it came."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from sftron.config import Config, ConfigError, load_config
from sftron.train.run_directory import read_result

_CHANGE_NO_WEIGHT = (
    "logging.",
    "checkpoints.interval",
    "checkpoints.keep_last",
    "checkpoints.async",
    "checkpoints.export",
    "checkpoints.resume",
)

Numbers = Mapping[str, float]
"""Numbers by the names that wandb has for them: "roles/assistant/loss"."""
ByStep = dict[int, float]


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """One run directory, read."""

    folder: Path
    config: Mapping[str, Any]
    """Every value, by dotted key."""
    status: str
    """That of result.json, or `unknown`."""
    error: str
    """Why it failed, where that is recorded."""
    steps: Mapping[int, Numbers]
    """metrics.jsonl by rising step."""
    evaluations: Mapping[int, Numbers]
    """evaluations.jsonl by rising step: "held_out/loss", "stop_rate"."""
    sets: tuple[str, ...]
    """The names of the evaluation sets."""
    fingerprints: Mapping[str, Any]
    """Those of its data, `training` and `evaluation`; empty where they are not recorded."""

    @property
    def name(self) -> str:
        return self.config["general.run_name"]

    @property
    def seed(self) -> int:
        return self.config["general.seed"]

    @property
    def last_step(self) -> int:
        return max(self.steps, default=0)

    def by_step(self, name: str) -> ByStep:
        """Returns a number of each step that has it."""
        return {step: numbers[name] for step, numbers in self.steps.items() if name in numbers}

    def evaluated(self, set_name: str) -> ByStep:
        """Returns the loss of a set's answers, or of all its tokens where that is not recorded, by step."""
        names = (f"{set_name}/roles/assistant/loss", f"{set_name}/loss")
        found = {step: [each[name] for name in names if name in each] for step, each in self.evaluations.items()}
        return {step: numbers[0] for step, numbers in found.items() if numbers}

    def minutes(self) -> ByStep:
        """Returns the time in steps up to each; what was trained again after a resume counts once."""
        seconds = self.by_step("step_seconds")
        return dict(zip(seconds, (total / 60 for total in accumulate(seconds.values())), strict=True))


def read_run(folder: Path) -> RecordedRun:
    """Reads a run directory. Raises ValueError where it is none, or holds what cannot be read."""
    if not (folder / "config.yaml").is_file():
        raise ValueError(f"{folder} is not the directory of a run: it has no config.yaml")
    try:
        config = load_config(folder / "config.yaml")
    except ConfigError as error:
        raise ValueError(f"the configuration of a run cannot be read: {error}") from error
    result = read_result(folder)
    steps, evaluations = _records(folder / "metrics.jsonl"), _records(folder / "evaluations.jsonl")
    return RecordedRun(
        folder=folder,
        config=flat_config(config),
        status=str(result.get("status", "unknown")),
        error=str(result.get("error", "")),
        steps={step: _numbers(record) for step, record in steps.items()},
        evaluations={step: _numbers({**each, **each.get("sets", {})}) for step, each in evaluations.items()},
        sets=tuple(dict.fromkeys(name for each in evaluations.values() for name in each.get("sets", {}))),
        fingerprints=_fingerprints(folder / "mix_report.json"),
    )


def _records(path: Path) -> dict[int, Mapping[str, Any]]:
    """Reads objects by rising step; the last line may be torn, where the run was killed or still writes."""
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    records: dict[int, Mapping[str, Any]] = {}
    for number, line in enumerate(lines, start=1):
        try:
            if line:
                record = json.loads(line)
                if type(step := record["step"]) is not int:
                    raise TypeError(f"its step is {step!r}")
                if not isinstance(sets := record.get("sets", {}), dict):
                    raise TypeError(f"its sets are {sets!r}")
                records[step] = record
        except (ValueError, KeyError, TypeError) as error:
            if number < len(lines):
                raise ValueError(f"{path}:{number}: is not an object with a step: {error}") from error
    return dict(sorted(records.items()))


def _fingerprints(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["fingerprints"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


def _numbers(record: Mapping[str, Any]) -> Numbers:
    return {name: float(value) for name, value in _flat(record, "/").items() if type(value) in (int, float)}


def flat_config(config: Config) -> dict[str, Any]:
    """Returns every value by its dotted key; lists are values."""
    return _flat(config.model_dump(mode="json"), ".")


def _flat(tree: Mapping[str, Any], separator: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= {f"{key}{separator}{name}": each for name, each in _flat(value, separator).items()}
        else:
            flat[key] = value
    return flat


def decides_training(key: str) -> bool:
    """Returns whether another value of this key makes other weights; some keys only decide what is kept and logged."""
    return not key.startswith(_CHANGE_NO_WEIGHT)


def value_text(value: Any) -> str:
    """Returns a value as YAML has it, at most 60 characters of it."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
