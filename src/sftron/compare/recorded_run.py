"""The recorded configuration, status and metrics of a run directory, whether or not the run has completed."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from sftron.config import Config, ConfigError, load_config
from sftron.regular_file import read_json_value, where_missing
from sftron.train.logs.loggers import flat, flat_numbers
from sftron.train.run_directory import read_records, read_result

_CHANGE_NO_WEIGHT = (
    "logging.",
    "checkpoints.interval",
    "checkpoints.keep_last",
    "checkpoints.async",
    "checkpoints.export",
    "checkpoints.resume",
    "lora.merge",
    "hub.",
    "data.num_workers",
    "parallelism.timeout_seconds",
)

_LEAST_SHARE_OF_RANKS = 0.1
"""The smallest share of the steps at which a number of ranks counts."""

Numbers = Mapping[str, float]
"""Numbers by their names in wandb, such as "roles/assistant/loss"."""
ByStep = dict[int, float]


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """The content of one run directory."""

    folder: Path
    config: Mapping[str, Any]
    """All values, by dotted key."""
    status: str
    """The status in result.json, or `unknown`."""
    error: str
    """The recorded reason for a failure, if any."""
    steps: Mapping[int, Numbers]
    """The content of metrics.jsonl, by increasing step."""
    evaluations: Mapping[int, Numbers]
    """The content of evaluations.jsonl, by increasing step: "held_out/loss", "stop_rate"."""
    sets: tuple[str, ...]
    """The names of the evaluation sets."""
    fingerprints: Mapping[str, Any]
    """The fingerprints of the data, under `training` and `evaluation`; empty if they are not recorded."""
    ranks: int | list[int] | None = None
    """The number of ranks, or a list if a resume changed it; None if no step is recorded."""

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
        """Returns a number by step, for the steps that have it."""
        return {step: numbers[name] for step, numbers in self.steps.items() if name in numbers}

    def evaluated(self, set_name: str) -> ByStep:
        """Returns the loss on the answers of an evaluation set by step, or on all tokens if that is not recorded."""
        names = (f"{set_name}/roles/assistant/loss", f"{set_name}/loss")
        losses = {step: [found[name] for name in names if name in found] for step, found in self.evaluations.items()}
        return {step: numbers[0] for step, numbers in losses.items() if numbers}

    def minutes(self) -> ByStep:
        """Returns the accumulated training time by step; steps that were repeated after a resume count once."""
        seconds = self.by_step("step_seconds")
        return dict(zip(seconds, (total / 60 for total in accumulate(seconds.values())), strict=True))


def read_run(folder: Path) -> RecordedRun:
    """Reads a run directory.

    Raises:
        ValueError: The folder is not a run directory, or its configuration cannot be read.
    """
    if not (folder / "config.yaml").is_file():
        raise ValueError(
            f"{folder} is not a run directory{'' if folder.is_dir() else where_missing(folder)}: it has no config.yaml"
        )
    try:
        config = load_config(folder / "config.yaml")
    except ConfigError as error:
        raise ValueError(f"the configuration of a run cannot be read: {error}") from error
    result = read_result(folder)
    steps = {record["step"]: record for record in read_records(folder / "metrics.jsonl")}
    records = {record["step"]: record for record in read_records(folder / "evaluations.jsonl")}
    sets = {step: found for step, each in records.items() if isinstance(found := each.get("sets"), dict)}
    return RecordedRun(
        folder=folder,
        config=flat_config(config),
        status=str(result.get("status", "unknown")),
        error=str(result.get("error", "")),
        steps={step: _numbers(each) for step, each in steps.items()},
        evaluations={step: _numbers({**each, **sets.get(step, {})}) for step, each in records.items()},
        sets=tuple(dict.fromkeys(name for each in sets.values() for name in each)),
        fingerprints=_fingerprints(folder / "mix_report.json"),
        ranks=_ranks([*steps.values()], config),
    )


def _ranks(records: Sequence[Mapping[str, Any]], config: Config) -> int | list[int] | None:
    """Returns the number of ranks, from the packs of the steps (`rows.packs`).

    A few steps also count preceding packs without a conversation, so rare numbers are ignored.
    """
    accumulation, counts = config.tokens.batch_accumulation_per_replica, Counter[int]()
    for record in records:
        with suppress(KeyError, TypeError, ValueError):
            first, end = record["rows"]["packs"]
            counts[(end - first) // accumulation * config.parallelism.context] += 1
    ranks = sorted(number for number, count in counts.items() if count >= _LEAST_SHARE_OF_RANKS * counts.total())
    return ranks[0] if len(ranks) == 1 else ranks or None


def _numbers(record: Mapping[str, Any]) -> Numbers:
    """Returns the finite numbers of a record by flat name; a run writes no other numbers."""
    return {name: value for name, value in flat_numbers(record).items() if abs(value) <= sys.float_info.max}


def _fingerprints(path: Path) -> Mapping[str, Any]:
    try:
        fingerprints = read_json_value(path)["fingerprints"] if path.exists() else {}
        if not isinstance(fingerprints, dict):
            raise TypeError("fingerprints is not a mapping")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error!r}); remove it to compare without its fingerprints") from error
    return fingerprints


def flat_config(config: Config) -> dict[str, Any]:
    """Returns all values by dotted key; lists are single values."""
    return flat(config.model_dump(mode="json"), ".")


def decides_training(key: str) -> bool:
    """Returns whether a change of this key changes the weights; other keys control logging, storage and speed."""
    return not key.startswith(_CHANGE_NO_WEIGHT)


def value_text(value: Any) -> str:
    """Returns a value as a person writes it in a configuration, and null as `none`."""
    if isinstance(value, list):
        return f"[{', '.join(map(value_text, value))}]"
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value)
