"""What an audit of a run found, for people and for machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sftron.visible_text import visible_text


@dataclass(frozen=True, slots=True)
class Check:
    """One law: whether it holds, and what was found; where it does not hold, by name."""

    name: str
    passed: bool
    found: str


@dataclass(frozen=True, slots=True)
class EpochCount:
    """What the ledger has of one epoch of a data set. rows: that it has; missing: that the ledger lacks; twice: dealt
    more often than once. is_due: every row of it must have been dealt."""

    dataset: str
    epoch: int
    rows: int
    trained: int
    dropped: dict[str, int]
    missing: int
    twice: int
    is_due: bool

    @property
    def verdict(self) -> str:
        if self.twice or (self.is_due and self.missing):
            return "FAIL"
        return "unfinished" if self.missing else "whole"


@dataclass(frozen=True, slots=True)
class NamedRow:
    """A row of a step. words: how the conversation begins; reason: why it was dropped, or None."""

    pack: int
    dataset: str
    row: int
    epoch: int
    location: str
    words: str
    reason: str | None


@dataclass(frozen=True, slots=True)
class NamedStep:
    """The rows of a step; loss and grad_norm as metrics.jsonl has them."""

    step: int
    loss: float | None
    grad_norm: float | None
    skipped: str | None
    rows: tuple[NamedRow, ...]

    def as_text(self) -> str:
        skipped = f"; no update was made: {self.skipped}" if self.skipped else ""
        head = f"step {self.step}: loss {self.loss}, grad norm {self.grad_norm}{skipped}"
        lines = [
            (
                f"pack {row.pack}",
                row.location,
                f"epoch {row.epoch}",
                f"dropped: {row.reason}" if row.reason else visible_text(row.words),
            )
            for row in self.rows
        ]
        return "\n".join([head, *_aligned(lines)])

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class RunAudit:
    run: str
    checks: tuple[Check, ...]
    epochs: tuple[EpochCount, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        epochs = [{**asdict(each), "verdict": each.verdict} for each in self.epochs]
        return {"run": self.run, "passed": self.passed, "checks": [asdict(c) for c in self.checks], "epochs": epochs}

    def as_text(self) -> str:
        """For people: a line a check, then a line an epoch and data set."""
        lines = [("", "check", "found")]
        lines += [("PASS" if check.passed else "FAIL", check.name, check.found) for check in self.checks]
        epochs = [("epoch", "data set", "rows", "trained", "dropped", "missing", "twice", "")]
        epochs += [
            (
                str(each.epoch),
                each.dataset,
                str(each.rows),
                str(each.trained),
                ", ".join(f"{count} {reason}" for reason, count in each.dropped.items()) or "0",
                str(each.missing),
                str(each.twice),
                each.verdict,
            )
            for each in self.epochs
        ]
        return "\n".join([self.run, "", *_aligned(lines), "", *_aligned(epochs)])


def _aligned(lines: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
