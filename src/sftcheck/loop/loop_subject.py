"""A training loop as the subject of checks: steps over its own micro-batches, each run as the loop runs it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from importlib.metadata import version
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from sftcheck.batches import SeenBatch, Step
from sftcheck.documents.declared import OF_A_LOOP
from sftcheck.documents.truth import Encoder
from sftcheck.documents.view import View
from sftcheck.loop.loop_batches import LoopBatch, seen_batches
from sftcheck.loop.loop_model import LoopModel, Update
from sftcheck.loop.loop_model import Step as StepFunction
from sftcheck.loop.loop_state import named_by, restore_loop_after
from sftcheck.subject import MovedTensors, Subject
from sftron.checks.report import Finding, NotMeasuredError

_TOKENS_ON_CPU, _TOKENS_ON_GPU, _MOST_MICRO_BATCHES = 8192, 400_000, 256


class StepSubject(Subject):
    """A loop, within `restore_loop_after`.

    Args:
        batches: What its loader gives. Only the first are taken: as many as a step has, and more within the budget.
        step: Computes the loss of a list of micro-batches.
        optimizer: Changes the model, if the step does not do so itself.
        num_micro_batches: The number of micro-batches that a step has.

    Raises:
        ValueError: The loop cannot be checked.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[Any],
        step: StepFunction,
        tokenizer: Any,
        conversations: Sequence[Any] | None,
        trained_roles: str,
        *,
        optimizer: Optimizer | None,
        num_micro_batches: int,
    ) -> None:
        self.library = OF_A_LOOP.library
        self.trained_roles, self.num_micro_batches = trained_roles, num_micro_batches
        self._step, self._optimizer = step, optimizer
        self._model = LoopModel(model, step, len(tokenizer))
        self._tokenizer, self._is_exhausted = tokenizer, False
        self.steps: list[list[LoopBatch]] = list(self._read(batches))
        """The micro-batches of each step that was looked at."""
        is_whole = self._is_exhausted and hasattr(batches, "__len__") and not isinstance(batches, (list, tuple))
        seen = [batch for each in self.steps for batch in each]
        self.training = View(
            OF_A_LOOP, Encoder(tokenizer), [], seen, trained_roles, conversations=conversations, is_whole=is_whole
        )

    def _read(self, batches: Iterable[Any]) -> Iterator[list[LoopBatch]]:
        given, num_tokens, num_steps = iter(batches), 0, 0
        device = next(self._model.module.parameters()).device.type
        budget = _TOKENS_ON_CPU if device == "cpu" else _TOKENS_ON_GPU
        while num_tokens < budget and num_steps * self.num_micro_batches < _MOST_MICRO_BATCHES:
            chosen = list(islice(given, self.num_micro_batches))
            self._is_exhausted = len(chosen) < self.num_micro_batches
            if not chosen and not num_steps:
                raise ValueError("batches holds no micro-batch")
            if self._is_exhausted and (num_steps or not chosen):
                return
            found = seen_batches(chosen, self._model.read(chosen), self._tokenizer)
            num_tokens += sum(batch.ids.size for batch in found)
            num_steps += 1
            yield found

    @property
    def model(self) -> LoopModel:
        return self._model

    @property
    def evaluation(self) -> dict[str, View | Finding]:
        return {}

    @property
    def together_and_alone(self) -> list[SeenBatch]:
        return []

    @cached_property
    def step(self) -> Step:
        """The shortest step whose micro-batches have unlike numbers of targets, if there is one."""
        steps = [Step(tuple(each), None) for each in self.steps]
        trained = [each for each in steps if any(batch.num_trained for batch in each.batches)] or steps
        return min(trained, key=lambda each: (not each.is_unlike, sum(batch.ids.size for batch in each.batches)))

    @cached_property
    def update(self) -> Update:
        """The step as the loop takes it, with its optimizer, if one is seen; everything is put back."""
        with restore_loop_after(self._model.module, self._step, self._optimizer):
            return self._model.update([batch.inputs for batch in self.step.batches], self._optimizer)

    @cached_property
    def scale(self) -> float:
        """The factor by which gradient scalers of the step multiply its loss."""
        scale = 1.0
        for each in named_by(self._step):
            scale *= each.get_scale() if isinstance(each, GradScaler) and each.is_enabled() else 1.0
        return scale

    def moves(self, named: Mapping[str, nn.Parameter]) -> MovedTensors:
        if not self.update.optimized:
            raise NotMeasuredError("step makes no step of an optimizer; let it make one, or pass optimizer=")
        trainable = {name for name, each in named.items() if each.requires_grad}
        found, num_steps = self.update, 1
        with_gradient = {name for name, each in found.used.items() if bool(each.any())}
        moved, optimized = found.moved, found.optimized
        if with_gradient != trainable:  # as an adapter's A, while its B is zero
            num_steps, inputs = 2, [batch.inputs for batch in self.step.batches]
            with restore_loop_after(self._model.module, self._step, self._optimizer):
                first = self._model.update(inputs, self._optimizer)
                self._model.module.zero_grad(set_to_none=True)
                second = self._model.update(inputs, self._optimizer)
            moved = first.moved | second.moved
            with_gradient |= {name for name, each in second.used.items() if bool(each.any())}
        return MovedTensors(num_steps, optimized, with_gradient, moved)

    @property
    def facts(self) -> dict[str, str]:
        """The checked loop, model and batches, and the versions of the software."""
        model, config = self._model.unwrapped, self._model.config
        batches = self.training.batches
        computed = ", ".join(f"{batch.input_ids.shape[0]} x {batch.input_ids.shape[1]}" for batch in self.step.batches)
        kind = getattr(config, "model_type", "no configuration")
        return {
            "step": f"{getattr(self._step, '__name__', type(self._step).__name__)}, of {self.num_micro_batches} "
            "micro-batches",
            "model": f"{type(model).__name__} ({kind}), {next(model.parameters()).dtype}",
            "data": f"{len(batches):,} micro-batches looked at, {sum(batch.ids.size for batch in batches):,} tokens",
            "labels": f"read from the gradient of the loss at the logits of {self._model.head or 'the model'}",
            "truth": self.training.truth,
            "computed": f"micro-batches of {computed} tokens",
            "trained": "what the model has to write" if self.trained_roles == "assistant" else "every token",
            "versions": ", ".join(f"{name} {version(name)}" for name in ("sftron", "torch", "transformers")),
        }


def require_checkable(model: Any, batches: Any, tokenizer: Any, trained_roles: str) -> None:
    """Raises ValueError, with the remedy, if the loop cannot be checked."""
    import transformers

    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}; wanted the torch.nn.Module that step calls")
    if isinstance(batches, (Mapping, str)) or not isinstance(batches, Iterable):
        raise ValueError(f"batches is a {type(batches).__name__}; wanted a loader, or a list of micro-batches")
    if not isinstance(tokenizer, transformers.PreTrainedTokenizerBase):
        raise ValueError(
            f"tokenizer is a {type(tokenizer).__name__}; wanted one of transformers, whose chat template is the truth "
            "(PreTrainedTokenizerFast(tokenizer_object=...) wraps one of tokenizers)"
        )
    if trained_roles not in ("assistant", "all"):
        raise ValueError(f"trained_roles is {trained_roles!r}; wanted 'assistant' or 'all'")
    is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    is_sharded = any(type(each).__name__ == "DTensor" for each in model.parameters())
    if is_sharded or (is_distributed and torch.distributed.get_world_size() > 1):
        raise ValueError(
            "the model is sharded, or several ranks run; check the loop in one process with the whole model: its "
            "batches are the same there"
        )
