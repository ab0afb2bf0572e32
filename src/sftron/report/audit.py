"""An audit of the data: counts of rows, roles, stop tokens, lengths and packs, and a list of problems."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from sftron.data.chat.check import MaskCount, require_reference_ids
from sftron.data.labels import Targets
from sftron.data.prepare import Preparation
from sftron.data.types import IGNORE_INDEX, Dropped, LabeledConversation, Pack, TokenizedConversation
from sftron.report.counts import LengthCount, PackingCount, SourceCount, TurnCount
from sftron.report.shown import (
    Locate,
    conversation_ranges,
    key_text,
    numbered_row,
    on_one_line,
    pack_trained_tokens,
    trained_tokens,
)
from sftron.report.tokens import RoleCount, role_name
from sftron.visible_text import counted

AuditedRow = tuple[TokenizedConversation, LabeledConversation] | Dropped
"""The result of preparing one row: the conversation before and after labels.py, or the reason for dropping it."""

_ROW_COUNTS = (
    *(
        "num_repeated",
        "num_boundary_tokens",
        "num_holding_control_text",
        "num_with_second_thought",
        "num_truncated",
        "num_untrained",
    ),
)
_BAR_COLUMNS = 40
_NUM_MASKS_COMPARED = 400
"""The number of conversations whose masks are compared. A comparison takes two or three renderings per answer, a few
milliseconds per conversation."""


class Audit:
    """Counts over the rows of the data and over packs made of them; either may be missing.

    Args:
        source_names: A name for each entry of `data.datasets`.
        targets: The tokens that the run is configured to train.
        packing: Counts the packs; None creates a `PackingCount` without options.
        masks: The masks compared with transformers' renderings, filled by the caller; None if nothing is compared.
        num_held_out: The number of rows held out for evaluation; the audit does not include them.
        locate: Names the rows.
    """

    def __init__(
        self,
        source_names: tuple[str, ...] = (),
        targets: Targets | None = None,
        packing: PackingCount | None = None,
        masks: MaskCount | None = None,
        num_held_out: int = 0,
        locate: Locate = numbered_row,
    ) -> None:
        self.source_names, self._targets, self.num_held_out = source_names, targets or Targets(), num_held_out
        self.locate = locate
        self.packing, self.masks = packing or PackingCount(), masks or MaskCount()
        self.sources: dict[int, SourceCount] = {}
        self.documents: dict[str, dict[str, int]] = {}  # by data set, of those that hold plain text; set by the caller
        self.is_partial = False  # whether some rows are left unread; set by the caller that adds the rows
        self.num_rows = self.num_kept = 0
        self.dropped: Counter[str] = Counter()
        self.row_roles, self.pack_roles = RoleCount(), RoleCount()
        self.turns, self.lengths = TurnCount(), LengthCount()
        self.left_out: Counter[str] = Counter()
        self.template_kwargs: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._first: dict[str, str] = {}  # the first location of each counted item
        self._seen: dict[bytes, str] = {}  # by a hash of the ids and labels of a row: where it was first

    def add_row(self, row: AuditedRow) -> None:
        key = row.key if isinstance(row, Dropped) else row[1].key
        where = key_text(key, self.locate)
        source = self.sources.setdefault(key.source, SourceCount())
        self.num_rows += 1
        source.num_rows += 1
        if isinstance(row, Dropped):
            self.dropped[row.reason] += 1
            source.dropped[row.reason] += 1
            detail = on_one_line(row.detail)
            self._count(f"dropped {row.reason}", 1, detail if where in detail else f"{where}: {detail}")
            return
        tokenized, labeled = row
        assert len(tokenized) == len(labeled), "not the conversation that was labeled, after any truncation"
        trained = trained_tokens(labeled.input_ids, labeled.labels, labeled.loss_weights)
        self.num_kept += 1
        source.num_kept += 1
        source.num_tokens += len(labeled)
        source.num_trained_tokens += int(trained.sum())
        self.lengths[len(labeled)] += 1
        self.row_roles.add(labeled.role_ids, trained)
        content = labeled.input_ids.tobytes() + labeled.labels.tobytes()
        earlier = self._seen.setdefault(hashlib.blake2b(content, digest_size=16).digest(), where)
        self._count("num_repeated", earlier != where, f"{where} is {earlier}")
        self._count("num_boundary_tokens", tokenized.num_boundary_tokens, where)
        self._count("num_holding_control_text", tokenized.holds_control_text, where)
        self._count("num_with_second_thought", tokenized.has_second_thought, where)
        self._count("num_truncated", tokenized.num_truncated_turns > 0, where)
        self._count("num_untrained", not trained.any(), where)
        for text in tokenized.template_kwargs:
            self.template_kwargs[text] += 1
            self._count(f"kwargs {text}", 1, where)
        for text in tokenized.left_out:
            self.left_out[text] += 1
            self._count(f"left out {text}", 1, where)
        num_empty = self.turns.num_empty
        turn = self.turns.add(tokenized, trained, self._targets)
        self._count("empty turns", self.turns.num_empty - num_empty, where)
        self._count("stops not trained", turn is not None, f"message {turn} of {where}")
        self._check_labels(labeled.input_ids, labeled.labels, where)

    def add_pack(self, pack: Pack) -> None:
        """Counts one pack; its rows are counted only by `add_row`."""
        self.packing.add(pack)
        real = slice(0, pack.num_tokens)
        self.pack_roles.add(pack.role_ids[real], pack_trained_tokens(pack)[real])
        for (start, end), key in zip(conversation_ranges(pack), pack.keys, strict=True):
            where = f"{key_text(key, self.locate)} in pack {pack.index}"
            self._check_labels(pack.input_ids[start:end], pack.labels[start:end], where)
        self._check_labels(pack.input_ids[:0], pack.labels[pack.num_tokens :], f"the padding of pack {pack.index}")

    def _check_labels(self, input_ids: np.ndarray, labels: np.ndarray, where: str) -> None:
        """Counts wrong labels: labels that are not the next token of `input_ids`, and a label at the last position."""
        next_ids = np.full(len(labels), IGNORE_INDEX)
        next_ids[: max(len(input_ids) - 1, 0)] = input_ids[1:]
        self._count("num_wrong_labels", int(((labels != IGNORE_INDEX) & (labels != next_ids)).sum()), where)

    def _count(self, name: str, number: int, where: str) -> None:
        if number:
            self._counts[name] += number
            self._first.setdefault(name, where)

    @property
    def problems(self) -> list[str]:
        """The reasons not to train on this data, one sentence each."""
        return [*self.problems_of_labels, *filter(None, [self.problem_of_stops]), *self.masks.problems]

    @property
    def problem_of_stops(self) -> str:
        """A sentence about answers that do not train their stop token; "" if all do."""
        turns = self.turns
        if not turns.num_stop_not_trained:
            return ""
        return (
            f"{turns.num_stop_not_trained:,} of {turns.num_turns:,} assistant turns do not train their stop token, "
            f"so the model is not taught to stop there; the first is {self._first['stops not trained']}."
        )

    @property
    def problems_of_labels(self) -> list[str]:
        """The problems of the trained tokens, except for stop tokens."""
        return [*self._problems_of_labels()]

    def _problems_of_labels(self) -> Iterator[str]:
        first = self._first
        if self.num_rows and not self.num_kept:
            yield f"None of {self.num_rows:,} rows was kept; the reasons are below."
        for name, roles in (("rows", self.row_roles), ("packs", self.pack_roles)):
            if roles.num_tokens and not roles.num_trained_tokens:
                yield f"No token is trained among the {counted(roles.num_tokens, 'tokens')} of the {name}."
        if 0 < (num := self._counts["num_untrained"]) < self.num_kept:
            yield f"{num:,} of {self.num_kept:,} kept rows train no token; the first is {first['num_untrained']}."
        if num := self._counts["num_wrong_labels"]:
            where = first["num_wrong_labels"]
            yield f"{num:,} labels are not the next token of their conversation; the first is in {where}."

    @property
    def acquittal(self) -> str:
        """The sentence that no problem was found; it names the kept rows if some were dropped."""
        if num_dropped := self.dropped.total():
            return f"No problem found in the {counted(self.num_kept, 'rows')} kept (dropped: {num_dropped:,})."
        return "No problem found."

    @property
    def assurance(self) -> str:
        """A sentence about what was verified, for data without problems."""
        num = self.turns.num_turns
        stops = f"Each of {num:,} assistant turns trains its stop token, and each label" if num else "Each label"
        return f"{stops} is the next token of its conversation."

    @property
    def empty_turns(self) -> str:
        """The number of empty answers and the location of the first one; "" without any."""
        return f"{self.turns.num_empty:,}, the first in {self._first['empty turns']}" if self.turns.num_empty else ""

    def drops(self) -> list[tuple[str, int, str]]:
        """Returns (reason, count, location of the first row) for dropped rows, with the most frequent reason first."""
        return [(reason, count, self._first[f"dropped {reason}"]) for reason, count in self.dropped.most_common()]

    def as_dict(self) -> dict[str, Any]:
        return {
            "rows": {
                "num_read": self.num_rows,
                "is_partial": self.is_partial,
                "num_held_out": self.num_held_out,
                "num_kept": self.num_kept,
                **({"documents": self.documents} if self.documents else {}),
                "dropped": {reason: {"count": count, "first": first} for reason, count, first in self.drops()},
                **{name: self._counts[name] for name in _ROW_COUNTS},
                "left_out_by_template": {
                    text: {"count": count, "first": self._first[f"left out {text}"]}
                    for text, count in self.left_out.items()
                },
                **({"chat_template_kwargs": dict(self.template_kwargs)} if self.template_kwargs else {}),
                "tokens": self.row_roles.as_dict(),
                "assistant_turns": self.turns.as_dict(),
                "lengths": {"quantiles": self.lengths.quantiles(), "buckets": self.lengths.buckets()},
            },
            "sources": [
                {"name": self._source_name(number)} | count.as_dict() for number, count in sorted(self.sources.items())
            ],
            "packs": {**self.packing.as_dict(), "tokens": self.pack_roles.as_dict()},
            "num_wrong_labels": self._counts["num_wrong_labels"],
            "masks": self.masks.as_dict(),
            "problems": self.problems,
        }

    @property
    def num_with_second_thought(self) -> int:
        return self._counts["num_with_second_thought"]

    def row_facts(self) -> Iterator[tuple[str, str]]:
        """Yields (name, value) for each count of rows that takes one line."""
        if not self.num_rows:
            return
        turns, masks = self.turns, self.masks
        yield "rows read", f"{self.num_rows:,}" + (" (the first ones only)" if self.is_partial else "")
        if self.num_held_out:
            yield "rows held out of training", f"{self.num_held_out:,}, which are not audited"
        yield "rows kept", _of(self.num_kept, self.num_rows)
        if num := self._counts["num_repeated"]:
            yield "rows equal to an earlier one", f"{num:,}; the first: {self._first['num_repeated']}"
        yield "tokens", f"{self.row_roles.num_tokens:,}"
        yield "trained tokens", _of(self.row_roles.num_trained_tokens, self.row_roles.num_tokens)
        yield "assistant turns training their stop", _of(turns.num_stop_trained, turns.num_turns)
        if turns.num_left_out_by_template:
            yield "assistant turns the template leaves out", f"{turns.num_left_out_by_template:,}"
        if turns.num_not_trained:
            yield "assistant turns not trained", f"{turns.num_not_trained:,}"
        if turns.num_empty:
            yield "assistant turns training nothing else", self.empty_turns
        if masks.num_rows:
            yield "masks matching an independent method", _of(masks.num_equal, masks.num_rows)
        if masks.not_compared:
            yield "masks that could not be compared", masks.reasons
        yield "boundary tokens, not trained", f"{self._counts['num_boundary_tokens']:,}"
        yield "rows holding control text", f"{self._counts['num_holding_control_text']:,}"
        if self.num_with_second_thought:
            yield "rows with a second thought of the template's", f"{self.num_with_second_thought:,}"
        for text, count in self.template_kwargs.most_common():
            yield f"rows with {text}", f"{count:,}, the first is {self._first[f'kwargs {text}']}"
        for text, count in self.left_out.most_common():
            yield f"{text} the template leaves out", f"{count:,}, the first in {self._first[f'left out {text}']}"
        for name, numbers in self.documents.items():
            cut = f"{numbers['num_cut']:,} of {numbers['num_documents']:,}, into {numbers['num_pieces']:,} pieces"
            yield f"documents of {on_one_line(name)} cut to fit", cut
        if num_truncated := self._counts["num_truncated"]:
            yield "rows cut to fit, last turns left out", f"{num_truncated:,}"

    def source_facts(self) -> Iterator[tuple[str, str, str]]:
        """Yields the name, the kept rows and the trained tokens of each data set, if there are several."""
        if len(self.sources) > 1:
            for number, count in sorted(self.sources.items()):
                kept = _of(count.num_kept, count.num_rows)
                tokens = _of(count.num_trained_tokens, count.num_tokens)
                yield on_one_line(self._source_name(number)), kept, tokens

    def pack_facts(self) -> Iterator[tuple[str, str]]:
        """Yields (name, value) for each count of packs."""
        yield from self.packing.facts()
        if self.packing.num_packs:
            yield "trained tokens in packs", _of(self.pack_roles.num_trained_tokens, self.pack_roles.num_tokens)

    def as_table(self) -> str:
        """Returns the audit as lines of text without control characters, for a terminal."""
        sources = [(name, f"{kept} rows kept, {tokens} tokens trained") for name, kept, tokens in self.source_facts()]
        facts = [*self.row_facts(), *sources, *self.pack_facts()]
        lines = [f"{name:<40} {value}" for name, value in facts]
        if drops := self.drops():
            lines += ["", "rows dropped"]
            lines += [f"  {on_one_line(reason):<30} {count:>9,}   first: {first}" for reason, count, first in drops]
        roles = self.row_roles if self.num_kept else self.pack_roles
        if roles.num_tokens:
            lines += ["", f"{'role':<14} {'tokens':>14} {'trained':>14}"]
            lines += [
                f"{role_name(r):<14} {roles.tokens[r]:>14,} {roles.trained[r]:>14,}" for r in sorted(roles.tokens)
            ]
        if buckets := self.lengths.buckets():
            highest = max(count for _, _, count in buckets)
            quantiles = ", ".join(f"{name} {length:,}" for name, length in self.lengths.quantiles().items())
            lines += ["", f"conversation lengths: {quantiles}"]
            for low, high, count in buckets:
                bar = "█" * round(_BAR_COLUMNS * count / highest) or "▏" * bool(count)
                lines.append(f"{low:>9,} to {high:>9,} {count:>9,} {bar}")
        verdict = [f"PROBLEM: {problem}" for problem in self.problems] or [f"{self.acquittal} {self.assurance}"]
        return "\n".join([*lines, "", *verdict]) + "\n"

    def _source_name(self, number: int) -> str:
        return self.source_names[number] if number < len(self.source_names) else f"data set {number}"


def _of(count: int, total: int) -> str:
    """Returns "3 of 4 (75.0%)". The percentage is rounded down, so that only all of them give 100%."""
    return f"{count:,} of {total:,} ({1000 * count // max(total, 1) / 10:.1f}%)"


def audited_rows(preparation: Preparation, masks: MaskCount) -> Iterator[AuditedRow]:
    """Yields every row in file order, and adds the comparison of the first masks to `masks`.

    Raises:
        DataError: If the ids of a conversation differ from those of apply_chat_template, or those of a document from
            `tokenizer(text)`. Pretokenized rows are not compared.
    """
    eos_id: Any = preparation.chat_tokenizer.tokenizer.eos_token_id
    for key in preparation.all_keys():
        tokenized = preparation.tokenize(key)
        if isinstance(tokenized, Dropped):
            yield tokenized
            continue
        parsed = preparation.parse(key)
        if not isinstance(parsed, TokenizedConversation) and not tokenized.num_truncated_turns:
            require_reference_ids(preparation.chat_tokenizer, parsed, tokenized)
            if masks.num_rows < _NUM_MASKS_COMPARED:
                stop_ids = {eos_id, *tokenized.stop_ids}
                labeled = preparation.label(tokenized)
                masks.add(preparation.chat_tokenizer, preparation.trained, parsed, tokenized, labeled, stop_ids)
        yield tokenized, preparation.label(tokenized)
