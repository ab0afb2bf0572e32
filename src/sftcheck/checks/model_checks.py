"""Checks of a trainer's model on its own batches: isolation, loss and padding.

verify_trainer.py says what a pass of each proves.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from sftcheck.batches import SeenBatch
from sftcheck.documents.document import Document
from sftcheck.faults import Fault
from sftcheck.subject import IN_DIFFERENT_ROWS, IN_ONE_ROW, MeasuredIsolation, Subject, with_finding_of
from sftcheck.tolerances import (
    EVALUATED_GAP,
    GRADIENT,
    LOSS,
    MICRO_BATCH_WEIGHT,
    OTHER_LOSS,
    PADDING_ROUNDINGS,
    SHARE_OF_GAP,
    WITHOUT_GRADIENT,
)
from sftcheck.trainer.trainer_subject import TrainerSubject
from sftron.checks.isolation import Isolation
from sftron.checks.report import Finding, NotMeasuredError
from sftron.data.types import IGNORE_INDEX, Role


def isolation(subject: Subject) -> Finding:
    found, problem = subject.isolations
    leaking = [each for each in found if not each.measured.isolated]
    if all(each.kind != IN_ONE_ROW for each in leaking):
        _require_bounds(subject)
    if not found and not problem and _are_alone(subject):
        measured = f"each of {len(subject.training.batches):,} batches holds one conversation"
        return Finding(True, measured, "no other one")
    if not found:
        raise NotMeasuredError(problem or "no batch holds two conversations with known bounds")
    chosen = max(leaking or found, key=lambda each: _size_of(each.measured))
    worst = chosen.measured
    measured = f"{worst.num_conversations} conversations {chosen.kind}: others change by {worst.difference:.2g}"
    if worst.shows_future:
        measured += f", and tokens before a changed one by {worst.past_difference:.2g}"
    counts = Counter(each.kind for each in found)
    detail = (
        f"measured {', '.join(f'{kind} ({number})' for kind, number in counts.items())}",
        f"a changed conversation itself changes by {worst.own_difference:.2g}",
        f"arguments: {', '.join(sorted(chosen.batch.seen))}",
    )
    faults = (_fault_of_isolation(subject, chosen),) if leaking else ()
    config = subject.model.config
    values = {
        "name": getattr(config, "model_type", "this model"),
        "attention": getattr(config, "_attn_implementation", None),
    }
    return Finding(not leaking, measured, f"<= {worst.rounding:.1g}", detail, faults, values)


def _size_of(each: Isolation) -> tuple[float, float, int]:
    return each.difference, each.past_difference, each.num_conversations


def _fault_of_isolation(subject: Subject, leak: MeasuredIsolation) -> Fault:
    batch, config = leak.batch, subject.model.config
    if leak.measured.shows_future:
        return Fault.FUTURE
    if leak.kind == IN_DIFFERENT_ROWS:
        return Fault.ROWS_MIXED
    if getattr(batch.seen.get("attention_mask"), "ndim", 2) > 2:
        return Fault.OWN_MASK
    if batch.positions is None:
        return Fault.NO_POSITIONS
    if batch.seen.get("use_cache", getattr(config, "use_cache", False)):
        return Fault.CACHE
    return Fault.MASK_OF_ONES if "attention_mask" in batch.seen else Fault.NOT_ISOLATED


def _require_bounds(subject: Subject) -> None:
    """Raises NotMeasuredError if rows are packed, and a document could be several conversations."""
    view = subject.training
    documents = view.documents
    is_packed = view.declared.is_packed is not False or any(each.num_cut_before for each in documents)
    unclear = [each for each in documents if each.source in ("", "ids") and not view.batches[each.batch].passes_bounds]
    if is_packed and any(map(view.may_be_several, unclear)):
        are_packed = "may be packed" if view.declared.is_packed is None else "are packed"
        raise NotMeasuredError(
            f"rows {are_packed}, and the template does not show where a conversation begins; give them as "
            "conversations="
        )


def _are_alone(subject: Subject) -> bool:
    """Returns whether every batch holds one conversation, which is known from its beginning to its end."""
    documents = subject.training.documents
    return all(each.source for each in documents) and set(Counter(each.batch for each in documents).values()) <= {1}


# -- loss ------------------------------------------------------------------------------------------------------------


def loss(subject: TrainerSubject) -> Finding:
    try:
        found = _of_training(subject)
    except NotMeasuredError as error:  # its evaluations are measured nevertheless
        found = Finding(None, str(error))
    for name, data in subject.evaluated_in_batches.items():
        found = with_finding_of(name, found, _of_evaluation(subject, data))
    return found


def _of_evaluation(subject: TrainerSubject, data: Any) -> Finding:
    """Returns whether `eval_loss` is one ratio, whatever the batches of the evaluation are."""
    try:
        pair = subject.evaluated_pair(data)
    except NotMeasuredError as error:
        return Finding(None, f"not measured, {error}")
    except Exception as error:  # of the trainer's own code, perhaps as its callbacks do not run
        return Finding(None, Finding.of_exception(error).measured)
    if not math.isfinite(pair.together + pair.ratio):
        return Finding(None, f"not measured, eval_loss is {pair.together}")
    if pair.gap <= EVALUATED_GAP * abs(pair.ratio):
        return Finding(None, "not measured, two rows of different lengths have the same eval_loss")
    if abs(pair.together - pair.ratio) <= SHARE_OF_GAP * pair.gap:
        return Finding(True, "eval_loss is one ratio")
    counts = " and ".join(map(str, pair.num_labels))
    measured = f"eval_loss of batches with {counts} labels is {pair.together:.6g}, their ratio {pair.ratio:.6g}"
    detail = (f"each batch alone: {pair.alone[0]:.6g} and {pair.alone[1]:.6g}",)
    return Finding(False, measured, "", detail, (Fault.EVALUATED_BY_BATCHES,))


def _of_training(subject: TrainerSubject) -> Finding:
    step, trainer = subject.step, subject.trainer
    counts = [batch.num_trained for batch in step.batches]
    num_trained, num_items = sum(counts), None if step.num_items is None else int(step.num_items)
    if not num_trained:
        raise NotMeasuredError("no token of the computed batches is trained")
    losses = subject.losses
    total, ratio = sum(losses.returned), sum(losses.sums) / num_trained
    pairs = zip(losses.returned, losses.sums, counts, strict=True)
    weights = [returned / (each / num_trained) for returned, each, count in pairs if count]
    apart, worst = abs(total - ratio) / ratio, max(abs(weight - 1) for weight in weights)
    tolerance = LOSS.limit_of(subject.model)
    detail = (
        f"labels of the micro-batches: {', '.join(map(str, counts))}; num_items_in_batch: {num_items}",
        f"the step returns {total:.6g}, the ratio is {ratio:.6g}",
        f"weight of each micro-batch against the ratio: {', '.join(f'{each:.3f}' for each in weights)}",
        f"without the auxiliary loss that the model adds, {losses.auxiliary:.3g} in each" if losses.auxiliary else "",
    )
    if not math.isfinite(total + ratio):
        measured = f"the step returns {total}, the ratio is {ratio}"
        return Finding(False, measured, "finite", detail, (Fault.NOT_FINITE,))
    if num_items not in (None, num_trained):
        measured = f"num_items_in_batch is {num_items}, and {num_trained} labels are trained"
        return Finding(False, measured, "equal", detail, (Fault.OTHER_COUNT,))
    if apart <= tolerance and worst <= max(tolerance, MICRO_BATCH_WEIGHT):
        measured = f"{apart:.1e} from the ratio of {num_trained:,} labels"
        found = Finding(True, measured, f"<= {tolerance:.0e}, relative", detail)
        # An untrained model's loss is near the logarithm of its vocabulary, whatever the labels are.
        smallest = min((batch for batch in step.batches if batch.num_trained), key=lambda batch: batch.ids.size)
        return _at_other_places(subject, smallest, found) or _with_neighbors(subject, found, tolerance)
    if _are_equal([*weights, num_trained]):
        measured = f"{total / ratio:,.0f} times the ratio: a sum that is not divided by its {num_trained:,} labels"
        return Finding(False, measured, f"<= {tolerance:.0e}", detail, (Fault.UNDIVIDED,))
    measured = f"{_shown(apart)} from the ratio; the weight of a micro-batch is off by {_shown(worst)}"
    passes_no_count = trainer.model_accepts_loss_kwargs is False and trainer.compute_loss_func is None
    fault = Fault.NO_LOSS_KWARGS if passes_no_count else Fault.MEAN_OF_MEANS
    allowed = f"<= {tolerance:.0e}" if apart > tolerance else f"<= {MICRO_BATCH_WEIGHT:.0%} a micro-batch"
    found = Finding(False, measured, allowed, detail, (fault,))
    return _of_another_loss(subject, found, tolerance)


def _shown(share: float) -> str:
    """Returns a share in percent, or with its exponent where the percentage would be rounded to nothing."""
    return f"{share:.1e}" if share < 1e-3 else f"{share:.1%}" if share < 0.1 else f"{share:.0%}"


def _are_equal(values: Sequence[float]) -> bool:
    return max(values) - min(values) <= MICRO_BATCH_WEIGHT * max(map(abs, values))


def _spread(losses: Sequence[float]) -> float:
    """Returns how far the loss of some rows together, the first, is from the sum of theirs alone, relative."""
    whole, *alone = losses
    return abs(sum(alone) - whole) / abs(whole) if whole else 0.0


def _with_neighbors(subject: TrainerSubject, found: Finding, tolerance: float) -> Finding:
    """Returns the finding, failed if the cross-entropies of a few rows are others where each is alone in its batch.

    They are compared without dropout.
    """
    spread, detail = 0.0, found.detail
    if subject.together_and_alone:
        spread = _spread([subject.model.evaluate_batch(each)[0] for each in subject.together_and_alone])
        detail = (*detail, f"the same rows one by one: {spread:.1e} apart")
    if spread <= tolerance:
        _require_accumulation(subject)
        return replace(found, detail=detail)
    measured = f"the same rows one by one have a loss {spread:.1e} off"
    return Finding(False, measured, f"<= {tolerance:.0e}", detail, (Fault.BATCH_DEPENDENT,))


def _require_accumulation(subject: TrainerSubject) -> None:
    """Raises NotMeasuredError if the step would have the same loss with a mean of the micro-batches' means."""
    step, accumulated = subject.step, subject.trainer.args.gradient_accumulation_steps
    if accumulated > 1 and len(step.batches) < 2:
        raise NotMeasuredError(
            f"the step has 1 micro-batch, but the trainer accumulates {accumulated}; give it rows for 2 or more"
        )
    if len(step.batches) > 1 and not step.is_unlike:
        counts = ", ".join(str(batch.num_trained) for batch in step.batches)
        raise NotMeasuredError(
            f"the micro-batches have {counts} labels, so a mean of means equals the ratio; give rows of unequal lengths"
        )


def _of_another_loss(subject: TrainerSubject, found: Finding, tolerance: float) -> Finding:
    """Returns the finding, passed if the trainer's own loss of a few rows is the same where each is alone in its batch.

    They are compared without dropout.
    """
    batches, num_items = subject.together_and_alone, subject.step.num_items
    if not batches or num_items is None:
        return found
    with torch.no_grad():
        spread = _spread([float(subject.model.loss_of(each.inputs, num_items, training=False)) for each in batches])
    if spread > max(tolerance, OTHER_LOSS):
        return replace(found, detail=(*found.detail, f"the same rows one by one: {_shown(spread)} apart"))
    if wrong := _at_other_places(subject, batches[0], found):
        return wrong
    what = "another loss than the cross-entropy"
    detail = (*found.detail, f"{what}: only its invariance to batching is measured")
    return Finding(True, f"{what}; the same rows one by one: {spread:.1e} apart", found.allowed, detail)


def _at_other_places(subject: TrainerSubject, batch: SeenBatch, found: Finding) -> Finding | None:
    """Returns the finding, failed, if the loss of a batch is over other tokens than its labels; else None."""
    num_missing, num_other = subject.model.gradient_positions(batch, subject.step.num_items)
    if not num_other and num_missing <= WITHOUT_GRADIENT * batch.num_trained:
        return None
    measured = f"the loss ignores {num_missing:,} of {batch.num_trained:,} labels and uses {num_other:,} other tokens"
    return Finding(False, measured, "the labels", found.detail, (Fault.OTHER_LABELS,))


# -- gradients -------------------------------------------------------------------------------------------------------


def gradients(subject: TrainerSubject) -> Finding:
    step = subject.step
    if not any(each.requires_grad for each in subject.model.trained.parameters()):
        raise NotMeasuredError("no tensor is trainable; see adapters")
    if not any(batch.num_trained for batch in step.batches):
        raise NotMeasuredError("no token of the computed batches is trained")
    tolerance = GRADIENT.limit_of(subject.model)
    found = subject.gradients_apart(of_entropies=False)
    if found.is_right(tolerance) and _is_ratio(subject):
        # A loss of the right size can have a gradient of another one. One of another direction is another loss.
        by_entropies = subject.gradients_apart(of_entropies=True)
        found = by_entropies if by_entropies.apart_from_factor <= tolerance else found
    allowed = f"<= {tolerance:.0e}, relative"
    detail = (
        f"all of them: {found.apart:.2g} apart, factor {found.factor:.4g}",
        f"furthest apart: {found.worst} ({found.worst_apart:.2g}, factor {found.worst_factor:.4g})",
    )
    count = f"{len(step.batches)} micro-batch{'es' * (len(step.batches) > 1)}"
    if found.is_right(tolerance):
        measured = f"{found.worst_apart:.1e} from the gradients of the loss in {count}"
        return Finding(True, measured, allowed, detail)
    if not math.isfinite(found.apart):
        return Finding(False, "the gradients are not finite", "finite", detail, (Fault.NOT_FINITE,))
    if found.apart_from_factor <= tolerance:
        measured = f"{found.factor:.4g} times the gradients of the loss in {count}"
        return Finding(False, measured, allowed, detail, (Fault.GRADIENT_SCALED,))
    measured = f"{found.apart:.2g} from the gradients of the loss in {count}; furthest {found.worst}"
    measured += f" ({found.worst_apart:.2g})"
    return Finding(False, measured, allowed, detail, (Fault.GRADIENT_CHANGED,))


def _is_ratio(subject: TrainerSubject) -> bool:
    """Returns whether each micro-batch has returned its cross-entropies by the number of labels, in float32."""
    losses, num_trained = subject.losses, sum(batch.num_trained for batch in subject.step.batches)
    pairs = zip(losses.returned, losses.sums, strict=True)
    return not subject.model.is_rounded and all(
        abs(returned - each / num_trained) <= LOSS.in_float32 * each / num_trained for returned, each in pairs
    )


# -- padding ---------------------------------------------------------------------------------------------------------


def padding(subject: Subject) -> Finding:
    view, num_padding, num_trained = subject.training, 0, 0
    for number, batch in enumerate(view.batches):
        is_padding = _padding_of(batch, [each for each in view.documents if each.batch == number])
        num_padding += int(is_padding.sum())
        num_trained += int((is_padding[:, 1:] & (batch.labels[:, 1:] != IGNORE_INDEX)).sum())
    hidden = [each for each in view.documents if _hides_text(view.batches[each.batch], each)]
    if not num_padding and not hidden:
        raise NotMeasuredError("no batch has padding")
    changes = filter(None, (_change_by_padding(subject, *pair) for pair in subject.computed_batches))
    difference, allowed = next(changes, (0.0, 0.0))
    found = [f"{num_trained:,} of {num_padding:,} padding tokens trained"] if num_trained else []
    if hidden:
        found.append(f"the attention mask is 0 at tokens of {len(hidden):,} conversations")
    if difference > allowed:
        found.append(f"attended: changing it changes others by {difference:.2g}")
    measured = ", ".join(found) or f"{num_padding:,} padding tokens: not trained, not attended to, not counted"
    faults = {
        Fault.TEXT_MASKED: hidden,
        Fault.PADDING_TRAINED: num_trained,
        Fault.PADDING_ATTENDED: difference > allowed,
    }
    return Finding(not found, measured, "none", (), tuple(fault for fault, is_found in faults.items() if is_found))


def _hides_text(batch: SeenBatch, document: Document) -> bool:
    """Returns whether the attention mask is 0 at a token that the template writes for a message or between two."""
    if batch.attended is None or document.tokens is None:
        return False
    is_text = document.tokens.role_ids != Role.TEMPLATE
    last = int(np.flatnonzero(is_text)[-1]) + 1 if is_text.any() else 0
    return bool((batch.attended[document.index][:last] == 0).any())


def _change_by_padding(subject: Subject, batch: SeenBatch, documents: Sequence[Document]) -> tuple[float, float] | None:
    """Returns how much a batch's hidden states change with its padding, and the rounding; None without padding."""
    ids = batch.input_ids
    is_padding = torch.from_numpy(_padding_of(batch, documents)).to(ids.device)
    if not is_padding.any() or is_padding.all():
        return None
    others = ids[~is_padding].unique()
    changed = torch.where(is_padding, others[len(others) // 2], ids)
    before, after = (subject.model.hidden(batch, each) for each in (ids, changed))
    real = ~is_padding.to(before.device)
    difference = float((before[real].float() - after[real].float()).abs().max())
    if not difference:
        return 0.0, 0.0
    longest = ids[max(documents, key=len).index][None]
    return difference, PADDING_ROUNDINGS * subject.model.rounding(longest)


def _padding_of(batch: SeenBatch, documents: Sequence[Document]) -> np.ndarray:
    """Returns whether each token is padding, bool [B, T]."""
    is_padding = np.ones(batch.ids.shape, dtype=bool)
    for each in documents:
        is_padding[each.index] = False
    return is_padding
