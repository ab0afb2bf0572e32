"""The interface between a trainer (or loop) and the checks: its batches, its model, and one computed step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sftcheck.batches import SeenBatch, Step
from sftcheck.documents.document import Document
from sftcheck.documents.view import View
from sftron.checks.isolation import Isolation, compare_documents
from sftron.checks.report import EVALUATION, Finding, NotMeasuredError

FEW_ROWS = 2
IN_ONE_ROW, IN_DIFFERENT_ROWS = "in one row", "in different rows"


class Model(Protocol):
    """A model that is called as its training step calls it."""

    @property
    def module(self) -> nn.Module: ...

    @property
    def trained(self) -> nn.Module:
        """The module whose tensors the optimizer changes, adapters included."""
        ...

    @property
    def unwrapped(self) -> Any:
        """The model itself, without wrappers."""
        ...

    @property
    def config(self) -> Any: ...

    @property
    def is_rounded(self) -> bool:
        """Whether it computes in another type than float32."""
        ...

    def hidden(self, batch: Any, ids: Tensor) -> Tensor:
        """Returns the last hidden states, or the logits, [B, T, any] of the batch with these ids, in training mode."""
        ...

    def hidden_in_batch(self, batch: Any) -> Tensor:
        """Returns the same of the batch as it is, without dropout."""
        ...

    def hidden_alone(self, ids: Tensor) -> Tensor:
        """Returns the same of ids [B, n] as the model is served, without dropout."""
        ...

    def rounding(self, ids: Tensor) -> float:
        """Returns the change of what is computed for ids [1, n] that is rounding."""
        ...


@dataclass(frozen=True, slots=True)
class MovedTensors:
    """What one or two steps of the optimizer change, by the names of the tensors."""

    num_steps: int
    optimized: Set[str]
    """The tensors that the optimizer holds."""
    with_gradient: Set[str]
    moved: Set[str]


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredIsolation:
    """Whether the conversations of one batch, `kind` "in one row" or "in different rows", see each other."""

    kind: str
    batch: SeenBatch
    measured: Isolation


class Subject(ABC):
    """A trainer, or a loop.

    Attributes:
        library: The package of the trainer's class, "" for transformers, or "loop" for a loop.
        training: The batches that are looked at, with their documents.
        trained_roles: "assistant", or "all" for a loss over every token.
    """

    library: str
    training: View
    trained_roles: str

    @property
    @abstractmethod
    def model(self) -> Model: ...

    @property
    @abstractmethod
    def evaluation(self) -> Mapping[str, View | Finding]:
        """For each data set of the evaluation: some of its batches, or why there are none."""

    @property
    @abstractmethod
    def step(self) -> Step:
        """The micro-batches of one optimizer step that is small enough to be computed."""

    @property
    @abstractmethod
    def together_and_alone(self) -> list[SeenBatch]:
        """A batch of a few rows of a micro-batch, and batches of each of them; empty if there are none."""

    @abstractmethod
    def moves(self, named: Mapping[str, nn.Parameter]) -> MovedTensors:
        """Takes one or two steps of the optimizer. Raises NotMeasuredError if there is none."""

    # -- what is computed --------------------------------------------------------------------------------------------

    @cached_property
    def computed_batches(self) -> list[tuple[SeenBatch, list[Document]]]:
        """The batches that are computed, with their documents; those with the most first."""
        found = self.training.documents_of(self.step.batches)
        pairs = [
            (batch, [each for each in found if each.batch == n and len(each)])
            for n, batch in enumerate(self.step.batches)
        ]
        return sorted(pairs, key=lambda pair: -len(pair[1]))

    @property
    def arguments(self) -> str:
        """The names of the arguments with which the model is called."""
        return ", ".join(sorted(self.step.batches[0].seen))

    @cached_property
    def isolations(self) -> tuple[list[MeasuredIsolation], str]:
        """The measurements between conversations "in one row" and "in different rows", or why there are none."""
        found, problem, model = list[MeasuredIsolation](), "", self.model
        for batch, documents in self.computed_batches:
            rows: dict[int, list[Document]] = {}
            for each in documents:
                rows.setdefault(each.row, []).append(each)
            packed = [each.index for each in max(rows.values(), key=len, default=[])]
            across = [(row, slice(each[0].index[1].start, each[-1].index[1].stop)) for row, each in rows.items()]
            for kind, indices in ((IN_ONE_ROW, packed), (IN_DIFFERENT_ROWS, across)):
                if len(indices) < 2:
                    continue
                try:
                    measured = compare_documents(
                        lambda ids, batch=batch: model.hidden(batch, ids),
                        batch.input_ids,
                        indices,
                        model.rounding,
                    )
                    found.append(MeasuredIsolation(kind, batch, measured))
                except NotMeasuredError as error:
                    problem = str(error)
            if len({each.kind for each in found}) == 2:
                break
        return found, problem

    @cached_property
    def apart_from_alone(self) -> float | None:
        """How far the last hidden states of conversations in a batch are from those of their ids alone, relative.

        A server passes the ids alone. None if no conversation has known bounds, or the model gives no logits.
        """
        batch = (self.together_and_alone or self.step.batches)[0]
        documents = [each for each in self.training.documents_of([batch]) if each.source and len(each)]
        if not documents:
            return None
        ids, apart = batch.input_ids, list[float]()
        try:
            together = self.model.hidden_in_batch(batch)
            for each in documents[-FEW_ROWS:]:
                is_input = torch.from_numpy(batch.is_input[each.index])
                alone = self.model.hidden_alone(ids[each.index][None])[0][is_input].float()
                apart.append(float((together[each.index][is_input].float() - alone).norm() / alone.norm()))
        except NotMeasuredError:
            return None
        return max(apart)


def with_evaluation(measure: Callable[[View], Finding]) -> Callable[[Subject], Finding]:
    """Returns a check of the training's batches that also fails if an evaluation's batches fail it.

    An evaluation whose batches cannot be made is named as not measured.
    """

    @wraps(measure)
    def check(subject: Subject) -> Finding:
        found = measure(subject.training)
        for name, view in subject.evaluation.items():
            try:
                other = view if isinstance(view, Finding) else measure(view)
            except NotMeasuredError as error:
                other = Finding(None, f"not measured, {error}")
            found = with_finding_of(name, found, other)
        return found

    return check


def with_finding_of(name: str, found: Finding, other: Finding) -> Finding:
    """Joins the finding of the training with the finding of one evaluation."""
    is_first = other.passed is False and found.passed is not False
    raised = found.raised or other.raised
    first, rest = (other, found) if is_first else (found, other)
    also = rest.faults if rest.passed is False else ()
    return replace(
        first,
        faults=tuple(dict.fromkeys((*first.faults, *also))),
        passed=False if False in (found.passed, other.passed) else None if raised else found.passed,
        measured=f"{found.measured}; {name}: {other.measured}",
        allowed=found.allowed,
        detail=(*found.detail, *(f"{name}: {line}" for line in other.detail if line)),
        part=EVALUATION if is_first else found.part,
        raised=raised,
    )
