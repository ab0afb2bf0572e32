"""verify_step: whether a training loop of one's own is silently wrong, without a Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from sftcheck.loop import step_checks
from sftcheck.loop.loop_state import restore_loop_after
from sftcheck.loop.loop_subject import StepSubject, require_checkable
from sftcheck.verify_trainer import REQUIRED
from sftcheck.verify_trainer import RULES as RULES_OF_TRAINERS
from sftron.checks.report import Check, Report, Rule, measure_all

_OWN = (
    Rule(
        "loss",
        step_checks.loss,
        proves=(
            "The loss of a step is one ratio: the sum over all trained tokens of its micro-batches, by their number."
        ),
    ),
    Rule(
        "generation",
        step_checks.generation,
        proves=(
            "The saved folder stops where the model is trained to stop, and its template gives the ids that are "
            "trained."
        ),
    ),
)
RULES = tuple(
    next((own for own in _OWN if own.name == each.name), each) for each in RULES_OF_TRAINERS if each.name != "gradients"
)
"""docs/verify-any-loop.md describes what differs from the rows of verify_trainer."""


def verify_step(
    model: nn.Module,
    batches: Iterable[Any],
    step: Callable[[list[Any]], Any],
    tokenizer: Any,
    conversations: Sequence[Any] | None = None,
    trained_roles: str = "assistant",
    *,
    optimizer: Optimizer | None = None,
    num_micro_batches: int = 2,
    on_start: Callable[[str, dict[str, str]], None] | None = None,
    on_check: Callable[[Check], None] | None = None,
) -> Report:
    """Checks a training loop before it trains, on its own batches, model and loss, and leaves them as they were.

    It reads from the gradient of the loss what is trained, so batches, labels and masks may have any form.

    Args:
        model: The module that the step calls, once for each micro-batch. Its ids are integers [B, T], or [T].
        batches: The micro-batches that the loop's loader gives, in any form; a list, a loader or an iterator.
        step: Takes a list of micro-batches, and computes the loss of one optimizer step over them. It calls backward,
            or returns the loss. It may also take the step of the optimizer.
        tokenizer: The tokenizer of transformers whose chat template the model is served with.
        conversations: The conversations of the data, as lists of messages or as rows. By default they are read from
            the ids.
        trained_roles: "assistant", if answers are meant to be trained; "all" for a loss over everything.
        optimizer: Changes the weights after `step`, if `step` does not do so itself; for the row "adapters".
        num_micro_batches: How many micro-batches a step accumulates; 1 if it does not.
        on_start: Called with the title and the facts before the first check.
        on_check: Called with each row as soon as it is measured.

    Raises:
        ValueError: The loop cannot be checked; the message has the remedy.
    """
    require_checkable(model, batches, tokenizer, trained_roles)
    with restore_loop_after(model, step, optimizer):
        subject = StepSubject(
            model,
            batches,
            step,
            tokenizer,
            conversations,
            trained_roles,
            optimizer=optimizer,
            num_micro_batches=num_micro_batches,
        )
        title = f"{type(subject.model.unwrapped).__name__}: a loop before it trains"
        return measure_all(title, RULES, subject, REQUIRED, on_start=on_start, on_check=on_check)
