"""What a run directory tells of its run, however far it came and whatever version wrote it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from sftron.config import ConfigError, load_config
from sftron.sweep.settings import flat
from sftron.train.run_directory import read_result

Series = list[tuple[float, float]]
"""Points by rising x."""


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """config: by dotted key. status: result.json's, or `unknown`. steps, evaluations: the lines of metrics.jsonl and
    evaluations.jsonl, by rising step. error: why it failed, if it says so. fingerprints: of its data, as
    Setup.data_fingerprints has them; empty where they are not recorded."""

    folder: Path
    config: Mapping[str, Any]
    status: str
    error: str
    steps: tuple[Mapping[str, Any], ...]
    evaluations: tuple[Mapping[str, Any], ...]
    fingerprints: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.config["general.run_name"]

    @property
    def seed(self) -> int:
        return self.config["general.seed"]

    @property
    def last_step(self) -> int:
        return self.steps[-1]["step"] if self.steps else 0

    def by_step(self, key: str) -> dict[int, float]:
        """A number of each step that has it, as `loss` or `roles.assistant.loss`."""
        found = ((step["step"], number_at(step, key)) for step in self.steps)
        return {step: number for step, number in found if number is not None}

    def tokens(self) -> dict[int, float]:
        """Seen up to and with each step."""
        return self.by_step("total_tokens")

    def minutes(self) -> dict[int, float]:
        """Spent in steps up to and with each; what was trained again after a resume counts once."""
        seconds = self.by_step("step_seconds")
        return dict(zip(seconds, (total / 60 for total in accumulate(seconds.values())), strict=True))


def number_at(record: Mapping[str, Any], key: str) -> float | None:
    """The number under a dotted key, None where there is none. Names may hold dots themselves: `datasets.x.jsonl`."""
    value: Any = record
    rest = key
    while rest:
        if not isinstance(value, Mapping):
            return None
        part = next((name for name in sorted(value, key=len, reverse=True) if f"{rest}.".startswith(f"{name}.")), None)
        if part is None:
            return None
        value, rest = value[part], rest[len(part) + 1 :]
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def read_run(folder: Path) -> RecordedRun:
    """Raises ValueError where the folder is no run directory, or holds what cannot be read."""
    if not (folder / "config.yaml").is_file():
        raise ValueError(f"{folder} is not the directory of a run: it has no config.yaml")
    try:
        config = load_config(folder / "config.yaml")
    except ConfigError as error:
        raise ValueError(f"the configuration of a run cannot be read: {error}") from error
    result = read_result(folder)
    return RecordedRun(
        folder=folder,
        config=flat(config),
        status=str(result.get("status", "unknown")),
        error=str(result.get("error", "")),
        steps=_records(folder / "metrics.jsonl"),
        evaluations=_records(folder / "evaluations.jsonl"),
        fingerprints=_fingerprints(folder / "mix_report.json"),
    )


def _fingerprints(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["fingerprints"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


def _records(path: Path) -> tuple[Mapping[str, Any], ...]:
    """The last line may be torn, where the run was killed or still writes; any other must be whole."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return ()
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
    return tuple(records[step] for step in sorted(records))
