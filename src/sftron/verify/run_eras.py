"""The stretches of a run that dealt of one and the same data, and what is known of how far each came."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sftron.checkpoint.manifest import read_state, verify_checkpoint
from sftron.train.ledger import digest
from sftron.verify.ledger_records import LedgerRecords, Start


@dataclass(frozen=True, slots=True)
class KnownState:
    """A state of the data, and who knows of it: a start of the run, or a checkpoint, which has counters as well."""

    name: str
    state: Mapping[str, Any]
    datasets: Sequence[Mapping[str, Any]] | None = None

    @property
    def next_pack(self) -> int:
        return int(self.state["next_pack"])


@dataclass(frozen=True, slots=True)
class Era:
    """starts: that dealt of these data. end_pack: of the next era, or None. states: in the order of their packs."""

    starts: tuple[Start, ...]
    end_pack: int | None
    states: tuple[KnownState, ...]

    @property
    def data(self) -> Mapping[str, Any]:
        return self.starts[-1].data

    @property
    def stream(self) -> tuple[str, int]:
        return self.starts[-1].stream

    @property
    def first_epoch(self) -> int:
        return self.stream[1]

    @property
    def base(self) -> Mapping[str, Any]:
        """The state that the ledger begins behind; without lanes, but for a ledger that was switched on later."""
        return self.starts[0].state

    @property
    def first_pack(self) -> int:
        return self.starts[0].next_pack

    def holds(self, packs: np.ndarray) -> np.ndarray:
        """Which numbers of packs are of this era."""
        end = np.iinfo(np.int64).max if self.end_pack is None else self.end_pack
        return (packs >= self.first_pack) & (packs < end)


def eras_of(records: LedgerRecords, checkpoints: Path) -> tuple[list[Era], list[str]]:
    """In the order of the run; and which checkpoints are of no era of it, or broken."""
    # A start that another one went back behind has left nothing.
    counting, limit = [], None
    for start in reversed(records.starts):
        if limit is None or start.next_pack < limit:
            counting.append(start)
            limit = start.next_pack
    groups: list[list[Start]] = []
    for start in reversed(counting):
        if not groups or groups[-1][-1].stream != start.stream:
            groups.append([])
        groups[-1].append(start)

    saved, problems = _saved_states(checkpoints)
    eras = []
    for number, starts in enumerate(groups):
        following = groups[number + 1][0] if number + 1 < len(groups) else None
        states = [KnownState(f"start {start.number}", start.state) for start in starts]
        if following and following.before_change:
            states.append(KnownState(f"the end before start {following.number}", following.before_change))
        own = [known for stream, known in saved if stream == starts[0].stream]
        # Of data that came twice, a checkpoint is of the era that its packs are in.
        end_pack = following.next_pack if following else None
        states += [
            known
            for known in own
            if known.next_pack >= starts[0].next_pack and (end_pack is None or known.next_pack <= end_pack)
        ]
        eras.append(Era(tuple(starts), end_pack, tuple(sorted(states, key=lambda known: known.next_pack))))
    known_names = {known.name for era in eras for known in era.states}
    problems += [
        f"{known.name} is of no data that the ledger knows" for _, known in saved if known.name not in known_names
    ]
    return eras, problems


def _saved_states(checkpoints: Path) -> tuple[list[tuple[tuple[str, int], KnownState]], list[str]]:
    """What the checkpoints of the run know, by the stream that they are of."""
    saved, problems = [], []
    folders = [path for path in checkpoints.glob("step-*") if path.name.removeprefix("step-").isdigit()]
    for folder in folders:
        if problem := verify_checkpoint(folder):
            problems.append(f"{folder.name}: {problem}")
            continue
        state = read_state(folder)
        stream = (digest(state["fingerprint"]), int(state["data"].get("first_epoch", 0)))
        saved.append((stream, KnownState(folder.name, state["data"], state["progress"]["datasets"])))
    return saved, problems


def newest_fingerprint(checkpoints: Path) -> Mapping[str, str] | None:
    """Of the newest checkpoint, broken or not."""
    numbers = [path.name.removeprefix("step-") for path in checkpoints.glob("step-*")]
    steps = sorted(int(number) for number in numbers if number.isdigit())
    return read_state(checkpoints / f"step-{steps[-1]}")["fingerprint"] if steps else None
