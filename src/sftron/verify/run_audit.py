"""Proves of a run that each row was dealt once in each epoch, from its ledger, its checkpoints and its data (law 6)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from sftron.checkpoint.architecture import is_of_the_model
from sftron.data.types import ConversationKey, Dropped
from sftron.train import feed
from sftron.train.resume import changes
from sftron.train.run_directory import RunDirectory, is_gone, process_name, read_result
from sftron.verify.dealt_rows import DealtStream, dealt_streams
from sftron.verify.ledger_records import TRAINED
from sftron.verify.opened_run import OpenedRun
from sftron.verify.run_audit_report import Check, EpochCount, RunAudit
from sftron.verify.run_eras import Era, newest_fingerprint

_MOST_NAMED, _MOST_READ_AGAIN = 5, 1000


def audit_run(run: OpenedRun) -> RunAudit:
    checks = [_is_readable(run), _packs_come_once(run), _data_is_the_runs(run)]
    epochs: list[EpochCount] = []
    for era in run.eras:
        era_checks, era_epochs = _audit_era(run, era)
        checks += era_checks
        epochs += era_epochs
    bad = [f"epoch {each.epoch} of {each.dataset}" for each in epochs if each.verdict == "FAIL"]
    whole = sum(each.verdict == "whole" for each in epochs)
    checks.append(_check("each row once in each finished epoch", bad, f"{whole} epochs are whole"))
    checks += [_drops_are_drops(run), _ending(run.folder)]
    return RunAudit(str(run.folder), tuple(checks), tuple(epochs))


def _is_readable(run: OpenedRun) -> Check:
    read, num_steps = run.read, _num_steps(run.records.packs)
    torn = f"; cut off at the end: {', '.join(read.torn)}" if read.torn else ""
    again = _num_steps(read.packs) - num_steps
    found = f"{num_steps} steps of {len(read.starts)} starts; {again} more were lost in kills and made again{torn}"
    return _check("the ledger can be read", [*read.problems, *run.era_problems], found)


def _num_steps(packs: np.ndarray) -> int:
    return len(np.unique(packs[:, :2], axis=0))


def _packs_come_once(run: OpenedRun) -> Check:
    numbers, times = np.unique(run.records.packs[:, 2], return_counts=True)
    first = run.eras[0].first_pack
    end = 1 + int(numbers.max(initial=first - 1))
    end = max([end, *(known.next_pack for era in run.eras for known in era.states)])
    problems = [f"packs 0 to {first - 1} were dealt before the ledger began"] if first else []
    problems += [f"pack {number} is missing" for number in np.setdiff1d(np.arange(first, end), numbers)]
    problems += [f"pack {number} came twice" for number in numbers[times > 1]]
    return _check("each pack once", problems, f"{end - first} packs, from number {first} on")


def _data_is_the_runs(run: OpenedRun) -> Check:
    name = "the data is what the run had"
    if run.has_data(run.eras[-1]):
        rows = run.preparation.num_rows or "streamed"
        return Check(name, True, f"{rows} rows, tokenizer, template and packing as they were")
    theirs = newest_fingerprint(run.folder / "checkpoints") or {}
    theirs = {key: value for key, value in theirs.items() if not is_of_the_model(key)}
    ours = feed.data_fingerprint(run.config, run.dataset)
    return _check(name, changes(ours=ours, theirs=theirs) or ["it has changed since"], "")


def _audit_era(run: OpenedRun, era: Era) -> tuple[list[Check], list[EpochCount]]:
    names = [each["name"] for each in era.data["datasets"]]
    sizes = [size for place in range(len(names)) if (size := run.num_rows_of(era, place)) is not None]
    if len(sizes) < len(names):
        return [Check("every row is one of the data", False, "how many rows a stream had cannot be told any more")], []
    packs, rows = run.rows_of(era)
    is_row = (rows[:, 1:3] >= 0).all(1) & (rows[:, 1] < len(sizes)) & (rows[:, 3] >= era.first_epoch)
    is_row[is_row] = rows[is_row, 2] < np.array(sizes)[rows[is_row, 1]]
    strange = [f"data set {source}, row {row}, epoch {epoch}" for source, row, epoch in rows[~is_row, 1:4].tolist()]
    checks = [_check("every row is one of the data", strange, f"{len(rows)} rows dealt")]
    packs, rows = packs[is_row], rows[is_row]
    checks.append(_counters_agree(era, packs, rows, run.records.reasons))
    epochs: list[EpochCount] = []
    for stream in dealt_streams(era.data, sizes, era.first_epoch):
        own = (rows[:, 1] >= stream.first_source) & (rows[:, 1] < stream.first_source + len(stream.sizes))
        codes = stream.codes(rows[own, 1], rows[own, 2], rows[own, 3])
        checks += [_states_agree(run, era, stream, packs[own], codes), _none_twice(run, era, stream, codes)]
        epochs += _epoch_counts(stream, rows[own], names, run.records.reasons, _num_due(run, era, stream))
    return checks, epochs


def _counters_agree(era: Era, packs: np.ndarray, rows: np.ndarray, reasons: Sequence[str]) -> Check:
    """The counters of each checkpoint are what the ledger has up to it."""
    problems = []
    counting = [known for known in era.states if known.datasets is not None and not era.base["lanes"]]
    for known in counting:
        below = rows[packs < known.next_pack]
        for source, counters in enumerate(known.datasets or ()):
            own = below[below[:, 1] == source, 4]
            found = {"conversations": int((own == TRAINED).sum()), "dropped": _by_reason(own, reasons)}
            promised = {"conversations": counters["conversations"], "dropped": dict(counters["dropped"])}
            if found != promised:
                name = era.data["datasets"][source]["name"]
                problems.append(f"{known.name} has {promised} of {name}, the ledger {found}")
    return _check("the checkpoints' counters", problems, f"{len(counting)} checkpoints count what the ledger has")


def _states_agree(run: OpenedRun, era: Era, stream: DealtStream, packs: np.ndarray, codes: np.ndarray) -> Check:
    """What a state of the lanes says was dealt is what the ledger has up to it."""
    base = stream.positions_left(era.base)
    left = [stream.positions_left(known.state) for known in era.states]
    order = stream.codes_at(1 + max((int(each.max()) for each in left if len(each)), default=-1))
    size = 1 + max(int(order.max(initial=-1)), int(codes.max(initial=-1)))
    problems = []
    for known, positions in zip(era.states, left, strict=True):
        expected, found = np.zeros(size, dtype=bool), np.zeros(size, dtype=bool)
        expected[order[positions]] = True
        found[codes[packs < known.next_pack]] = True
        found[order[base]] = True
        lacking, early = np.flatnonzero(expected & ~found), np.flatnonzero(found & ~expected)
        problems += [f"{known.name}: {run.name(era, stream, int(code))} is missing" for code in lacking[:_MOST_NAMED]]
        if stream.is_exact:
            problems += [
                f"{known.name}: {run.name(era, stream, int(code))} is too many" for code in early[:_MOST_NAMED]
            ]
    which = "all" if stream.is_exact else "at least"
    found = f"{which} that {len(left)} starts and checkpoints say, at last {len(left[-1])} rows"
    return _check(f"the rows that have left the lanes{_of(era, stream)}", problems, found)


def _none_twice(run: OpenedRun, era: Era, stream: DealtStream, codes: np.ndarray) -> Check:
    found, times = np.unique(codes, return_counts=True)
    problems = [run.name(era, stream, int(code)) for code in found[times > 1][: _MOST_NAMED + 1]]
    return _check(f"no row twice in an epoch{_of(era, stream)}", problems, f"{len(found)} rows of all epochs together")


def _of(era: Era, stream: DealtStream) -> str:
    return "" if stream.is_exact else f", {era.data['datasets'][stream.place]['name']}"


def _num_due(run: OpenedRun, era: Era, stream: DealtStream) -> int:
    """Epochs that must be whole: by the states, and where the run has ended, all that it was to train."""
    num_left = max((stream.num_epochs_left(known.state) for known in era.states), default=0)
    num_epochs = run.config.tokens.train_epochs
    if era.end_pack is not None or num_epochs is None or read_result(run.folder).get("status") != "completed":
        return num_left
    return max(num_left, num_epochs - era.first_epoch)


def _drops_are_drops(run: OpenedRun) -> Check:
    """Rows that were dropped, read again."""
    era, name = run.eras[-1], "dropped rows are dropped again"
    if not run.has_data(era):
        return Check(name, True, "not looked at, as the data has changed")
    _, rows = run.rows_of(era)
    dropped = np.unique(rows[rows[:, 4] != TRAINED][:, [1, 2, 4]], axis=0)[:_MOST_READ_AGAIN].tolist()
    run.rewind()
    problems = []
    for source, row, number in dropped:
        again, reason = run.preparation.read(ConversationKey(source, row)), run.records.reasons[number]
        if not isinstance(again, Dropped) or again.reason != reason:
            now = again.reason if isinstance(again, Dropped) else "kept"
            problems.append(f"{run.location(era, source, row)}: dropped as {reason}, and now {now}")
    return _check(name, problems, f"{len(dropped)} rows read again")


def _epoch_counts(
    stream: DealtStream, rows: np.ndarray, names: Sequence[str], reasons: Sequence[str], num_due: int
) -> Iterator[EpochCount]:
    last = max(int(rows[:, 3].max(initial=-1)), stream.first_epoch + num_due - 1)
    for epoch in range(stream.first_epoch, last + 1):
        for source, size in enumerate(stream.sizes, stream.first_source):
            own = rows[(rows[:, 3] == epoch) & (rows[:, 1] == source)]
            num_different = len(np.unique(own[:, 2]))
            yield EpochCount(
                names[source],
                epoch,
                rows=size,
                trained=int((own[:, 4] == TRAINED).sum()),
                dropped=_by_reason(own[:, 4], reasons),
                missing=size - num_different,
                twice=len(own) - num_different,
                is_due=epoch - stream.first_epoch < num_due,
            )


def _by_reason(numbers: np.ndarray, reasons: Sequence[str]) -> dict[str, int]:
    counts = Counter(numbers[numbers != TRAINED].tolist())
    return {reasons[int(number)]: times for number, times in counts.items()}


def _check(name: str, problems: Sequence[str], found: str) -> Check:
    more = ", ..." if len(problems) > _MOST_NAMED else ""
    return Check(name, not problems, ", ".join(problems[:_MOST_NAMED]) + more if problems else found)


def _ending(folder: Path) -> Check:
    """How the run has ended, or whether it runs; no law depends on it. That it was killed is written down."""
    name, result = "how the run ended", read_result(folder)
    status = result.get("status")
    if status == "killed":
        RunDirectory(folder).write_result(**result)
    if status == "running":
        known = "is running" if is_gone(result.get("process")) is False else "cannot be looked at from here"
        return Check(name, True, f"running: {process_name(result)}, {known}")
    more = result.get("error") or (f"after step {result['step']}" if "step" in result else "")
    return Check(name, True, f"{status or 'no result.json'}{': ' * bool(more)}{more}")
