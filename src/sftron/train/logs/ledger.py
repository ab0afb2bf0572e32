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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from sftron.config import Config
from sftron.data.dataset import PackedDataset
from sftron.data.types import Batch
from sftron.regular_file import read_lines
from sftron.train.run import data_fingerprint

_BEGINS = b'{"begins": '

# --- Writing ---


def ledger_file(folder: Path, dp_rank: int) -> Path:
    return folder / f"ledger-rank-{dp_rank}.jsonl"


def _ledger_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("ledger-rank-*.jsonl"))


def next_start(folder: Path) -> int:
    """Returns the number of the start that is beginning; one rank has to determine it for all ranks."""
    number = 0
    for path in _ledger_files(folder):
        with suppress(ValueError):  # a line that no run has written
            for line in read_lines(path):
                if line.startswith(_BEGINS) and line.endswith(b"\n"):
                    number = max(number, int(line[len(_BEGINS) :].split(b",")[0]))
    return number + 1


def start_line(number: int, *, step: int, state: Mapping[str, Any], data: Mapping[str, Any]) -> bytes:
    """Returns the line of a start that resumes after `step` at data position `state`; `data` is from `data_facts`."""
    return _line({"begins": number, "step": step, "state": state, "data": data})


def step_line(start: int, step: int, batches: Sequence[Batch], skipped: str | None = None) -> bytes:
    """Returns the line with the rows that a rank consumed in `step`.

    Batches without a conversation do not make a step; they are written with the number of the last step.

    Args:
        skipped: The reason why the weights were not updated; None if they were.
    """
    packs = [
        {
            "pack": pack.index,
            "trained": [[key.source, key.row, key.epoch] for key in pack.keys],
            "dropped": [[drop.key.source, drop.key.row, drop.key.epoch, drop.reason] for drop in pack.dropped_rows],
        }
        for pack in (batch.pack for batch in batches)
    ]
    line = {"start": start, "step": step, "packs": packs}
    return _line(line if skipped is None else line | {"skipped": skipped})


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, separators=(",", ":")).replace(":", ": ", 1).encode()


def data_facts(config: Config, dataset: PackedDataset) -> dict[str, Any]:
    """Returns the facts that identify a data version, with row counts for when the data no longer exists."""
    fingerprint = data_fingerprint(config, dataset)
    return {
        "datasets": [{"name": each.name, "rows": each.num_rows} for each in dataset.preparation.datasets],
        "num_epochs": dataset.num_epochs,
        "fingerprint": sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest(),
    }


# --- Reading ---


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
    begins: dict[int, list[Mapping[str, Any]]] = {}
    packs: dict[int, list[LedgerPack]] = {}
    skipped: dict[tuple[int, int], str] = {}
    reasons, torn, problems = {"": 0}, [], []
    for path in files:
        for number, line in enumerate(_lines(path), 1):
            if not line.endswith(b"\n"):
                torn.append(path.name)
                continue
            try:
                record = json.loads(line)
                if "begins" in record:
                    _require_start(record)
                    begins.setdefault(record["begins"], []).append(record)
                    continue
                start = int(record["start"])
                packs.setdefault(start, []).extend(_packs(record, start, reasons))
                if "skipped" in record:
                    skipped[start, int(record["step"])] = record["skipped"]
            except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
                problems.append(f"{path.name}:{number}: not a line of a ledger: {line[:60]!r}")
    if not begins:
        raise ValueError(f"{folder}: the ledger holds no start of the run, so it proves nothing")
    if unknown := sorted(packs.keys() - begins.keys()):
        problems.append(f"start {unknown[0]} of the run has steps, but no line that shows where it began")
    starts = tuple(_start(number, begins[number]) for number in sorted(begins))
    valid: dict[int, LedgerPack] = {}
    for start in starts:
        valid = {index: pack for index, pack in valid.items() if index < start.next_pack}
        for pack in packs.get(start.number, ()):
            if pack.index in valid:
                problems.append(f"pack {pack.index} came twice")
            valid[pack.index] = pack
    written = {(pack.start, pack.step) for each in packs.values() for pack in each}
    kept = {(pack.start, pack.step) for pack in valid.values()}
    return Ledger(
        starts,
        packs=tuple(valid[index] for index in sorted(valid)),
        num_lost_steps=len(written - kept),
        reasons=tuple(reasons),
        skipped={step: why for (start, step), why in skipped.items() if (start, step) in kept},
        torn=tuple(torn),
        problems=tuple(problems),
    )


def _lines(path: Path) -> Iterator[bytes]:
    """Yields the lines of a ledger. Raises ValueError if it cannot be read."""
    try:
        yield from read_lines(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read ({error}); move it away") from error


def _require_start(record: Mapping[str, Any]) -> None:
    """Raises an error if a line does not have what `start_line` writes."""
    state, data = record["state"], record["data"]
    numbers = [record["begins"], state["next_pack"], state["first_epoch"], *map(int, state["lanes"].keys())]
    optional = [data["num_epochs"], *(each["rows"] for each in data["datasets"])]
    numbers += [number for number in optional if number is not None]
    names = [data["fingerprint"], *(each["name"] for each in data["datasets"])]
    if not all(type(n) is int and 0 <= n < 2**31 for n in numbers) or not all(isinstance(name, str) for name in names):
        raise ValueError("not the start of a run")


def _packs(record: Mapping[str, Any], start: int, reasons: dict[str, int]) -> Iterator[LedgerPack]:
    """Yields the packs of a step's line; `reasons` numbers the drop reasons."""
    for pack in record["packs"]:
        rows = [[*key, 0] for key in pack["trained"]]
        rows += [[*key, reasons.setdefault(reason, len(reasons))] for *key, reason in pack["dropped"]]
        table = np.array(rows, dtype=np.int64).reshape(len(rows), 4)
        yield LedgerPack(start, int(record["step"]), int(pack["pack"]), table)


def _start(number: int, lines: Sequence[Mapping[str, Any]]) -> LedgerStart:
    """Joins the lines of all ranks for one start; each line has the lanes of its rank."""
    lanes = {int(lane): state for line in lines for lane, state in line["state"]["lanes"].items()}
    return LedgerStart(number, {**lines[0]["state"], "lanes": lanes}, lines[0]["data"])
