"""Checks of the model on the user's own conversations: isolation in a pack, gradients in batches (laws 7, 8)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from sftron.data.types import Batch, LabeledConversation
from sftron.models.llama import LlamaForSFT
from sftron.models.loss import LossSum
from sftron.train.step import loss_of, train_step
from sftron.verify.subject import NATIVE_LOSS, Subject
from sftron.verify.table import Finding, skipped

_MOST_CHANGED = 3


def unless_refused(subject: Subject) -> Finding | None:
    """Returns the outcome of a check of the model where there is no model to check."""
    return skipped("run_train.py would refuse this run: see start-up") if subject.refusal else None


def _unless_alone(subject: Subject) -> Finding | None:
    if refused := unless_refused(subject):
        return refused
    if not subject.config.data.remove_cross_attention:
        return skipped("data.remove_cross_attention is false")
    if len(subject.documents) < 2:
        return skipped(f"{len(subject.documents)} conversation fits into --tokens")
    return None


def check_isolation(subject: Subject) -> Finding:
    """Changes the first, the middle and the last conversation: no other's hidden states may change by a bit."""
    if finding := _unless_alone(subject):
        return finding
    model, documents = subject.model.eval(), subject.documents
    with torch.no_grad():
        before = hidden_states(model, subject.batch(documents)).split(list(map(len, documents)))
        num_compared, wrong = 0, []
        for number in _some(len(documents)):
            changed = [*documents[:number], _other(documents[number], model), *documents[number + 1 :]]
            after = hidden_states(model, subject.batch(changed)).split(list(map(len, documents)))
            if before[number].equal(after[number]):
                return Finding(False, f"changing conversation {number} had no effect on itself", "an effect")
            others = [other for other in range(len(documents)) if other != number]
            num_compared += len(others)
            wrong += [
                f"changing conversation {number} changes {other} by up to "
                f"{(before[other] - after[other]).abs().max().item():.2e}"
                for other in others
                if not before[other].equal(after[other])
            ]
    return Finding(
        not wrong,
        f"{len(wrong)} of {num_compared} neighbours changed",
        "0, to the bit",
        (*wrong[:5], _setting(subject)),
    )


def check_gradient_isolation(subject: Subject) -> Finding:
    """Takes the gradient of one conversation's loss at the embeddings of all others' tokens, which must be 0."""
    if finding := _unless_alone(subject):
        return finding
    model, documents = subject.model.train(), subject.documents
    batch = subject.batch(documents)
    bounds = [0, *torch.tensor([len(document) for document in documents]).cumsum(0).tolist()]
    worst, own = 0.0, []
    for number in _some(len(documents)):
        start, end = bounds[number], bounds[number + 1]
        gradient = _embedding_gradient(model, _labels_of(batch, start, end), subject.loss)
        own.append(gradient[start:end].abs().max().item())
        others = torch.cat([gradient[:start], gradient[end:]])
        # NaN is not 0, and the maximum of numbers with a NaN is one.
        worst = torch.tensor([worst, others.abs().max().item()]).max().item()
    if not all(size > 0 for size in own):
        return Finding(False, f"a conversation's own gradient is {min(own)}", "not 0")
    return Finding(
        worst == 0,
        f"{worst:.3g} at other conversations' tokens",
        "exactly 0",
        (f"at a conversation's own tokens up to {max(own):.2e}", _setting(subject)),
    )


def _setting(subject: Subject) -> str:
    lengths = ", ".join(str(len(document)) for document in subject.documents)
    dtype = str(subject.model.compute_dtype).removeprefix("torch.")
    setting = f"attention {subject.model.attention} in {dtype}; conversations of {lengths} tokens; {subject.depth}"
    return setting.removesuffix("; ")


def _some(number: int) -> list[int]:
    """Returns the first, the middle and the last index."""
    return sorted({0, number // 2, number - 1})[:_MOST_CHANGED]


def _other(document: LabeledConversation, model: LlamaForSFT) -> LabeledConversation:
    """Returns a document of the same length with another id at every position."""
    return replace(document, input_ids=(document.input_ids + 1) % model.config.vocab_size)


def hidden_states(model: LlamaForSFT, batch: Batch) -> Tensor:
    """Returns the hidden states [T, H], on the model's device."""
    device = model.head_weight.device
    cu_seqlens = batch.cu_seqlens if model.attention == "sdpa" else batch.cu_seqlens.to(device)
    return model(batch.input_ids.to(device), batch.position_ids.to(device), cu_seqlens, batch.max_seqlen)


def _labels_of(batch: Batch, start: int, end: int) -> Batch:
    """Returns the batch with the labels of the tokens [start, end) alone."""
    is_own = (batch.label_positions >= start) & (batch.label_positions < end)
    names = ("label_positions", "labels", "loss_weights")
    return replace(batch, **{name: getattr(batch, name)[is_own] for name in names})


def _embedding_gradient(model: LlamaForSFT, batch: Batch, loss_function: LossSum) -> Tensor:
    """Returns the gradient [T, H] of the batch's loss at the output of the embeddings."""
    embedded: list[Tensor] = []
    keep: Callable[[Any], None] = embedded.append
    handle = model.model.embed_tokens.register_forward_hook(lambda _, __, output: keep(output))
    try:
        loss = loss_of(model, batch, loss_function)
    finally:
        handle.remove()
    (gradient,) = torch.autograd.grad(loss, embedded[0])
    return gradient


FP32_GRADIENTS = 1e-4
"""Relative to the gradient's norm. fp32 sums in another order differ by about 1e-6, a mistake makes 1e-2 and more."""

ROUNDING_SLACK, ROUNDED_LOSS = 1.5, 2**-8
"""In bfloat16 the yardstick of a gradient is what bfloat16 itself does to it, times this; that of a loss is one unit in
the last place, as its own rounding may happen to be 0."""

_NUM_MICRO_BATCHES, _NUM_ROUNDED = 4, 3


def check_packed(subject: Subject) -> Finding:
    """Compares loss and gradients of a pack with the sum over its conversations alone, in fp32."""
    if finding := _unless_alone(subject):
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
    """Does the same in the run's own type, attention and loss; the yardstick is the rounding of that type."""
    if finding := _unless_alone(subject):
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
            f"{len(documents)} conversations; attention {model.attention}, loss {subject.plan.model.loss}",
            f"the parameter furthest apart is {where}",
            subject.depth,
        ),
    )


def _difference(
    model: LlamaForSFT, batches: Sequence[Batch], others: Sequence[Batch], loss_function: LossSum
) -> tuple[float, float, str]:
    """Returns the relative difference of two ways to the same sum: loss, all gradients, and the worst parameter.

    The second gradient is subtracted from the first in place, so there is never more than one in memory.
    """
    model.train().zero_grad(set_to_none=True)
    first = _add_gradients(model, batches, loss_function, sign=1)
    norms = _norms(model)
    second = _add_gradients(model, others, loss_function, sign=-1)
    residuals = _norms(model)
    model.zero_grad(set_to_none=True)
    return _relative(abs(first - second), abs(first)), *_relative_norms(residuals, norms)


def _rounding(subject: Subject, packed: Batch) -> tuple[float, float]:
    """Returns what the run's type does to loss and gradient of a pack, relative to fp32."""
    subject.model.zero_grad(set_to_none=True)
    rounded = _add_gradients(subject.model, [packed], subject.loss, sign=1)
    norms = _norms(subject.model)
    with subject.in_fp32() as model:
        exact = _add_gradients(model, [packed], NATIVE_LOSS, sign=-1)
        residuals = _norms(model)
        model.zero_grad(set_to_none=True)
    return _relative(abs(rounded - exact), abs(exact)), _relative_norms(residuals, norms)[0]


def _add_gradients(model: LlamaForSFT, batches: Iterable[Batch], loss_function: LossSum, *, sign: int) -> float:
    """Adds the gradients to the parameters' `grad`, times `sign`; returns the sum of the losses."""
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
    """Returns infinity where there is nothing to compare with, and for NaN, so that neither passes."""
    value = difference / size if size > 0 else math.inf
    return value if math.isfinite(value) else math.inf


class _GradientsOnly(torch.optim.Optimizer):
    """An optimizer that keeps the gradients of a step and does not change the weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {})
        self._model = model
        self.gradients: dict[str, Tensor] = {}

    def step(self, closure: Any = None) -> None:
        self.gradients = {name: p.grad for name, p in self._model.named_parameters() if p.grad is not None}


def check_accumulation(subject: Subject) -> Finding:
    """Compares loss and gradient of the trainer's step over the same tokens in 4 micro-batches, in 2 and in 1."""
    if refused := unless_refused(subject):
        return refused
    documents = subject.documents
    num_parts = min(_NUM_MICRO_BATCHES, len(documents))
    if num_parts < 2:
        return skipped(f"{num_parts} conversation fits into --tokens")
    # Neighboring documents, not every fourth one, so that the parts have unlike numbers of labels.
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
    """Makes the trainer's own step without the update."""
    optimizer = _GradientsOnly(model)
    result = train_step(model, optimizer, batches, max_grad_norm=None, loss_function=NATIVE_LOSS)
    return result.loss if result.loss is not None else math.nan, optimizer.gradients


def _mean_loss(model: LlamaForSFT, batch: Batch) -> float:
    with torch.no_grad():
        return loss_of(model, batch, NATIVE_LOSS).item() / batch.weight_sum


def _distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Returns the norm of the difference, or of `a` itself where `b` is empty."""
    return math.hypot(*((a[name] - b[name] if b else a[name]).double().norm().item() for name in a))


def joined(batches: Sequence[Batch]) -> Batch:
    """Joins batches into one with the same documents. Its `pack` is the first one's, which the model never sees."""
    starts = [0]
    for batch in batches:
        starts.append(starts[-1] + len(batch.input_ids))

    def concatenated(name: str) -> Tensor:
        return torch.cat([getattr(batch, name) for batch in batches])

    pairs = list(zip(batches, starts, strict=False))
    bounds = [batches[0].cu_seqlens[:1], *(batch.cu_seqlens[1:] + start for batch, start in pairs)]
    of_tokens, of_labels = ("input_ids", "position_ids", "role_ids"), ("labels", "loss_weights")
    measured = ("label_roles", "label_sources", "untrained_labels", "untrained_roles")
    return replace(
        batches[0],
        **{name: concatenated(name) for name in (*of_tokens, *of_labels, *measured)},
        cu_seqlens=torch.cat(bounds).int(),
        max_seqlen=max(batch.max_seqlen for batch in batches),
        label_positions=torch.cat([batch.label_positions + start for batch, start in pairs]),
        untrained_rows=torch.cat([batch.untrained_rows + start for batch, start in pairs]),
        weight_sum=sum(batch.weight_sum for batch in batches),
    )
