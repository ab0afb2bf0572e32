"""The rows that a step of a run trained or dropped, found in the data by its ledger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sftron.data.sources import StreamedSource
from sftron.data.types import Conversation, ConversationKey, DataError
from sftron.train.run_directory import intact_records
from sftron.verify.ledger import OpenedRun
from sftron.verify.table import aligned
from sftron.visible_text import visible_text

_NUM_WORDS = 12


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


def name_step(run: OpenedRun, step: int) -> NamedStep:
    """Finds the rows of a step in the data.

    Raises:
        ValueError: The ledger does not contain the step.
    """
    packs = [(version, pack) for version in run.data_versions for pack in version.packs if pack.step == step]
    if not packs:
        last = max((pack.step for pack in run.ledger.packs), default=0)
        raise ValueError(f"the ledger of {run.folder} has no step {step}; the last one is {last}")
    rows = [(version, pack.index, *values) for version, pack in packs for values in pack.rows.tolist()]
    for dataset in run.preparation.datasets:
        if isinstance(dataset.source, StreamedSource):
            dataset.source.seek(0)
    named: dict[int, RowOfStep] = {}
    # A stream can only be read forward, so rows are read in the order of the data, then put in training order again.
    for number in sorted(range(len(rows)), key=lambda n: rows[n][2:4]):
        version, pack, source, row, epoch, reason = rows[number]
        name, words = f"data set {source}", "(not in the data)"
        if run.is_row(version, source, row):
            name, words = version.datasets[source]["name"], "(the data has changed since)"
            if run.has_data(version):
                words = _first_words(run, ConversationKey(source, row, epoch))
        location = run.location(version, source, row)  # for a row of a stream, this is known only after reading it
        named[number] = RowOfStep(pack, name, row, epoch, location, words, run.ledger.reasons[reason] or None)
    metrics, skipped = _metrics_of(run.folder, step), run.ledger.skipped.get(step)
    in_order = tuple(named[number] for number in range(len(rows)))
    return NamedStep(step, metrics.get("loss"), metrics.get("grad_norm"), skipped, in_order)


def _first_words(run: OpenedRun, key: ConversationKey) -> str:
    """Returns the first words of the first two texts of a row, so that the answer is included."""
    try:
        parsed = run.preparation.parse(key)
    except DataError as error:
        return str(error)
    if isinstance(parsed, Conversation):
        texts = [f"{message.role.name.lower()}: {message.content}" for message in parsed.messages if message.content]
    else:
        texts = [run.preparation.chat_tokenizer.decode(parsed.input_ids[: 4 * _NUM_WORDS].tolist())]
    return " | ".join(" ".join(text.split()[:_NUM_WORDS]) for text in texts[:2])


def _metrics_of(folder: Path, step: int) -> Mapping[str, Any]:
    return next((record for record in intact_records(folder / "metrics.jsonl") if record["step"] == step), {})
