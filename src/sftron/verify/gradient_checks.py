"""Law 8 on the user's own model and conversations: a loss and its gradient do not depend on how tokens are batched."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from sftron.data.types import Batch
from sftron.models.llama import LlamaForSFT
from sftron.models.loss import LossSum
from sftron.train.step import loss_of, train_step
from sftron.verify.model_checks import unless_refused
from sftron.verify.run_check import Finding, skipped
from sftron.verify.run_subject import NATIVE_LOSS, Subject

FP32_GRADIENTS = 1e-4
"""Relative to the gradient's norm. fp32 sums in another order part by some 1e-6; an error of ours by 1e-2 and more."""

ROUNDING_SLACK, ROUNDED_LOSS = 1.5, 2**-8
"""In bfloat16 the yardstick of a gradient is what bfloat16 itself does to it, times this; that of a loss is one unit in
the last place, as its own rounding may happen to be 0."""

_NUM_MICRO_BATCHES, _NUM_ROUNDED = 4, 3


def check_packed(subject: Subject) -> Finding:
    """Loss and gradients of a pack against the sum over its conversations alone, in fp32."""
    if finding := _unless_comparable(subject):
        return finding
    with subject.in_fp32() as model:
        batches = [subject.batch(subject.documents), *(subject.batch([each]) for each in subject.documents)]
        loss, gradient, where = _difference(model, batches[:1], batches[1:], NATIVE_LOSS)
    return Finding(
        loss <= FP32_GRADIENTS and gradient <= FP32_GRADIENTS,
        f"loss {loss:.1e}, gradients {gradient:.1e} apart",
        f"<= {FP32_GRADIENTS:.0e}, relative",
        (f"{len(subject.documents)} conversations; the parameter furthest apart is {where}", subject.depth),
    )


def check_packed_rounded(subject: Subject) -> Finding:
    """The same in the run's own type, attention and loss; the yardstick is the rounding of that type."""
    if finding := _unless_comparable(subject):
        return finding
    model = subject.model
    if model.compute_dtype == torch.float32:
        return skipped("model.compute_dtype is float32: the row above is this one")
    documents = subject.documents[:_NUM_ROUNDED]
    packed, alone = subject.batch(documents), [subject.batch([each]) for each in documents]
    loss, gradient, where = _difference(model, [packed], alone, subject.loss)
    rounding_loss, rounding = _rounding(subject, packed)
    allowed = ROUNDING_SLACK * rounding
    dtype = str(model.compute_dtype).removeprefix("torch.")
    return Finding(
        # A yardstick that is not finite measures nothing.
        loss <= ROUNDED_LOSS and gradient <= allowed < math.inf,
        f"loss {loss:.1e}, gradients {gradient:.1e} apart",
        f"<= {ROUNDED_LOSS:.0e}, {allowed:.0e}",
        (
            f"{dtype} itself moves the loss of this pack by {rounding_loss:.1e} and its gradient by {rounding:.1e} "
            f"against float32; of that, {ROUNDING_SLACK} times is allowed to the gradient",
            f"{len(documents)} conversations; attention {model.attention}, loss {subject.plan.loss}",
            f"the parameter furthest apart is {where}",
            subject.depth,
        ),
    )


def _unless_comparable(subject: Subject) -> Finding | None:
    if refused := unless_refused(subject):
        return refused
    if not subject.config.data.remove_cross_attention:
        return skipped("data.remove_cross_attention is false")
    if len(subject.documents) < 2:
        return skipped(f"{len(subject.documents)} conversation fits into --tokens")
    return None


def _difference(
    model: LlamaForSFT, ours: Sequence[Batch], theirs: Sequence[Batch], loss_function: LossSum
) -> tuple[float, float, str]:
    """How far two ways to the same sum are apart, relative: the loss, all gradients together, and where most.

    The second way is subtracted from the first where that lies, so there is never more than one gradient in memory.
    """
    model.train().zero_grad(set_to_none=True)
    first = _add_gradients(model, ours, loss_function, sign=1)
    norms = _norms(model)
    second = _add_gradients(model, theirs, loss_function, sign=-1)
    residuals = _norms(model)
    model.zero_grad(set_to_none=True)
    return _relative(abs(first - second), abs(first)), *_relative_norms(residuals, norms)


def _rounding(subject: Subject, packed: Batch) -> tuple[float, float]:
    """What the run's type does to loss and gradient of a pack, relative to fp32."""
    subject.model.zero_grad(set_to_none=True)
    rounded = _add_gradients(subject.model, [packed], subject.loss, sign=1)
    norms = _norms(subject.model)
    with subject.in_fp32() as model:
        exact = _add_gradients(model, [packed], NATIVE_LOSS, sign=-1)
        residuals = _norms(model)
        model.zero_grad(set_to_none=True)
    return _relative(abs(rounded - exact), abs(exact)), _relative_norms(residuals, norms)[0]


def _add_gradients(model: LlamaForSFT, batches: Iterable[Batch], loss_function: LossSum, *, sign: int) -> float:
    """Into the parameters' `grad`; the sum of the losses."""
    total = 0.0
    for batch in batches:
        loss = loss_of(model, batch, loss_function)
        (sign * loss).backward()
        total += loss.item()
    return total


def _norms(model: nn.Module) -> dict[str, float]:
    return {name: p.grad.double().norm().item() for name, p in model.named_parameters() if p.grad is not None}


def _relative_norms(residuals: dict[str, float], norms: dict[str, float]) -> tuple[float, str]:
    whole = _relative(math.hypot(*residuals.values()), math.hypot(*norms.values()))
    worst = max(residuals, key=lambda name: _relative(residuals[name], norms[name]))
    return whole, f"{worst} ({_relative(residuals[worst], norms[worst]):.1e})"


def _relative(difference: float, size: float) -> float:
    """Infinite where there is nothing to compare with, and for what is no number, so that neither passes."""
    value = difference / size if size > 0 else math.inf
    return value if math.isfinite(value) else math.inf


class _GradientsOnly(torch.optim.Optimizer):
    """Takes the gradients of a step, and leaves the weights alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {})
        self._model = model
        self.gradients: dict[str, Tensor] = {}

    def step(self, closure: Any = None) -> None:
        self.gradients = {name: p.grad for name, p in self._model.named_parameters() if p.grad is not None}


def check_accumulation(subject: Subject) -> Finding:
    """One step of the trainer over the same tokens in 4 micro-batches, in 2 and in 1: its loss and its gradient."""
    if refused := unless_refused(subject):
        return refused
    documents = subject.documents
    num_parts = min(_NUM_MICRO_BATCHES, len(documents))
    if num_parts < 2:
        return skipped(f"{num_parts} conversation fits into --tokens")
    # One after another, not in turn: the parts are to have unlike numbers of labels.
    bounds = [len(documents) * part // num_parts for part in range(num_parts + 1)]
    parts = [subject.batch(documents[start:end]) for start, end in pairwise(bounds)]
    halves = [joined(parts[: num_parts // 2]), joined(parts[num_parts // 2 :])]
    layouts = [parts, halves, [joined(parts)]] if num_parts > 2 else [parts, [joined(parts)]]
    with subject.in_fp32() as model:
        steps = [_step(model.train(), batches) for batches in layouts]
        means = [_mean_loss(model, batch) for batch in parts]
    (loss, gradients), *others = steps
    apart = [_relative(abs(loss - other), loss) for other, _ in others]
    apart += [_relative(_distance(gradients, other), _distance(gradients, {})) for _, other in others]
    largest = max(apart)
    mean_of_means = sum(means) / len(means)
    return Finding(
        largest <= FP32_GRADIENTS,
        f"{', '.join(str(len(batches)) for batches in layouts)} micro-batches: {largest:.1e} apart",
        f"<= {FP32_GRADIENTS:.0e}, relative",
        (
            f"labels of the micro-batches: {', '.join(str(len(part.labels)) for part in parts)}",
            f"loss {loss:.6f}; a mean of the micro-batches' means would be {mean_of_means:.6f}, "
            f"{abs(mean_of_means - loss) / loss:.1%} off",
            subject.depth,
        ),
    )


def _step(model: LlamaForSFT, batches: Sequence[Batch]) -> tuple[float, dict[str, Tensor]]:
    """The trainer's own step, but for the update."""
    optimizer = _GradientsOnly(model)
    result = train_step(model, optimizer, batches, max_grad_norm=None, loss_function=NATIVE_LOSS)
    return result.loss if result.loss is not None else math.nan, optimizer.gradients


def _mean_loss(model: LlamaForSFT, batch: Batch) -> float:
    with torch.no_grad():
        return loss_of(model, batch, NATIVE_LOSS).item() / batch.weight_sum


def _distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The norm of their difference; of `a` itself where `b` is empty."""
    return math.hypot(*((a[name] - b[name] if b else a[name]).double().norm().item() for name in a))


def joined(batches: Sequence[Batch]) -> Batch:
    """Several batches as one: documents stay what they are. Its pack is the first one's, which the model never sees."""
    starts = [0]
    for batch in batches:
        starts.append(starts[-1] + len(batch.input_ids))

    def together(name: str) -> Tensor:
        return torch.cat([getattr(batch, name) for batch in batches])

    pairs = list(zip(batches, starts, strict=False))
    bounds = [batches[0].cu_seqlens[:1], *(batch.cu_seqlens[1:] + start for batch, start in pairs)]
    of_tokens, of_labels = ("input_ids", "position_ids", "role_ids"), ("labels", "loss_weights")
    measured = ("label_roles", "label_sources", "untrained_labels", "untrained_roles")
    return replace(
        batches[0],
        **{name: together(name) for name in (*of_tokens, *of_labels, *measured)},
        cu_seqlens=torch.cat(bounds).int(),
        max_seqlen=max(batch.max_seqlen for batch in batches),
        labeled_rows=torch.cat([batch.labeled_rows + start for batch, start in pairs]),
        untrained_rows=torch.cat([batch.untrained_rows + start for batch, start in pairs]),
        weight_sum=sum(batch.weight_sum for batch in batches),
    )
