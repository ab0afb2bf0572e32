"""Checks of the model on the user's own conversations: parity, isolation, packing and accumulation (laws 7 to 9)."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sftron.checkpoint.model_folder import stop_ids_of
from sftron.checks.isolation import isolation_of_pack
from sftron.checks.parity import FP32_TOLERANCE, check_generation, check_logits, rounding_of_experts
from sftron.checks.reference import load_rounded_reference
from sftron.checks.report import Finding, NotMeasuredError
from sftron.checks.round_trip import check_round_trip
from sftron.checks.subject import Subject
from sftron.data.types import Batch, LabeledConversation, Role
from sftron.models.attention import describe_backends
from sftron.models.llama import LlamaForSFT
from sftron.models.loss import weighted_loss_sum
from sftron.models.quantization import dtype_name
from sftron.train.metrics import TokenSums
from sftron.train.objective import Objective, hidden_states, loss_of
from sftron.train.step import train_step
from sftron.visible_text import counted


def start_up(subject: Subject) -> Finding:
    setup = subject.setup_or_refusal
    if isinstance(setup, ValueError):
        message = str(setup).splitlines()
        return Finding(False, message[0], "nothing to refuse", tuple(message))
    budget = f"packs of {setup.data.dataset.token_budget:,} tokens; rows in {setup.data.dataset.lanes_in_words}"
    attention, dtype = describe_backends(setup.model.attention), dtype_name(setup.model.compute_dtype)
    measured = f"attention {attention}, loss {setup.model.loss}, {dtype}"
    return Finding(True, measured, "nothing to refuse", (f"on {setup.ranks.device}", budget))


# -- transformers ----------------------------------------------------------------------------------------------------

_NUM_DOCUMENTS, _NUM_PROMPTS, _LONGEST_PROMPT, _NUM_NEW_TOKENS = 4, 3, 256, 12


def weights(subject: Subject) -> Finding:
    folder = _require_own_rows(subject)
    with subject.at_start() as native:
        check = check_round_trip(native, folder)
    return Finding(check.passed, check.measured, "every bit")


def reference(subject: Subject) -> Finding:
    folder = _require_own_rows(subject)
    documents = [each.input_ids.tolist() for each in subject.documents[:_NUM_DOCUMENTS]]
    prompts, tolerance = _short_prompts(subject), FP32_TOLERANCE
    if subject.config.lora is not None and subject.config.lora.adapter is not None:
        raise NotMeasuredError("the run starts from lora.adapter: exported = trained compares that with peft")
    model = load_rounded_reference(subject.setup)
    with subject.at_start(), subject.in_fp32() as native, torch.inference_mode():
        checks = list(check_logits(native.eval(), model, documents, tolerance))
        measured, notes = f"logits {checks[0].value:.2e} apart", []
        if prompts:
            greedy, answers = check_generation(
                native, model, prompts, _NUM_NEW_TOKENS, stop_ids_of(folder), tolerance.logits
            )
            checks.append(greedy)
            measured += f", {len(prompts) - len(greedy.detail)} of {len(prompts)} answers equal"
            notes = [*greedy.detail, f"answers begin {subject.chat_tokenizer.decode(answers[0])!r}"]
        else:
            measured += ", no prompt is short enough to answer"
    del model
    gc.collect()
    notes = [*(f"{each.name}: {each.measured}, allowed {each.allowed}" for each in checks), *notes]
    detail = (f"{counted(len(documents), 'conversations')} of the rows", *notes)
    return Finding(all(check.passed for check in checks), measured, f"<= {tolerance.logits:.0e}, all", detail)


def _require_own_rows(subject: Subject) -> Path:
    """Returns the model's folder. Raises NotMeasuredError if its embeddings differ from the model's."""
    folder, adapters = subject.setup.model.folder, subject.setup.model.adapters
    if subject.config.tokenizer.add_tokens:
        raise NotMeasuredError("tokenizer.add_tokens changes the embeddings, so the model's files differ")
    if adapters is not None and adapters.start.tensors and adapters.start.spec.modules_to_save:
        raise NotMeasuredError("lora.adapter has its own embeddings or head, so the model's files differ")
    subject.require_documents(1)
    return folder


def _short_prompts(subject: Subject) -> list[list[int]]:
    """Returns the ids before the first answer of some rows, as in training. Skips long ones to save time."""
    prompts = []
    for row in subject.rows:
        answers = (turn for turn in row.tokenized.turns if turn.role is Role.ASSISTANT and turn.start < turn.end)
        start = next((turn.start for turn in answers), 0)
        if 0 < start <= _LONGEST_PROMPT:
            prompts.append(row.tokenized.input_ids[:start].tolist())
    return prompts[:_NUM_PROMPTS]


# -- a pack ----------------------------------------------------------------------------------------------------------


def _isolated_documents(subject: Subject) -> tuple[LabeledConversation, ...]:
    """Returns at least two documents. Raises NotMeasuredError if there are fewer, or the run does not isolate them."""
    if not subject.setup.config.data.remove_cross_attention:
        raise NotMeasuredError("data.remove_cross_attention is false")
    return subject.require_documents(2)


def isolation(subject: Subject) -> Finding:
    model, documents = subject.model.eval(), _isolated_documents(subject)
    batch, longest = subject.batch(documents), max(documents, key=len)

    def beside_copies(number: int) -> Sequence[Tensor]:
        return hidden_states(model, subject.batch([longest] * number)).split(len(longest))

    found = isolation_of_pack(
        lambda ids: hidden_states(model, replace(batch, input_ids=ids)),
        batch.input_ids,
        [len(each) for each in documents],
        lambda: rounding_of_experts(model, beside_copies),
    )
    return replace(found, detail=(_setting(subject),))


def _bounds(documents: Sequence[LabeledConversation]) -> list[tuple[int, int]]:
    return list(pairwise(accumulate(map(len, documents), initial=0)))


def gradients_apart(subject: Subject) -> Finding:
    documents = _isolated_documents(subject)
    batch = subject.batch(documents)
    bounds, own, others = _bounds(documents), [], []
    for number in sorted({0, len(documents) // 2, len(documents) - 1}):
        start, end = bounds[number]
        gradient = _embedding_gradient(subject, _labels_within(batch, start, end))
        own.append(gradient[start:end].abs().max().item())
        others.append(torch.cat([gradient[:start], gradient[end:]]).abs().max())
    if not all(size > 0 for size in own):
        return Finding(False, f"a conversation's own gradient is {min(own)}", "not 0")
    worst = torch.stack(others).max().item()  # NaN if any value is NaN, which then does not equal 0
    detail = (f"at a conversation's own tokens up to {max(own):.2e}", _setting(subject))
    return Finding(worst == 0, f"{worst:.3g} at other conversations' tokens", "exactly 0", detail)


def _setting(subject: Subject) -> str:
    lengths = ", ".join(str(len(document)) for document in subject.documents)
    model = subject.model
    attention = describe_backends(model.attention)
    return f"attention {attention} in {dtype_name(model.compute_dtype)}; conversations of {lengths} tokens"


def _labels_within(batch: Batch, start: int, end: int) -> Batch:
    """Returns the batch with only the labels of tokens [start, end)."""
    is_own = (batch.label_positions >= start) & (batch.label_positions < end)
    names = ("label_positions", "labels", "loss_weights")
    return replace(batch, **{name: getattr(batch, name)[is_own] for name in names})


def _embedding_gradient(subject: Subject, batch: Batch) -> Tensor:
    """Returns the gradient [T, H] of the batch's loss with respect to the output of the embeddings."""
    embedded: list[Tensor] = []
    model = subject.model.train()

    def as_leaf(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        # Frozen embeddings have an output without a gradient.
        embedded.append(output.detach().requires_grad_())
        return embedded[0]

    handle = model.model.embed_tokens.register_forward_hook(as_leaf)
    try:
        loss = loss_of(model, batch, subject.loss)
    finally:
        handle.remove()
    return torch.autograd.grad(loss, embedded[0])[0]


FP32_GRADIENTS = 1e-4
"""The tolerance relative to the gradient's norm. Another order of fp32 sums gives about 1e-6; a mistake gives over
1e-2."""

ROUNDING_SLACK, ROUNDED_LOSS = 1.5, 2**-8
"""The tolerances in bfloat16. For a gradient it is a multiple of bfloat16's own rounding error. For a loss it is one
unit in the last place, because its rounding error may happen to be 0."""

_NUM_MICRO_BATCHES, _NUM_ROUNDED = 4, 3


def packed_as_single(subject: Subject) -> Finding:
    documents = _isolated_documents(subject)
    with subject.in_fp32():
        loss, gradient, worst = _differences(subject, [documents], [[each] for each in documents])
    measured, allowed = f"loss {loss:.1e}, gradients {gradient:.1e} apart", f"<= {FP32_GRADIENTS:.0e}, relative"
    detail = (f"{counted(len(documents), 'conversations')}; the parameter furthest apart is {worst}",)
    return Finding(max(loss, gradient) <= FP32_GRADIENTS, measured, allowed, detail)


def packed_in_its_type(subject: Subject) -> Finding:
    model, documents = subject.model, _isolated_documents(subject)
    if model.compute_dtype == torch.float32:
        raise NotMeasuredError("model.compute_dtype is float32, which the row above measures")
    documents = documents[:_NUM_ROUNDED]
    loss, gradient, worst = _differences(subject, [documents], [[each] for each in documents])
    rounding_loss, rounding, _ = _differences(subject, [documents], [documents], second_in=subject.in_fp32)
    allowed, attention = ROUNDING_SLACK * rounding, describe_backends(model.attention)
    is_right = loss <= ROUNDED_LOSS and gradient <= allowed < math.inf  # an infinite bound allows no conclusion
    detail = (
        f"{dtype_name(model.compute_dtype)} itself moves the loss of this pack by {rounding_loss:.1e} and its gradient "
        f"by {rounding:.1e} against float32; the gradient may differ by {ROUNDING_SLACK} times that",
        f"{counted(len(documents), 'conversations')}; attention {attention}, loss {subject.setup.model.loss}",
        f"the parameter furthest apart is {worst}",
    )
    measured = f"loss {loss:.1e}, gradients {gradient:.1e} apart"
    return Finding(is_right, measured, f"<= {ROUNDED_LOSS:.0e}, {allowed:.0e}", detail)


Documents = Sequence[LabeledConversation]


def _differences(
    subject: Subject,
    first: Sequence[Documents],
    second: Sequence[Documents],
    second_in: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> tuple[float, float, str]:
    """Returns the relative differences between two computations of one sum: loss, all gradients, and worst parameter.

    The second gradients are subtracted from the first in place, so memory holds only one set of them.
    """
    model = subject.model.train()
    model.zero_grad(set_to_none=True)
    loss = _add_gradients(subject, first, sign=1)
    norms = _norms(model)
    with second_in():
        other = _add_gradients(subject, second, sign=-1)
    residuals = _norms(model)
    model.zero_grad(set_to_none=True)
    worst = max(residuals, key=lambda name: _relative(residuals[name], norms[name]))
    return (
        _relative(abs(loss - other), abs(other)),
        _relative(math.hypot(*residuals.values()), math.hypot(*norms.values())),
        f"{worst} ({_relative(residuals[worst], norms[worst]):.1e})",
    )


def _add_gradients(subject: Subject, packs: Sequence[Documents], *, sign: int) -> float:
    """Adds the gradients times `sign` to the parameters' `grad`. Returns the sum of the losses."""
    total = 0.0
    for documents in packs:
        loss = _own_loss(subject, subject.batch(documents))
        (sign * loss).backward()
        total += loss.item()
    return total


def _own_loss(subject: Subject, batch: Batch) -> Tensor:
    """Returns the objective's sum over a batch."""
    objective = subject.objective
    return objective.loss_sum(subject.model, batch, TokenSums(1, subject.model.head_weight.device, objective.names))


def _norms(model: nn.Module) -> dict[str, float]:
    return {name: p.grad.double().norm().item() for name, p in model.named_parameters() if p.grad is not None}


def _relative(difference: float, size: float) -> float:
    """Returns the ratio, or infinity if the size is 0 or the ratio is NaN, so that neither passes."""
    value = difference / size if size > 0 else math.inf
    return value if math.isfinite(value) else math.inf


# -- a step ----------------------------------------------------------------------------------------------------------


class _GradientsOnly(torch.optim.Optimizer):
    """An optimizer that stores the gradients of a step without changing the weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {})
        self.gradients: list[Tensor] = []

    def step(self, closure: Any = None) -> None:
        self.gradients = [p.grad for p in self.param_groups[0]["params"] if p.grad is not None]


def accumulation(subject: Subject) -> Finding:
    model, documents = subject.model, subject.require_documents(2)

    def split(num_batches: int) -> list[Batch]:
        # Each part takes neighboring documents rather than every fourth one, so that the numbers of labels differ.
        bounds = [len(documents) * number // num_batches for number in range(num_batches + 1)]
        return [subject.batch(documents[start:end], isolated=True) for start, end in pairwise(bounds)]

    layouts = [split(num) for num in sorted({min(_NUM_MICRO_BATCHES, len(documents)), 2, 1}, reverse=True)]
    with subject.in_fp32():
        with torch.no_grad():
            means = [loss_of(model, each, weighted_loss_sum).item() / each.weight_sum for each in layouts[0]]
        (loss, gradients), *others = [_step(model.train(), batches, subject.objective) for batches in layouts]
    size = _norm(gradients)
    apart = [_relative(abs(loss - other), loss) for other, _ in others]
    apart += [_relative(_norm([a - b for a, b in zip(gradients, other, strict=True)]), size) for _, other in others]
    mean_of_means = sum(means) / len(means)
    measured = f"{', '.join(str(len(batches)) for batches in layouts)} micro-batches: {max(apart):.1e} apart"
    detail = (
        f"labels of the micro-batches: {', '.join(str(len(each.labels)) for each in layouts[0])}",
        f"loss {loss:.6f}; the mean of the micro-batches' means would be {mean_of_means:.6f}, "
        f"{abs(mean_of_means - loss) / loss:.1%} off",
    )
    return Finding(max(apart) <= FP32_GRADIENTS, measured, f"<= {FP32_GRADIENTS:.0e}, relative", detail)


def _step(model: LlamaForSFT, batches: Sequence[Batch], objective: Objective) -> tuple[float, list[Tensor]]:
    """Performs the trainer's own step without an update. Returns the loss and the gradients."""
    optimizer = _GradientsOnly(model)
    result = train_step(model, optimizer, batches, objective, max_grad_norm=None)
    return result.loss if result.loss is not None else math.nan, optimizer.gradients


def _norm(tensors: Sequence[Tensor]) -> float:
    return math.hypot(*(tensor.double().norm().item() for tensor in tensors))
