"""Audit of a run by its ledger: counts every row once per epoch, and makes each pack again from the data (law 6).

A pack is a pure function of data, settings and index (law 5), so the rows of a step must equal those in the ledger.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np

from sftron.checkpoint.checkpoint import read_state, steps_in
from sftron.config import load_config
from sftron.data.types import ConversationKey, Pack
from sftron.models.architecture import is_of_the_model
from sftron.train.logs.ledger import Ledger, LedgerPack, LedgerStart, data_facts, read_ledger
from sftron.train.resume import changes
from sftron.train.run import data_fingerprint
from sftron.train.run_directory import RunDirectory, process_name, read_result
from sftron.train.start import run_data
from sftron.verify.table import Check, aligned, check_lines

_MOST_NAMED = 5


@dataclass(frozen=True, slots=True)
class DataVersion:
    """Consecutive packs of a run that were made from the same data."""

    spans: tuple[tuple[LedgerStart, int], ...]
    """The starts of the run that made these packs, each with the index after its last pack."""
    packs: tuple[LedgerPack, ...]

    @property
    def start(self) -> LedgerStart:
        return self.spans[0][0]

    @property
    def datasets(self) -> Sequence[Mapping[str, Any]]:
        return self.start.data["datasets"]


class OpenedRun:
    """A run that has ended or was killed, with its ledger and its reopened data.

    Args:
        overrides: Replacements for values of the run's configuration, for instance if the data has moved.

    Raises:
        ValueError: The run has no ledger, or its data cannot be opened.
    """

    def __init__(self, folder: Path, overrides: Sequence[str] = ()) -> None:
        if not (folder / "config.yaml").is_file():
            raise ValueError(f"{folder} is not a run directory: it has no config.yaml")
        self.folder = folder
        self.config = load_config(folder / "config.yaml", overrides)
        self.ledger = read_ledger(folder)
        self.data_versions = []
        for _, group in groupby(self.ledger.spans(), key=lambda span: span[0].data_version):
            spans = tuple(group)
            first, end = spans[0][0].next_pack, spans[-1][1]
            packs = tuple(pack for pack in self.ledger.packs if first <= pack.index < end)
            self.data_versions.append(DataVersion(spans, packs))
        self.preparation = run_data.open_data(self.config, run_data.load_chat_tokenizer(self.config))
        self.dataset = run_data.make_dataset(self.config, self.preparation)
        if self.dataset.is_planned:
            self.dataset.measure()  # the fingerprint says how an epoch is packed, which depends on all lengths
        self._fingerprint = data_facts(self.config, self.dataset)["fingerprint"]
        checkpoints = folder / "checkpoints"
        self.saved_states = [read_state(checkpoints / f"step-{step}") for step in sorted(steps_in(checkpoints))]

    def has_data(self, version: DataVersion) -> bool:
        """Returns whether the current data is that of `version`."""
        return version.start.data["fingerprint"] == self._fingerprint

    def num_rows(self, version: DataVersion, source: int) -> int | None:
        """Returns the number of rows in a data set; None for a stream that was not read to its end."""
        num_rows = version.datasets[source]["rows"]
        if num_rows is None and self.has_data(version):
            num_rows = getattr(self.preparation.datasets[source].source, "num_rows", None)
        return num_rows

    def is_row(self, version: DataVersion, source: int, row: int) -> bool:
        if source not in range(len(version.datasets)):
            return False
        num_rows = self.num_rows(version, source)
        return row in range(sys.maxsize if num_rows is None else num_rows)

    def location(self, version: DataVersion, source: int, row: int) -> str:
        """Returns the location of a row: file:line if the data is unchanged, else the data set and the row."""
        if not self.is_row(version, source, row):
            return f"data set {source}, row {row}, which the data does not have"
        if self.has_data(version):
            return self.preparation.location(ConversationKey(source, row))
        return f"{version.datasets[source]['name']}, row {row}"

    def replay(self, version: DataVersion) -> Iterator[Pack]:
        """Makes the packs of `version` again, from the first to the last one in the ledger."""
        lanes = dict(version.start.state["lanes"])
        last = version.packs[-1].index if version.packs else -1
        for start, end in version.spans:
            self.dataset.num_epochs = start.data["num_epochs"]
            self.dataset.seek(start.next_pack, dict(lanes), start.state["first_epoch"])
            for pack in islice(self.dataset, max(0, min(end, last + 1) - start.next_pack)):
                lanes[pack.lane] = pack.lane_state
                yield pack


@dataclass(frozen=True, slots=True)
class EpochCount:
    """The rows of one data set and epoch in the ledger."""

    dataset: str
    epoch: int
    rows: int | None
    """The number of rows in the data set; None, as is `missing`, for a stream that was not read to its end."""
    trained: int
    dropped: dict[str, int]
    missing: int | None
    twice: int
    """The number of repeated rows."""
    is_due: bool
    """Whether the epoch must be complete, because the run has completed."""

    @property
    def verdict(self) -> str:
        if self.twice or (self.is_due and self.missing):
            return "FAIL"
        return "whole" if self.missing == 0 else "unfinished"

    def cells(self) -> tuple[str, ...]:
        dropped = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items()) or "0"
        rows, missing = ("?" if number is None else str(number) for number in (self.rows, self.missing))
        return str(self.epoch), self.dataset, rows, str(self.trained), dropped, missing, str(self.twice), self.verdict


@dataclass(frozen=True, slots=True)
class RunAudit:
    run: str
    checks: tuple[Check, ...]
    epochs: tuple[EpochCount, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        epochs = [{**asdict(each), "verdict": each.verdict} for each in self.epochs]
        return {"run": self.run, "passed": self.passed, "checks": [asdict(c) for c in self.checks], "epochs": epochs}

    def as_text(self) -> str:
        """Returns one line per check, then one line per epoch and data set."""
        columns = ("epoch", "data set", "rows", "trained", "dropped", "missing", "twice", "")
        epochs = aligned([columns, *(each.cells() for each in self.epochs)])
        return "\n".join([self.run, "", *check_lines(self.checks), "", *epochs])


def audit_run(run: OpenedRun) -> RunAudit:
    """Checks the ledger against the data, the checkpoints and result.json."""
    checks = [_is_readable(run.ledger), _packs_come_once(run), _data_is_unchanged(run), _packs_are_made_again(run)]
    # After the packs, which determine the number of rows in a stream.
    problems: list[str] = []
    epochs = [each for version in run.data_versions for each in _count_epochs(run, version, problems)]
    whole = sum(each.verdict == "whole" for each in epochs)
    checks += [_check("each row once an epoch", problems, f"{whole} epochs are whole"), _ending(run.folder)]
    return RunAudit(str(run.folder), tuple(checks), tuple(epochs))


def _check(name: str, problems: Sequence[str], measured: str) -> Check:
    more = ", ..." if len(problems) > _MOST_NAMED else ""
    return Check(name, not problems, ", ".join(problems[:_MOST_NAMED]) + more if problems else measured)


def _is_readable(ledger: Ledger) -> Check:
    measured = f"{len({pack.step for pack in ledger.packs})} steps of {len(ledger.starts)} starts; "
    measured += f"{ledger.num_lost_steps} more were lost in kills and made again"
    measured += f"; cut off at the end: {', '.join(ledger.torn)}" if ledger.torn else ""
    return _check("the ledger can be read", ledger.problems, measured)


def _packs_come_once(run: OpenedRun) -> Check:
    """Checks that every pack occurs once, at least up to the last start and the last checkpoint."""
    first = run.data_versions[0].start.next_pack
    found = {pack.index for pack in run.ledger.packs}
    saved = [int(state["data"]["next_pack"]) for state in run.saved_states]
    end = max(first, run.ledger.spans()[-1][0].next_pack, max(found, default=-1) + 1, *saved)
    problems = [f"packs 0 to {first - 1} were trained before the ledger began"] if first else []
    missing = (index for index in range(first, end) if index not in found)
    problems += [f"pack {index} is missing" for index in islice(missing, _MOST_NAMED + 1)]
    return _check("each pack once", problems, f"{end - first} packs, from number {first} on")


def _data_is_unchanged(run: OpenedRun) -> Check:
    name = "the data is what the run had"
    if run.has_data(run.data_versions[-1]):
        rows = run.preparation.num_rows or "streamed"
        return Check(name, True, f"{rows} rows, tokenizer, template and packing are unchanged")
    saved = run.saved_states[-1]["fingerprint"] if run.saved_states else {}
    saved = {key: value for key, value in saved.items() if not is_of_the_model(key)}
    now = data_fingerprint(run.config, run.dataset)
    return _check(name, changes(saved=saved, now=now) or ["it has changed since"], "")


def _packs_are_made_again(run: OpenedRun) -> Check:
    """Compares each pack in the ledger, row by row, with the pack made again from the data."""
    problems, num_made, num_unknown = [], 0, 0
    for version in run.data_versions:
        if not run.has_data(version):
            num_unknown += len(version.packs)
            continue
        packs = {pack.index: pack for pack in version.packs}
        for made in run.replay(version):
            if made.index in packs:
                problems += _differences(run, version, packs[made.index], made)
                num_made += 1
            if len(problems) > _MOST_NAMED:
                break
    unknown = f"; the data of {num_unknown} others is no longer available" if num_unknown else ""
    return _check("each pack is made again", problems, f"{num_made} packs have the same rows{unknown}")


def _differences(run: OpenedRun, version: DataVersion, written: LedgerPack, made: Pack) -> Iterator[str]:
    keys = [(key, "trained") for key in made.keys]
    keys += [(drop.key, f"dropped as {drop.reason}") for drop in made.dropped_rows]
    expected = [(key.source, key.row, key.epoch, how) for key, how in keys]
    hows = ["trained", *(f"dropped as {reason}" for reason in run.ledger.reasons[1:])]
    found = [(source, row, epoch, hows[reason]) for source, row, epoch, reason in written.rows.tolist()]
    missing, strange = Counter(expected) - Counter(found), Counter(found) - Counter(expected)
    for rows, problem in ((missing, "is missing"), (strange, "does not belong there")):
        for source, row, epoch, how in rows:
            yield f"pack {written.index}: {run.location(version, source, row)} in epoch {epoch}, {how}, {problem}"
    if found != expected and not missing and not strange:
        yield f"pack {written.index} has its rows in another order"


def _count_epochs(run: OpenedRun, version: DataVersion, problems: list[str]) -> Iterator[EpochCount]:
    """Yields the count of each epoch and data set; appends repeated rows, and missing ones if due, to `problems`."""
    rows = np.concatenate([np.empty((0, 4), dtype=np.int64), *(pack.rows for pack in version.packs)])
    num_due = 0
    if version is run.data_versions[-1] and read_result(run.folder).get("status") in ("completed", "diverged"):
        num_due = run.config.tokens.train_epochs or 0
    for source, row in np.unique(rows[:, :2], axis=0).tolist():
        if not run.is_row(version, source, row):
            problems.append(run.location(version, source, row))
    for epoch in sorted({*rows[:, 2].tolist(), *range(version.start.state["first_epoch"], num_due)}):
        for source, dataset in enumerate(version.datasets):
            own = rows[(rows[:, 0] == source) & (rows[:, 2] == epoch)]
            found, times = np.unique(own[:, 1], return_counts=True)
            known = set(found.tolist())
            size = run.num_rows(version, source)
            num_missing = (size or 0) - int(((found >= 0) & (found < (size or 0))).sum())
            missing = (row for row in range(size or 0) if row not in known) if epoch < num_due and num_missing else ()
            named = [(row, "twice") for row in found[times > 1]]
            named += [(row, "is missing") for row in islice(missing, _MOST_NAMED + 1)]
            for row, problem in named[: _MOST_NAMED + 1]:
                problems.append(f"{run.location(version, source, int(row))} in epoch {epoch}: {problem}")
            yield EpochCount(
                dataset["name"],
                epoch,
                rows=size,
                trained=int((own[:, 3] == 0).sum()),
                dropped=dict(Counter(run.ledger.reasons[reason] for reason in own[own[:, 3] > 0, 3].tolist())),
                missing=None if size is None else num_missing,
                twice=len(own) - len(found),
                is_due=epoch < num_due,
            )


def _ending(folder: Path) -> Check:
    """Reports how the run ended, if it has. For a killed run, this is also written to result.json."""
    result = read_result(folder)
    status, how = result.get("status", "no result.json"), result.get("error", "")
    if status == "killed":
        RunDirectory(folder).write_result(**result)
    if status == "running":
        how = f"{process_name(result)}, is running"
    elif not how and "step" in result:
        how = f"after step {result['step']}"
    return Check("how the run ended", True, f"{status}: {how}" if how else status)
