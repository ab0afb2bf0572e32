"""Audit of a run: rebuilds the packs of every step from the data, and counts every row once per epoch (law 6).

A pack is a pure function of data, settings and index (law 5), so the rebuilt packs must have the digests in
metrics.jsonl (data/digest.py). If they do, the run trained exactly their rows.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby, islice
from typing import Any

from sftron.checks.opened_run import MOST_PACKS, OpenedRun, RecordedStep
from sftron.checks.report import Check, Report, aligned
from sftron.data.digest import join_digests, pack_digest
from sftron.data.sources import StreamedSource
from sftron.data.types import Conversation, ConversationKey, DataError, Document, Pack
from sftron.models.architecture import is_of_the_model
from sftron.train.run import changes
from sftron.train.run_directory import RunDirectory, process_name
from sftron.visible_text import counted, visible_text

_MOST_NAMED = 5
_NUM_WORDS = 12


# --- The replay ---


@dataclass(frozen=True, slots=True)
class RowCount:
    """How often each row of a data set occurs in an epoch's packs, and how many rows were dropped for each reason."""

    rows: Counter[int] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)


class Replay:
    """The packs of a run, rebuilt from the current data. Steps that used other data are left out.

    Attributes:
        num_steps: The number of rebuilt steps.
        problems: The differences from the run's records.
        packs_of_step: The packs of `wanted_step`, if it was rebuilt.
        counts: The rows by the data's first epoch, then by epoch and data set.
    """

    def __init__(self, run: OpenedRun, wanted_step: int | None = None) -> None:
        self.num_steps, self.problems = 0, list[str]()
        self.packs_of_step: list[Pack] = []
        self.counts: dict[int, defaultdict[tuple[int, int], RowCount]] = {}
        self._run, self._dataset = run, run.dataset
        for first_epoch, steps in groupby(filter(run.has_data_of, run.steps), key=lambda step: step.first_epoch):
            counts = self.counts[first_epoch] = defaultdict(RowCount)
            for step, packs in self._packs(list(steps)):
                for pack in packs:
                    for key in pack.keys:
                        counts[key.epoch, key.source].rows[key.row] += 1
                    for drop in pack.dropped_rows:
                        count = counts[drop.key.epoch, drop.key.source]
                        count.rows[drop.key.row] += 1
                        count.dropped[drop.reason] += 1
                if step is not None:
                    self.num_steps += 1
                    self._compare(step, packs)
                    if step.step == wanted_step:
                        self.packs_of_step = packs

    def _packs(self, steps: Sequence[RecordedStep]) -> Iterator[tuple[RecordedStep | None, list[Pack]]]:
        """Yields each step with its packs, and None with the packs between two steps, which must hold no
        conversation."""
        lanes: dict[int, str] = {}
        at = steps[0].first if steps[0].first_epoch else 0
        num_epochs, packs = steps[0].num_epochs, self._packs_from(at, steps[0], lanes)
        for step in steps:
            if not 0 <= step.first - at <= MOST_PACKS:
                self.problems.append(f"step {step.step} has pack {step.first}, but the next one is pack {at}")
                return
            between = list(islice(packs, step.first - at))
            # Another check reports missing earlier steps.
            if any(pack.keys for pack in between) and step is not self._run.steps[0]:
                self.problems.append(f"packs {at} to {step.first - 1} hold conversations, but belong to no step")
            yield None, between
            if step.num_epochs != num_epochs:  # the last epoch's end is packed without a following epoch
                num_epochs, packs = step.num_epochs, self._packs_from(step.first, step, lanes)
            yield step, list(islice(packs, step.end - step.first))
            at = step.end
        if self._run.is_complete and steps[-1] is self._run.steps[-1]:
            # After the last step, each lane may have had rows that were all dropped.
            for pack in islice(packs, self._dataset.num_lanes):
                if pack.keys:
                    break
                yield None, [pack]

    def _packs_from(self, number: int, step: RecordedStep, lanes: dict[int, str]) -> Iterator[Pack]:
        """Yields the packs from this number on as the run's start for this step saw them, and records the lanes'
        states."""
        self._dataset.num_epochs = step.num_epochs
        self._dataset.seek(number, dict(lanes), step.first_epoch)
        for pack in self._dataset:
            lanes[pack.lane] = pack.lane_state
            yield pack

    def _compare(self, step: RecordedStep, packs: Sequence[Pack]) -> None:
        made = join_digests([pack_digest(pack) for pack in packs])
        where = f"step {step.step} (packs {step.first} to {step.end - 1})"
        if made["keys"] != step.digests["keys"]:
            self.problems.append(f"{where} trained rows that differ from the data's")
        elif made["tokens"] != step.digests["tokens"]:
            self.problems.append(f"{where} trained its rows with different tokens or weights")


# --- The audit ---


@dataclass(frozen=True, slots=True)
class EpochCount:
    """The rows of one data set and epoch in the rebuilt packs."""

    dataset: str
    epoch: int
    rows: int | None
    """The number of rows in the data set. For a stream that was not read to its end, this and `missing` are None."""
    trained: int
    dropped: dict[str, int]
    missing: int | None
    twice: int
    """The number of repeated rows."""
    is_due: bool
    """Whether the epoch must be complete because the run has completed it."""

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
class RowOfStep:
    """A row of a step; `words` are the first words of the conversation, and `reason` is why it was dropped, or None."""

    pack: int
    dataset: str
    row: int
    epoch: int
    location: str
    words: str
    reason: str | None


@dataclass(frozen=True, slots=True)
class NamedStep:
    """The rows of a step, with its loss and gradient norm from metrics.jsonl."""

    step: int
    loss: float | None
    grad_norm: float | None
    skipped: str | None
    rows: tuple[RowOfStep, ...]

    def as_text(self) -> str:
        skipped = f"; no update was made: {self.skipped}" if self.skipped else ""
        lines = []
        for row in self.rows:
            words = f"dropped: {row.reason}" if row.reason else visible_text(row.words)
            lines.append((f"pack {row.pack}", row.location, f"epoch {row.epoch}", words))
        return "\n".join([f"step {self.step}: loss {self.loss}, grad norm {self.grad_norm}{skipped}", *aligned(lines)])


@dataclass(frozen=True, slots=True)
class RunAudit(Report):
    """The checks of an audit, the rows of each epoch, and the rows of the requested step."""

    epochs: tuple[EpochCount, ...] = ()
    step: NamedStep | None = None

    def as_dict(self) -> dict[str, Any]:
        found = Report.as_dict(self)
        found["epochs"] = [{**asdict(each), "verdict": each.verdict} for each in self.epochs]
        return found if self.step is None else found | {"step": asdict(self.step)}

    def as_text(self) -> str:
        """Returns one line per check, then one line per epoch and data set, then the rows of the step."""
        columns = ("epoch", "data set", "rows", "trained", "dropped", "missing", "twice", "")
        epochs = aligned([columns, *(each.cells() for each in self.epochs)])
        step = [] if self.step is None else ["", self.step.as_text()]
        return "\n".join([Report.as_text(self), "", *epochs, *step])


def audit_run(run: OpenedRun, step: int | None = None) -> RunAudit:
    """Compares metrics.jsonl with the data, the checkpoints and result.json, and names the rows of `step`.

    Raises ValueError if the step's rows cannot be determined.
    """
    replay = Replay(run, step)
    unknown = sum(not run.has_data_of(each) for each in run.steps)
    verb = "has" if replay.num_steps == 1 else "have"
    measured = f"{counted(replay.num_steps, 'steps')} {verb} the same rows, tokens and weights"
    measured += f"; the data of {unknown} others is no longer available" if unknown else ""
    problems: list[str] = []
    epochs = tuple(_count_epochs(run, replay, problems))
    whole = sum(each.verdict == "whole" for each in epochs)
    checks = (
        _steps_are_recorded(run),
        _data_is_unchanged(run),
        _check("each step is made again", replay.problems, measured),
        _check("each row once an epoch", problems, f"{counted(whole, 'epochs')} {'is' if whole == 1 else 'are'} whole"),
        _ending(run),
    )
    named = None if step is None else _name(run, step, replay)
    return RunAudit(str(run.folder), {}, checks, epochs=epochs, step=named)


def _check(name: str, problems: Sequence[str], measured: str) -> Check:
    more = ", ..." if len(problems) > _MOST_NAMED else ""
    return Check(name, not problems, ", ".join(problems[:_MOST_NAMED]) + more if problems else measured)


def _steps_are_recorded(run: OpenedRun) -> Check:
    """Checks that no step is missing before the last checkpoint or before the end that result.json states."""
    found = {step.step for step in run.steps}
    ended = run.result.get("step")
    last = max(*found, *run.saved_steps, ended if type(ended) is int else 0)
    missing = (
        f"step {step} has no record with a digest of its rows" for step in range(1, last + 1) if step not in found
    )
    problems = list(islice(missing, _MOST_NAMED + 1))
    return _check(
        "each step is recorded", problems, f"{counted(len(found), 'steps')}, {counted(run.steps[-1].end, 'packs')}"
    )


def _data_is_unchanged(run: OpenedRun) -> Check:
    name = "the data is what the run had"
    if run.has_data_of(run.steps[-1]):
        num_rows = run.preparation.num_rows
        rows = counted(num_rows, "rows") if num_rows else "streamed rows"
        return Check(name, True, f"{rows}, tokenizer, template and packing are unchanged")
    saved = {key: value for key, value in run.saved_state.get("fingerprint", {}).items() if not is_of_the_model(key)}
    return _check(name, changes(saved=saved, now=run.fingerprint) or ["the data has changed since"], "")


def _count_epochs(run: OpenedRun, replay: Replay, problems: list[str]) -> Iterator[EpochCount]:
    """Yields the count of each epoch and data set; appends repeated rows, and missing ones if due, to `problems`."""
    for first_epoch, counts in replay.counts.items():
        is_last = run.has_data_of(run.steps[-1]) and first_epoch == run.steps[-1].first_epoch
        num_due = (run.config.tokens.train_epochs or 0) if run.is_complete and is_last else 0
        for epoch in sorted({epoch for epoch, _ in counts} | {*range(first_epoch, num_due)}):
            for source, dataset in enumerate(run.preparation.datasets):
                count = counts[epoch, source]
                # The number of rows of a stream is known once it is read to its end.
                size: int | None = dataset.num_rows or getattr(dataset.source, "num_rows", None)
                wrong = [(row, "twice") for row, times in sorted(count.rows.items()) if times > 1]
                if epoch < num_due:
                    wrong += [(row, "is missing") for row in range(size or 0) if row not in count.rows]
                for row, problem in wrong[: _MOST_NAMED + 1]:
                    location = run.preparation.location(ConversationKey(source, row))
                    problems.append(f"{location} in epoch {epoch}: {problem}")
                yield EpochCount(
                    dataset.name,
                    epoch,
                    rows=size,
                    trained=count.rows.total() - count.dropped.total(),
                    dropped=dict(count.dropped),
                    missing=None if size is None else size - len(count.rows),
                    twice=count.rows.total() - len(count.rows),
                    is_due=epoch < num_due,
                )


def _ending(run: OpenedRun) -> Check:
    """Reports how the run ended, if it has. If it was killed, also writes this to result.json."""
    result = run.result
    status, how = result.get("status", "no result.json"), result.get("error", "")
    if status == "killed":
        RunDirectory(run.folder).write_result(**result)
    if status == "running":
        how = f"{process_name(result)}, is running"
    elif not how and "step" in result:
        how = f"after step {result['step']}"
    return Check("how the run ended", True, f"{status}: {how}" if how else status)


# --- The rows of a step ---


def _name(run: OpenedRun, number: int, replay: Replay) -> NamedStep:
    step = next((step for step in run.steps if step.step == number), None)
    if step is None:
        raise ValueError(f"{run.folder} has no step {number}; the last one is {run.steps[-1].step}")
    if not replay.packs_of_step:
        raise ValueError(f"step {number} of {run.folder} cannot be rebuilt: the data has changed since")
    keys = [(pack.index, key, None) for pack in replay.packs_of_step for key in pack.keys]
    keys += [(pack.index, drop.key, drop.reason) for pack in replay.packs_of_step for drop in pack.dropped_rows]
    for dataset in run.preparation.datasets:
        if isinstance(dataset.source, StreamedSource):
            dataset.source.seek(0)
    rows: dict[int, RowOfStep] = {}
    # A stream can only be read forward, so rows are read in the order of the data, then put in training order again.
    for n in sorted(range(len(keys)), key=lambda n: (keys[n][1].source, keys[n][1].row)):
        pack, key, reason = keys[n]
        words = _first_words(run, key)
        location = run.preparation.location(key)  # for a row of a stream, this is known only after reading it
        dataset = run.preparation.datasets[key.source].name
        rows[n] = RowOfStep(pack, dataset, key.row, key.epoch, location, words, reason)
    loss, grad_norm, skipped = (step.record.get(name) for name in ("loss", "grad_norm", "skipped"))
    return NamedStep(number, loss, grad_norm, skipped, tuple(rows[n] for n in range(len(keys))))


def _first_words(run: OpenedRun, key: ConversationKey) -> str:
    """Returns the first words of the first two texts of a row, so that the answer is included."""
    try:
        parsed = run.preparation.parse(key)
    except DataError as error:
        return str(error)
    if isinstance(parsed, Conversation):
        texts = [f"{message.role.name.lower()}: {message.content}" for message in parsed.messages if message.content]
    elif isinstance(parsed, Document):
        texts = [f"text: {parsed.text}"]
    else:
        texts = [run.preparation.chat_tokenizer.decode(parsed.input_ids[: 4 * _NUM_WORDS].tolist())]
    return " | ".join(" ".join(text.split()[:_NUM_WORDS]) for text in texts[:2])
