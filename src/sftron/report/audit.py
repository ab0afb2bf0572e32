"""What is in the data, counted: rows, roles, stop tokens, lengths, packs; and what is wrong with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from sftron.data.chat.check import MaskCount
from sftron.data.labels import Targets
from sftron.data.types import (
    IGNORE_INDEX,
    ConversationKey,
    Dropped,
    LabeledConversation,
    Pack,
    TokenizedConversation,
)
from sftron.report.counts import LengthCount, PackingCount, RoleCount, SourceCount, TurnCount
from sftron.report.tokens import conversation_ranges, key_text, pack_trained_tokens, role_name, trained_tokens
from sftron.visible_text import visible_text

AuditedRow = tuple[TokenizedConversation, LabeledConversation] | Dropped
"""What became of one row: the conversation that is trained on, before and after labels.py, or why there is none."""

_BAR_COLUMNS = 40


class Audit:
    """Counts over rows of the data and over packs made of them; either may be missing.

    Args:
        source_names: A name for each entry of `data.datasets`.
        targets: What the run means to train.
        packing: Counts the packs; None makes a plain one.
        masks: How masks compare with transformers' renderings, counted by the caller; None where nothing is compared.

    Attributes:
        is_partial: Whether rows are left unread; set by the code that adds the rows, and part of the report.
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
        self.num_rows = self.num_kept = 0
        self.dropped: Counter[str] = Counter()
        self.first_dropped: dict[str, Dropped] = {}
        self.row_roles, self.pack_roles = RoleCount(), RoleCount()
        self.turns, self.lengths = TurnCount(), LengthCount()
        self.num_boundary_tokens = self.num_control_text_rows = self.num_truncated_rows = self.num_untrained_rows = 0
        self.left_out: Counter[str] = Counter()
        self.num_wrong_labels = 0
        self._first: dict[str, str] = {}
        """Where each finding was first seen, for people."""

    def add_row(self, row: AuditedRow) -> None:
        """Counts one row.

        Raises:
            ValueError: The two stages of a kept row do not hold the same ids.
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
        where = self._where(key)
        if not np.array_equal(tokenized.input_ids, labeled.input_ids):
            raise ValueError(
                f"{where} has {len(tokenized)} ids before labels and {len(labeled)} after, "
                "and they are not the same; audit the conversation that was labelled, after any truncation"
            )
        trained = trained_tokens(labeled.input_ids, labeled.labels, labeled.loss_weights)
        self.num_kept += 1
        source.num_kept += 1
        source.num_tokens += len(labeled)
        source.num_trained_tokens += int(trained.sum())
        self.lengths.add(len(labeled))
        self.row_roles.add(labeled.role_ids, trained)
        self.num_boundary_tokens += tokenized.num_boundary_tokens
        self.num_control_text_rows += tokenized.holds_control_text
        self.num_truncated_rows += tokenized.num_truncated_turns > 0
        for text in tokenized.left_out:
            self.left_out[text] += 1
            self._first.setdefault(text, where)
        if not trained.any():
            self.num_untrained_rows += 1
            self._first.setdefault("untrained", where)
        num_empty = self.turns.num_empty
        turn = self.turns.add(tokenized, trained, self._targets)
        if self.turns.num_empty > num_empty:
            self._first.setdefault("empty", where)
        if turn is not None:
            self._first.setdefault("stop", f"message {turn} of {where}")
        self._check_labels(labeled.input_ids, labeled.labels, where)

    def add_pack(self, pack: Pack) -> None:
        """Counts one pack; its rows are counted by `add_row` alone."""
        self.packing.add(pack)
        real = slice(0, pack.num_tokens)
        self.pack_roles.add(pack.role_ids[real], pack_trained_tokens(pack)[real])
        for (start, end), key in zip(conversation_ranges(pack), pack.keys, strict=True):
            where = f"{self._where(key)} in pack {pack.index}"
            self._check_labels(pack.input_ids[start:end], pack.labels[start:end], where)
        no_ids = pack.input_ids[:0]
        self._check_labels(no_ids, pack.labels[pack.num_tokens :], f"the unused tail of pack {pack.index}")

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
                f"dropped; the first is {self._first['untrained']}."
            )
        if self.turns.num_stop_not_trained:
            problems.append(
                f"{self.turns.num_stop_not_trained:,} of {self.turns.num_turns:,} assistant turns do not train their "
                f"stop token, so the model is not taught to stop there; the first is {self._first['stop']}."
            )
        if self.num_wrong_labels:
            problems.append(
                f"{self.num_wrong_labels:,} labels are not the next token of their conversation; the first is in "
                f"{self._first['label']}."
            )
        return problems + self.masks.problems

    @property
    def assurance(self) -> str:
        """What the absence of problems means, in a sentence."""
        turns = f"{self.turns.num_turns:,} assistant turns"
        stops = f"Each of {turns} trains its stop token, and each label" if self.turns.num_turns else "Each label"
        return f"{stops} is the next token of its conversation."

    def as_dict(self) -> dict[str, Any]:
        """Returns all counts, for JSON."""
        return {
            "rows": {
                "num_read": self.num_rows,
                "is_partial": self.is_partial,
                "num_kept": self.num_kept,
                "dropped": {reason: {"count": count, "first": first} for reason, count, first in self.drops()},
                "num_seam_tokens": self.num_boundary_tokens,
                "num_holding_control_text": self.num_control_text_rows,
                "num_truncated": self.num_truncated_rows,
                "num_untrained": self.num_untrained_rows,
                "left_out_by_template": {
                    text: {"count": count, "first": self._first[text]} for text, count in self.left_out.items()
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
        """Yields the counts that are one line each, as (name, value); those of a missing part are left out."""
        yield from self.row_facts()
        for name, kept, tokens in self.source_facts():
            yield name, f"{kept} rows kept, {tokens} tokens trained"
        yield from self.pack_facts()

    def row_facts(self) -> Iterator[tuple[str, str]]:
        if not self.num_rows:
            return
        turns, masks = self.turns, self.masks
        yield "rows read", f"{self.num_rows:,}" + (" (the first ones only)" if self.is_partial else "")
        yield "rows kept", _of(self.num_kept, self.num_rows)
        yield "tokens", f"{self.row_roles.num_tokens:,}"
        yield "trained tokens", _of(self.row_roles.num_trained_tokens, self.row_roles.num_tokens)
        yield "assistant turns training their stop", _of(turns.num_stop_trained, turns.num_turns)
        if turns.num_left_out:
            yield "assistant turns the template leaves out", f"{turns.num_left_out:,}"
        if turns.num_not_trained:
            yield "assistant turns not trained", f"{turns.num_not_trained:,}"
        if turns.num_empty:
            yield "assistant turns training nothing else", self.empty_turns
        if masks.num_rows:
            yield "masks as found a second way", _of(masks.num_equal, masks.num_rows)
        if masks.not_compared:
            yield "masks that could not be compared", masks.reasons
        yield "seam tokens, not trained", f"{self.num_boundary_tokens:,}"
        yield "rows holding control text", f"{self.num_control_text_rows:,}"
        for text, count in self.left_out.most_common():
            yield f"{text} the template leaves out", f"{count:,}, the first in {self._first[text]}"
        if self.num_truncated_rows:
            yield "rows cut to fit, last turns left out", f"{self.num_truncated_rows:,}"

    @property
    def empty_turns(self) -> str:
        """How many answers are empty, and where the first is; "" if none is."""
        return f"{self.turns.num_empty:,}, the first in {self._first['empty']}" if self.turns.num_empty else ""

    def source_facts(self) -> Iterator[tuple[str, str, str]]:
        """Yields for each of several data sets its name, its rows kept, and its tokens trained."""
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
        """Returns rows not kept as (reason, count, the first of them), the most frequent reason first."""
        firsts = {
            reason: f"{self._where(row.key)}: {_on_one_line(row.detail)}" for reason, row in self.first_dropped.items()
        }
        return [(reason, count, firsts[reason]) for reason, count in self.dropped.most_common()]

    def as_table(self) -> str:
        """Returns the audit as lines of text, safe for a terminal."""
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
        if buckets := self.lengths.buckets():
            highest = max(bucket.count for bucket in buckets)
            quantiles = self.lengths.quantiles()
            lines += ["", "conversation lengths: " + ", ".join(f"{name} {n:,}" for name, n in quantiles.items())]
            for bucket in buckets:
                bar = "█" * round(_BAR_COLUMNS * bucket.count / highest) or "▏" * bool(bucket.count)
                lines.append(f"{bucket.low:>9,} to {bucket.high:>9,} {bucket.count:>9,} {bar}")
        verdict = [f"PROBLEM: {problem}" for problem in self.problems] or [f"No problem found. {self.assurance}"]
        return "\n".join([*lines, "", *verdict]) + "\n"

    def _check_labels(self, input_ids: np.ndarray, labels: np.ndarray, where: str) -> None:
        """Counts the labels that are not the next of `input_ids`; a label without a next token is one of them."""
        next_ids = np.full(len(labels), IGNORE_INDEX)
        next_ids[: max(len(input_ids) - 1, 0)] = input_ids[1:]
        num_wrong = int(((labels != IGNORE_INDEX) & (labels != next_ids)).sum())
        if num_wrong:
            self.num_wrong_labels += num_wrong
            self._first.setdefault("label", where)

    def _source_name(self, number: int) -> str:
        return self.source_names[number] if number < len(self.source_names) else f"data set {number}"

    def _where(self, key: ConversationKey) -> str:
        return key_text(key, self.source_names)


def _on_one_line(text: str) -> str:
    return " ".join(visible_text(text).split())


def _of(part: int, whole: int) -> str:
    """Returns "3 of 4 (75.0%)", rounded down, so that only everything is 100%."""
    return f"{part:,} of {whole:,} ({1000 * part // max(whole, 1) / 10:.1f}%)"
