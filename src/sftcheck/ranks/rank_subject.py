"""A trainer on several ranks as the subject of checks: its batches of an epoch, and one step that can be computed.

every rank     its own dataloader's batches  ->  the rows of which it computes all or a part (rank_batches.py)
               one step of them, on all ranks and in one process (rank_step.py)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import SequentialSampler

from sftcheck.batches import SeenBatch, Step, are_unlike, ids_of, with_fewer_labels
from sftcheck.documents.view import View
from sftcheck.ranks.exchange import Exchange
from sftcheck.ranks.rank_batches import (
    FIRST_NUMBER,
    MicroBatch,
    Part,
    SeenPart,
    clone_inputs,
    numbered_batch,
    numbered_rows,
    part_of,
    whole_rows,
)
from sftcheck.ranks.rank_model import (
    ModelOfOneProcess,
    WrappedModel,
    copy_model,
    without_auxiliary_loss,
    without_dropout,
)
from sftcheck.ranks.rank_step import StepOnRanks
from sftcheck.restore import own_collator, restored
from sftcheck.subject import MovedTensors
from sftcheck.trainer.recording import recorded, require_mappings
from sftcheck.trainer.trainer_subject import MOST_MICRO_BATCHES, TrainerSubject
from sftron.checks.report import Finding
from sftron.user_code import place_of

_TOKENS_ON_CPU, _TOKENS_ON_GPU, _MOST_TOKENS = 256, 4096, 400_000
"""Of one rank."""


class RankSubject(TrainerSubject):
    """A trainer on several ranks, and their batches. This is a collective.

    Args:
        trainer: A `transformers.Trainer` that `require_checkable` lets through, within `restore_after`.
        exchange: The ranks.
    """

    def __init__(
        self, trainer: Any, tokenizer: Any, conversations: Any, trained_roles: str, exchange: Exchange
    ) -> None:
        self.exchange, self.rank, self.trainer = exchange, exchange.rank, trainer
        model = copy_model(trainer.model)
        for each in (model, trainer.model):
            without_dropout(each)
            without_auxiliary_loss(each)
        with restored(trainer, "model", "model_wrapped", "optimizer", "lr_scheduler"):
            self.wrapped = WrappedModel(trainer, model)
        self.num_batches = list[int]()
        """By rank, how many batches the dataloader gives; as far as they are looked at."""
        self.is_exhausted = False
        """Whether the dataloader gives no more."""
        self.micro_batches = list[MicroBatch]()
        """The micro-batches of the batches that were made last."""
        super().__init__(trainer, tokenizer, conversations, trained_roles)
        self.training.missing = []  # the rows of all ranks are counted by themselves
        self.seen, self.seen_batches, self.is_whole_epoch = self.micro_batches, self.num_batches, self.is_exhausted
        self.step = self._unlike_step()
        self.computed_micro_batches = self.micro_batches
        """Those of `step`, of this rank."""
        self.on_ranks = StepOnRanks(
            trainer, self.model, self.wrapped, exchange, self.computed_micro_batches, self.step.num_items
        )

    @cached_property
    def model(self) -> ModelOfOneProcess:
        return ModelOfOneProcess(self.trainer)

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
        return any(micro.is_split(rank) for micro in self.seen for rank in range(self.exchange.world_size))

    @property
    def facts(self) -> dict[str, str]:
        """Those of the trainer, and its ranks."""
        kinds = Counter(type(each).__name__ for each in self.wrapped.named.values())
        sharing = max((len(micro.group_of(self.rank)) for micro in self.seen), default=1)
        shared, wrapper = f", {sharing} share a row" if self.is_split else "", type(self.wrapped.module).__name__
        return {**super().facts, "ranks": f"{self.exchange.world_size}{shared}; {wrapper}, {', '.join(kinds)}"}

    @property
    def together_and_alone(self) -> list[SeenBatch]:
        return []  # rows that are collated again, which ranks cannot do apart

    def moves(self, named: Mapping[str, nn.Parameter]) -> MovedTensors:
        return self.model.moves(named, self.step, dict(self.on_ranks.measure().gradients))

    # -- batches -----------------------------------------------------------------------------------------------------

    def accumulations(self, sample: Any) -> Iterator[Step]:
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
                    given = list(islice(loader, args.gradient_accumulation_steps))
                    require_mappings(given)
                    given = [dict(each) for each in given]
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
        own = part_of(batch, numbers, num_numbered)
        parts = [Part(*each) for each in self.exchange.gather("the parts", own.values)]
        self.micro_batches.append(whole_rows(batch, parts, self.rank))
        return self.micro_batches[-1].whole

    def _seen(self, inputs: Any, features: Sequence[Any], num_items: Any) -> SeenPart:
        """Returns what this rank computes: the arguments of the model's call in `training_step`."""
        module, own = self.model.module, clone_inputs(dict(inputs))
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

    def _unlike_step(self) -> Step:
        """Returns one accumulation that is small enough to be computed, of every rank. This is a collective.

        Where all micro-batches of all ranks have the same number of labels, one loses half of them: else a mean of
        means would be the ratio. Where the number of labels is a multiple of the number of ranks, one loses a label:
        else a quotient that is rounded down would be exact.
        """
        step, world_size = self._small_step(), self.exchange.world_size
        micro_batches, rank = self.micro_batches, self.rank
        counts = self.exchange.gather("the labels", [batch.num_trained for batch in step.batches])
        units = {(n, each): counts[each][n] for n, micro in enumerate(micro_batches) for each in micro.first_of_groups}
        total, most = sum(units.values()), max(units, key=lambda unit: units[unit])
        num_kept = units[most] if are_unlike([*units.values()]) else units[most] // 2
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
        is_cpu = torch.device(self.trainer.args.device).type == "cpu"
        budget = _TOKENS_ON_CPU if is_cpu else _TOKENS_ON_GPU
        lengths = self.exchange.gather("the lengths", self._row_lengths)
        steps, step = self._small_steps(
            lengths[0], budget, least=MOST_MICRO_BATCHES, num_ranks=self.exchange.world_size
        )
        first = sum(len(each.batches) for each in steps[: steps.index(step)])
        self.micro_batches = self.micro_batches[first : first + len(step.batches)]
        return step
