"""The checks of a trainer on several ranks: the checks of one process on each, and the checks between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from sftcheck.ranks import part_checks, rank_checks, rank_rows
from sftcheck.ranks.exchange import Exchange, fields_of, finding_of, time_limit_of_trainer
from sftcheck.ranks.rank_subject import RankSubject
from sftcheck.restore import restore_after
from sftron.checks.report import Check, Finding, Report, Rule

_ADDED = {
    "ids": Rule(
        "rows",
        rank_rows.rows,
        proves="Each row of the data is computed once in an epoch, by one rank or in parts by those that share it.",
    ),
    "positions": Rule(
        "across ranks",
        part_checks.across_ranks,
        proves="No conversation sees another, neither on its own rank nor on another, and no token those after it.",
    ),
    "truncation": Rule(
        "rotations",
        part_checks.rotations,
        proves="Each part of a row has the positions and the rotations that its tokens have in the whole row.",
    ),
    "loss": Rule(
        "denominators",
        rank_checks.denominators,
        proves="The loss is divided on every rank by the number of labels of all ranks.",
    ),
    "padding": Rule(
        "borders",
        part_checks.borders,
        proves="Each label of a row is trained by the token before it, also where a part of the row ends.",
    ),
    "adapters": Rule(
        "replicas",
        rank_checks.replicas,
        proves="What every rank holds is the same on all of them, before the first step and after it.",
    ),
}
"""The rules between ranks, each by the rule of one process that it precedes."""
_REPLACED = {
    "loss": Rule(
        "loss",
        rank_checks.loss,
        proves=(
            "The mean over the ranks of what a step returns is one ratio: the loss of all trained tokens, by their "
            "number."
        ),
    ),
    "gradients": Rule(
        "gradients",
        rank_checks.gradients,
        proves="After the trainer's own reduction, every rank has the gradients that one process computes of all rows.",
    ),
}
_LEAD_S = 0.5
_REQUIRED = ("rows", "loss", "gradients", "replicas")


def on_first_rank(measure: Callable[[Any], Finding]) -> Callable[[RankSubject], Finding]:
    """Returns a check that rank 0 makes alone, as it alone saves."""

    def check(subject: RankSubject) -> Finding:
        return finding_of(subject.exchange.of_first("the finding of rank 0", lambda: fields_of(measure(subject))))

    return check


def join_findings(findings: Sequence[Finding]) -> Finding:
    """Joins the findings of all ranks: fails if one of them fails, and says which."""
    if len({(each.passed, each.measured, each.faults) for each in findings}) == 1:
        return findings[0]
    failed = [rank for rank, each in enumerate(findings) if each.passed is False]
    raised = [rank for rank, each in enumerate(findings) if each.raised]
    measured = [rank for rank, each in enumerate(findings) if each.passed is not None]
    named = failed or raised
    shown = (named or measured or [0])[0]
    first = findings[shown]
    if named:
        words = "; ".join(f"rank {rank}: {findings[rank].measured}" for rank in named)
    elif len(measured) == len(findings):
        words = f"{first.measured} (rank {shown}; the others pass too)"
    elif measured:
        words = f"{first.measured} (rank {shown}; {len(measured)} of {len(findings)} ranks measured it)"
    else:
        words = f"rank {shown}: {first.measured}"
    detail = tuple(f"rank {rank}: {line}" for rank in named or [shown] for line in findings[rank].detail if line)
    faults = tuple(dict.fromkeys(fault for rank in named or [shown] for fault in findings[rank].faults))
    return replace(first, measured=words, detail=detail, faults=faults)


def num_ranks(trainer: Any) -> int:
    is_started = dist.is_available() and dist.is_initialized()
    return max(int(trainer.args.world_size), dist.get_world_size() if is_started else 1)


def leave_together(time_limit: float) -> None:
    """Lets the other ranks wait until rank 0 has printed and written, as torchrun ends all when the first one ends."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    store, key = distributed_c10d._get_default_store(), "sftron rank 0 has written"
    if dist.get_rank() == 0:
        store.set(key, "")
        time.sleep(_LEAD_S)  # the store may be in this process
    else:
        with suppress(RuntimeError):
            store.wait([key], timedelta(seconds=time_limit))


def rules_of_ranks(rules: Sequence[Rule]) -> list[Rule]:
    """Returns the rules of one process with those between ranks."""
    found = list[Rule]()
    for rule in rules:
        if rule.name in _ADDED:
            found.append(_ADDED[rule.name])
        if rule.name == "generation":
            rule = replace(rule, measure=on_first_rank(rule.measure))
        found.append(_REPLACED.get(rule.name, rule))
    return found


def verify_on_ranks(
    trainer: Any,
    tokenizer: Any,
    conversations: Sequence[Any] | None,
    trained_roles: str,
    rules: Sequence[Rule],
    required: Sequence[str],
    time_limit: float,
    on_start: Callable[[str, dict[str, str]], None] | None,
    on_check: Callable[[Check], None] | None,
) -> Report:
    """Returns the report of all ranks, the same on each of them; `verify_trainer` describes the arguments.

    Raises ValueError if the trainer cannot be checked.
    """
    exchange = Exchange(time_limit)
    is_main, checks = exchange.rank == 0, list[Check]()
    try:
        with restore_after(trainer), time_limit_of_trainer(time_limit):
            subject = exchange.on_all(lambda: RankSubject(trainer, tokenizer, conversations, trained_roles, exchange))
            facts = exchange.on_all(lambda: subject.facts)
            title = f"{type(trainer).__name__}: before it trains, on {exchange.world_size} ranks"
            if is_main and on_start is not None:
                on_start(title, facts)
            for rule in rules_of_ranks(rules):
                started = time.perf_counter()
                found = join_findings(exchange.row(rule.name, lambda rule=rule: rule.measure(subject)))
                checks.append(Check.of(rule, found, time.perf_counter() - started, subject.library))
                if is_main and on_check is not None:
                    on_check(checks[-1])
    finally:
        exchange.close()
    names = (*required, *_REQUIRED)
    return Report(title, facts, tuple(checks), names, _no_script)


def _no_script(_name: str | None) -> str:
    raise ValueError("a program is made of a trainer in one process; check it without torchrun")
