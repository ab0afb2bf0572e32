"""Looking at the data before and while it is trained on: packs to read, an audit to believe, the problems found."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from sftron.data.labels import Targets
from sftron.data.mask_check import MaskCount
from sftron.data.types import Pack
from sftron.report.audit import Audit, AuditedRow
from sftron.report.html import report_page
from sftron.report.packing_count import PackingCount
from sftron.report.pieces import Decode
from sftron.report.terminal import pack_as_text


@dataclass(frozen=True, slots=True)
class Inspection:
    """Some packs of a run and the audit of its data. Not empty `problems` mean: do not train on this."""

    packs: tuple[Pack, ...]
    audit: Audit
    decode: Decode
    title: str

    @property
    def problems(self) -> list[str]:
        return self.audit.problems

    def as_text(self, *, color: bool, width: int = 100, max_tokens: int | None = 1000) -> str:
        """The packs, then the audit, for a terminal; `color`, `width` and `max_tokens` as in `pack_as_text`."""
        packs = [
            pack_as_text(
                pack,
                self.decode,
                color=color,
                width=width,
                max_tokens=max_tokens,
                source_names=self.audit.source_names,
            )
            for pack in self.packs
        ]
        return "\n".join([*packs, self.audit.as_table()])

    def as_dict(self) -> dict[str, Any]:
        return self.audit.as_dict()

    def write_html(self, path: Path) -> None:
        """Write one page that needs no other file and no network."""
        path.write_text(report_page(self.packs, self.audit, self.decode, title=self.title), encoding="utf-8")

    def write_json(self, path: Path) -> None:
        path.write_text(json.dumps(self.as_dict(), indent=2) + "\n", encoding="utf-8")


def inspect_packs(
    packs: Iterable[Pack],
    rows: Iterable[AuditedRow],
    decode: Decode,
    *,
    max_rows: int | None = None,
    num_shown: int | None = None,
    packing: PackingCount | None = None,
    source_names: Sequence[str] = (),
    targets: Targets | None = None,
    masks: MaskCount | None = None,
    title: str = "What the model is trained on",
) -> Inspection:
    """Audit rows and packs; the first `num_shown` packs are shown, or all of them.

    rows: what became of each row, in order; read until they end, or until `max_rows` of them and one more, which tells
        whether the audit is partial. They may be empty: then the audit is of the packs alone.
    decode: see `pieces.Decode`.
    packing: counts the packs; None makes a plain one.
    source_names: a name for each entry of `data.datasets`. targets: what the run means to train.
    masks: what reading `rows` counts of how they compare with transformers' renderings.
    """
    audit = Audit(tuple(source_names), targets, packing, masks)
    remaining = iter(rows)
    for row in islice(remaining, max_rows):
        audit.add_row(row)
    audit.is_partial = max_rows is not None and next(remaining, None) is not None
    shown = []
    for number, pack in enumerate(packs):
        audit.add_pack(pack)
        if num_shown is None or number < num_shown:
            shown.append(pack)
    return Inspection(tuple(shown), audit, decode, title)
