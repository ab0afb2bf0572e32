"""Names what a step was trained on: the first question when the loss jumps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from sftron.data.preparation import Preparation
from sftron.data.types import Conversation, ConversationKey, DataError
from sftron.verify.ledger_records import TRAINED
from sftron.verify.opened_run import OpenedRun
from sftron.verify.run_audit_report import NamedRow, NamedStep

_NUM_WORDS = 12


def name_step(run: OpenedRun, step: int) -> NamedStep:
    """Raises ValueError where the ledger has no such step."""
    packs = run.records.packs
    if not (packs[:, 1] == step).any():
        last = int(packs[:, 1].max(initial=0))
        raise ValueError(f"the ledger of {run.folder} has no step {step}; the last one is {last}")
    rows = run.records.rows[packs[run.records.rows[:, 0], 1] == step]
    run.rewind()
    # In the order of the rows, as those of a stream can be had, and then as they were trained.
    named = {int(place): _named_row(run, rows[place]) for place in np.lexsort((rows[:, 2], rows[:, 1]))}
    metrics = _metrics_of(run.folder, step)
    return NamedStep(
        step,
        metrics.get("loss"),
        metrics.get("grad_norm"),
        run.read.skipped.get(step),
        tuple(named[place] for place in range(len(rows))),
    )


def _named_row(run: OpenedRun, values: np.ndarray) -> NamedRow:
    pack_place, source, row, epoch, reason = values.tolist()
    pack = int(run.records.packs[pack_place, 2])
    era = next(era for era in reversed(run.eras) if era.first_pack <= pack)
    words = "(the data has changed since)"
    if run.has_data(era):
        words = _words(run.preparation, ConversationKey(source, row, epoch))
    return NamedRow(
        pack,
        era.data["datasets"][source]["name"],
        row,
        epoch,
        run.location(era, source, row),
        words,
        None if reason == TRAINED else run.records.reasons[reason],
    )


def _words(preparation: Preparation, key: ConversationKey) -> str:
    """How its first two texts begin, so that an answer is seen as well."""
    try:
        parsed = preparation.parse(key)
    except DataError as error:
        return str(error)
    if isinstance(parsed, Conversation):
        texts = [f"{message.role.name.lower()}: {message.content}" for message in parsed.messages if message.content]
    else:
        texts = [preparation.chat_tokenizer.decode(parsed.input_ids[: 4 * _NUM_WORDS].tolist())]
    return " | ".join(" ".join(text.split()[:_NUM_WORDS]) for text in texts[:2])


def _metrics_of(folder: Path, step: int) -> Mapping[str, Any]:
    """What metrics.jsonl has of a step."""
    with suppress(OSError):
        for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            with suppress(ValueError):
                if (record := json.loads(line)).get("step") == step:
                    return record
    return {}
