"""The difference of two losses as a sum of parts: one factor is exchanged at a time, under one reference.

    A's rows, ids, trained tokens, weights, context, model
      rows         the conversations that one record lacks, and in which step each is
      ids          B's ids of the same conversations: template, tokenizer, truncation
      trained      B's trained tokens
      weights      B's weight of each: means of means, denominators
      context      what each may see: neighbors, positions
      model        the weights, the function and the type of the model
    B's loss

Weights, context and model are measured within each record, against the ratio of its trained tokens and against the
reference of the conversation alone. So the parts add up to the difference, whatever the faults are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from sftcheck.diff.matching import Matching, trains_itself
from sftron.report.token_record import TokenRecord


class Factor(Enum):
    """What can differ; the value is its name in the table."""

    ROWS = "rows"
    IDS = "ids"
    TRAINED = "trained tokens"
    WEIGHTS = "weights"
    CONTEXT = "context"
    MODEL = "model"
    RESIDUAL = "residual"


@dataclass(frozen=True, slots=True, eq=False)
class Losses:
    """The losses of a record with one factor after another in the form that any sound trainer has.

    Attributes:
        reported: What the steps have returned.
        own: The sum over tokens, by their weights and the trainer's log-probabilities.
        in_context: The same with the reference beside the neighbors.
        of_itself: The same with the reference of each whole conversation alone, by the record's own model.
        alone: The same with the reference of each conversation alone: one reference for both records.
        as_ratio: The same with the ratio of each step in place of its weights.
        of_common: The ratio over the trained tokens of the conversations that both records have, in A's steps.
    """

    reported: float
    own: float
    in_context: float
    of_itself: float
    alone: float
    as_ratio: float
    of_common: float


def decompose(matching: Matching) -> tuple[dict[Factor, float], Losses, Losses]:
    """Returns the part of each factor in the difference of the losses, B - A, and the losses of both."""
    a, b, at = matching.a, matching.b, matching.places
    own_a, own_b = _reference(a), _reference(b)
    # One reference: the log-probability of the same id after the same ids is A's, or that of the whole conversation.
    one_a, one_b = own_a.copy(), own_b.copy()
    is_known_a, is_known_b = ~np.isnan(a.reference[at.a]), ~np.isnan(b.reference[at.b])
    is_one = at.is_same & trains_itself(b)[at.b] & trains_itself(a)[at.a]
    from_a = is_one & is_known_a & (is_known_b | at.is_cut_b) & ~at.is_cut_a
    from_b = is_one & is_known_b & at.is_cut_a
    one_b[at.b[from_a]], one_a[at.a[from_b]] = own_a[at.a[from_a]], own_b[at.b[from_b]]
    cut_a, cut_b = np.zeros(len(a.id), dtype=bool), np.zeros(len(b.id), dtype=bool)
    cut_a[at.a[from_b]], cut_b[at.b[from_a & at.is_cut_b]] = True, True
    common_a = np.isin(a.document, [-1, *(each.a.number for each in matching.pairs)])
    common_b = np.isin(b.document, [-1, *(each.b.number for each in matching.pairs)])
    steps_of_b = b.step.copy()
    for pair in matching.pairs:
        steps_of_b[pair.b.at] = a.step[pair.a.at[0]]
    losses_a = _losses(a, own_a, one_a, common_a, cut_a, a.step)
    losses_b = _losses(b, own_b, one_b, common_b, cut_b, steps_of_b)
    # B's ids with A's trained tokens
    exchanged = losses_a.of_common
    if not matching.pairs:
        losses_b = replace(losses_b, of_common=exchanged)
    else:
        is_trained, values = _trained_as_in_a(matching), one_b.copy()
        takes_a = at.is_same | ~trains_itself(b)[at.b]
        values[at.b[takes_a]] = one_a[at.a[takes_a]]
        padding = a.is_trained & (a.document < 0)
        steps = np.concatenate([steps_of_b[is_trained], a.step[padding]])
        exchanged = _mean_of_steps(np.concatenate([values[is_trained], one_a[padding]]), steps)
    parts = {
        Factor.ROWS: (losses_b.as_ratio - losses_b.of_common) - (losses_a.as_ratio - losses_a.of_common),
        Factor.IDS: exchanged - losses_a.of_common,
        Factor.TRAINED: losses_b.of_common - exchanged,
        Factor.WEIGHTS: (losses_b.alone - losses_b.as_ratio) - (losses_a.alone - losses_a.as_ratio),
        Factor.CONTEXT: (losses_b.in_context - losses_b.of_itself) - (losses_a.in_context - losses_a.of_itself),
        Factor.MODEL: (losses_b.own - losses_b.in_context + losses_b.of_itself - losses_b.alone)
        - (losses_a.own - losses_a.in_context + losses_a.of_itself - losses_a.alone),
        Factor.RESIDUAL: (losses_b.reported - losses_b.own) - (losses_a.reported - losses_a.own),
    }
    return parts, losses_a, losses_b


def _trained_as_in_a(matching: Matching) -> np.ndarray:
    """Returns which tokens of B's conversations are trained by A, bool [n].

    One that A does not have is trained if B trains it, and A the token of both records before or behind it.
    """
    trained_a, trained_b = matching.a.is_trained, matching.b.is_trained
    found = np.zeros(len(trained_b), dtype=bool)
    for pair in matching.pairs:
        places, own = pair.aligned[:, 1], trained_a[pair.a.at[pair.aligned[:, 0]]]
        if len(alone := np.setdiff1d(np.arange(len(pair.b.ids)), places)):
            around = np.concatenate([[False], own, [False]])
            behind = np.searchsorted(places, alone)
            found[pair.b.at[alone]] = trained_b[pair.b.at[alone]] & (around[behind] | around[behind + 1])
    found[matching.places.b] = trained_a[matching.places.a]
    return found


def _reference(record: TokenRecord) -> np.ndarray:
    """Returns the loss of each token by the reference; beside its neighbors where nothing of its own is before it."""
    return -np.where(np.isnan(record.reference), record.context, record.reference)


def _losses(
    record: TokenRecord,
    reference: np.ndarray,
    one: np.ndarray,
    is_common: np.ndarray,
    is_cut: np.ndarray,
    steps: np.ndarray,
) -> Losses:
    weight, is_trained = record.weight / record.num_steps, record.is_trained
    counts = np.bincount(record.step[is_trained], minlength=record.num_steps)
    ratio = np.where(is_trained, 1 / (np.maximum(counts, 1)[record.step] * record.num_steps), 0.0)
    as_ratio = float((ratio * one)[is_trained].sum())
    return Losses(
        reported=record.loss,
        own=float(-(weight * record.own).sum()),
        in_context=float(-(weight * record.context).sum()),
        of_itself=float((weight * np.where(is_cut, one, reference))[is_trained].sum()),
        alone=float((weight * one)[is_trained].sum()),
        as_ratio=as_ratio,
        of_common=_mean_of_steps(one[is_trained & is_common], steps[is_trained & is_common])
        if (is_trained & is_common).any()
        else as_ratio,
    )


def _mean_of_steps(values: np.ndarray, steps: np.ndarray) -> float:
    """Returns the mean of the means of the steps, as a record's loss is one of its steps' ratios."""
    if not len(values):
        return 0.0
    return float(np.mean([values[steps == each].mean() for each in np.unique(steps)]))
