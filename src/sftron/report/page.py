"""Packs together with their audit, for a terminal and as a page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

from sftron.data.types import IGNORE_INDEX, Pack, Role
from sftron.report.audit import Audit, AuditedRow
from sftron.report.html import render
from sftron.report.shown import (
    Locate,
    ShownConversation,
    key_text,
    num_attention_documents,
    pack_trained_tokens,
    shown_conversations,
)
from sftron.report.terminal import pack_as_text
from sftron.report.tokens import Decode, role_name
from sftron.visible_text import counted


@dataclass(frozen=True, slots=True)
class Inspection:
    """Some packs of a run and the audit of its data. If `problems` is not empty, the data is unfit for training."""

    packs: tuple[Pack, ...]
    audit: Audit
    decode: Decode
    title: str

    @property
    def problems(self) -> list[str]:
        return self.audit.problems

    def as_text(self, *, color: bool, max_tokens: int | None = 1000) -> str:
        """Returns the packs, then the audit, for a terminal; `pack_as_text` describes the arguments."""
        packs = [
            pack_as_text(pack, self.decode, color=color, max_tokens=max_tokens, locate=self.audit.locate)
            for pack in self.packs
        ]
        return "\n".join([*packs, self.audit.as_table()])

    def as_html(self) -> str:
        """Returns a self-contained HTML page that needs neither other files nor a network."""
        shown = shown_packs(self.packs, self.decode, self.audit.locate)
        return render("samples.html.jinja", title=self.title, audit=self.audit, shown=shown)

    def __repr__(self) -> str:
        counts = f"{counted(len(self.packs), 'packs')} shown, {counted(len(self.problems), 'problems')}"
        return f"{type(self).__name__}({self.title!r}, {counts})"


def inspect_packs(
    packs: Iterable[Pack],
    rows: Iterable[AuditedRow],
    decode: Decode,
    *,
    audit: Audit | None = None,
    max_rows: int | None = None,
    num_shown: int | None = None,
    title: str = "What the model is trained on",
) -> Inspection:
    """Audits rows and packs, and shows the first `num_shown` packs, or all of them.

    Args:
        rows: The result of each row, in order. At most `max_rows` are audited; one more is read to determine whether
            the audit is partial. Without rows, the audit covers only the packs.
        audit: An empty audit to add the rows and packs to; None creates one without options.
    """
    audit, remaining = audit or Audit(), iter(rows)
    for row in islice(remaining, max_rows):
        audit.add_row(row)
    audit.is_partial = max_rows is not None and next(remaining, None) is not None
    shown = []
    for number, pack in enumerate(packs):
        audit.add_pack(pack)
        if num_shown is None or number < num_shown:
            shown.append(pack)
    return Inspection(tuple(shown), audit, decode, title)


def shown_packs(packs: Sequence[Pack], decode: Decode, locate: Locate) -> dict[str, Any]:
    """Returns the values for packs.html.jinja: the roles of the legend, and each pack with its conversations.

    A token takes about 30 bytes of the page instead of 120 with a title attribute. Each span of text is an <i> without
    attributes, and the numbers of all tokens are in one block of JSON, in which pack.js finds a span's numbers by
    counting.
    """
    return {
        "roles": sorted({Role(role) for pack in packs for role in pack.role_ids[: pack.num_tokens].tolist()}),
        "packs": [_shown_pack(pack, decode, locate) for pack in packs],
    }


def _shown_pack(pack: Pack, decode: Decode, locate: Locate) -> dict[str, Any]:
    conversations = list(shown_conversations(pack, decode))
    num_documents = num_attention_documents(pack)
    isolation = (
        "attention stays inside each conversation"
        if num_documents == len(pack.keys)
        else f"attention sees {num_documents:,} document{'s' * (num_documents != 1)}, across conversations"
    )
    return {
        "pack": pack,
        "isolation": isolation,
        "conversations": [(each, key_text(each.key, locate)) for each in conversations],
        "trained": list(equal_spans(pack_trained_tokens(pack).tolist())),
        "numbers": _token_numbers(pack, conversations),
    }


def equal_spans(values: Sequence[Any]) -> Iterator[tuple[Any, int, int]]:
    """Yields (value, start, length) for each maximal span of equal adjacent values."""
    start = 0
    for value, group in groupby(values):
        length = len(list(group))
        yield value, start, length
        start += length


def _token_numbers(pack: Pack, conversations: Sequence[ShownConversation]) -> dict[str, Any]:
    """Returns the tooltips' values, indexed by token; `spans` has the number of tokens of each <i>, in page order."""
    real = slice(0, pack.num_tokens)
    weights = pack.loss_weights[real].tolist()
    return {
        "ids": pack.input_ids[real].tolist(),
        "labels": pack.labels[real].tolist(),
        "weights": [float(f"{weight:.4g}") if weight % 1 else int(weight) for weight in weights],
        "positions": pack.position_ids[real].tolist(),
        "roles": pack.role_ids[real].tolist(),
        "documents": pack.cu_seqlens.tolist(),
        "conversations": pack.conversation_bounds.tolist(),
        "spans": [span.end - span.start for each in conversations for span in each.spans],
        "role_names": [role_name(role) for role in Role],
        "ignore_index": IGNORE_INDEX,
    }
