"""Checks of a loop's step: the weight of each token in its loss, the gradient that it keeps, and what it saves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from sftcheck.batches import Step
from sftcheck.faults import Fault
from sftcheck.loop.loop_batches import LoopBatch
from sftcheck.loop.loop_model import Update
from sftcheck.loop.loop_subject import StepSubject
from sftcheck.loop.reading import is_cross_entropy
from sftcheck.tolerances import LOST_GRADIENT, TOKEN_WEIGHT
from sftron.checks.report import Finding, NotMeasuredError
from sftron.data.types import IGNORE_INDEX

_SAME_GRADIENT = 1e-3
"""Relative difference up to which the kept gradient counts as that of the last backward pass alone."""


def loss(subject: StepSubject) -> Finding:
    steps = [each for each in subject.steps if any(batch.num_trained for batch in each)]
    if not steps:
        raise NotMeasuredError("no token of the micro-batches is trained")
    for step in steps:
        if lost := [n for n, batch in enumerate(step) if not batch.reading.has_gradient]:
            measured = f"{len(lost)} of {len(step)} micro-batches have no gradient"
            return Finding(False, measured, "all have one", (), (Fault.GRADIENT_LOST,))
    worst = max((_of_step(subject, step) for step in steps), key=lambda each: each.passed is False)
    if worst.passed is False:
        return _unless_intended(subject, steps, worst)
    if found := _of_gradient(subject, subject.update):
        return found
    return _with_unlike_steps(subject, worst)


def _of_step(subject: StepSubject, step: Sequence[LoopBatch]) -> Finding:
    """Returns the finding for the weights of the tokens of one step."""
    weights = [_weights(subject, batch) for batch in step]
    every = np.concatenate(weights)
    total, mean = float(every.sum()), float(every.mean())
    sums = ", ".join(f"{len(each):,} targets with {each.sum():.3f}" for each in weights)
    detail = (f"the weights of a step's tokens sum to {total:.4g}, by micro-batch: {sums}",)
    allowed = f"<= {TOKEN_WEIGHT:.0%}"
    if _spread(every) <= TOKEN_WEIGHT:
        if abs(total - 1) <= TOKEN_WEIGHT:
            measured = f"{len(every):,} targets have the same weight, in all micro-batches ({len(step)})"
            return Finding(True, measured, allowed, detail)
        if abs(mean - 1) <= TOKEN_WEIGHT:
            measured = f"{total:,.0f} times the ratio: a sum that is not divided by its {len(every):,} targets"
            return Finding(False, measured, allowed, detail, (Fault.UNDIVIDED,))
        measured = f"{total:.3g} times the ratio of {len(every):,} targets"
        return Finding(False, measured, allowed, detail, (Fault.OTHER_COUNT,))
    if _is_given(step, weights):
        measured = f"{len(every):,} targets have the weights that the batches give, by their sum"
        return Finding(True, measured, allowed, detail)
    if all(_spread(each) <= TOKEN_WEIGHT for each in weights if len(each)):
        off = max(abs(float(each.mean()) / mean - 1) for each in weights if len(each))
        measured = f"the weight of a micro-batch's tokens is off by {off:.0%}"
        return Finding(False, measured, allowed, detail, (Fault.MEAN_OF_MEANS,))
    off = f"the weight of a token is {every.min() / mean:.2f} to {every.max() / mean:.2f} times the mean"
    if _is_by_document(subject, step):
        measured = f"{off}: each conversation counts alike, whatever its length"
        return Finding(False, measured, allowed, detail, (Fault.MEAN_BY_SEQUENCE,))
    return Finding(False, off, allowed, detail, (Fault.MEAN_OF_MEANS,))


def _weights(subject: StepSubject, batch: LoopBatch) -> np.ndarray:
    return batch.reading.weights[batch.reading.targets != IGNORE_INDEX] / subject.scale


def _spread(values: np.ndarray) -> float:
    return float((values.max() - values.min()) / values.max()) if len(values) else 0.0


def _is_given(step: Sequence[LoopBatch], weights: Sequence[np.ndarray]) -> bool:
    """Returns whether a tensor of the batches holds these weights, which are divided by their sum over the step."""
    by_batch = [_given_weights(batch) for batch in step]
    for candidates in zip(*by_batch, strict=False):
        total = sum(float(each.sum()) for each in candidates)
        pairs = zip(candidates, weights, strict=True)
        if total and all(len(a) == len(b) and np.allclose(a / total, b, rtol=TOKEN_WEIGHT) for a, b in pairs):
            return True
    return False


def _given_weights(batch: LoopBatch) -> list[np.ndarray]:
    """Returns what each tensor of real numbers has at the targets, or at the tokens that they are."""
    (num_rows, size), found = batch.reading.targets.shape, list[np.ndarray]()
    is_trained = batch.reading.targets != IGNORE_INDEX
    for each in pytree.tree_leaves(batch.inputs):
        if not (isinstance(each, Tensor) and each.is_floating_point()) or each.numel() not in (
            num_rows * size,
            num_rows * (size + 1),
        ):
            continue
        values = each.detach().cpu().double().numpy().reshape(num_rows, -1)
        behind = np.pad(values[:, 1:], ((0, 0), (0, max(0, size + 1 - values.shape[1]))))
        found += [values[:, :size][is_trained], behind[:, :size][is_trained]]
    return found


def _is_by_document(subject: StepSubject, step: Sequence[LoopBatch]) -> bool:
    """Returns whether the weights of each conversation's tokens are equal, and have the same sum in a micro-batch."""
    for batch in step:
        sums = list[float]()
        for each in subject.training.documents_of([batch]):
            row = np.pad(batch.reading.weights[each.row], (1, 0))[each.index[1]]
            own = row[row > 0]
            if _spread(own) > TOKEN_WEIGHT:
                return False
            sums += [float(own.sum())] if len(own) else []
        if _spread(np.array(sums)) > TOKEN_WEIGHT:
            return False
    return True


def _unless_intended(subject: StepSubject, steps: Sequence[Sequence[LoopBatch]], found: Finding) -> Finding:
    """Returns the finding, passed if all targets of a step have one weight that is not 1 by their number for a reason:
    the loop divides the gradients of a sum afterwards, or its loss is another one.
    """
    weights = [np.concatenate([_weights(subject, batch) for batch in step]) for step in steps]
    if not all(_spread(each) <= TOKEN_WEIGHT for each in weights):
        return found
    own = sum(float(_weights(subject, batch).sum()) for batch in _step_of(subject))
    if abs(own * _kept(subject.update.summed, subject.update.used)[0] * subject.scale - 1) <= TOKEN_WEIGHT:
        measured = "all targets have the same weight; the gradient of their sum is divided afterwards"
    elif not _is_cross_entropy(subject):
        measured = "another loss than the cross-entropy: all targets have the same weight; its size is not measured"
    else:
        return found
    passed = replace(found, passed=True, measured=measured, faults=())
    return _of_gradient(subject, subject.update) or _with_unlike_steps(subject, passed)


def _step_of(subject: StepSubject) -> list[LoopBatch]:
    return [batch for batch in subject.step.batches if isinstance(batch, LoopBatch)]


def _is_cross_entropy(subject: StepSubject) -> bool:
    step = _step_of(subject)

    def unlike(logits: Tensor) -> Tensor:
        random = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))
        return random.to(logits)

    found = subject.model.gradients([batch.inputs for batch in step], unlike)
    pairs = zip(found, step, strict=True)
    return all(is_cross_entropy(each, batch.reading.targets != IGNORE_INDEX) for (_, each), batch in pairs)


# -- the gradient that is kept ---------------------------------------------------------------------------------------


def _kept(passes: Mapping[str, Tensor], used: Mapping[str, Tensor]) -> tuple[float, float]:
    """Returns the factor by which the kept gradient is that of backward passes, and the median of what a tensor's
    gradient is off from that, relative; clipping and dividing have a factor, and change no direction."""
    factors, off = list[float](), list[float]()
    for name, summed in passes.items():
        kept = used.get(name)
        size = float(summed.norm())
        if kept is None or not size:
            continue
        factor = float((kept.double() * summed.double()).sum()) / size**2
        factors.append(factor)
        off.append(float((kept - factor * summed).norm()) / float(kept.norm()) if kept.any() else 1.0)
    if not off:
        return 1.0, 0.0
    return float(np.median(factors)), float(np.median(off))


def _of_gradient(subject: StepSubject, update: Update) -> Finding | None:
    """Returns the failure if the step's gradient is not the sum over its micro-batches; else None."""
    if not all(bool(torch.isfinite(each).all()) for each in update.summed.values()):
        return Finding(False, "the gradient is not finite", "finite", (), (Fault.NOT_FINITE,))
    _, off = _kept(update.summed, update.used)
    if off <= LOST_GRADIENT:
        return None
    measured = f"the gradient of the step is {off:.0%} off from the sum of its micro-batches' gradients"
    is_last = _kept(update.last, update.used)[1] <= _SAME_GRADIENT
    fault = Fault.GRADIENT_LOST if is_last else Fault.GRADIENT_CHANGED
    return Finding(False, measured, f"<= {LOST_GRADIENT:.0%}", (), (fault,))


def _with_unlike_steps(subject: StepSubject, found: Finding) -> Finding:
    """Returns the finding; raises NotMeasuredError if a mean of the micro-batches' means would be the same."""
    if subject.num_micro_batches < 2:
        return found
    step: Step = subject.step
    if len(step.batches) < 2:
        raise NotMeasuredError(
            f"there is 1 micro-batch, and a step has {subject.num_micro_batches}; give more (num_micro_batches=1 if "
            "the loop does not accumulate)"
        )
    if not step.is_unlike:
        counts = ", ".join(str(batch.num_trained) for batch in step.batches)
        raise NotMeasuredError(
            f"the micro-batches have {counts} targets, so a mean of means equals the ratio; give some of other lengths"
        )
    return found


# -- what is saved ---------------------------------------------------------------------------------------------------


def generation(subject: StepSubject) -> Finding:
    stops = sorted(
        {
            int(each.ids[turn.stop])
            for each in subject.training.with_roles()
            for turn in each.answers
            if turn.stop is not None and each.trained[turn.stop]
        }
    )
    names = ", ".join(subject.training.tokenizer.convert_ids_to_tokens(stops)) or "the stop token"
    raise NotMeasuredError(f"how a loop saves is not seen; what it saves has to end generation at {names}")
