"""Readable packs together with an audit of their data: the trained tokens, and problems of the data."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from sftron.data.types import Pack
from sftron.report.audit import Audit, AuditedRow
from sftron.report.page import render, shown_packs
from sftron.report.terminal import pack_as_text
from sftron.report.tokens import Decode


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
        """Returns the packs, then the audit, for a terminal; the arguments are those of `pack_as_text`."""
        names = self.audit.source_names
        packs = [
            pack_as_text(pack, self.decode, color=color, max_tokens=max_tokens, source_names=names)
            for pack in self.packs
        ]
        return "\n".join([*packs, self.audit.as_table()])

    def as_html(self) -> str:
        """Returns a self-contained HTML page that needs neither other files nor a network."""
        shown = shown_packs(self.packs, self.decode, self.audit.source_names)
        return render("samples.html.jinja", title=self.title, audit=self.audit, shown=shown)

    def write_html(self, path: Path) -> None:
        path.write_text(self.as_html(), encoding="utf-8")

    def write_json(self, path: Path) -> None:
        path.write_text(json.dumps(self.audit.as_dict(), indent=2) + "\n", encoding="utf-8")


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
        audit: An audit without rows and packs, which are added to it; None creates one without options.
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
