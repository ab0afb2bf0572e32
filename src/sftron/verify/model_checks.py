"""Checks of the model on the user's own conversations: parity, isolation, packing and accumulation (laws 7 to 9)."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from sftron.checkpoint.hf_export import stop_ids_of
from sftron.data.types import Batch, Role
from sftron.models.llama import LlamaForSFT
from sftron.models.loss import LossSum
from sftron.train.step import loss_of, train_step
from sftron.verify.parity import FP32_TOLERANCE, check_generation, check_logits, check_round_trip, load_reference
from sftron.verify.subject import NATIVE_LOSS, Subject
from sftron.verify.table import Finding, NotMeasuredError, rule


@rule(
    "start-up",
    if_red="run_train.py would end with this message and status 2; the message has the remedy.",
)
def start_up(subject: Subject) -> Finding:
    """run_train.py accepts configuration, data and model."""
    if subject.refusal:
        return Finding(False, subject.refusal.splitlines()[0], "nothing to refuse", tuple(subject.refusal.splitlines()))
    plan = subject.plan
    budget = f"packs of {plan.data.dataset.token_budget:,} tokens; rows in {plan.data.dataset.lanes_in_words}"
    measured = f"attention {plan.model.attention}, loss {plan.model.loss}, {_name_of(plan.model.compute_dtype)}"
    return Finding(True, measured, "nothing to refuse", (f"on {plan.ranks.device}", budget))


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -- transformers ----------------------------------------------------------------------------------------------------

_NUM_DOCUMENTS, _NUM_PROMPTS, _LONGEST_PROMPT, _NUM_NEW_TOKENS = 4, 3, 256, 12


@rule(
    "weights",
    if_red="The export would hold other weights than were trained. Is the folder whole, and its config.json its own?",
)
def weights(subject: Subject) -> Finding:
    """Hugging Face to sftron and back loses no bit of any tensor."""
    _require_the_models_own_rows(subject)
    check = check_round_trip(subject.model, subject.plan.model.folder)
    return Finding(check.passed is True, check.measured, "every bit", (subject.depth,))


@rule(
    "transformers",
    if_red="Training would start from another function than the model's own. Do not train; run tools/check_sft.py for "
    "the full comparison, and report it.",
)
def reference(subject: Subject) -> Finding:
    """The model computes what transformers computes, and gives the same greedy answers."""
    _require_the_models_own_rows(subject)
    folder, decode = subject.plan.model.folder, subject.chat_tokenizer.decode
    documents = [each.input_ids.tolist() for each in subject.documents[:_NUM_DOCUMENTS]]
    prompts, stop_ids, tolerance = _short_prompts(subject), stop_ids_of(folder), FP32_TOLERANCE
    model = load_reference(folder, torch.float32, subject.ranks.device)
    try:
        with subject.in_fp32() as native, torch.inference_mode():
            checks = list(check_logits(native.eval(), model, documents, tolerance))
            measured, notes = f"logits {checks[0].measured.split()[0]} apart", []
            if prompts:
                found = check_generation(native, model, prompts, _NUM_NEW_TOKENS, stop_ids, tolerance.logits)
                checks.append(found.check)
                measured += f", {len(prompts) - len(found.divergences)} of {len(prompts)} answers equal"
                notes = [*map(str, found.divergences), f"answers begin {decode(found.expected[0])!r}"]
            else:
                measured += ", no prompt short enough to answer"
    finally:
        del model
        gc.collect()
    notes = [*(f"{each.name}: {each.measured}, allowed {each.allowed}" for each in checks), *notes]
    detail = (f"{len(documents)} conversations of the rows", *notes, subject.depth)
    return Finding(all(check.passed for check in checks), measured, f"<= {tolerance.logits:.0e}, all", detail)


def _require_the_models_own_rows(subject: Subject) -> None:
    subject.require_model()
    if subject.config.tokenizer.add_tokens:
        raise NotMeasuredError("tokenizer.add_tokens changes rows of the embeddings: the model's files differ")
    if not subject.documents:
        raise NotMeasuredError("no conversation fits into --tokens")


def _short_prompts(subject: Subject) -> list[list[int]]:
    """Returns the ids before the first answer of some rows, as in training; long ones are skipped to save time."""
    prompts = []
    for row in subject.rows:
        answers = (turn for turn in row.tokenized.turns if turn.role is Role.ASSISTANT and turn.start < turn.end)
        start = next((turn.start for turn in answers), 0)
        if 0 < start <= _LONGEST_PROMPT:
            prompts.append(row.tokenized.input_ids[:start].tolist())
    return prompts[:_NUM_PROMPTS]


# -- a pack ----------------------------------------------------------------------------------------------------------


def _require_isolated_documents(subject: Subject) -> None:
    subject.require_model()
    if not subject.config.data.remove_cross_attention:
        raise NotMeasuredError("data.remove_cross_attention is false")
    _require_two_documents(subject)


def _require_two_documents(subject: Subject) -> None:
    if len(subject.documents) < 2:
        raise NotMeasuredError(f"{len(subject.documents)} conversation fits into --tokens")


@rule(
    "isolation",
    if_red="Answers would be learned from other conversations' text. Set model.attention: sdpa, and report the "
    "backend.",
)
def isolation(subject: Subject) -> Finding:
    """With this attention backend no conversation sees its neighbors in the pack."""
    _require_isolated_documents(subject)
    model, documents = subject.model.eval(), subject.documents
    lengths = [len(document) for document in documents]
    num_compared, wrong = 0, []
    with torch.no_grad():
        before = hidden_states(model, subject.batch(documents)).split(lengths)
        for number in _first_middle_last(len(documents)):
            other_ids = (documents[number].input_ids + 1) % model.config.vocab_size
            changed = replace(documents[number], input_ids=other_ids)
            batch = subject.batch([*documents[:number], changed, *documents[number + 1 :]])
            after = hidden_states(model, batch).split(lengths)
            if before[number].equal(after[number]):
                return Finding(False, f"changing conversation {number} had no effect on itself", "an effect")
            for other in set(range(len(documents))) - {number}:
                num_compared += 1
                if not before[other].equal(after[other]):
                    size = (before[other] - after[other]).abs().max().item()
                    wrong.append(f"changing conversation {number} changes {other} by up to {size:.2e}")
    measured = f"{len(wrong)} of {num_compared} neighbors changed"
    return Finding(not wrong, measured, "0, to the bit", (*wrong[:5], _setting(subject)))


@rule(
    "gradients apart",
    if_red="The backward pass would leak between conversations. Set model.attention: sdpa, and report the backend.",
)
def gradients_apart(subject: Subject) -> Finding:
    """No conversation's loss has a gradient at another one's tokens."""
    _require_isolated_documents(subject)
    model, documents = subject.model.train(), subject.documents
    batch = subject.batch(documents)
    bounds = [0, *torch.tensor([len(document) for document in documents]).cumsum(0).tolist()]
    own, others = [], []
    for number in _first_middle_last(len(documents)):
        start, end = bounds[number : number + 2]
        gradient = _embedding_gradient(model, _labels_within(batch, start, end), subject.loss)
        own.append(gradient[start:end].abs().max().item())
        others.append(torch.cat([gradient[:start], gradient[end:]]).abs().max())
    if not all(size > 0 for size in own):
        return Finding(False, f"a conversation's own gradient is {min(own)}", "not 0")
    worst = torch.stack(others).max().item()  # NaN if any value is NaN, which then does not equal 0
    detail = (f"at a conversation's own tokens up to {max(own):.2e}", _setting(subject))
    return Finding(worst == 0, f"{worst:.3g} at other conversations' tokens", "exactly 0", detail)


def _first_middle_last(number: int) -> list[int]:
    return sorted({0, number // 2, number - 1})


def _setting(subject: Subject) -> str:
    lengths = ", ".join(str(len(document)) for document in subject.documents)
    model = subject.model
    setting = f"attention {model.attention} in {_name_of(model.compute_dtype)}; conversations of {lengths} tokens"
    return f"{setting}; {subject.depth}" if subject.depth else setting


def hidden_states(model: LlamaForSFT, batch: Batch) -> Tensor:
    """Returns the hidden states [T, H] on the model's device."""
    device = model.head_weight.device
    cu_seqlens = batch.cu_seqlens if model.attention == "sdpa" else batch.cu_seqlens.to(device)
    return model(batch.input_ids.to(device), batch.position_ids.to(device), cu_seqlens, batch.max_seqlen)


def _labels_within(batch: Batch, start: int, end: int) -> Batch:
    """Returns the batch with only the labels of tokens [start, end)."""
    is_own = (batch.label_positions >= start) & (batch.label_positions < end)
    names = ("label_positions", "labels", "loss_weights")
    return replace(batch, **{name: getattr(batch, name)[is_own] for name in names})


def _embedding_gradient(model: LlamaForSFT, batch: Batch, loss_function: LossSum) -> Tensor:
    """Returns the gradient [T, H] of the batch's loss with respect to the output of the embeddings."""
    embedded: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        embedded.append(output)

    handle = model.model.embed_tokens.register_forward_hook(keep)
    try:
        loss = loss_of(model, batch, loss_function)
    finally:
        handle.remove()
    return torch.autograd.grad(loss, embedded[0])[0]


FP32_GRADIENTS = 1e-4
"""The tolerance relative to the gradient's norm. Another order of fp32 sums gives about 1e-6, a mistake over 1e-2."""

ROUNDING_SLACK, ROUNDED_LOSS = 1.5, 2**-8
"""The tolerances in bfloat16. For a gradient it is a multiple of bfloat16's own rounding error. For a loss it is one
unit in the last place, because its rounding error may happen to be 0."""

_NUM_MICRO_BATCHES, _NUM_ROUNDED = 4, 3


@rule(
    "packed = single",
    if_red="Packing would change what is learned. Set data.packing.strategy: none until it is found, and report it.",
)
def packed_as_single(subject: Subject) -> Finding:
    """A pack has the loss and the gradients of its conversations alone: positions, bounds and masks are right."""
    _require_isolated_documents(subject)
    packed, alone = subject.batch(subject.documents), [subject.batch([each]) for each in subject.documents]
    with subject.in_fp32():
        loss, gradient, worst = _differences(subject, [packed], alone)
    return Finding(
        loss <= FP32_GRADIENTS and gradient <= FP32_GRADIENTS,
        f"loss {loss:.1e}, gradients {gradient:.1e} apart",
        f"<= {FP32_GRADIENTS:.0e}, relative",
        (f"{len(alone)} conversations; the parameter furthest apart is {worst}", subject.depth),
    )


@rule(
    "packed in its type",
    if_red="This backend or loss is less exact than its type. Set model.attention: sdpa and model.loss: native.",
)
def packed_in_its_type(subject: Subject) -> Finding:
    """The same in the run's own type, attention and loss, up to the rounding of that type."""
    _require_isolated_documents(subject)
    model, documents = subject.model, subject.documents[:_NUM_ROUNDED]
    if model.compute_dtype == torch.float32:
        raise NotMeasuredError("model.compute_dtype is float32: the row above is this one")
    packed, alone = subject.batch(documents), [subject.batch([each]) for each in documents]
    loss, gradient, worst = _differences(subject, [packed], alone)
    rounding_loss, rounding, _ = _differences(subject, [packed], [packed], second_in=subject.in_fp32)
    allowed, dtype = ROUNDING_SLACK * rounding, _name_of(model.compute_dtype)
    return Finding(
        # A bound that is not finite allows no conclusion.
        loss <= ROUNDED_LOSS and gradient <= allowed < math.inf,
        f"loss {loss:.1e}, gradients {gradient:.1e} apart",
        f"<= {ROUNDED_LOSS:.0e}, {allowed:.0e}",
        (
            f"{dtype} itself moves the loss of this pack by {rounding_loss:.1e} and its gradient by {rounding:.1e} "
            f"against float32; of that, {ROUNDING_SLACK} times is allowed to the gradient",
            f"{len(documents)} conversations; attention {model.attention}, loss {subject.plan.model.loss}",
            f"the parameter furthest apart is {worst}",
            subject.depth,
        ),
    )


def _differences(
    subject: Subject,
    first: Sequence[Batch],
    second: Sequence[Batch],
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


def _add_gradients(subject: Subject, batches: Sequence[Batch], *, sign: int) -> float:
    """Adds the gradients times `sign` to the parameters' `grad`. Returns the sum of the losses."""
    total = 0.0
    for batch in batches:
        loss = loss_of(subject.model, batch, subject.loss)
        (sign * loss).backward()
        total += loss.item()
    return total


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
        self._model = model
        self.gradients: dict[str, Tensor] = {}

    def step(self, closure: Any = None) -> None:
        self.gradients = {name: p.grad for name, p in self._model.named_parameters() if p.grad is not None}


@rule(
    "accumulation",
    if_red="Tokens would weigh more or less by who shares their micro-batch. Set "
    "tokens.batch_accumulation_per_replica: 1, and report it.",
)
def accumulation(subject: Subject) -> Finding:
    """The step's loss is one ratio: the same tokens give the same gradient in 1, 2 or 4 micro-batches."""
    subject.require_model()
    _require_two_documents(subject)
    documents, num_parts = subject.documents, min(_NUM_MICRO_BATCHES, len(subject.documents))

    def split(num_batches: int) -> list[Batch]:
        # Each part takes neighboring documents rather than every fourth one, so that the numbers of labels differ.
        bounds = [len(documents) * number // num_batches for number in range(num_batches + 1)]
        return [subject.batch(documents[start:end], isolated=True) for start, end in pairwise(bounds)]

    layouts = [split(number) for number in sorted({num_parts, 2, 1}, reverse=True)]
    with subject.in_fp32() as model, torch.no_grad():
        means = [loss_of(model, each, NATIVE_LOSS).item() / each.weight_sum for each in layouts[0]]
    with subject.in_fp32() as model:
        (loss, gradients), *others = [_step(model.train(), batches) for batches in layouts]
    size = math.hypot(*(gradient.double().norm().item() for gradient in gradients.values()))
    apart = [_relative(abs(loss - other), loss) for other, _ in others]
    for _, other in others:
        norms = ((gradients[name] - other[name]).double().norm().item() for name in gradients)
        apart.append(_relative(math.hypot(*norms), size))
    mean_of_means = sum(means) / len(means)
    return Finding(
        max(apart) <= FP32_GRADIENTS,
        f"{', '.join(str(len(batches)) for batches in layouts)} micro-batches: {max(apart):.1e} apart",
        f"<= {FP32_GRADIENTS:.0e}, relative",
        (
            f"labels of the micro-batches: {', '.join(str(len(each.labels)) for each in layouts[0])}",
            f"loss {loss:.6f}; a mean of the micro-batches' means would be {mean_of_means:.6f}, "
            f"{abs(mean_of_means - loss) / loss:.1%} off",
            subject.depth,
        ),
    )


def _step(model: LlamaForSFT, batches: Sequence[Batch]) -> tuple[float, dict[str, Tensor]]:
    """Performs the trainer's own step without an update. Returns the loss and the gradients."""
    optimizer = _GradientsOnly(model)
    result = train_step(model, optimizer, batches, max_grad_norm=None, loss_function=NATIVE_LOSS)
    return result.loss if result.loss is not None else math.nan, optimizer.gradients
