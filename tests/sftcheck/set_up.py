"""The set-ups of a zoo: each names the fault that its report must find, and the rows in which it may show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sftcheck.faults import Fault


@dataclass(frozen=True, kw_only=True)
class SetUp:
    """A trainer or a loop that is broken, or sound, as its docstring states.

    Attributes:
        fault: What the report must find in one of the rows of `fails`; None if the set-up is sound.
        fails: The rows that must FAIL (`a|b`: one of the two).
        may_fail: Those that may fail as a consequence.
        proof: Measures without sftron that the set-up is what it claims to be.
        ranks: The number of processes.
        arguments: The keyword arguments of verify_trainer.
    """

    make: Callable[[], Any]
    fault: Fault | None
    fails: tuple[str, ...]
    may_fail: tuple[str, ...]
    proof: Callable[[Any], bool]
    ranks: int = 1
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.make.__name__

    @property
    def why(self) -> str:
        return " ".join((self.make.__doc__ or "").split())

    def problem(self, report: Any) -> str:
        """Returns what is not as expected in the report, or nothing."""
        failed = {row.name: row for row in report.checks if row.status == "FAIL"}
        wanted = [set(rows.split("|")) for rows in self.fails]
        problems = [f"{' and '.join(sorted(rows))} did not fail" for rows in wanted if not rows & failed.keys()]
        allowed = set().union(*wanted, self.may_fail)
        problems += [f"{name} failed: {failed[name].measured}" for name in sorted(failed.keys() - allowed)]
        problems += [f"{row.name} raised {row.measured}" for row in report.checks if row.raised]
        found = {fault for name in failed.keys() & set().union(*wanted) for fault in failed[name].faults}
        if self.fault is not None and self.fault.name not in found:
            problems.append(f"{self.fault.name} was not found, but {', '.join(sorted(found)) or 'nothing'}")
        if report.passed == bool(self.fails):
            problems.append(report.verdict)
        return "; ".join(problems)


class Zoo(dict[str, SetUp]):
    """Set-ups by name. Its decorators add the function that makes one."""

    def broken(
        self,
        fault: Fault | None,
        *fails: str,
        may: str = "",
        proof: Callable[[Any], bool],
        ranks: int = 1,
        **arguments: Any,
    ) -> Callable[..., Any]:
        def add(make: Callable[[], Any]) -> Callable[[], Any]:
            self[make.__name__] = SetUp(
                make=make,
                fault=fault,
                fails=fails,
                may_fail=tuple(name.strip() for name in may.split(",") if name),
                proof=proof,
                ranks=ranks,
                arguments=arguments,
            )
            return make

        return add

    def sound(self, proof: Callable[[Any], bool], ranks: int = 1, **arguments: Any) -> Callable[..., Any]:
        return self.broken(None, proof=proof, ranks=ranks, **arguments)
