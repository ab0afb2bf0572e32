"""The report of `check`, `verify`, `verify-trainer` and `audit`: its checks, their rules, and its table."""

from __future__ import annotations

import hashlib
import json
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from sftron.user_code import place_of

TRAINING, EVALUATION = "training", "evaluation"
"""The parts of a trainer's data; each is checked separately."""


class NotMeasuredError(ValueError):
    """There is nothing to measure. The table shows the message as the reason and never counts it as a pass."""


@dataclass(frozen=True, slots=True)
class Check:
    """One row of a report.

    Attributes:
        passed: Whether the check passed; None if nothing was measured, and `measured` is then the reason.
        detail: Lines shown below a failed row, and on the page.
        seconds: The duration of the check; None if it is not measured.
        proves: The meaning of a pass.
        remedy: The meaning of a failure for training, and what fixes it; empty unless the check failed.
        raised: Whether an exception ended the check. It then proves nothing, and its report does not pass.
        value: The measured value, if it is a number.
        faults: The names of the faults found; the remedy belongs to the first.
        part: "evaluation" if only the evaluation's batches have the fault, else "training".
    """

    name: str
    passed: bool | None
    measured: str
    allowed: str = ""
    detail: tuple[str, ...] = ()
    seconds: float | None = None
    proves: str = ""
    remedy: str = ""
    raised: bool = False
    value: float | None = None
    faults: tuple[str, ...] = ()
    part: str = TRAINING

    @classmethod
    def of(cls, rule: Rule, found: Finding, seconds: float, library: str = "") -> Check:
        """Returns the row for a rule's finding in a trainer of this library."""
        has_failed = found.passed is False
        return cls(
            rule.name,
            found.passed,
            found.measured,
            found.allowed,
            detail=tuple(filter(None, found.detail)),
            seconds=seconds,
            proves=rule.proves,
            remedy=(found.remedy(library) or rule.remedy) if has_failed else "",
            raised=found.raised,
            value=found.value,
            faults=tuple(each.name for each in found.faults) if has_failed else (),
            part=found.part,
        )

    @property
    def status(self) -> str:
        return {True: "PASS", False: "FAIL", None: "SKIP"}[self.passed]


class Fault(Protocol):
    """What a check may find wrong; sftcheck/faults.py has the faults of trainers."""

    @property
    def name(self) -> str: ...

    def remedy(self, library: str, values: Mapping[str, Any]) -> str: ...


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a rule; `Check` describes the fields. Empty lines of the detail are left out."""

    passed: bool | None
    measured: str
    allowed: str = ""
    detail: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()
    """The faults found, with the one whose remedy is shown first; without faults, the rule's remedy is shown."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """The values for the placeholders in the first fault's texts."""
    part: str = TRAINING
    raised: bool = False
    value: float | None = None

    def remedy(self, library: str) -> str:
        """Returns the meaning and the remedy of the first fault in this library; "" without faults."""
        if not self.faults:
            return ""
        where = "In the evaluation's batches: " if self.part == EVALUATION else ""
        return where + self.faults[0].remedy(library, self.values)

    @classmethod
    def of_exception(cls, error: Exception, ended: str = "not measured:") -> Finding:
        """Builds the finding of a check that raised: the error's class, its message's first line, and its place."""
        (first, *_) = str(error).strip().splitlines() or [""]
        measured = f"{ended} {type(error).__name__}: {first} ({place_of(error)})"
        detail = tuple("".join(traceback.format_exception(error)).splitlines()[-8:])
        return cls(None, measured, detail=detail, raised=True)


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the table before it is measured.

    Attributes:
        measure: Measures the subject; may raise NotMeasuredError.
        proves: The law that holds if the check passes.
        remedy: The meaning of a failure for training, and what fixes it, unless the finding has its own.
    """

    name: str
    measure: Callable[[Any], Finding]
    proves: str = ""
    remedy: str = ""


def carry_out(rules: Sequence[Rule], subject: object, *, is_own_code: bool = False) -> Iterator[Check]:
    """Yields each row as soon as it is measured.

    Args:
        is_own_code: Whether the rules run only sftron's own code, so that an exception is a failure. In another
            library's trainer, an exception may have any cause and proves nothing.
    """
    for rule in rules:
        started = time.perf_counter()
        try:
            found = rule.measure(subject)
        except NotMeasuredError as error:
            found = Finding(None, str(error))
        except Exception as error:
            if is_own_code:
                found = replace(Finding.of_exception(error, "raised"), passed=False, allowed="no error", raised=False)
            else:
                found = Finding.of_exception(error)
        yield Check.of(rule, found, time.perf_counter() - started, getattr(subject, "library", ""))


@dataclass(frozen=True, slots=True)
class Report:
    """All rows of the table; `facts` describe the subject of the checks by name."""

    title: str
    facts: dict[str, Any]
    checks: tuple[Check, ...]
    required: tuple[str, ...] = ()
    """The names of the checks that must be measured for `passed`."""
    make_script: Callable[[str | None], str] | None = field(default=None, repr=False, compare=False)
    """Makes the program for a failed row; None where the report is not of a trainer."""

    def script(self, name: str | None = None) -> str:
        """Returns a program without sftron that shows the fault of a failed row, by default of the first one.

        The program is minimized by running it repeatedly, and confirmed in its own process. It exits with 1 if the
        fault shows, else with 0.

        Raises:
            ValueError: The row has not failed, or no program could show its fault; the message says why.
        """
        if self.make_script is None:
            raise ValueError("only a report of verify_trainer has programs")
        return self.make_script(name)

    @property
    def card_line(self) -> str:
        """One line for a model card, with a hash of the facts and the rows; a trainer's JSON report contains it."""
        num_passed = sum(check.passed is True for check in self.checks)
        rows = [[check.name, check.status.lower(), check.measured, check.allowed] for check in self.checks]
        content = json.dumps([self.facts, rows], sort_keys=True)
        digest = hashlib.sha256(content.encode()).hexdigest()[:12]
        failed = f"; failed: {', '.join(check.name for check in self.failed)}" if self.failed else ""
        count = f"{self.title}: {num_passed} of {len(self.checks)} checks passed{failed}"
        return f"{count} ({self.facts.get('versions', '')}; {digest})"

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if check.passed is False]

    @property
    def missing(self) -> list[str]:
        """The names of unmeasured checks that keep the report from passing: required ones, and ones that raised."""
        open_checks = [check for check in self.checks if check.passed is None]
        return [check.name for check in open_checks if check.raised or check.name in self.required]

    @property
    def passed(self) -> bool:
        """Whether no check failed, none raised, every required one was measured, and at least one passed."""
        return not self.failed and not self.missing and any(check.passed for check in self.checks)

    @property
    def verdict(self) -> str:
        """The result of all checks in one sentence."""
        num_passed = sum(check.passed is True for check in self.checks)
        if self.failed:
            names = ", ".join(check.name for check in self.failed)
            return f"Do not train yet: {len(self.failed)} of {len(self.checks)} checks failed: {names}."
        if not num_passed:
            return "Nothing was measured."
        if self.missing:
            return f"Not passed: nothing failed, but not measured: {', '.join(self.missing)}."
        seconds = sum(check.seconds or 0 for check in self.checks)
        duration = f"{seconds:.0f} s" if seconds < 100 else f"{seconds // 60:.0f} min {seconds % 60:.0f} s"
        count = f"All {num_passed}" if num_passed == len(self.checks) else f"{num_passed} of {len(self.checks)}"
        return f"{count} checks passed in {duration}."

    @property
    def not_measured(self) -> str:
        """A sentence after the verdict that names the checks that were not measured; empty if all were."""
        names = [check.name for check in self.checks if check.passed is None]
        return f"Not measured: {', '.join(names)}." if names else ""

    def as_dict(self) -> dict[str, Any]:
        checks = [{"status": check.status.lower(), **asdict(check)} for check in self.checks]
        found = {"passed": self.passed, "title": self.title, "facts": self.facts, "checks": checks}
        return found if self.make_script is None else {**found, "card_line": self.card_line}

    def __str__(self) -> str:
        return self.as_text()

    def as_text(self) -> str:
        """Returns the title, one aligned line per check without its duration, and the details and remedies."""
        rows = [("", "check", "measured", "allowed")]
        rows += [(check.status, check.name, check.measured, check.allowed) for check in self.checks]
        table = aligned(rows if any(check.allowed for check in self.checks) else [row[:3] for row in rows])
        lines = [self.title, "", *table]
        for check in self.checks:
            lines += ["", f"{check.name}: {check.remedy}"] if check.passed is False and check.remedy else []
            lines += [f"  {each}" for each in check.detail]
        return "\n".join(lines)


def measure_all(
    title: str,
    rules: Sequence[Rule],
    subject: Any,
    required: tuple[str, ...] = (),
    *,
    is_own_code: bool = False,
    on_start: Callable[[str, dict[str, Any]], None] | None = None,
    on_check: Callable[[Check], None] | None = None,
) -> Report:
    """Measures all rows of a table, and returns its report.

    Args:
        subject: What the rules measure; its `facts` become the report's.
        is_own_code: See `carry_out`.
        on_start: Called with the title and the facts before the first check.
        on_check: Called with each row as soon as it is measured.
    """
    facts, checks = subject.facts, list[Check]()
    if on_start is not None:
        on_start(title, facts)
    for check in carry_out(rules, subject, is_own_code=is_own_code):
        checks.append(check)
        if on_check is not None:
            on_check(check)
    return Report(title, facts, tuple(checks), required)


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Returns one line per row, with each cell padded to the width of its column."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
