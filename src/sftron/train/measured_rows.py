"""The lengths of a run's rows, measured once by all ranks together and kept in the run directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sftron import __version__
from sftron.checkpoint.atomic import main_or_raise
from sftron.data.lanes.row_lengths import RowLengths, measure_rows
from sftron.train import console
from sftron.train.ledger import digest
from sftron.train.plan import RunPlan

_LONG_ENOUGH_TO_SAY = 20_000


def measure_once(plan: RunPlan, file: Path) -> dict[str, Any] | None:
    """Gives a planned dataset the lengths of its rows: those in `file`, or, where these are of other data or settings,
    measured now, each rank its part. Every rank calls this, once all are known to have the same data.

    Returns what `file` has to hold for the next start; None where it does, or nothing is to be measured.

    Raises ValueError on all ranks for a bad row on one.
    """
    dataset, ranks, num_rows = plan.dataset, plan.ranks, plan.preparation.num_rows
    if not dataset.is_planned or num_rows is None:
        return None
    fingerprint = digest({**plan.fingerprint, "sftron": __version__})
    rows, is_known = main_or_raise(ranks, lambda: _read(file, fingerprint, num_rows)), True
    if rows is None:
        is_known = False
        if num_rows >= _LONG_ENOUGH_TO_SAY:
            console.say(f"measuring  {num_rows:,} rows, once, so that packs are full to the end of an epoch")
        part = range(ranks.dp_rank, num_rows, ranks.dp_world_size)
        measured = ranks.together(lambda: measure_rows(plan.preparation, part))
        rows = [0] * num_rows
        for rank, each in enumerate(ranks.gather({"rows": measured})):
            rows[rank :: ranks.dp_world_size] = each["rows"]
    dataset.row_lengths = RowLengths.of(plan.preparation, rows)
    return None if is_known else {"fingerprint": fingerprint, "rows": rows}


def _read(file: Path, fingerprint: str, num_rows: int) -> list[int | str] | None:
    """The rows of `file`, if it is whole and of this data; a row that is not what it says is found when it is read."""
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        rows = kept["rows"] if kept["fingerprint"] == fingerprint else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not isinstance(rows, list) or len(rows) != num_rows:
        return None
    return rows if all(isinstance(row, str) or (type(row) is int and 0 < row < 2**31) for row in rows) else None
