"""ledger-rank-R.jsonl: the rows that each step of a rank trained or dropped, as evidence for law 6.

The file is append-only, with one line for each start of the run and one for each step. Rows are [data set, row, epoch]:

    {"begins": 1, "step": 0, "state": {"next_pack": 0, "lanes": {}, "first_epoch": 0}, "data": {...}}
    {"start": 1, "step": 1, "packs": [{"pack": 0, "trained": [[0, 17, 0], [0, 3, 0]], "dropped": []}, ...]}
    {"start": 1, "step": 2, "packs": [{"pack": 1, "trained": [[0, 8, 0]], "dropped": [[0, 5, 0, "overlong"]]}, ...]}
    {"begins": 2, "step": 1, "state": {"next_pack": 1, ...}, ...}

A start resumes from a checkpoint. It invalidates the lines of earlier starts for packs from its next_pack on: those
steps were lost with the process and are trained again. Their lines stay in the file as a record.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from sftron.checkpoint.atomic import main_or_raise
from sftron.config import Config
from sftron.data.dataset import PackedDataset
from sftron.data.types import Batch, Pack
from sftron.models.architecture import is_of_the_model
from sftron.train.line_file import LineFile
from sftron.train.run_data import data_fingerprint
from sftron.train.setup import Setup

_BEGINS = b'{"begins": '


def open_ledger(folder: Path, plan: Setup, *, step: int, state: Mapping[str, Any]) -> LedgerWriter:
    """Opens this rank's ledger and writes the line of a start that resumes after `step` at data position `state`."""
    ranks = plan.ranks
    ledger = LedgerWriter(folder, start=main_or_raise(ranks, lambda: next_start(folder)), dp_rank=ranks.dp_rank)
    ledger.begin(step=step, state=state, data=data_facts(plan.config, plan.data.dataset))
    return ledger


def next_start(folder: Path) -> int:
    """Returns the number of the start that is beginning; one rank has to determine it for all ranks."""
    number = 0
    for path in _ledger_files(folder):
        with path.open("rb") as file:
            for line in file:
                if line.startswith(_BEGINS) and line.endswith(b"\n"):
                    number = max(number, int(line[len(_BEGINS) :].split(b",")[0]))
    return number + 1


def _ledger_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("ledger-rank-*.jsonl"))


def data_facts(config: Config, dataset: PackedDataset) -> dict[str, Any]:
    """Returns the facts that identify a data version, with row counts for when the data no longer exists."""
    return {
        "datasets": [{"name": each.name, "rows": each.num_rows} for each in dataset.preparation.datasets],
        "num_epochs": dataset.num_epochs,
        "fingerprint": digest(data_fingerprint(config, dataset)),
    }


def digest(fingerprint: Mapping[str, str]) -> str:
    """Returns one hash of the data entries in a checkpoint's fingerprint."""
    of_the_data = {name: value for name, value in fingerprint.items() if not is_of_the_model(name)}
    return sha256(json.dumps(of_the_data, sort_keys=True).encode()).hexdigest()


class LedgerWriter:
    """Appends to the ledger of a rank. `LineFile` handles kills and full disks."""

    def __init__(self, folder: Path, *, start: int, dp_rank: int) -> None:
        self._start = start
        self._lines = LineFile(folder / f"ledger-rank-{dp_rank}.jsonl")
        self.sync, self.close = self._lines.sync, self._lines.close

    def begin(self, **facts: Any) -> None:
        """Writes the line of this start; see `open_ledger`."""
        self._append({"begins": self._start, **facts})

    def write(self, step: int, batches: Sequence[Batch], *, skipped: str | None) -> None:
        """Writes the rows that this rank consumed in `step`.

        Batches without a conversation do not make a step; they are written with the number of the last one.

        Args:
            skipped: The reason why the weights were not updated; None if they were.
        """
        line = {"start": self._start, "step": step, "packs": [_rows_of(batch.pack) for batch in batches]}
        self._append(line if skipped is None else line | {"skipped": skipped})

    def _append(self, line: Mapping[str, Any]) -> None:
        self._lines.append(json.dumps(line, separators=(",", ":")).replace(":", ": ", 1).encode())


def _rows_of(pack: Pack) -> dict[str, Any]:
    return {
        "pack": pack.index,
        "trained": [[key.source, key.row, key.epoch] for key in pack.keys],
        "dropped": [[drop.key.source, drop.key.row, drop.key.epoch, drop.reason] for drop in pack.dropped_rows],
    }


@dataclass(frozen=True, slots=True)
class LedgerStart:
    """One start of the run."""

    number: int
    state: Mapping[str, Any]
    """The data position of all ranks at this start."""
    data: Mapping[str, Any]
    """The facts from `data_facts`."""

    @property
    def next_pack(self) -> int:
        return int(self.state["next_pack"])

    @property
    def data_version(self) -> tuple[str, int]:
        """The identity of the data version; equal for starts that pack the same data."""
        return self.data["fingerprint"], int(self.state["first_epoch"])


@dataclass(frozen=True, slots=True, eq=False)
class LedgerPack:
    """The rows that one pack consumed, in its order."""

    start: int
    step: int
    index: int
    rows: np.ndarray
    """int64 [rows, 4]: data set, row, epoch, and the index of the drop reason in `Ledger.reasons`, 0 if trained."""


@dataclass(frozen=True, slots=True, eq=False)
class Ledger:
    """The joined ledgers of all ranks, without the steps that a later start trained again."""

    starts: tuple[LedgerStart, ...]
    packs: tuple[LedgerPack, ...]
    """The valid packs, in ascending order of index."""
    num_lost_steps: int
    """The number of steps that were lost to kills and trained again."""
    reasons: tuple[str, ...]
    """The drop reasons by index; the first is "", for trained rows."""
    skipped: Mapping[int, str]
    """The reason why a step did not update the weights, by step."""
    torn: tuple[str, ...]
    """The files whose last line is incomplete."""
    problems: tuple[str, ...]
    """Messages about unreadable lines, repeated packs and missing starts."""

    def spans(self) -> list[tuple[LedgerStart, int]]:
        """Returns each start that has valid packs, with the index after its last valid pack."""
        spans, end = [], sys.maxsize
        for start in reversed(self.starts):
            if start.next_pack < end:
                spans.append((start, end))
                end = start.next_pack
        return spans[::-1]


def read_ledger(folder: Path) -> Ledger:
    """Reads and joins the ledgers of all ranks. Raises ValueError if the run has none."""
    if not (files := _ledger_files(folder)):
        raise ValueError(f"{folder} holds no ledger; a run writes one with logging.ledger: true")
    reader = _Reader()
    for path in files:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    reader.torn.append(path.name)
                    continue
                try:
                    reader.add(json.loads(line))
                except (ValueError, KeyError, TypeError, OverflowError):
                    reader.problems.append(f"{path.name}:{number}: not a line of a ledger: {line[:60]!r}")
    if not reader.begins:
        raise ValueError(f"{folder}: the ledger holds no start of the run; nothing can be proven from it")
    return reader.joined()


class _Reader:
    def __init__(self) -> None:
        self.begins: dict[int, list[Mapping[str, Any]]] = {}
        self.packs: dict[int, list[LedgerPack]] = {}
        self.reasons = {"": 0}
        self.skipped: dict[tuple[int, int], str] = {}
        self.torn: list[str] = []
        self.problems: list[str] = []

    def add(self, line: Mapping[str, Any]) -> None:
        if "begins" in line:
            self.begins.setdefault(int(line["begins"]), []).append(line)
            return
        start, step = int(line["start"]), int(line["step"])
        for pack in line["packs"]:
            rows = [[*key, 0] for key in pack["trained"]]
            rows += [[*key, self.reasons.setdefault(reason, len(self.reasons))] for *key, reason in pack["dropped"]]
            table = np.array(rows, dtype=np.int64).reshape(len(rows), 4)
            self.packs.setdefault(start, []).append(LedgerPack(start, step, int(pack["pack"]), table))
        if "skipped" in line:
            self.skipped[start, step] = line["skipped"]

    def joined(self) -> Ledger:
        starts = tuple(_start(number, self.begins[number]) for number in sorted(self.begins))
        if unknown := sorted(self.packs.keys() - self.begins.keys()):
            self.problems.append(f"start {unknown[0]} of the run has steps, but no line that shows where it began")
        packs: dict[int, LedgerPack] = {}
        for start in starts:
            packs = {index: pack for index, pack in packs.items() if index < start.next_pack}
            for pack in self.packs.get(start.number, ()):
                if pack.index in packs:
                    self.problems.append(f"pack {pack.index} came twice")
                packs[pack.index] = pack
        written = {(pack.start, pack.step) for each in self.packs.values() for pack in each}
        kept = {(pack.start, pack.step) for pack in packs.values()}
        return Ledger(
            starts,
            tuple(packs[index] for index in sorted(packs)),
            len(written - kept),
            tuple(self.reasons),
            {step: why for (start, step), why in self.skipped.items() if (start, step) in kept},
            tuple(self.torn),
            tuple(self.problems),
        )


def _start(number: int, lines: Sequence[Mapping[str, Any]]) -> LedgerStart:
    """Joins the lines of all ranks for one start; each line has the lanes of its rank."""
    lanes = {int(lane): state for line in lines for lane, state in line["state"]["lanes"].items()}
    return LedgerStart(number, {**lines[0]["state"], "lanes": lanes}, lines[0]["data"])
