"""The ledger of a run, read: what was dealt by which start, and what of it counts (see train/ledger.py)."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from sftron.train.ledger import ledger_files

TRAINED = -1
"""In place of the reason that a row was dropped for."""


@dataclass(frozen=True, slots=True)
class Start:
    """One start of the run: after which step, with the data in `state`; before_change: as the checkpoint had it, where
    that was of other data. data: see train.ledger.data_facts."""

    number: int
    step: int
    state: Mapping[str, Any]
    before_change: Mapping[str, Any] | None
    data: Mapping[str, Any]

    @property
    def next_pack(self) -> int:
        return int(self.state["next_pack"])

    @property
    def stream(self) -> tuple[str, int]:
        """Equal for starts that deal of the same stream of packs."""
        return self.data["fingerprint"], int(self.state.get("first_epoch", 0))


@dataclass(frozen=True, slots=True, eq=False)
class LedgerRecords:
    """starts: by number, ascending.

    packs: int64 [P, 3], start, step and number of each pack.
    rows: int64 [R, 5], the pack (as an index into `packs`), data set, row, epoch, and TRAINED or the reason of the drop
        (as an index into `reasons`).
    skipped: why the weights were not updated, by step; of what counts.
    torn: files whose last line was cut off. problems: what cannot be read in their midst.
    """

    starts: tuple[Start, ...]
    packs: np.ndarray
    rows: np.ndarray
    reasons: tuple[str, ...]
    skipped: Mapping[int, str]
    torn: tuple[str, ...]
    problems: tuple[str, ...]

    def effective(self) -> LedgerRecords:
        """Without what a later start went back behind."""
        counts = _counts(self.starts, self.packs)
        place = np.cumsum(counts) - 1
        rows = self.rows[counts[self.rows[:, 0]]]
        rows[:, 0] = place[rows[:, 0]]
        return replace(self, packs=self.packs[counts], rows=rows)


def _counts(starts: Sequence[Start], packs: np.ndarray) -> np.ndarray:
    """Whether each pack is below the next_pack of every start after its own."""
    limits, limit = {}, np.iinfo(np.int64).max
    for start in reversed(starts):
        limits[start.number] = limit
        limit = min(limit, start.next_pack)
    numbers, inverse = np.unique(packs[:, 0], return_inverse=True)
    return packs[:, 2] < np.array([limits.get(int(number), 0) for number in numbers], dtype=np.int64)[inverse]


@dataclass(slots=True)
class _Reading:
    begins: dict[int, list[Mapping[str, Any]]] = field(default_factory=dict)
    packs: array[int] = field(default_factory=lambda: array("q"))
    rows: array[int] = field(default_factory=lambda: array("q"))
    reasons: dict[str, int] = field(default_factory=dict)
    skipped: dict[tuple[int, int], str] = field(default_factory=dict)
    torn: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, line: Mapping[str, Any]) -> None:
        if "begins" in line:
            self.begins.setdefault(int(line["begins"]), []).append(line)
            return
        start, step = int(line["start"]), int(line["step"])
        for pack in line["packs"]:
            number = len(self.packs) // 3
            # Whole or not at all: `extend` would leave half a row where a number is none.
            self.packs += array("q", (start, step, pack["pack"]))
            for source, row, epoch in pack["trained"]:
                self.rows += array("q", (number, source, row, epoch, TRAINED))
            for source, row, epoch, reason in pack["dropped"]:
                reason = self.reasons.setdefault(reason, len(self.reasons))
                self.rows += array("q", (number, source, row, epoch, reason))
        if "skipped" in line:
            self.skipped[start, step] = line["skipped"]


def read_ledger(folder: Path) -> LedgerRecords:
    """Of all ranks. Raises ValueError where the run has none."""
    files = ledger_files(folder)
    if not files:
        raise ValueError(f"{folder} holds no ledger; a run writes one with logging.ledger: true")
    reading = _Reading()
    for path in files:
        for number, line in _whole_lines(path, reading.torn):
            try:
                reading.add(json.loads(line))
            except (ValueError, KeyError, TypeError, OverflowError):
                reading.problems.append(f"{path.name}:{number}: not a line of a ledger: {line[:60]!r}")
    if not reading.begins:
        raise ValueError(f"{folder}: the ledger holds no start of the run; nothing can be proven from it")
    starts = tuple(_start(number, reading.begins[number]) for number in sorted(reading.begins))
    packs = np.frombuffer(reading.packs, dtype=np.int64).reshape(-1, 3)
    if unknown := sorted({int(start) for start in packs[:, 0]} - {start.number for start in starts}):
        reading.problems.append(f"start {unknown[0]} of the run has steps, but no line that says where it began")
    records = LedgerRecords(
        starts,
        packs,
        np.frombuffer(reading.rows, dtype=np.int64).reshape(-1, 5),
        tuple(reading.reasons),
        {},
        tuple(reading.torn),
        tuple(reading.problems),
    )
    counted = {(int(start), int(step)) for start, step, *_ in records.effective().packs}
    skipped = {step: why for (start, step), why in reading.skipped.items() if (start, step) in counted}
    return replace(records, skipped=skipped)


def _whole_lines(path: Path, torn: list[str]) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n"):
                yield number, line
            else:
                torn.append(path.name)


def _start(number: int, lines: Sequence[Mapping[str, Any]]) -> Start:
    """Of the lines of all ranks, whose states have their own lanes only."""

    def united(key: str) -> dict[str, Any] | None:
        states = [line[key] for line in lines]
        lanes = {lane: state for each in states if each for lane, state in each["lanes"].items()}
        return None if states[0] is None else {**states[0], "lanes": lanes}

    state = united("state")
    assert state is not None
    return Start(number, int(lines[0]["step"]), state, united("before_change"), lines[0]["data"])
