"""A trainer on several ranks as the subject of checks.

    every rank     its own dataloader's batches  ->  the rows of which it computes all or a part (rank_batches.py)
                   the trainer's own step on the wrapped model: losses, gradients after the trainer's reduction
    rank 0         the same rows, whole, with the model before it is wrapped: the sum of all losses by their labels

Each method that is a collective says so: all ranks call it, in the same order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sftcheck.batches import SeenBatch
from sftcheck.gradients import GradientDifference, difference_of
from sftcheck.ranks.rank_batches import (
    MicroBatch,
    arguments_of_one_process,
    cloned,
)
from sftcheck.ranks.rank_data import RankData
from sftcheck.ranks.rank_model import (
    gradient_places,
    gradients_of,
    kept_outputs,
    loss_sum,
)
from sftcheck.restore import own_collator, restored
from sftcheck.trainer.called_model import StepLosses
from sftron.checks.report import NotMeasuredError
from sftron.data.types import IGNORE_INDEX


@dataclass(frozen=True, slots=True, eq=False)
class RankRun:
    """One step of the trainer on all ranks, as this rank has seen it."""

    returned: list[list[float]]
    """By rank, what `training_step` returned for each micro-batch."""
    gradients: dict[str, Tensor | None]
    """Those of this rank after the trainer's reduction, whole."""


@dataclass(frozen=True, slots=True, eq=False)
class ReferenceRun:
    """The same rows in one process."""

    num_labels: int
    loss: float
    """The sum of all cross-entropies by the number of labels."""


class RankSubject(RankData):
    """A trainer on several ranks: its own step, and the same in one process."""

    @property
    def together_and_alone(self) -> list[SeenBatch]:
        return []  # rows that are collated again, which ranks cannot do apart

    @cached_property
    def run(self) -> RankRun:
        """The trainer's own step on all ranks. This is a collective."""
        _ = self.expected_gradients  # those of the original model, which are looked at below
        trainer, wrapped, step = self.trainer, self.wrapped, self.step
        micro_batches, returned = self.computed_micro_batches, list[float]()
        with wrapped.in_place() as module, restored(trainer, "current_gradient_accumulation_steps"):
            trainer.current_gradient_accumulation_steps = len(micro_batches)
            self._zero_gradients()
            for number, micro in enumerate(micro_batches):
                is_last = number == len(micro_batches) - 1
                trainer.accelerator.gradient_state._set_sync_gradients(is_last)
                torch.manual_seed(0)
                with nullcontext() if is_last else trainer.accelerator.no_sync(model=module):
                    returned.append(float(trainer.training_step(module, cloned(micro.inputs), step.num_items)))
            control = trainer.callback_handler.on_pre_optimizer_step(trainer.args, trainer.state, trainer.control)
            trainer.control = control
            gradients = gradients_of(wrapped.named, self.names)
        self._require_gradients(gradients)
        return RankRun(self.exchange.gather("the losses", returned), gradients)

    def _zero_gradients(self) -> None:
        for each in (*self.wrapped.named.values(), *self.original.parameters()):
            each.grad = None

    def _require_gradients(self, gradients: Mapping[str, Tensor | None]) -> None:
        """Raises NotMeasuredError if the copy of the model calls the model of which it is a copy."""
        is_elsewhere = any(each.grad is not None for each in self.original.parameters())
        if is_elsewhere and all(each is None for each in gradients.values()):
            raise NotMeasuredError("a function of the model holds the model itself, so no copy of it can be computed")

    @cached_property
    def losses(self) -> StepLosses:
        return StepLosses(self.run.returned[self.rank], [], 0.0, dict(self.run.gradients))

    def hidden_on_ranks(self, changed: Sequence[np.ndarray]) -> list[Tensor]:
        """Returns the last hidden states [B, T, H] that this rank computes of each micro-batch. This is a collective.

        Args:
            changed: For each micro-batch, the ids of its whole rows.
        """
        trainer, found = self.trainer, list[Tensor]()
        with self.wrapped.in_place() as module, torch.no_grad(), restored(trainer.accelerator, "backward"):
            trainer.accelerator.backward = lambda *_args, **_options: None
            for micro, ids in zip(self.computed_micro_batches, changed, strict=True):
                inputs = cloned(micro.inputs)
                inputs["input_ids"] = _placed(inputs["input_ids"], ids, micro.given_index)
                torch.manual_seed(0)
                with kept_outputs(self.wrapped.inner) as outputs:
                    try:
                        trainer.training_step(module, inputs, self.step.num_items)
                    except Exception:  # without gradients, a backward pass of the trainer's own raises
                        if not outputs:
                            raise
                if not outputs:
                    raise NotMeasuredError("the model shows neither hidden states nor logits")
                found.append(outputs[0])
        return found

    def labelled_everywhere(self, micro: MicroBatch) -> tuple[np.ndarray, np.ndarray | None]:
        """Computes a micro-batch in which every token has a label, padding excepted. This is a collective.

        Returns the labels of its whole rows [B, T], and at which tokens of this rank the loss has a gradient in the
        last hidden state, bool [B, T]; None if the decoder is not found.
        """
        whole = micro.whole
        is_text = np.ones(whole.ids.shape, dtype=bool) if whole.attended is None else whole.attended != 0
        labels = np.where(is_text, whole.ids, IGNORE_INDEX)
        inputs = cloned(micro.inputs)
        if inputs["input_ids"].shape == whole.ids.shape:
            values = torch.from_numpy(labels).to(inputs["input_ids"])
            behind = torch.nn.functional.pad(values[:, 1:], (0, 1), value=IGNORE_INDEX)
            for name, each in (("labels", values), ("shift_labels", behind)):
                if name in inputs:
                    inputs[name] = each
        else:
            rows = [{**each, "labels": list(each["input_ids"])} for each in whole.features]
            inputs = dict(own_collator(self.trainer)(rows))
            sizes = [len(each["labels"]) for each in rows] if len(whole.ids) == 1 else []
            labels[0, np.cumsum([0, *sizes[:-1]], dtype=int)] = IGNORE_INDEX
        named = self.wrapped.named
        before = {name: each.grad for name, each in named.items()}
        for each in named.values():
            each.grad = None
        with self.wrapped.in_place() as module, gradient_places(self.wrapped.inner) as places:
            torch.manual_seed(0)
            with self.trainer.accelerator.no_sync(model=module):
                self.trainer.training_step(module, inputs, self.step.num_items)
        for name, each in named.items():
            each.grad = before[name]
        return labels, places[-1] if places else None

    def rotations(self, micro: MicroBatch) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Returns the cosines and sines [B or 1, T, D] of each rotary embedding that this rank computes of its part,
        and those of the whole rows. This is a collective.
        """
        arguments = arguments_of_one_process(micro, is_split=micro.is_split(self.rank))
        inputs, module = cloned(micro.inputs), self.model.module
        own = self.model.first_rotations(lambda: self.trainer.training_step(module, inputs, self.step.num_items))
        return own, self.model.first_rotations(lambda: module(**arguments))

    @cached_property
    def names(self) -> list[str]:
        """The names of the trained parameters. Raises NotMeasuredError if ranks train different ones."""
        own = [name for name, each in self.wrapped.named.items() if each.requires_grad]
        for rank, other in enumerate(self.exchange.gather("the trained parameters", own)):
            if other != own:
                differing = sorted(set(other) ^ set(own))
                raise NotMeasuredError(f"rank {rank} trains other parameters than rank {self.rank}: {differing[:4]}")
        return own

    @cached_property
    def reference(self) -> ReferenceRun:
        """The whole rows of the step in one process, on rank 0, whose model has their gradients afterwards.

        This is a collective.
        """
        own = [
            (arguments_of_one_process(micro, is_split=micro.is_split(self.rank)), micro.whole.labels)
            for micro in self.computed_micro_batches
        ]
        own = [({name: _on(each, "cpu") for name, each in given.items()}, labels) for given, labels in own]
        batches = self.exchange.gather("the whole rows", own)
        return ReferenceRun(*self.exchange.of_first("the reference", lambda: self._computed_in_one_process(batches)))

    def _computed_in_one_process(
        self, batches: Sequence[Sequence[tuple[dict[str, Any], np.ndarray]]]
    ) -> tuple[int, float]:
        """Returns the fields of the reference."""
        model, micro_batches = self.original, self.computed_micro_batches
        units = [(n, rank) for n, micro in enumerate(micro_batches) for rank in micro.first_of_groups]
        num_labels = sum(int((batches[rank][n][1][:, 1:] != IGNORE_INDEX).sum()) for n, rank in units)
        if not num_labels:
            raise NotMeasuredError("no token of the computed batches is trained")
        total = 0.0
        for each in model.parameters():
            each.grad = None
        for n, rank in units:
            arguments, labels = batches[rank][n]
            arguments = {name: _on(each, self.trainer.args.device) for name, each in arguments.items()}
            torch.manual_seed(0)
            context = self.trainer.compute_loss_context_manager
            total += loss_sum(model, arguments, labels, 1 / num_labels, context)
        return num_labels, total / num_labels

    @cached_property
    def expected_gradients(self) -> dict[str, Tensor]:
        """The gradients of the reference, on every rank, in fp32. This is a collective."""
        _ = self.reference
        named = dict(self.original.named_parameters())
        found = dict[str, Tensor]()
        for name in self.names:
            own = named[name].grad if self.rank == 0 else None
            values = torch.zeros(named[name].shape) if own is None else own.detach().float().cpu()
            found[name] = self.exchange.broadcast(values.contiguous())
        return found

    @cached_property
    def differences(self) -> list[GradientDifference]:
        """The gradients of each rank against those of the reference. This is a collective."""
        own = difference_of(self.run.gradients, self.expected_gradients)
        del self.expected_gradients  # a copy of the model in size
        return [GradientDifference(*each) for each in self.exchange.gather("the gradients", astuple(own))]

    @cached_property
    def facts(self) -> dict[str, str]:
        """Those of the trainer, and its ranks. This is a collective."""
        facts, kinds = super().facts, Counter(type(each).__name__ for each in self.wrapped.named.values())
        split = self.exchange.gather("the parts of rows", self.is_split)
        shared = f", {max(len(m.group_of(self.rank)) for m in self.seen)} share a row" if any(split) else ""
        wrapper = type(self.wrapped.module).__name__
        own = f"{self.exchange.world_size}{shared}; {wrapper}, {', '.join(kinds)}"
        return {**facts, "ranks": own}


def _placed(given: Tensor, ids: np.ndarray, index: np.ndarray) -> Tensor:
    """Returns the ids of a dataloader's batch [B, T], of which those with a place in the whole rows are changed."""
    found, has_place = given.clone(), index[..., 0] >= 0
    at = index[has_place]
    found[torch.from_numpy(has_place)] = torch.from_numpy(ids[at[:, 0], at[:, 1]]).to(given)
    return found


def _on(value: Any, device: Any) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value
