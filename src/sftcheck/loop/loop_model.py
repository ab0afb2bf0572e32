"""The model of a loop, called as the loop's own step calls it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from sftcheck.interception import end_forward, intercepted
from sftcheck.loop.call import Arguments, Call
from sftcheck.loop.loop_batches import LoopBatch
from sftcheck.loop.reading import Reading, read
from sftcheck.restore import restored
from sftcheck.tolerances import UNKNOWN_ROUNDING
from sftron.checks.isolation import rounding_of
from sftron.checks.report import NotMeasuredError
from sftron.user_code import naming_the_line

Step = Callable[[list[Any]], Any]


@dataclass(slots=True)
class Update:
    """One step of the loop, with its gradients, and of its optimizer, if there is one."""

    summed: dict[str, Tensor] = field(default_factory=dict)
    """The sum of the gradients of all backward passes, by parameter."""
    last: dict[str, Tensor] = field(default_factory=dict)
    """The gradients of the last backward pass."""
    used: dict[str, Tensor] = field(default_factory=dict)
    """The gradients that the optimizer was given; those after the step if it has taken none."""
    optimized: set[str] = field(default_factory=set)
    """The parameters that an optimizer holds; empty if none was seen."""
    moved: set[str] = field(default_factory=set)


class LoopModel:
    """A model and the step that calls it, within `restore_loop_after`.

    Args:
        step: Computes the loss, and the gradients, of a list of micro-batches.
        num_tokens: The size of the tokenizer, by which the head is found if the model has no embedding layer.
    """

    def __init__(self, model: nn.Module, step: Step, num_tokens: int) -> None:
        self.model, self.step = model, step
        self.head = ""
        """The name of the module whose logits are read; "" until they are, and for the model itself."""
        self._width, self._num_tokens = 0, num_tokens
        self._is_autocast = False
        self._context: Any = None

    @property
    def module(self) -> nn.Module:
        """The model that is called, without torch.compile around it."""
        return getattr(self.model, "_orig_mod", self.model)

    @property
    def trained(self) -> nn.Module:
        return self.module

    @property
    def unwrapped(self) -> Any:
        model: Any = self.module
        return model.get_base_model() if hasattr(model, "get_base_model") else model

    @property
    def config(self) -> Any:
        return getattr(self.unwrapped, "config", None)

    @property
    def is_rounded(self) -> bool:
        return self._is_autocast or next(self.module.parameters()).dtype != torch.float32

    # -- the step, with hooks on the model ---------------------------------------------------------------------------

    def run(
        self,
        batches: Sequence[Any],
        on_call: Callable[[Call], Arguments | None],
        on_logits: Callable[[Tensor], Tensor | None],
        on_optimizer: Callable[[Optimizer], None] = end_forward,
    ) -> Any:
        """Returns what the step returns for copies of the batches, or None if one of the functions has ended it.

        Args:
            on_call: Takes each call of the model; may return other arguments.
            on_logits: Takes each tensor of logits of the innermost module that returns them; may return others.
            on_optimizer: Called before each step of an optimizer; by default, it ends the step there.
        """
        heads, calls = list[str](), list[Call]()

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
            heads.clear()
            calls.append(Call(module, args, kwargs))
            self._is_autocast = torch.is_autocast_enabled(calls[-1].ids.device.type)
            return on_call(calls[-1])

        def embed(module: Any, inputs: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
            if calls and not self._width:
                self._see_embedding(module, inputs, calls[-1].ids)

        names = {module: name for name, module in self.module.named_modules()}

        def after(module: nn.Module, output: Any) -> Any:
            logits, name = self.logits_of(output), names[module]
            if logits is None or any(each != name and each.startswith(f"{name}." if name else "") for each in heads):
                return None
            heads.append(name)
            self.head = name
            changed = on_logits(logits)
            return None if changed is None else _with_logits(output, changed)

        with ExitStack() as stack:
            # A compiled model would run without hooks.
            stack.enter_context(torch.compiler.set_stance("force_eager") if _HAS_STANCE else nullcontext())
            stack.enter_context(intercepted([self.module], on_call=before))
            stack.enter_context(intercepted([each for each in names if isinstance(each, nn.Embedding)], on_call=embed))
            stack.enter_context(intercepted(names, on_output=after))
            stack.enter_context(_seen_by(on_optimizer))
            torch.manual_seed(0)  # the same dropout in every pass
            return self.step(copy.deepcopy(list(batches)))
        return None

    def _see_embedding(self, module: nn.Embedding, inputs: tuple[Any, ...], ids: Tensor) -> None:
        """Keeps the size of the vocabulary; computing with another id would end a CUDA process."""
        given = inputs[0] if inputs else None
        if not isinstance(given, Tensor) or not torch.equal(given.reshape(-1).long(), ids.reshape(-1)):
            return
        self._width = module.num_embeddings
        if (largest := int(ids.max())) >= self._width:
            raise ValueError(f"the batches hold token {largest:,}, and the model has embeddings for {self._width:,}")

    def logits_of(self, output: Any) -> Tensor | None:
        """Returns the logits among what a module returns; None if there are none."""
        parts = [output]
        if isinstance(output, Mapping):
            parts = [output.get("logits")]
        elif isinstance(output, (tuple, list)):
            parts = list(output)
        for each in parts:
            if isinstance(each, Tensor) and each.is_floating_point() and each.ndim > 1:
                width = each.shape[-1]
                if width == self._width or (not self._width and width >= self._num_tokens):
                    return each
        return None

    # -- what is trained ---------------------------------------------------------------------------------------------

    def read(self, batches: Sequence[Any]) -> list[Reading]:
        """Returns what one step trains in each micro-batch. Raises ValueError if it cannot be read."""
        return [read(call, each) for call, each in self.gradients(batches, torch.zeros_like)]

    def gradients(self, batches: Sequence[Any], make: Callable[[Tensor], Tensor]) -> list[tuple[Call, list[Tensor]]]:
        """Returns each call of the model in a step, and the logits that it had in place of its own, with gradients.

        Args:
            make: Returns logits in the form of those that the head gives.
        """
        calls, leaves = list[Call](), list[list[Tensor]]()

        def on_call(call: Call) -> None:
            calls.append(call)
            leaves.append([])

        def on_logits(logits: Tensor) -> Tensor:
            with torch.enable_grad():
                leaves[-1].append(make(logits.detach()).requires_grad_())
                return leaves[-1][-1].clone()  # as a loop may change it in place

        try:
            with naming_the_line("the step raises"), torch.enable_grad(), without_scaler():
                result = self.run(batches, on_call, on_logits)
                if not any(leaf.grad is not None for each in leaves for leaf in each):
                    backward(result)
        finally:
            self.module.zero_grad(set_to_none=True)
        self._require(batches, calls, leaves)
        return list(zip(calls, leaves, strict=True))

    def _require(self, batches: Sequence[Any], calls: Sequence[Call], leaves: Sequence[Sequence[Tensor]]) -> None:
        if not calls:
            raise ValueError("step never calls the model; give the module that it calls (not a copy, nor a part of it)")
        if len(calls) != len(batches):
            raise ValueError(
                f"step calls the model {len(calls)} times for {len(batches)} micro-batches; wanted one call for each. "
                "Give the input of one call as a micro-batch, and set num_micro_batches= to their number in a step"
            )
        if not all(leaves):
            raise ValueError(
                "no module of the model gives logits [..., vocabulary]; switch off what fuses the head with the loss "
                "(Liger's fused_linear_cross_entropy, cut cross-entropy) for this check"
            )
        if not any(leaf.grad is not None for each in leaves for leaf in each):
            loss = math.log(leaves[0][0].shape[-1])
            raise ValueError(
                f"no gradient reaches the logits, which the check sets to 0, a loss of {loss:.1f} a token. Let step "
                "return the loss, or call backward itself; switch off what skips or clamps large losses"
            )

    # -- what is computed --------------------------------------------------------------------------------------------

    def hidden(self, batch: LoopBatch, ids: Tensor) -> Tensor:
        given = batch.given(ids)
        return batch.shown(self._computed(batch.inputs, lambda call: call.with_ids(given), given, is_training=None))

    def hidden_in_batch(self, batch: LoopBatch) -> Tensor:
        given = batch.given(batch.input_ids)
        return batch.shown(self._computed(batch.inputs, lambda _: None, given, is_training=False))

    def hidden_alone(self, ids: Tensor) -> Tensor:
        def alone(call: Call) -> Arguments:
            if call.given_ids.ndim == 1 and len(ids) > 1:
                raise NotMeasuredError("the model takes one flat row of ids, so the check cannot compare rows")
            return call.alone(ids, self.module)

        try:
            return self._computed(self._context, alone, ids, is_training=False)
        except (TypeError, ValueError, RuntimeError, IndexError, AssertionError) as error:
            raise NotMeasuredError(f"the model cannot compute one conversation alone: {error}") from error

    def rounding(self, ids: Tensor) -> float:
        try:
            return rounding_of(self.module, self.hidden_alone, ids)
        except NotMeasuredError:  # such a model has no neighbors to which a copy could be added
            return UNKNOWN_ROUNDING.limit_of(self)

    @torch.no_grad()
    def _computed(
        self, batch: Any, arguments: Callable[[Call], Arguments | None], ids: Tensor, *, is_training: bool | None
    ) -> Tensor:
        """Returns the logits [B, T, V] of ids [B, T], within a step of one micro-batch.

        Args:
            is_training: The mode of the model; None for that of the step.
        """
        found = list[Tensor]()
        self._context = batch

        def on_call(call: Call) -> Arguments | None:
            if is_training is not None:
                self.module.train(is_training)
            return arguments(call)

        def on_logits(logits: Tensor) -> None:
            found.append(logits.detach())
            if sum(each.numel() for each in found) >= ids.numel() * logits.shape[-1]:
                end_forward()

        self.run([batch], on_call, on_logits)
        return torch.cat([each.reshape(len(ids), -1, each.shape[-1]) for each in found], dim=1)

    def update(self, batches: Sequence[Any], optimizer: Optimizer | None) -> Update:
        """Takes the step with its own gradients, and the optimizer's step if there is one. Changes the weights."""
        named = {name: each for name, each in self.module.named_parameters() if each.requires_grad}
        before = {name: each.detach().clone() for name, each in self.module.named_parameters()}
        names, found = {id(each): name for name, each in named.items()}, Update()

        def add(name: str, gradient: Tensor) -> None:
            known, found.last[name] = found.summed.get(name), gradient.detach().float().clone()
            found.summed[name] = gradient.detach().float().clone() if known is None else known + gradient.float()

        def on_optimizer(stepping: Optimizer) -> None:
            for group in stepping.param_groups:
                group["lr"] = group["lr"] or group.get("initial_lr", 0.0)  # as a warmup begins at 0
                found.optimized.update(names[id(each)] for each in group["params"] if id(each) in names)
            keep()

        def keep() -> None:
            found.used.update({n: each.grad.float().clone() for n, each in named.items() if each.grad is not None})

        with ExitStack() as stack, torch.enable_grad():
            for name, each in named.items():
                stack.callback(each.register_hook(lambda gradient, name=name: add(name, gradient)).remove)
            result = self.run(batches, lambda _: None, lambda _: None, on_optimizer)
            if not found.summed:
                backward(result)
            if not found.used:
                keep()
            if not found.optimized and optimizer is not None:
                with _seen_by(on_optimizer):
                    optimizer.step()
        found.moved = {n for n, each in self.module.named_parameters() if not each.equal(before[n])}
        return found


_HAS_STANCE = hasattr(torch.compiler, "set_stance")


@contextmanager
def without_scaler() -> Iterator[None]:
    """Ends a step where a GradScaler looks at gradients, as it refuses a model without them."""
    with restored(GradScaler, "unscale_", "step"):
        for name in ("unscale_", "step"):
            setattr(GradScaler, name, end_forward)
        yield


@contextmanager
def _seen_by(on_optimizer: Callable[[Optimizer], None]) -> Iterator[None]:
    hook = register_optimizer_step_pre_hook(lambda optimizer, *_: on_optimizer(optimizer))
    try:
        yield
    finally:
        hook.remove()


def backward(result: Any) -> None:
    """Computes the gradients of the loss that a step returns, alone or with others. Raises ValueError for several."""
    parts = list(result.values()) if isinstance(result, Mapping) else result
    if isinstance(result, list):
        losses = [each for each in result if isinstance(each, Tensor) and each.requires_grad and each.numel() == 1]
        if len(losses) > 1:
            raise ValueError(f"step returns a list of {len(losses)} losses; return their sum, or call backward")
    for each in parts if isinstance(parts, (tuple, list)) else [parts]:
        if isinstance(each, Tensor) and each.requires_grad:
            each.sum().backward()
            return


def _with_logits(output: Any, logits: Tensor) -> Any:
    """Returns what a module has returned, with other logits."""
    if isinstance(output, Tensor):
        return logits
    if isinstance(output, Mapping):
        copied: Any = copy.copy(output)
        copied["logits"] = logits
        return copied
    parts = list(output)
    at = next(n for n, each in enumerate(parts) if isinstance(each, Tensor) and each.shape == logits.shape)
    parts[at] = logits
    return type(output)(parts)
