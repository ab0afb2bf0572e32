"""The loss can go down: a few steps of the run's own optimizer on one small batch. It changes the model: comes last."""

from __future__ import annotations

import math

import torch

from sftron.data.types import Batch, Role
from sftron.models.loss import weighted_loss_sum
from sftron.train.build import build_optimizer
from sftron.train.step import train_step
from sftron.verify.model_checks import hidden_states, unless_refused
from sftron.verify.run_check import Finding, skipped
from sftron.verify.run_subject import Subject

_NUM_STEPS, _MOST_TOKENS = 6, 256
_SURE = 0.9
"""A stop token as likely as that need not become likelier."""


def check_learning(subject: Subject) -> Finding:
    """Loss of the batch and probability of its stop tokens, before and after."""
    if refused := unless_refused(subject):
        return refused
    documents, room = [], _MOST_TOKENS
    for document in subject.documents:
        if not documents or len(document) <= room:
            documents.append(document)
            room -= len(document)
    if not documents:
        return skipped("no conversation fits into --tokens")
    batch, model = subject.batch(documents), subject.model
    stop_ids = _stop_ids(subject)
    loss_before, stop_before = _look(subject, batch, stop_ids)
    optimizer = build_optimizer(subject.plan, model.train())
    is_finite = True
    for _ in range(_NUM_STEPS):
        max_norm = subject.config.optimizer.max_grad_norm
        result = train_step(model, optimizer, [batch], max_grad_norm=max_norm, loss_function=subject.loss)
        is_finite &= result.is_finite
    loss, stop = _look(subject, batch, stop_ids)
    # Written so that no comparison with a NaN passes.
    falls = is_finite and loss < loss_before
    stops = stop is None or stop_before is None or stop >= min(stop_before, _SURE)
    said = "" if stop is None or stop_before is None else f", stop {stop_before:.1%} to {stop:.1%}"
    return Finding(
        falls and stops,
        f"loss {loss_before:.3f} to {loss:.3f}{said}",
        "falls; the stop rises",
        (
            f"{_NUM_STEPS} steps of AdamW at the peak rate {subject.config.optimizer.learning_rate:g} on "
            f"{len(documents)} conversations of {len(batch.input_ids)} tokens",
            "stop: mean probability of the stop tokens that end these answers",
            subject.depth,
        ),
    )


def _stop_ids(subject: Subject) -> set[int]:
    """What ends the answers of the rows."""
    turns = ((row.tokenized, turn) for row in subject.rows for turn in row.tokenized.turns)
    return {
        int(row.input_ids[turn.stop]) for row, turn in turns if turn.role is Role.ASSISTANT and turn.stop is not None
    }


def _look(subject: Subject, batch: Batch, stop_ids: set[int]) -> tuple[float, float | None]:
    """The batch's loss, and the mean probability of its stop tokens."""
    model = subject.model
    device = model.head_weight.device
    with torch.no_grad():
        hidden = hidden_states(model.eval(), batch)
        labels = [tensor.to(device) for tensor in (batch.labeled_rows, batch.labels, batch.loss_weights)]
        total, measures = weighted_loss_sum(hidden, model.head_weight, *labels)
    is_stop = torch.isin(batch.labels, torch.tensor(sorted(stop_ids), dtype=torch.int64))
    stop = measures.losses.cpu()[is_stop].neg().exp().mean().item() if is_stop.any() else math.nan
    return total.item() / batch.weight_sum, None if math.isnan(stop) else stop
