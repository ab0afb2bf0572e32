"""ledger-rank-R.jsonl: which rows each step of a rank trained or dropped, so that it can be proven afterwards (law 6).

One line a start of the run and one a step, only ever appended; rows are [data set, row, epoch]:

    {"begins": 1, "step": 0, "state": {"next_pack": 0, ...}, "before_change": null, "data": {...}, "dp_world_size": 1}
    {"start": 1, "step": 1, "packs": [{"pack": 0, "trained": [[0, 17, 0], [0, 3, 0]], "dropped": []}, ...]}
    {"start": 1, "step": 2, "packs": [{"pack": 1, "trained": [[0, 8, 0]], "dropped": [[0, 5, 0, "overlong"]]}, ...]}
    {"begins": 2, "step": 1, "state": {"next_pack": 1, ...}, ...}

A start goes on from a checkpoint, and voids what earlier starts wrote of packs from its next_pack on: those were lost
with the process, and are dealt again. Their lines stay, as what happened. See verify/ledger_records.py for the reader.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from sftron.checkpoint.agreement import on_main
from sftron.checkpoint.architecture import is_of_the_model
from sftron.config import Config
from sftron.data.dataset import PackedDataset
from sftron.data.sources import StreamedSource
from sftron.data.types import Batch, Pack
from sftron.train.feed import data_fingerprint
from sftron.train.line_file import LineFile
from sftron.train.plan import RunPlan

BEGINS = b'{"begins": '
"""How the line of a start begins."""


def ledger_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("ledger-rank-*.jsonl"))


def next_start(folder: Path) -> int:
    """The number of the start that is about to be made; on several ranks one of them has to count for all."""
    number = 0
    for path in ledger_files(folder):
        with path.open("rb") as file:
            for line in file:
                if line.startswith(BEGINS) and line.endswith(b"\n"):
                    number = max(number, int(line[len(BEGINS) :].split(b",")[0]))
    return number + 1


def data_facts(config: Config, dataset: PackedDataset) -> dict[str, Any]:
    """What decides which row is dealt where, also when the data is there no more."""
    preparation = dataset.preparation
    return {
        "datasets": [
            {"name": each.name, "rows": each.num_rows, "streamed": isinstance(each.source, StreamedSource)}
            for each in preparation.datasets
        ],
        "is_mixture": preparation.weights is not None,
        "num_lanes": dataset.num_lanes,
        "seed": dataset.seed,
        "fingerprint": digest(data_fingerprint(config, dataset)),
    }


def digest(fingerprint: Mapping[str, str]) -> str:
    """Of the data's part of a checkpoint's fingerprint, in one word."""
    of_the_data = {name: value for name, value in fingerprint.items() if not is_of_the_model(name)}
    return sha256(json.dumps(of_the_data, sort_keys=True).encode()).hexdigest()


def open_ledger(
    folder: Path, plan: RunPlan, *, step: int, state: Mapping[str, Any], before_change: Mapping[str, Any] | None
) -> LedgerWriter:
    """The ledger of this rank, with the line of a start that goes on after `step` with the data in `state`.

    before_change: the data's state in the checkpoint, where it is that of other data.
    """
    ranks = plan.ranks
    ledger = LedgerWriter(folder, start=on_main(ranks, lambda: next_start(folder)), dp_rank=ranks.dp_rank)
    ledger.begin(
        step=step,
        state=state,
        before_change=before_change,
        data=data_facts(plan.config, plan.dataset),
        dp_world_size=ranks.dp_world_size,
    )
    return ledger


class LedgerWriter:
    """Appends to the ledger of a rank; see line_file.py for what kills and full disks do to it."""

    def __init__(self, folder: Path, *, start: int, dp_rank: int) -> None:
        self._start = start
        self._lines = LineFile(folder / f"ledger-rank-{dp_rank}.jsonl")

    def begin(self, **facts: Any) -> None:
        """What this start goes on from; see `open_ledger`."""
        self._append({"begins": self._start, **facts})

    def write(self, step: int, batches: Sequence[Batch], *, skipped: str | None) -> None:
        """What this rank had in `step`; or after it, where no conversation was among it. skipped: why the weights were
        not updated."""
        line = {"start": self._start, "step": step, "packs": [_rows_of(batch.pack) for batch in batches]}
        self._append(line if skipped is None else line | {"skipped": skipped})

    def sync(self) -> None:
        """To the disk: a checkpoint that is about to be saved must not know of a step that the ledger does not."""
        self._lines.sync()

    def close(self) -> None:
        self._lines.close()

    def _append(self, line: Mapping[str, Any]) -> None:
        self._lines.append(json.dumps(line, separators=(",", ":")).replace(":", ": ", 1).encode())


def _rows_of(pack: Pack) -> dict[str, Any]:
    return {
        "pack": pack.index,
        "trained": [[key.source, key.row, key.epoch] for key in pack.keys],
        "dropped": [[drop.key.source, drop.key.row, drop.key.epoch, drop.reason] for drop in pack.dropped_rows],
    }
