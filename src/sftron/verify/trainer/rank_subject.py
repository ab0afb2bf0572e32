"""A trainer on several ranks as the subject of checks.

    every rank     its own dataloader's batches  ->  the rows of which it computes all or a part (rank_batches.py)
                   the trainer's own step on the wrapped model: losses, gradients after the trainer's reduction
    rank 0         the same rows, whole, with the model before it is wrapped: the sum of all losses by their labels

Each method that is a collective says so: all ranks call it, in the same order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import SequentialSampler

from sftron.data.types import IGNORE_INDEX
from sftron.errors import place_of
from sftron.verify.report import Finding, NotMeasuredError
from sftron.verify.trainer.batches import (
    SeenBatch,
    Step,
    ids_of,
    recorded,
    select,
    small_sizes,
    with_fewer_labels,
)
from sftron.verify.trainer.exchange import Exchange
from sftron.verify.trainer.model import StepLosses
from sftron.verify.trainer.rank_batches import (
    FIRST_NUMBER,
    MicroBatch,
    SeenPart,
    arguments_of_one_process,
    cloned,
    numbered_batch,
    numbered_rows,
    part_of,
    whole_rows,
)
from sftron.verify.trainer.rank_model import (
    ModelOfOneProcess,
    WrappedModel,
    copied,
    gradient_places,
    gradients_of,
    kept_outputs,
    loss_sum,
    without_auxiliary_loss,
    without_dropout,
)
from sftron.verify.trainer.state import own_collator, restored
from sftron.verify.trainer.subject import TrainerSubject
from sftron.verify.trainer.view import View

_TOKENS_ON_CPU, _TOKENS_ON_GPU, _MOST_MICRO_BATCHES, _MOST_TOKENS, _MOST_ROUNDS = 256, 4096, 8, 400_000, 6
"""Of one rank."""
_LEAST_UNLIKE = 0.1


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


class RankSubject(TrainerSubject):
    """A trainer on several ranks. This is a collective.

    Args:
        trainer: A `transformers.Trainer` that `require_checkable` lets through, within `untouched`.
        exchange: The ranks.
    """

    def __init__(
        self, trainer: Any, tokenizer: Any, conversations: Any, trained_roles: str, exchange: Exchange
    ) -> None:
        self.model: ModelOfOneProcess
        self.exchange, self.rank = exchange, exchange.rank
        self.original = trainer.model
        model = copied(trainer.model)
        for each in (model, trainer.model):
            without_dropout(each)
            without_auxiliary_loss(each)
        with restored(trainer, "model", "model_wrapped", "optimizer", "lr_scheduler"):
            self.wrapped = WrappedModel(trainer, model)
        self.num_batches = list[int]()
        """By rank, how many batches the dataloader gives; as far as they are looked at."""
        self.is_exhausted = False
        """Whether that is all that it gives."""
        self.micro_batches = list[MicroBatch]()
        """Those of the batches that were made last."""
        super().__init__(trainer, tokenizer, conversations, trained_roles)
        self.training.missing = []  # the rows of all ranks are counted by themselves
        self.seen, self.seen_batches, self.is_whole_epoch = self.micro_batches, self.num_batches, self.is_exhausted
        _ = self.step
        self.computed_micro_batches = self.micro_batches
        """Those of `step`, of this rank."""

    def _called_model(self, trainer: Any) -> ModelOfOneProcess:
        return ModelOfOneProcess(trainer)

    @property
    def declared_size(self) -> int:
        """The number of ranks that share a row, as the trainer declares it."""
        trainer, sizes = self.trainer, [1]
        names = ("context_parallel_size", "sequence_parallel_size", "sequence_parallel_degree")
        sizes += [int(getattr(trainer, name, lambda: 1)()) for name in ("get_cp_size", "get_sp_size")]
        sizes += [int(getattr(trainer.args, name, None) or 1) for name in names]
        return max(sizes)

    @property
    def is_split(self) -> bool:
        """Whether a rank computes parts of rows."""
        seen = getattr(self, "seen", self.micro_batches)
        return any(micro.is_split(rank) for micro in seen for rank in range(self.exchange.world_size))

    # -- batches -----------------------------------------------------------------------------------------------------

    def _accumulations(self, sample: Any) -> Iterator[Step]:
        """Yields the accumulations of this rank, as long as every rank has one. This is a collective."""
        trainer, args, gather = self.trainer, self.trainer.args, self.exchange.gather
        self.micro_batches, self.num_batches, self.is_exhausted = [], [0] * self.exchange.world_size, False
        with recorded(trainer, "train_dataset", sample) as recorder, restored(trainer, "_get_train_sampler"):
            if self._needs_all_rows:
                trainer._get_train_sampler = lambda *_: SequentialSampler(sample)
            try:
                loader, problem = iter(trainer.get_train_dataloader()), ""
            except Exception as error:
                loader, problem = iter(()), f"{place_of(error)}: {type(error).__name__}: {error}"
            num_tokens = 0
            while num_tokens <= _MOST_TOKENS:
                try:
                    given = [dict(each) for each in islice(loader, args.gradient_accumulation_steps)]
                except Exception as error:
                    given, problem = [], f"{place_of(error)}: {type(error).__name__}: {error}"
                counts, problems = zip(*gather("the number of batches", (len(given), problem)), strict=True)
                if any(problems):
                    rank = next(rank for rank, each in enumerate(problems) if each)
                    raise ValueError(f"rank {rank} cannot make its batches: {problems[rank]}")
                self.num_batches = [done + count for done, count in zip(self.num_batches, counts, strict=True)]
                if len(set(counts)) > 1 or not counts[0]:
                    self.is_exhausted = True
                    return
                features = [recorder.features.pop(0) if recorder.features else [] for _ in given]
                batches, num_items = trainer.get_batch_samples(iter(given), len(given), args.device)
                step = self._seen_step(batches, features, num_items)
                sizes = gather("the tokens", sum(batch.ids.size for batch in step.batches))
                num_tokens += max(sizes)
                yield step

    def _see(self, inputs: Any, features: Sequence[Any], num_items: Any) -> SeenBatch:
        """Returns the whole rows of which this rank computes all or a part. This is a collective."""
        batch = self._seen(inputs, features, num_items)
        part = part_of(batch, None, 0)
        keys = self.exchange.gather("the rows of a batch", (part.key, part.given))
        is_cut = any(len({given for other, given in keys if other == key}) > 1 for key, _ in keys)
        is_cut |= self.declared_size > 1 and self._num_given(batch) < self._num_of(features)
        is_cut = any(self.exchange.gather("whether rows are cut", is_cut))
        numbers, num_numbered = self._numbered(batch, num_items, of_rows=is_cut)
        parts = self.exchange.gather("the parts", part_of(batch, numbers, num_numbered))
        self.micro_batches.append(whole_rows(batch, parts, self.rank))
        return self.micro_batches[-1].whole

    def _seen(self, inputs: Any, features: Sequence[Any], num_items: Any) -> SeenPart:
        """Returns what this rank computes: the arguments of the model's call in `training_step`."""
        module, own = self.model.module, cloned(dict(inputs))
        seen = self.model.arguments(lambda: self.trainer.training_step(module, own, num_items))
        return SeenPart(features, dict(inputs), seen or dict(inputs))

    def _num_of(self, features: Sequence[Any]) -> int:
        return sum(0 if (ids := ids_of(each)) is None else len(ids) for each in features)

    def _num_given(self, batch: SeenBatch) -> int:
        mask = batch.inputs.get("attention_mask")
        is_mask = isinstance(mask, Tensor) and mask.ndim == 2
        return int((mask != 0).sum()) if is_mask else int(batch.inputs["input_ids"].numel())

    def _numbered(self, batch: SeenBatch, num_items: Any, *, of_rows: bool) -> tuple[np.ndarray | None, int]:
        """Returns which tokens of its rows this rank computes, int64 [B, T], and how many the rows have.

        Args:
            of_rows: Whether the collator cuts the rows, so that its own rows are numbered, and not its batch.
        """
        if of_rows and not all(ids_of(each) is not None for each in batch.features):
            return None, 0
        if of_rows:
            rows, count = numbered_rows(batch.features)
            collator = own_collator(self.trainer)
            given: Any = getattr(collator, "collator", collator)(rows)  # not that of the recorder, which keeps rows
        else:
            given, count = numbered_batch(batch.inputs)
        seen = self._seen(given, batch.features, num_items)
        numbers = np.where(seen.ids >= FIRST_NUMBER, seen.ids - FIRST_NUMBER, -1)
        return (numbers, count) if numbers.shape == batch.ids.shape and numbers.max(initial=0) < count else (None, 0)

    def _evaluated(self, data: Any) -> View | Finding:
        if self.is_split:
            return Finding(None, "not measured: its rows are split")
        return super()._evaluated(data)

    # -- the step that is computed -----------------------------------------------------------------------------------

    @cached_property
    def step(self) -> Step:
        """One accumulation that is small enough to be computed, of every rank. This is a collective.

        Where all micro-batches of all ranks have the same number of labels, one loses half of them: else a mean of
        means would be the ratio. Where the number of labels is a multiple of the number of ranks, one loses a label:
        else a quotient that is rounded down would be exact.
        """
        step, world_size = self._small_step(), self.exchange.world_size
        micro_batches, rank = self.micro_batches, self.rank
        counts = self.exchange.gather("the labels", [batch.num_trained for batch in step.batches])
        units = {(n, each): counts[each][n] for n, micro in enumerate(micro_batches) for each in micro.first_of_groups}
        is_unlike = max(units.values()) - min(units.values()) > _LEAST_UNLIKE * max(units.values())
        total, most = sum(units.values()), max(units, key=lambda unit: units[unit])
        num_kept = units[most] if is_unlike else units[most] // 2
        num_kept -= (total - units[most] + num_kept) % world_size == 0
        if num_kept in (0, units[most]):
            return step
        given = [dict(micro.inputs) for micro in micro_batches]
        number, first = most
        if rank in micro_batches[number].group_of(first) and (rank == first or micro_batches[number].is_split(first)):
            given[number] = self._with_fewer_labels(micro_batches[number], num_kept)
        features = [micro.whole.features for micro in micro_batches]
        self.micro_batches = []
        batches, num_items = self.trainer.get_batch_samples(iter(given), len(given), self.trainer.args.device)
        return self._seen_step(batches, features, num_items)

    def _with_fewer_labels(self, micro: MicroBatch, num_kept: int) -> dict[str, Any]:
        """Returns the batch of this rank's dataloader with the first labels of its whole rows alone."""
        given = micro.inputs.get("input_ids")
        if isinstance(given, Tensor) and tuple(given.shape) == micro.whole.ids.shape:
            return with_fewer_labels(SeenBatch(micro.whole.features, micro.inputs, micro.inputs), num_kept)
        return dict(micro.inputs)  # its collator cuts rows, whose labels another rank has

    def _small_step(self) -> Step:
        trainer, args, lengths = self.trainer, self.trainer.args, self._row_lengths
        budget = _TOKENS_ON_CPU if torch.device(args.device).type == "cpu" else _TOKENS_ON_GPU
        shortest = np.sort(lengths)
        accumulated = min(args.gradient_accumulation_steps, _MOST_MICRO_BATCHES)
        size, accumulated = small_sizes(shortest, budget, trainer._train_batch_size, accumulated)
        num_rows = min(size * accumulated * self.exchange.world_size, len(lengths))
        order = np.argsort(lengths, kind="stable")
        with restored(trainer, "_train_batch_size"), restored(args, "gradient_accumulation_steps"):
            trainer._train_batch_size, args.gradient_accumulation_steps = size, accumulated
            for _ in range(_MOST_ROUNDS):
                room = max(num_rows, int(np.searchsorted(shortest, budget / max(1, num_rows), side="right")))
                chosen = order[np.unique(np.linspace(0, room - 1, num_rows).round().astype(int))]
                steps = self._steps(select(self.sample, np.sort(chosen)))
                step = max(steps, key=lambda each: len(each.batches), default=None)
                if step is not None and (len(step.batches) >= accumulated or num_rows == len(lengths)):
                    first = sum(len(each.batches) for each in steps[: steps.index(step)])
                    self.micro_batches = self.micro_batches[first : first + len(step.batches)]
                    return step
                num_rows = min(2 * num_rows, len(lengths))
        raise ValueError(f"the ranks make no batch of {num_rows:,} rows; set dataloader_drop_last=False")

    @cached_property
    def _row_lengths(self) -> list[int]:
        lengths = super()._row_lengths
        return self.exchange.gather("the lengths", lengths)[0]

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
        return self.exchange.of_first("the reference", lambda: self._computed_in_one_process(batches))

    def _computed_in_one_process(self, batches: Sequence[Sequence[tuple[dict[str, Any], np.ndarray]]]) -> ReferenceRun:
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
        return ReferenceRun(num_labels, total / num_labels)

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
