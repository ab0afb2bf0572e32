"""What is in the data, counted: rows, roles, stop tokens, lengths, packs; and what is wrong with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from sftron.data.labels import Targets
from sftron.data.mask_check import MaskCount
from sftron.data.types import (
    IGNORE_INDEX,
    ConversationKey,
    Dropped,
    LabeledConversation,
    Pack,
    TokenizedConversation,
)
from sftron.report.counts import LengthCount, RoleCount, SourceCount, TurnCount
from sftron.report.packing_count import PackingCount
from sftron.report.transcript import conversation_ranges, key_text, pack_trained_tokens, role_name, trained_tokens
from sftron.visible_text import visible_text

AuditedRow = tuple[TokenizedConversation, LabeledConversation] | Dropped
"""What became of one row: the conversation that is trained on, before and after labels.py, or why there is none."""

_BAR_COLUMNS = 40


class Audit:
    """Counts over rows of the data and over packs made of them; either may be missing.

    source_names: a name for each entry of `data.datasets`. targets: what the run means to train.
    packing: counts its packs; None makes a plain one.
    masks: how masks compare with transformers' renderings, counted by the caller; empty where nothing is compared.
    is_partial: the rows were not read to the end; whoever adds them sets it, and the report says so.
    """

    def __init__(
        self,
        source_names: tuple[str, ...] = (),
        targets: Targets | None = None,
        packing: PackingCount | None = None,
        masks: MaskCount | None = None,
    ) -> None:
        self.source_names, self._targets = source_names, targets or Targets()
        self.packing, self.masks = packing or PackingCount(), masks or MaskCount()
        self.sources: dict[int, SourceCount] = {}
        self.is_partial = False
        self.num_rows = 0
        self.num_kept = 0
        self.dropped: Counter[str] = Counter()
        self.first_dropped: dict[str, Dropped] = {}
        self.row_roles = RoleCount()
        self.turns = TurnCount()
        self.lengths = LengthCount()
        self.num_seam_tokens = 0
        self.num_control_text_rows = 0
        self.num_truncated_rows = 0
        self.num_untrained_rows = 0
        self.left_out: Counter[str] = Counter()
        self.pack_roles = RoleCount()
        self.num_wrong_labels = 0
        self._first_place: dict[str, str] = {}

    def add_row(self, row: AuditedRow) -> None:
        """Count one row.

        Raises:
            ValueError: the two stages of a kept row do not hold the same ids.
        """
        self.num_rows += 1
        key = row.key if isinstance(row, Dropped) else row[1].key
        source = self.sources.setdefault(key.source, SourceCount())
        source.num_rows += 1
        if isinstance(row, Dropped):
            self.dropped[row.reason] += 1
            source.dropped[row.reason] += 1
            self.first_dropped.setdefault(row.reason, row)
            return
        tokenized, labeled = row
        if not np.array_equal(tokenized.input_ids, labeled.input_ids):
            raise ValueError(
                f"{self._place(tokenized.key)} has {len(tokenized)} ids before labels and {len(labeled)} after, "
                "and they are not the same; audit the conversation that was labelled, after any truncation"
            )
        trained = trained_tokens(labeled.input_ids, labeled.labels, labeled.loss_weights)
        self.num_kept += 1
        source.num_kept += 1
        source.num_tokens += len(labeled)
        source.num_trained_tokens += int(trained.sum())
        self.lengths.add(len(labeled))
        self.row_roles.add(labeled.role_ids, trained)
        self.num_seam_tokens += tokenized.num_seam_tokens
        self.num_control_text_rows += tokenized.holds_control_text
        self.num_truncated_rows += tokenized.num_truncated_turns > 0
        for text in tokenized.left_out:
            self.left_out[text] += 1
            self._first_place.setdefault(text, self._place(labeled.key))
        if not trained.any():
            self.num_untrained_rows += 1
            self._first_place.setdefault("untrained", self._place(labeled.key))
        num_empty = self.turns.num_empty
        turn = self.turns.add(tokenized, trained, self._targets)
        if self.turns.num_empty > num_empty:
            self._first_place.setdefault("empty", self._place(labeled.key))
        if turn is not None:
            self._first_place.setdefault("stop", f"message {turn} of {self._place(labeled.key)}")
        self._check_labels(labeled.input_ids, labeled.labels, self._place(labeled.key))

    def add_pack(self, pack: Pack) -> None:
        """Count one pack; its rows are counted by `add_row` alone."""
        self.packing.add(pack)
        real = slice(0, pack.num_tokens)
        self.pack_roles.add(pack.role_ids[real], pack_trained_tokens(pack)[real])
        for (start, end), key in zip(conversation_ranges(pack), pack.keys, strict=True):
            place = f"{self._place(key)} in pack {pack.index}"
            self._check_labels(pack.input_ids[start:end], pack.labels[start:end], place)
        tail = slice(pack.num_tokens, None)
        self._check_labels(pack.input_ids[tail][:0], pack.labels[tail], f"the unused tail of pack {pack.index}")

    @property
    def problems(self) -> list[str]:
        """What makes this data unfit to train on, one sentence each; empty if nothing was found."""
        problems = []
        if self.num_rows and not self.num_kept:
            problems.append(f"None of {self.num_rows:,} rows was kept; the reasons are below.")
        for name, roles in (("rows", self.row_roles), ("packs", self.pack_roles)):
            if roles.num_tokens and not roles.num_trained_tokens:
                problems.append(f"No token is trained among the {roles.num_tokens:,} tokens of the {name}.")
        if 0 < self.num_untrained_rows < self.num_kept:
            problems.append(
                f"{self.num_untrained_rows:,} of {self.num_kept:,} kept rows train no token and should have been "
                f"dropped; the first is {self._first_place['untrained']}."
            )
        if self.turns.num_stop_not_trained:
            problems.append(
                f"{self.turns.num_stop_not_trained:,} of {self.turns.num_turns:,} assistant turns do not train their "
                f"stop token, so the model is not taught to stop there; the first is {self._first_place['stop']}."
            )
        if self.num_wrong_labels:
            problems.append(
                f"{self.num_wrong_labels:,} labels are not the next token of their conversation; the first is in "
                f"{self._first_place['label']}."
            )
        return problems + self.masks.problems

    @property
    def assurance(self) -> str:
        """What the absence of problems says, in a sentence."""
        turns = f"{self.turns.num_turns:,} assistant turns"
        stops = f"Each of {turns} trains its stop token, and each label" if self.turns.num_turns else "Each label"
        return f"{stops} is the next token of its conversation."

    def as_dict(self) -> dict[str, Any]:
        """Everything counted, for JSON."""
        return {
            "rows": {
                "num_read": self.num_rows,
                "is_partial": self.is_partial,
                "num_kept": self.num_kept,
                "dropped": {
                    reason: {"count": count, "first": self._dropped_example(reason)}
                    for reason, count in self.dropped.most_common()
                },
                "num_seam_tokens": self.num_seam_tokens,
                "num_holding_control_text": self.num_control_text_rows,
                "num_truncated": self.num_truncated_rows,
                "num_untrained": self.num_untrained_rows,
                "left_out_by_template": {
                    text: {"count": count, "first": self._first_place[text]} for text, count in self.left_out.items()
                },
                "tokens": self.row_roles.as_dict(),
                "assistant_turns": self.turns.as_dict(),
                "lengths": self.lengths.as_dict(),
            },
            "sources": [
                {"name": self._source_name(number)} | count.as_dict() for number, count in sorted(self.sources.items())
            ],
            "packs": {**self.packing.as_dict(), "tokens": self.pack_roles.as_dict()},
            "num_wrong_labels": self.num_wrong_labels,
            "masks": self.masks.as_dict(),
            "problems": self.problems,
        }

    def facts(self) -> Iterator[tuple[str, str]]:
        """The counts that are one line each, as (name, value) for people; what was not looked at is left out."""
        yield from self.row_facts()
        for name, kept, tokens in self.source_facts():
            yield name, f"{kept} rows kept, {tokens} tokens trained"
        yield from self.pack_facts()

    def row_facts(self) -> Iterator[tuple[str, str]]:
        if self.num_rows:
            yield "rows read", f"{self.num_rows:,}" + (" (the first ones only)" if self.is_partial else "")
            yield "rows kept", _of(self.num_kept, self.num_rows)
            yield "tokens", f"{self.row_roles.num_tokens:,}"
            yield "trained tokens", _of(self.row_roles.num_trained_tokens, self.row_roles.num_tokens)
            yield "assistant turns training their stop", _of(self.turns.num_stop_trained, self.turns.num_turns)
            if self.turns.num_left_out:
                yield "assistant turns the template leaves out", f"{self.turns.num_left_out:,}"
            if self.turns.num_not_trained:
                yield "assistant turns not trained", f"{self.turns.num_not_trained:,}"
            if self.turns.num_empty:
                yield "assistant turns training nothing else", self.empty_turns
            if self.masks.num_rows:
                yield "masks as found a second way", _of(self.masks.num_equal, self.masks.num_rows)
            if self.masks.not_compared:
                yield "masks that could not be compared", self.masks.reasons
            yield "seam tokens, not trained", f"{self.num_seam_tokens:,}"
            yield "rows holding control text", f"{self.num_control_text_rows:,}"
            for text, count in self.left_out.most_common():
                yield f"{text} the template leaves out", f"{count:,}, the first in {self._first_place[text]}"
            if self.num_truncated_rows:
                yield "rows cut to fit, last turns left out", f"{self.num_truncated_rows:,}"

    @property
    def empty_turns(self) -> str:
        """How many answers are empty, and where the first is; "" if none is."""
        return f"{self.turns.num_empty:,}, the first in {self._first_place['empty']}" if self.turns.num_empty else ""

    def source_facts(self) -> Iterator[tuple[str, str, str]]:
        """Of several data sets, the name of each, its rows kept, and its tokens trained."""
        if len(self.sources) > 1:
            for number, count in sorted(self.sources.items()):
                kept = _of(count.num_kept, count.num_rows)
                tokens = _of(count.num_trained_tokens, count.num_tokens)
                yield _on_one_line(self._source_name(number)), kept, tokens

    def pack_facts(self) -> Iterator[tuple[str, str]]:
        yield from self.packing.facts()
        if self.packing.num_packs:
            yield "trained tokens in packs", _of(self.pack_roles.num_trained_tokens, self.pack_roles.num_tokens)

    def drops(self) -> list[tuple[str, int, str]]:
        """Rows not kept as (reason, count, the first of them), the most frequent reason first."""
        return [(reason, count, self._dropped_example(reason)) for reason, count in self.dropped.most_common()]

    def as_table(self) -> str:
        """The audit as lines of text, safe for a terminal."""
        lines = [f"{name:<40} {value}" for name, value in self.facts()]
        if self.dropped:
            lines += ["", "rows dropped"]
            lines += [
                f"  {_on_one_line(reason):<30} {count:>9,}   first: {first}" for reason, count, first in self.drops()
            ]
        roles = self.row_roles if self.num_kept else self.pack_roles
        if roles.num_tokens:
            lines += ["", f"{'role':<14} {'tokens':>14} {'trained':>14}"]
            lines += [
                f"{role_name(r):<14} {roles.tokens[r]:>14,} {roles.trained[r]:>14,}" for r in sorted(roles.tokens)
            ]
        buckets = self.lengths.buckets()
        if buckets:
            highest = max(bucket.count for bucket in buckets)
            quantiles = self.lengths.as_dict()["quantiles"]
            lines += ["", "conversation lengths: " + ", ".join(f"{name} {n:,}" for name, n in quantiles.items())]
            for bucket in buckets:
                bar = "█" * round(_BAR_COLUMNS * bucket.count / highest) or "▏" * bool(bucket.count)
                lines.append(f"{bucket.low:>9,} to {bucket.high:>9,} {bucket.count:>9,} {bar}")
        lines += (
            ["", *(f"PROBLEM: {problem}" for problem in self.problems)]
            if self.problems
            else ["", f"No problem found. {self.assurance}"]
        )
        return "\n".join(lines) + "\n"

    def _check_labels(self, input_ids: np.ndarray, labels: np.ndarray, place: str) -> None:
        """Count the labels that are not the next of `input_ids`; a label without a next token is one of them."""
        next_ids = np.full(len(labels), IGNORE_INDEX)
        next_ids[: max(len(input_ids) - 1, 0)] = input_ids[1:]
        num_wrong = int(((labels != IGNORE_INDEX) & (labels != next_ids)).sum())
        if num_wrong:
            self.num_wrong_labels += num_wrong
            self._first_place.setdefault("label", place)

    def _dropped_example(self, reason: str) -> str:
        first = self.first_dropped[reason]
        return f"{self._place(first.key)}: {_on_one_line(first.detail)}"

    def _source_name(self, number: int) -> str:
        return self.source_names[number] if number < len(self.source_names) else f"data set {number}"

    def _place(self, key: ConversationKey) -> str:
        return key_text(key, self.source_names)


def _on_one_line(text: str) -> str:
    return " ".join(visible_text(text).split())


def _of(part: int, whole: int) -> str:
    """ "3 of 4 (75.0%)", rounded down, so that only everything is 100%."""
    return f"{part:,} of {whole:,} ({1000 * part // max(whole, 1) / 10:.1f}%)"
