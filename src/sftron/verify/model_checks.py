"""Law 7 on the user's own model and conversations: what a conversation's neighbours in the pack can do to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sftron.data.types import Batch, LabeledConversation
from sftron.models.llama import LlamaForSFT
from sftron.models.loss import LossSum
from sftron.train.step import loss_of
from sftron.verify.run_check import Finding, skipped
from sftron.verify.run_subject import Subject

_MOST_CHANGED = 3


def unless_refused(subject: Subject) -> Finding | None:
    """The finding of every check of the model where there is none to check."""
    return skipped("run_train.py would refuse this run: see start-up") if subject.refusal else None


def _unless_alone(subject: Subject) -> Finding | None:
    if refused := unless_refused(subject):
        return refused
    if not subject.config.data.remove_cross_attention:
        return skipped("data.remove_cross_attention is false")
    if len(subject.documents) < 2:
        return skipped(f"{len(subject.documents)} conversation fits into --tokens, which has no neighbour")
    return None


def check_isolation(subject: Subject) -> Finding:
    """Hidden states of every other conversation, to the bit, when the first, the middle and the last is changed."""
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
        (*wrong[:5], _what(subject)),
    )


def check_gradient_isolation(subject: Subject) -> Finding:
    """The gradient of one conversation's loss, at the embeddings of all others' tokens."""
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
        (f"at a conversation's own tokens up to {max(own):.2e}", _what(subject)),
    )


def _what(subject: Subject) -> str:
    lengths = ", ".join(str(len(document)) for document in subject.documents)
    dtype = str(subject.model.compute_dtype).removeprefix("torch.")
    what = f"attention {subject.model.attention} in {dtype}; conversations of {lengths} tokens; {subject.depth}"
    return what.removesuffix("; ")


def _some(number: int) -> list[int]:
    """The first, the middle and the last."""
    return sorted({0, number // 2, number - 1})[:_MOST_CHANGED]


def _other(document: LabeledConversation, model: LlamaForSFT) -> LabeledConversation:
    """Of the same length, with another id at every place."""
    return replace(document, input_ids=(document.input_ids + 1) % model.config.vocab_size)


def hidden_states(model: LlamaForSFT, batch: Batch) -> Tensor:
    """[T, H], on the model's device."""
    device = model.head_weight.device
    cu_seqlens = batch.cu_seqlens if model.attention == "sdpa" else batch.cu_seqlens.to(device)
    return model(batch.input_ids.to(device), batch.position_ids.to(device), cu_seqlens, batch.max_seqlen)


def _labels_of(batch: Batch, start: int, end: int) -> Batch:
    """With the labels of the tokens [start, end) alone."""
    is_own = (batch.labeled_rows >= start) & (batch.labeled_rows < end)
    names = ("labeled_rows", "labels", "loss_weights")
    return replace(batch, **{name: getattr(batch, name)[is_own] for name in names})


def _embedding_gradient(model: LlamaForSFT, batch: Batch, loss_function: LossSum) -> Tensor:
    """Of the batch's loss, at what the embeddings give: [T, H]."""
    embedded: list[Tensor] = []
    keep: Callable[[Any], None] = embedded.append
    handle = model.model.embed_tokens.register_forward_hook(lambda _, __, output: keep(output))
    try:
        loss = loss_of(model, batch, loss_function)
    finally:
        handle.remove()
    (gradient,) = torch.autograd.grad(loss, embedded[0])
    return gradient
