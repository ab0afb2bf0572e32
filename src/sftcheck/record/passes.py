"""Two passes of a trainer's own step: what it trains, read from the gradient of its loss, and the step as it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sftcheck.gradients import GradientDifference, difference_of
from sftcheck.interception import intercepted
from sftcheck.loop.call import Call
from sftcheck.loop.loop_model import LoopModel, backward, without_scaler
from sftcheck.loop.reading import Reading, read
from sftcheck.record.fused import NO_LOGITS_REMEDY, FusedHead, calls_instead, targets_of, with_hidden, without_autocast
from sftcheck.tolerances import Tolerance
from sftron.checks.report import NotMeasuredError
from sftron.data.types import IGNORE_INDEX
from sftron.report.first_update import FirstUpdate
from sftron.report.token_record import groups_of
from sftron.user_code import naming_the_line

_ROWS_AT_ONCE = 256
_LINEAR = Tolerance(1e-6, 2**-7)
"""Relative, how far logits are from those of the head times one number, if the model scales them."""

Make = Callable[[Tensor], Tensor]


@dataclass(slots=True, eq=False)
class _SeenCall:
    """A call of the model in a step, with the leaves that were put in place of its logits or log-probabilities."""

    call: Call
    micro_batch: int
    logits: list[Tensor] = field(default_factory=list)
    log_probs: Tensor | None = None
    hidden: Tensor | None = None
    """In place of the last hidden states, if the head is fused with the loss."""

    @property
    def has_gradient(self) -> bool:
        leaves = (*self.logits, self.log_probs, self.hidden)
        return any(each is not None and each.grad is not None for each in leaves)


@dataclass(frozen=True, slots=True, eq=False)
class ReadCall:
    """What one call of the model trains."""

    number: int
    """The number of the call in the step; a step may call the model without a gradient too."""
    micro_batch: int
    reading: Reading
    own: np.ndarray
    """float64 [B, T]: log p(target) in the call, at the token before the target; 0 without one."""

    @property
    def loss(self) -> float:
        return float((self.reading.weights * -self.own).sum())


@dataclass(slots=True, eq=False)
class OwnStep:
    """The step as it is, with its gradients."""

    result: Any = None
    logits: dict[int, Tensor] = field(default_factory=dict)
    """By the number of the call: its logits [B, n, V], or the log-probabilities [B, n] of its labels."""
    decoded: list[Any] = field(default_factory=list)
    """What the decoder returns in each of its calls."""
    fused: dict[int, FusedHead] = field(default_factory=dict)
    """By the number of the call: the head, if it is fused with the loss."""
    scales: dict[int, float] = field(default_factory=dict)
    """By what the model multiplies the logits of its head."""
    norms: dict[str, float] = field(default_factory=dict)
    """The norm of each tensor's gradient, as the optimizer is given it."""
    kept: GradientDifference | None = None
    """How far these gradients are from the sum over all backward passes; None if they were not compared."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    """The name and the groups, without their tensors, of an optimizer whose step was seen."""
    update: dict[str, Any] = field(default_factory=dict)
    """What `FirstUpdate` measures; empty if it was not measured."""

    autocast: str = "none"
    """The type to which autocast converts within the model."""
    dropout: float = 0.0
    """The largest probability of dropout that was at work."""

    def read(self, number: int, micro_batch: int, reading: Reading) -> ReadCall:
        """Returns what a call trains, by its own logits.

        Args:
            reading: What it trains by the logits of the head, which the model may have multiplied.
        """
        logits, targets = self.logits[number], reading.targets
        weights = reading.weights / (self.scales.get(number, 1.0) or 1.0)
        if logits.ndim == 3:
            own = log_probabilities(logits, targets)
        else:
            own = np.zeros(targets.shape)
            own[:, : logits.shape[1]] = logits.double().cpu().numpy()
            own[targets == IGNORE_INDEX] = 0.0
        return ReadCall(number, micro_batch, replace(reading, weights=weights), own)


class Passes:
    """The passes of one step.

    Args:
        model: The model, called by its step.
        batches: The micro-batches of the step.
        micro_batch: Returns the number of the micro-batch that is computed; None numbers the calls.
        scale: The factor of a GradScaler, by which the loss is multiplied for its gradient.
        optimizer: Returns an optimizer for a step that takes none of its own.
        max_norm: To which the gradients are clipped for it.
    """

    def __init__(
        self,
        model: LoopModel,
        batches: Sequence[Any],
        micro_batch: Callable[[], int] | None,
        scale: float = 1.0,
        optimizer: Callable[[], Any] = lambda: None,
        max_norm: float | None = None,
    ) -> None:
        self.model, self.batches, self.micro_batch, self.scale = model, batches, micro_batch, scale
        self.optimizer, self.max_norm = optimizer, max_norm

    def read(self, own: OwnStep, make: Make = torch.zeros_like) -> list[ReadCall]:
        """Returns what each call of the model trains. Raises ValueError if it cannot be read.

        Args:
            own: The step as it is, whose hidden states are taken again.
            make: Returns logits in the form of those that the head gives. Zeros show a cross-entropy exactly; a loss
                whose weights depend on probabilities shows its own weights at its own logits.
        """
        seen = list[_SeenCall]()

        def on_call(call: Call) -> None:
            number = len(seen) if self.micro_batch is None else self.micro_batch()
            seen.append(_SeenCall(call, number))

        def on_logits(logits: Tensor) -> Tensor:
            with torch.enable_grad():  # in float32, as a gradient in bfloat16 is no exact weight
                seen[-1].logits.append(make(logits.detach().float()).requires_grad_())
                return seen[-1].logits[-1].clone()

        def on_output(_module: Any, output: Any) -> Any:
            found = getattr(output, "log_probs", None)  # TRL computes no logits
            if not isinstance(found, Tensor):
                return None
            with torch.enable_grad():
                seen[-1].log_probs = found.detach().float().requires_grad_()
                output.log_probs = seen[-1].log_probs.clone()
            return output

        def decode(*_args: Any, **_options: Any) -> Any:
            decoded = next(outputs)
            if len(seen) - 1 not in own.fused:
                return decoded
            with torch.enable_grad():
                seen[-1].hidden = make(decoded.last_hidden_state.detach().float()).requires_grad_()
            return with_hidden(decoded, seen[-1].hidden)

        outputs = iter(own.decoded)
        remedy = f"; {NO_LOGITS_REMEDY}" if own.fused else ""
        with naming_the_line("the step raises", remedy), ExitStack() as stack, torch.enable_grad(), without_scaler():
            stack.enter_context(intercepted([self.model.module], on_output=on_output))
            if self._decoder is not None and own.decoded:
                stack.enter_context(calls_instead(self._decoder, decode))
            if own.fused:  # whose gradient autocast would round
                stack.enter_context(without_autocast(self.model.module))
                stack.enter_context(next(iter(own.fused.values())).in_float32())
            result = self.model.run(self.batches, on_call, on_logits)
            if not any(each.has_gradient for each in seen):
                backward(result)
        self.model.module.zero_grad(set_to_none=True)
        if not seen:
            raise ValueError("the step never calls the model; give the module that it calls")
        found = [
            own.read(n, each.micro_batch, self._reading(each, own, n)) for n, each in enumerate(seen)
            if each.has_gradient
        ]  # fmt: skip
        if not found:
            raise ValueError("no gradient reaches the model's logits; let the step return its loss, or call backward")
        if len({each.micro_batch for each in found}) < len(found):
            raise ValueError("the step computes a gradient in several calls of the model for one micro-batch")
        return found

    def _reading(self, seen: _SeenCall, own: OwnStep, number: int) -> Reading:
        if seen.hidden is not None and seen.hidden.grad is not None:
            decoded = with_hidden(own.decoded[number], seen.hidden)
            return own.fused[number].read(decoded, seen.hidden.grad / self.scale)
        if seen.log_probs is not None and seen.log_probs.grad is not None:
            return _of_log_probs(seen.call, seen.log_probs.grad / self.scale)
        leaves, width = seen.logits, seen.call.ids.shape[1]
        if len(leaves) == 1 and leaves[0].ndim == 3 and leaves[0].shape[1] < width:
            gradient, leaves = leaves[0].grad, [_of_all_tokens(leaves[0].detach(), seen.call)]
            leaves[0].grad = None if gradient is None else _of_all_tokens(gradient, seen.call)
        reading = read(seen.call, leaves)
        return replace(reading, weights=reading.weights / self.scale)

    @property
    def _decoder(self) -> nn.Module | None:
        """The part before the head; None if it cannot be found."""
        model = self.model.unwrapped
        found = model.get_decoder() if hasattr(model, "get_decoder") else None
        return found if isinstance(found, nn.Module) and found is not model else None

    def own(self, *, updates: bool = False) -> OwnStep:
        """Takes the step as it is. Leaves no gradient; may change the weights.

        Args:
            updates: Whether the update of the weights is measured.
        """
        seen: tuple[FirstUpdate, Any] | None = None
        found, heads, number = OwnStep(), list[Tensor](), -1
        parameters = {name: each for name, each in self.model.module.named_parameters() if each.requires_grad}
        summed, calls = dict[str, Tensor](), list[Call]()

        def on_call(call: Call) -> None:
            nonlocal number
            number += 1
            calls.append(call)
            heads.clear()

        def see_autocast() -> None:
            device = next(self.model.module.parameters()).device.type
            if torch.is_autocast_enabled(device):
                found.autocast = str(torch.get_autocast_dtype(device)).removeprefix("torch.")

        def on_head(logits: Tensor) -> None:
            see_autocast()
            heads.append(logits.detach())

        def on_decoder(_module: nn.Module, output: Any) -> None:
            see_autocast()
            found.decoded.append(
                pytree.tree_map(lambda each: each.detach() if isinstance(each, Tensor) else each, output)
            )

        def on_output(_module: Any, output: Any) -> None:
            log_probs = getattr(output, "log_probs", None)
            if isinstance(log_probs, Tensor):
                found.logits[number] = log_probs.detach()
                return
            logits = self.model.logits_of(output)
            head = (
                torch.cat([each.reshape(len(calls[-1].ids), -1, each.shape[-1]) for each in heads], dim=1)
                if heads
                else None
            )
            if logits is None or logits.ndim != 3:
                logits = head
            elif head is not None:
                found.scales[number] = _factor_of(logits.detach(), head)
            if logits is None:
                found.fused[number] = FusedHead(self.model, self._decoder, calls[-1])
                return
            is_part = logits.shape[1] < calls[-1].ids.shape[1]
            found.logits[number] = _of_all_tokens(logits.detach(), calls[-1]) if is_part else logits.detach()

        def on_optimizer(optimizer: Any) -> None:
            nonlocal seen
            for each in found.fused.values():
                each.refuse_optimizer()
            found.optimizer = {"name": type(optimizer).__name__, "groups": groups_of(optimizer)}
            keep()
            if updates and seen is None:
                seen = FirstUpdate(parameters.values()), optimizer

        def keep() -> None:
            found.norms = {
                name: _norm(each.grad) / self.scale for name, each in parameters.items() if each.grad is not None
            }
            used = {name: each.grad for name, each in parameters.items() if each.grad is not None}
            if summed:
                try:
                    found.kept = difference_of(used, summed)
                except NotMeasuredError:
                    found.kept = None

        def add(name: str, gradient: Tensor) -> None:
            summed[name] = summed[name] + gradient if name in summed else gradient.detach().clone()

        with naming_the_line("the step raises"), ExitStack() as stack, torch.enable_grad():
            for name, each in parameters.items():
                stack.callback(each.register_hook(lambda gradient, name=name: add(name, gradient)).remove)
            stack.enter_context(intercepted([self.model.module], on_output=on_output))
            decoders = [] if self._decoder is None else [self._decoder]
            stack.enter_context(intercepted(decoders, on_output=on_decoder))
            found.result = self.model.run(self.batches, on_call, on_head, on_optimizer)
            found.dropout = _dropout_of(self.model.module)
            with torch.no_grad():
                kind = None if found.autocast == "none" else getattr(torch, found.autocast)
                found.logits |= {n: each.logits(found.decoded[n], kind) for n, each in found.fused.items()}
            if not summed:
                backward(found.result)
            if not found.norms:
                keep()
        if updates:
            # An optimizer may need more than gradients, such as a closure; then its update is not known.
            with suppress(Exception):
                before, optimizer = seen or self._step(parameters.values())
                found.update = {} if optimizer is None else before.measure(optimizer)
        self.model.module.zero_grad(set_to_none=True)
        return found

    def _step(self, parameters: Collection[nn.Parameter]) -> tuple[FirstUpdate, Any]:
        """Takes the optimizer's step with clipped gradients. Returns what was before, and the optimizer."""
        before, optimizer = FirstUpdate(parameters), self.optimizer()
        if optimizer is not None:
            for each in parameters:
                if each.grad is not None:
                    each.grad.div_(self.scale)
            if self.max_norm:
                nn.utils.clip_grad_norm_(parameters, self.max_norm)
            optimizer.step()
        return before, optimizer


def log_probabilities(logits: Tensor, targets: np.ndarray) -> np.ndarray:
    """Returns log p(target) at the tokens [B, T] before the targets, float64; 0 where there is no target.

    Args:
        logits: [B, T, V]
        targets: int [B, T], IGNORE_INDEX for none.
    """
    found = np.zeros(targets.shape)
    rows, columns = np.nonzero(targets != IGNORE_INDEX)
    for begin in range(0, len(rows), _ROWS_AT_ONCE):
        part = slice(begin, begin + _ROWS_AT_ONCE)
        own = logits[torch.from_numpy(rows[part]), torch.from_numpy(columns[part])].float()
        wanted = torch.from_numpy(targets[rows[part], columns[part]].astype(np.int64)).to(own.device)
        values = own.log_softmax(-1).gather(1, wanted[:, None])[:, 0]
        found[rows[part], columns[part]] = values.cpu().numpy()
    return found


def _of_log_probs(call: Call, gradient: Tensor) -> Reading:
    """Returns the reading of a loss over log-probabilities of labels, by their gradient [B, T] or [B, T - 1]."""
    targets, weights, width = targets_of(call), np.zeros(tuple(call.ids.shape)), gradient.shape[1]
    if targets is None:
        raise ValueError("the model is given no labels, so it is not known of which tokens its log-probabilities are")
    targets[:, width:] = IGNORE_INDEX
    weights[:, :width] = -gradient.double().cpu().numpy()
    weights[targets == IGNORE_INDEX] = 0.0  # whose log-probability is always 0
    return Reading(call, np.where(weights == 0, IGNORE_INDEX, targets), weights, True)


def _of_all_tokens(values: Tensor, call: Call) -> Tensor:
    """Returns values [B, T, V] of all tokens, 0 for those whose logits the model does not keep."""
    kept, width = call.seen.get("logits_to_keep"), call.ids.shape[1]
    whole = values.new_zeros((len(values), width, values.shape[-1]))
    is_chosen = isinstance(kept, Tensor) and kept.ndim > 0  # as ms-swift chooses them; else the last ones
    whole[:, kept if is_chosen else slice(width - values.shape[1], width)] = values
    return whole


def _factor_of(logits: Tensor, head: Tensor) -> float:
    """Returns the number by which the model multiplies the logits of its head; 1 if it changes them in another way."""
    ours, theirs = head[:1, -1].double(), logits[:1, -1].double()
    if ours.shape != theirs.shape or not (square := float((ours * ours).sum())):
        return 1.0
    factor = float((ours * theirs).sum()) / square
    apart = float((theirs - factor * ours).norm()) / max(float(theirs.norm()), 1e-30)
    is_rounded = logits.dtype != torch.float32
    limit = _LINEAR.in_others if is_rounded else _LINEAR.in_float32
    return factor if apart <= limit and abs(factor - 1) > limit else 1.0  # a tanh that bounds them is nearly 1


def _dropout_of(model: nn.Module) -> float:
    """Returns the largest probability of dropout among modules in training; attention has its own as a number."""
    names = ("p", "attention_dropout", "attn_dropout", "dropout_p")
    values = [
        getattr(each, name, 0.0)
        for each in model.modules()
        if each.training
        for name in (names if isinstance(each, nn.modules.dropout._DropoutNd) else names[1:])
    ]
    return max((float(each) for each in values if isinstance(each, (int, float))), default=0.0)


def _norm(gradient: Tensor) -> float:
    return math.sqrt(float(gradient.double().square().sum()))


@contextmanager
def in_float32(device: torch.device) -> Iterator[None]:
    """Switches autocast off, and computes nothing for a gradient."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def facts_of_gradients(own: OwnStep) -> Mapping[str, Any]:
    kept = own.kept
    return {} if kept is None else {"factor": kept.factor, "apart": kept.apart_from_factor, "worst": kept.worst}
