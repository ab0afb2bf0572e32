"""For the tests of a training script: one that fails if its trainer is silently wrong.

from sftron.testing import assert_trainer_is_sound

def test_the_trainer_is_sound():
    assert_trainer_is_sound(make_trainer())
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sftcheck.verify_trainer import verify_trainer
from sftron.checks.report import Report


def assert_trainer_is_sound(
    trainer: Any,
    conversations: Sequence[Any] | None = None,
    trained_roles: str = "assistant",
    *,
    with_script: bool = True,
) -> None:
    """Fails unless `verify_trainer` passes the trainer, which takes the same arguments.

    Args:
        with_script: Whether the message has the program of the first failed row, which takes about a minute.

    Raises:
        AssertionError: The verdict, the failed rows with their remedies, and the program, or why there is none.
        ValueError: The trainer cannot be checked.
    """
    __tracebackhide__ = True  # pytest shows the line of the test alone
    report = verify_trainer(trainer, conversations, trained_roles)
    if not report.passed:
        raise AssertionError(_message(report, with_script=with_script))


def _message(report: Report, *, with_script: bool) -> str:
    lines = [report.verdict]
    for check in report.checks:
        if check.passed is False:
            lines += ["", f"{check.name}: {check.measured} (allowed: {check.allowed})", check.remedy]
        elif check.name in report.missing:
            lines += ["", f"{check.name}: not measured: {check.measured}"]
    if report.failed and with_script:
        try:
            lines += ["", "A program without sftron that shows it:", "", report.script()]
        except ValueError as error:
            lines += ["", f"No program shows it: {error}"]
    return "\n".join(lines)
