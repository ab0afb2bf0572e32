"""verify_trainer: whether a run of TRL, transformers or another trainer built on them is silently wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from sftcheck.checks import data_checks, label_checks, model_checks, saved_checks
from sftcheck.program.rebuild import Materials, collect
from sftcheck.program.search import script_of
from sftcheck.ranks.on_ranks import num_ranks, verify_on_ranks
from sftcheck.restore import restore_after
from sftcheck.trainer.recording import require_checkable
from sftcheck.trainer.trainer_subject import TrainerSubject
from sftron.checks.report import Check, Report, Rule, measure_all

RULES = (
    Rule(
        "ids",
        data_checks.ids,
        proves="Each document has the ids that the tokenizer's own template gives for its row, with one beginning.",
    ),
    Rule(
        "trained tokens",
        label_checks.trained_tokens,
        proves="What is trained is what the model itself has to write; each label is the token at the same index.",
    ),
    Rule(
        "stop tokens",
        label_checks.stop_tokens,
        proves="Each answer that is whole trains the token that ends it, so the model learns to stop there.",
    ),
    Rule(
        "isolation",
        model_checks.isolation,
        proves="No conversation of a batch sees another, with the arguments that the model is really called with.",
    ),
    Rule(
        "positions",
        data_checks.positions,
        proves="Positions restart with each document, and no document's first token is predicted from its neighbor.",
    ),
    Rule(
        "truncation",
        data_checks.truncation,
        proves=(
            "No answer is cut off, no conversation loses its beginning, and no row is dropped, skipped or untrained."
        ),
    ),
    Rule(
        "loss",
        model_checks.loss,
        proves="The loss of a step, or of an evaluation, is one ratio: the sum of its token losses by their number.",
    ),
    Rule(
        "gradients",
        model_checks.gradients,
        proves="The steps of one accumulation leave the gradients of their loss in each trained tensor, and no others.",
    ),
    Rule(
        "padding",
        model_checks.padding,
        proves="Padding is neither trained, nor attended to, nor counted.",
    ),
    Rule(
        "forgery",
        data_checks.forgery,
        proves="Text that spells a control token stays plain text.",
    ),
    Rule(
        "adapters",
        saved_checks.adapters,
        proves=(
            "Each trainable tensor moves within two steps, no frozen one does, and no token without training is frozen."
        ),
    ),
    Rule(
        "generation",
        saved_checks.generation,
        proves=(
            "The saved folder stops where the model is trained to stop, and its template gives the ids that are "
            "trained."
        ),
    ),
)
"""docs/verify-any-trainer.md describes the method of each. Each failed finding has its own remedy."""

REQUIRED = ("ids", "trained tokens", "stop tokens", "isolation", "truncation")
"""The checks that must be measured for a report to pass."""


def verify_trainer(
    trainer: Any,
    conversations: Sequence[Any] | None = None,
    trained_roles: str = "assistant",
    *,
    time_limit: float = 600,
    on_start: Callable[[str, dict[str, str]], None] | None = None,
    on_check: Callable[[Check], None] | None = None,
) -> Report:
    """Checks a trainer before `train()`, on its own batches and model, and leaves it as it was.

    On several ranks, each of them calls this function and returns the same report.

    Args:
        trainer: A `transformers.Trainer`, or one of its subclasses.
        conversations: The conversations of its data set, as lists of messages or as rows, if it holds ids alone. By
            default they come from its rows, or are read from the ids.
        trained_roles: "assistant", if answers are meant to be trained; "all" for a loss over everything.
        time_limit: How long a rank waits for another one, in seconds.
        on_start: Called with the title and the facts before the first check, on rank 0.
        on_check: Called with each row as soon as it is measured, on rank 0.

    Raises:
        ValueError: The trainer cannot be checked; the message has the remedy.
    """
    tokenizer = require_checkable(trainer, trained_roles)
    if num_ranks(trainer) > 1:
        return verify_on_ranks(
            trainer, tokenizer, conversations, trained_roles, RULES, REQUIRED, time_limit, on_start, on_check
        )
    with restore_after(trainer):
        subject = TrainerSubject(trainer, tokenizer, conversations, trained_roles)
        title = f"{type(trainer).__name__}: before it trains"
        report = measure_all(title, RULES, subject, REQUIRED, on_start=on_start, on_check=on_check)
        materials = _materials(subject, report.checks)
    return replace(report, make_script=partial(script_of, materials, report.checks))


def _materials(subject: TrainerSubject, checks: Sequence[Check]) -> Materials | str:
    """Returns the parts of the trainer for its scripts, or why there are none."""
    try:
        return collect(subject, [check.name for check in checks])
    except Exception as error:  # the report does not depend on it
        return f"the trainer cannot be written as a program: {type(error).__name__}: {error}"
