"""A run that has ended or was killed, as its audit reads it: the steps of metrics.jsonl, and the reopened data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sftron.checkpoint.checkpoint import read_state, steps_in
from sftron.config import load_config
from sftron.data.digest import digest_of
from sftron.regular_file import where_missing
from sftron.train import build_data
from sftron.train.extension import given_rows
from sftron.train.run import data_fingerprint
from sftron.train.run_directory import intact_records, read_result

MOST_PACKS = 2**16
"""More packs than a step has; a damaged line must not let the replay run forever."""


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A line of metrics.jsonl: the packs [first, end) of a step, and the digests of its rows; see data/digest.py."""

    step: int
    first: int
    end: int
    first_epoch: int
    num_epochs: int | None
    digests: Mapping[str, str]
    record: Mapping[str, Any]

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> RecordedStep:
        """Raises KeyError, TypeError or ValueError if the record is not what a run writes."""
        rows = record["rows"]
        (first, end), (first_epoch, num_epochs) = rows["packs"], rows["epochs"]
        numbers = [first, end, first_epoch, num_epochs or 0]
        if not all(type(n) is int and 0 <= n < 2**31 for n in numbers) or not 0 < end - first <= MOST_PACKS:
            raise ValueError
        digests = {name: str(rows[name]) for name in ("data", "keys", "tokens")}
        return cls(record["step"], first, end, first_epoch, num_epochs, digests, record)


def read_steps(folder: Path) -> list[RecordedStep]:
    """Returns the steps of metrics.jsonl that have digests. Raises ValueError if none has.

    If a resume repeated a step, its last record counts, and later steps recorded before it do not.
    """
    steps: list[RecordedStep] = []
    for record in intact_records(folder / "metrics.jsonl"):
        while steps and steps[-1].step >= record["step"]:
            steps.pop()
        with suppress(KeyError, TypeError, ValueError):
            steps.append(RecordedStep.of(record))
    if not steps:
        raise ValueError(
            f"{folder}: no step in metrics.jsonl has a digest of its rows, so nothing can be proven: the run made no "
            "step, or an earlier version of sftron made it"
        )
    return steps


class OpenedRun:
    """A run that has ended or was killed, with its recorded steps and its reopened data.

    Args:
        overrides: Replacements for values of the run's configuration, for example if the data has moved.

    Raises:
        ValueError: The run has no digests, or its data cannot be opened.
    """

    def __init__(self, folder: Path, overrides: Sequence[str] = ()) -> None:
        if not (folder / "config.yaml").is_file():
            where = "" if folder.is_dir() else where_missing(folder)
            raise ValueError(f"{folder} is not a run directory{where}: it has no config.yaml")
        self.folder = folder
        self.steps = read_steps(folder)
        self.config = load_config(folder / "config.yaml", overrides)
        self.preparation = build_data.open_data(
            self.config,
            build_data.load_chat_tokenizer(self.config),
            given_rows(self.config.extend, self.config.model.path),
        )
        self.dataset = build_data.make_dataset(self.config, self.preparation)
        if self.dataset.is_planned:
            self.dataset.measure()  # the fingerprint says how an epoch is packed, which depends on all lengths
        self.fingerprint = data_fingerprint(self.config, self.dataset)
        self._data = digest_of(self.fingerprint)
        self.result = read_result(folder)
        self.is_complete = self.result.get("status") in ("completed", "diverged")
        checkpoints = folder / "checkpoints"
        self.saved_steps = sorted(steps_in(checkpoints))
        self.saved_state = read_state(checkpoints / f"step-{self.saved_steps[-1]}") if self.saved_steps else {}

    def has_data_of(self, step: RecordedStep) -> bool:
        """Returns whether the current data is the data that the step used."""
        return step.digests["data"] == self._data
