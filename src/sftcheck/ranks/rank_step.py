"""One step of a trainer on several ranks, and the same step in one process.

every rank     the trainer's own step on the wrapped model: losses, gradients after the trainer's reduction
rank 0         the same rows, whole, with the model before it is wrapped: the sum of all losses by their labels
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sftcheck.gradients import GradientDifference, difference_of
from sftcheck.ranks.exchange import Exchange
from sftcheck.ranks.rank_batches import (
    MicroBatch,
    arguments_of_one_process,
    clone_inputs,
)
from sftcheck.ranks.rank_model import (
    ModelOfOneProcess,
    WrappedModel,
    gradient_places,
    gradients_of,
    kept_outputs,
    loss_sum,
)
from sftcheck.restore import own_collator, restored
from sftron.checks.report import NotMeasuredError
from sftron.data.types import IGNORE_INDEX


@dataclass(frozen=True, slots=True)
class Reference:
    """The rows of the step in one process."""

    num_labels: int
    loss: float
    """The sum of all cross-entropies by the number of labels."""


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredStep:
    """One step of the trainer on all ranks, as this rank has seen it."""

    returned: list[list[float]]
    """By rank, what `training_step` returned for each micro-batch."""
    gradients: dict[str, Tensor | None]
    """The gradients of this rank after the trainer's reduction, whole, by the name of the trained tensor."""
    differences: tuple[GradientDifference, ...]
    """By rank, the gradients against the reference's; empty if the reference has no gradient."""


class StepOnRanks:
    """The step that is computed. Each method is a collective: all ranks call it, in the same order.

    Args:
        trainer: The trainer, which holds the original model.
        micro_batches: The micro-batches of the step.
        num_items: The number by which the trainer divides their loss.
    """

    def __init__(
        self,
        trainer: Any,
        model: ModelOfOneProcess,
        wrapped: WrappedModel,
        exchange: Exchange,
        micro_batches: Sequence[MicroBatch],
        num_items: Any,
    ) -> None:
        self._trainer, self._model, self._wrapped, self._exchange = trainer, model, wrapped, exchange
        self._micro_batches, self._num_items, self._original = micro_batches, num_items, trainer.model
        self._reference: Reference | None = None
        self._measured: MeasuredStep | None = None

    def reference(self) -> Reference:
        """Computes the step in one process, on rank 0, whose original model keeps the gradients. Computes it once."""
        if self._reference is None:
            own = [(_on_device(self._arguments(micro), "cpu"), micro.whole.labels) for micro in self._micro_batches]
            batches = self._exchange.gather("the whole rows", own)
            fields = self._exchange.of_first("the reference", lambda: self._computed_in_one_process(batches))
            self._reference = Reference(*fields)
        return self._reference

    def measure(self) -> MeasuredStep:
        """Takes the trainer's own step on all ranks, and compares its gradients with the reference's. Takes it once."""
        if self._measured is None:
            self.reference()
            names = self._trained_names()
            expected = self._expected_gradients(names)  # of the original model, at which the step looks
            returned, gradients = self._run(names)
            returned = self._exchange.gather("the losses", returned)
            self._measured = MeasuredStep(returned, gradients, self._compared(gradients, expected))
        return self._measured

    def hidden(self, changed: Sequence[np.ndarray]) -> list[Tensor]:
        """Returns the last hidden states [B, T, H] that this rank computes of each micro-batch.

        Args:
            changed: For each micro-batch, the ids of its whole rows.
        """
        trainer, found = self._trainer, list[Tensor]()
        with self._wrapped.in_place() as module, torch.no_grad(), restored(trainer.accelerator, "backward"):
            trainer.accelerator.backward = lambda *_args, **_options: None
            for micro, ids in zip(self._micro_batches, changed, strict=True):
                inputs = clone_inputs(micro.inputs)
                given = inputs["input_ids"]
                inputs["input_ids"] = torch.from_numpy(micro.given.read(ids, given.cpu().numpy())).to(given)
                torch.manual_seed(0)
                with kept_outputs(self._wrapped.inner) as outputs:
                    try:
                        trainer.training_step(module, inputs, self._num_items)
                    except Exception:  # without gradients, a backward pass of the trainer's own raises
                        if not outputs:
                            raise
                if not outputs:
                    raise NotMeasuredError("the model shows neither hidden states nor logits")
                found.append(outputs[0])
        return found

    def trained_everywhere(self, micro: MicroBatch) -> tuple[np.ndarray, np.ndarray | None]:
        """Computes a micro-batch in which every token has a label, except padding.

        Returns the labels of its whole rows [B, T], and at which tokens of this rank the loss has a gradient in the
        last hidden state, bool [B, T]; None if the decoder is not found.
        """
        labels, inputs = self._labelled(micro)
        named = self._wrapped.named
        before = {name: each.grad for name, each in named.items()}
        for each in named.values():
            each.grad = None
        with self._wrapped.in_place() as module, gradient_places(self._wrapped.inner) as places:
            torch.manual_seed(0)
            with self._trainer.accelerator.no_sync(model=module):
                self._trainer.training_step(module, inputs, self._num_items)
        for name, each in named.items():
            each.grad = before[name]
        return labels, places[-1] if places else None

    def rotations(self, micro: MicroBatch) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Returns the cosines and sines [B or 1, T, D] of each rotary embedding that this rank computes of its part,
        and those of the whole rows.
        """
        inputs, module = clone_inputs(micro.inputs), self._model.module
        own = self._model.first_rotations(lambda: self._trainer.training_step(module, inputs, self._num_items))
        return own, self._model.first_rotations(lambda: module(**self._arguments(micro)))

    # -- parts of these ----------------------------------------------------------------------------------------------

    def _arguments(self, micro: MicroBatch) -> dict[str, Any]:
        return arguments_of_one_process(micro, is_split=micro.is_split(self._exchange.rank))

    def _computed_in_one_process(
        self, batches: Sequence[Sequence[tuple[dict[str, Any], np.ndarray]]]
    ) -> tuple[int, float]:
        """Returns the fields of the reference."""
        units = [(n, rank) for n, micro in enumerate(self._micro_batches) for rank in micro.first_of_groups]
        num_labels = sum(int((batches[rank][n][1][:, 1:] != IGNORE_INDEX).sum()) for n, rank in units)
        if not num_labels:
            raise NotMeasuredError("no token of the computed batches is trained")
        total, trainer = 0.0, self._trainer
        for each in self._original.parameters():
            each.grad = None
        for n, rank in units:
            arguments, labels = batches[rank][n]
            arguments = _on_device(arguments, trainer.args.device)
            torch.manual_seed(0)
            context = trainer.compute_loss_context_manager
            total += loss_sum(self._original, arguments, labels, 1 / num_labels, context)
        return num_labels, total / num_labels

    def _trained_names(self) -> list[str]:
        """Returns the names of the trained parameters. Raises NotMeasuredError if ranks train different ones."""
        own = [name for name, each in self._wrapped.named.items() if each.requires_grad]
        for rank, other in enumerate(self._exchange.gather("the trained parameters", own)):
            if other != own:
                differing, here = sorted(set(other) ^ set(own)), self._exchange.rank
                raise NotMeasuredError(f"rank {rank} trains other parameters than rank {here}: {differing[:4]}")
        return own

    def _expected_gradients(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Returns the gradients of the reference, on every rank, in fp32."""
        named, found = dict(self._original.named_parameters()), dict[str, Tensor]()
        for name in names:
            own = named[name].grad if self._exchange.rank == 0 else None
            values = torch.zeros(named[name].shape) if own is None else own.detach().float().cpu()
            found[name] = self._exchange.broadcast(values.contiguous())
        return found

    def _run(self, names: Sequence[str]) -> tuple[list[float], dict[str, Tensor | None]]:
        """Takes the trainer's step. Returns this rank's losses by micro-batch, and its gradients."""
        trainer, micro_batches, returned = self._trainer, self._micro_batches, list[float]()
        with self._wrapped.in_place() as module, restored(trainer, "current_gradient_accumulation_steps"):
            trainer.current_gradient_accumulation_steps = len(micro_batches)
            for each in (*self._wrapped.named.values(), *self._original.parameters()):
                each.grad = None
            for number, micro in enumerate(micro_batches):
                is_last = number == len(micro_batches) - 1
                trainer.accelerator.gradient_state._set_sync_gradients(is_last)
                torch.manual_seed(0)
                with nullcontext() if is_last else trainer.accelerator.no_sync(model=module):
                    returned.append(float(trainer.training_step(module, clone_inputs(micro.inputs), self._num_items)))
            control = trainer.callback_handler.on_pre_optimizer_step(trainer.args, trainer.state, trainer.control)
            trainer.control = control
            gradients = gradients_of(self._wrapped.named, names)
        is_elsewhere = any(each.grad is not None for each in self._original.parameters())
        if is_elsewhere and all(each is None for each in gradients.values()):
            raise NotMeasuredError("a function of the model refers to the model, so the check cannot compute a copy")
        return returned, gradients

    def _compared(
        self, gradients: Mapping[str, Tensor | None], expected: Mapping[str, Tensor]
    ) -> tuple[GradientDifference, ...]:
        if not any(bool(each.any()) for each in expected.values()):  # the same on all ranks
            return ()
        own = astuple(difference_of(gradients, expected))
        return tuple(GradientDifference(*each) for each in self._exchange.gather("the gradients", own))

    def _labelled(self, micro: MicroBatch) -> tuple[np.ndarray, dict[str, Any]]:
        """Returns the labels of whole rows in which every token has one, and the inputs of this rank with them."""
        whole, inputs = micro.whole, clone_inputs(micro.inputs)
        is_text = np.ones(whole.ids.shape, dtype=bool) if whole.attended is None else whole.attended != 0
        labels = np.where(is_text, whole.ids, IGNORE_INDEX)
        if inputs["input_ids"].shape == whole.ids.shape:
            values = torch.from_numpy(labels).to(inputs["input_ids"])
            behind = torch.nn.functional.pad(values[:, 1:], (0, 1), value=IGNORE_INDEX)
            return labels, inputs | {
                name: each for name, each in (("labels", values), ("shift_labels", behind)) if name in inputs
            }
        rows = [{**each, "labels": list(each["input_ids"])} for each in whole.features]
        sizes = [len(each["labels"]) for each in rows] if len(whole.ids) == 1 else []
        labels[0, np.cumsum([0, *sizes[:-1]], dtype=int)] = IGNORE_INDEX
        return labels, dict(own_collator(self._trainer)(rows))


def _on_device(arguments: Mapping[str, Any], device: Any) -> dict[str, Any]:
    return {name: each.to(device) if isinstance(each, Tensor) else each for name, each in arguments.items()}
