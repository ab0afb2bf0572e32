"""A trainer of another library as the subject of checks: its own batches, its own model, and its own loss.

    trainer  ->  a sample of its rows  ->  Step: the batches of one accumulation, from its own dataloader and collator
             ->  SeenBatch: the arguments with which its model is really called
             ->  Document: one conversation, or a fragment of one, in a row of a batch (documents.py)

The data checks take all sampled rows and compute nothing: the call of the model is caught and ended. The checks of the
model take a second, small sample, which is computed in full.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sftcheck.batches import SeenBatch, Step, are_unlike, with_fewer_labels
from sftcheck.documents.declared import Declared
from sftcheck.documents.truth import Encoder
from sftcheck.documents.view import View
from sftcheck.gradients import GradientDifference, difference_of
from sftcheck.restore import own_collator, restored
from sftcheck.subject import FEW_ROWS, MovedTensors, Subject
from sftcheck.tolerances import SMALL_TENSOR
from sftcheck.trainer.called_model import StepLosses
from sftcheck.trainer.evaluation import EvaluatedPair, evaluated_by_rows, num_shared_rows, unlike_pair
from sftcheck.trainer.recording import (
    MOST_TOKENS,
    TrainerBatches,
    chosen_rows,
    own_callbacks,
    recorded,
    rows_of,
    select,
    small_sizes,
)
from sftcheck.trainer.schedule import num_steps_of, schedule_note
from sftron.checks.report import Finding, NotMeasuredError
from sftron.data.types import SeekablePacks

_NUM_ROWS, _NUM_EVALUATED, _NUM_PACKS = 256, 64, 16
_TOKENS_ON_CPU, _TOKENS_ON_GPU, MOST_MICRO_BATCHES = 512, 16384, 8


class TrainerSubject(TrainerBatches, Subject):
    """A trainer, as it is before `train()`.

    Args:
        trainer: A `transformers.Trainer` that `require_checkable` lets through, within `restore_after`.
        tokenizer: Its tokenizer.
        conversations: The conversations of the data set, if its rows hold ids alone.
        trained_roles: "assistant", or "all" for a loss over every token.

    Raises:
        ValueError: The trainer cannot be checked.
    """

    def __init__(self, trainer: Any, tokenizer: Any, conversations: Any, trained_roles: str) -> None:
        self.trained_roles, self.declared = trained_roles, Declared.of(trainer)
        self.library = self.declared.library
        self.encoder = Encoder(tokenizer)
        data = trainer.train_dataset
        self._is_endless = isinstance(data, SeekablePacks)
        if self._is_endless:  # its first packs stand for all
            state = data.state_dict()
            data = list(islice(data, _NUM_PACKS))
            trainer.train_dataset.load_state_dict(state)
        super().__init__(trainer, len(data))
        self.sample = select(data, chosen_rows(len(data), _NUM_ROWS))
        self.rows = rows_of(self.sample)
        batches = [batch for step in self._steps(self.sample) for batch in step.batches]
        self._require_embeddings(batches)
        is_whole = not self._is_endless and len(data) <= _NUM_ROWS
        is_whole &= sum(each.ids.size for each in batches) <= MOST_TOKENS
        declared, encoder = self.declared, self.encoder
        self.training = View(
            declared, encoder, self.rows, batches, trained_roles, conversations=conversations, is_whole=is_whole
        )

    def _require_embeddings(self, batches: Sequence[SeenBatch]) -> None:
        """Raises ValueError if the model has no embedding for an id, as computing with it would end a CUDA process."""
        weight = getattr(self.model.unwrapped.get_input_embeddings(), "weight", None)
        largest = max((int(each.ids.max(initial=0)) for each in batches), default=0)
        if isinstance(weight, Tensor) and largest >= len(weight):
            raise ValueError(
                f"the batches hold token {largest:,}, {self.encoder.decode([largest])!r}, and the model has embeddings "
                f"for {len(weight):,}; call model.resize_token_embeddings (LLaMA-Factory: resize_vocab: true), or take "
                "a template whose tokens the model knows"
            )

    # -- batches -----------------------------------------------------------------------------------------------------

    @property
    def _data_of_evaluation(self) -> dict[str, Any]:
        data = self.trainer.eval_dataset
        return data if isinstance(data, dict) else {} if data is None else {"eval": data}

    @cached_property
    def evaluation(self) -> dict[str, View | Finding]:
        return {name: self._evaluated(each) for name, each in self._data_of_evaluation.items()}

    def _evaluated(self, data: Any) -> View | Finding:
        if not hasattr(data, "__len__") or not len(data):
            return Finding(None, "not measured: the data set streams or is empty")
        sample = select(data, chosen_rows(len(data), _NUM_EVALUATED))
        try:
            batch = self._first_evaluated(sample)
        except Exception as error:  # of the trainer's own code
            return Finding.of_exception(error)
        rows = rows_of(sample)
        return View(self.declared, self.encoder, rows, [batch], self.trained_roles, training=self.training)

    def _first_evaluated(self, sample: Any) -> SeenBatch:
        """Returns the first batch of an evaluation, with the arguments of the model's call in `prediction_step`."""
        trainer, module = self.trainer, self.model.module
        with recorded(trainer, "eval_dataset", sample) as recorder:
            inputs = next(iter(trainer.get_eval_dataloader()))
            module.eval()
            seen = self.model.arguments(lambda: trainer.prediction_step(module, dict(inputs), True))
            return SeenBatch(recorder.features[0] if recorder.features else [], dict(inputs), seen or inputs)

    @property
    def evaluated_in_batches(self) -> dict[str, Any]:
        """The data sets of the evaluation that need more than one batch."""
        size = self.trainer.args.eval_batch_size
        return {name: data for name, data in self._data_of_evaluation.items() if _size_of(data) > size}

    def evaluated_pair(self, data: Any) -> EvaluatedPair:
        """Evaluates two rows, each in a batch of its own, with the trainer's `evaluate`.

        Raises NotMeasuredError, or an exception of the trainer's own code.
        """
        sample = select(data, chosen_rows(len(data), _NUM_EVALUATED))
        numbers = unlike_pair(rows_of(sample), self._budget)
        first, second, both = (select(sample, np.array(each)) for each in (numbers[:1], numbers[1:], numbers))
        with evaluated_by_rows(self.trainer):
            one, other = (self._first_evaluated(each).num_trained for each in (first, second))
            if not (one and other and are_unlike((one, other))):
                raise NotMeasuredError(f"the rows have {one} and {other} labels, so a mean of means equals the ratio")
            alone = self._eval_loss(first, 1), self._eval_loss(second, 1)
            return EvaluatedPair((one, other), alone, self._eval_loss(both, 2))

    def _eval_loss(self, sample: Any, num_batches: int) -> float:
        with recorded(self.trainer, "eval_dataset", sample) as recorder:
            found = self.trainer.evaluate().get("eval_loss")
        if found is None:
            raise NotMeasuredError("evaluate() returns no eval_loss")
        if recorder.features and len(recorder.features) != num_batches:
            raise NotMeasuredError("the evaluation's dataloader fills its batches itself")
        return float(found)

    # -- what is computed --------------------------------------------------------------------------------------------

    @cached_property
    def step(self) -> Step:
        """One accumulation that is small enough to be computed: fewer or shorter rows, but the trainer's own batches.

        The number of micro-batches is the trainer's, up to eight, where the rows suffice for it. Where all have the
        same number of labels, one loses half of them: else a mean of the micro-batches' means would be the ratio.
        """
        (_, step), trainer = self._small_steps(self._row_lengths, self._budget), self.trainer
        if len(step.batches) < 2 or step.is_unlike:
            return step
        most = max(step.batches, key=lambda batch: batch.num_trained)
        inputs = [with_fewer_labels(batch) if batch is most else dict(batch.inputs) for batch in step.batches]
        batches, num_items = trainer.get_batch_samples(iter(inputs), len(inputs), trainer.args.device)
        return self._seen_step(batches, [batch.features for batch in step.batches], num_items)

    def _small_steps(
        self, lengths: Sequence[int], budget: int, *, least: int = 2, num_ranks: int = 1
    ) -> tuple[list[Step], Step]:
        """Returns the steps over a few rows, and the longest of them.

        Args:
            lengths: The number of tokens of each row.
            budget: The number of tokens of one rank that are computed, if rows are short enough.
            least: The fewest micro-batches that suffice, if the trainer accumulates as many.
        """
        trainer, args = self.trainer, self.trainer.args
        size, accumulated = trainer._train_batch_size, min(args.gradient_accumulation_steps, MOST_MICRO_BATCHES)
        order, shortest = np.argsort(lengths, kind="stable"), np.sort(lengths)
        size, accumulated = small_sizes(shortest, budget, size, accumulated)
        number = min(size * accumulated * num_ranks, len(lengths))
        with restored(trainer, "_train_batch_size"), restored(args, "gradient_accumulation_steps"):
            trainer._train_batch_size, args.gradient_accumulation_steps = size, accumulated
            while True:
                room = max(number, int(np.searchsorted(shortest, budget / max(1, number), side="right")))
                chosen = order[np.unique(np.linspace(0, room - 1, number).round().astype(int))]
                steps = self._steps(select(self.sample, np.sort(chosen)))
                step = max(steps, key=lambda each: len(each.batches), default=None)
                if step is not None and (len(step.batches) >= min(least, accumulated) or number == len(lengths)):
                    return steps, step
                if number == len(lengths):
                    raise ValueError(f"the trainer makes no batch of {number:,} rows; set dataloader_drop_last=False")
                number = min(2 * number, len(lengths))  # a sampler that packs rows fills a batch with many of them

    @property
    def _budget(self) -> int:
        """The number of tokens that are computed."""
        is_cpu = torch.device(self.trainer.args.device).type == "cpu"
        return _TOKENS_ON_CPU if is_cpu else _TOKENS_ON_GPU

    @cached_property
    def _row_lengths(self) -> list[int]:
        """The number of tokens of each sampled row; of its batch, on average, where the row itself has no ids."""
        if all(isinstance(row, Mapping) and "input_ids" in row for row in self.rows):
            return [len(row["input_ids"]) for row in self.rows]
        num_tokens = sum(batch.ids.size for batch in self.training.batches)
        return [max(1, num_tokens // len(self.rows))] * len(self.rows)

    @cached_property
    def losses(self) -> StepLosses:
        return self.model.train(self.step)

    def gradients_apart(self, *, of_entropies: bool) -> GradientDifference:
        """Returns how far the gradients that the steps leave are from those of the cross-entropies, or of their loss.

        The auxiliary loss of a mixture of experts is part of both.
        """
        expected = self.model.expected_gradients(self.step, self.losses, of_entropies=of_entropies)
        return difference_of(self.losses.gradients, expected, least=SMALL_TENSOR.limit_of(self.model))

    def moves(self, named: Mapping[str, nn.Parameter]) -> MovedTensors:
        return self.model.moves(named, self.step, self.losses.gradients)

    @cached_property
    def together_and_alone(self) -> list[SeenBatch]:
        features = max((batch.features for batch in self.step.batches), key=len)
        if len(features) < 2:
            return []
        lengths = [
            len(each["input_ids"]) if isinstance(each, Mapping) and "input_ids" in each else 0 for each in features
        ]
        order = np.argsort(lengths, kind="stable")
        few = [features[n] for n in order[np.unique(np.linspace(0, len(order) - 1, FEW_ROWS).astype(int))]]

        def collated(rows: Sequence[Any]) -> SeenBatch:
            rows = [dict(row) if isinstance(row, Mapping) else row for row in rows]
            return self._see(own_collator(self.trainer)(rows), rows, self.step.num_items)

        return [collated(rows) for rows in (few, *([each] for each in few))]

    @property
    def _notes(self) -> dict[str, str]:
        """What is no fault by itself, and often none that is meant."""
        trained = list[str]()
        for name, data in self._data_of_evaluation.items():
            view = self.evaluation[name]
            num_shared = 0 if self._is_endless else num_shared_rows(self.trainer.train_dataset, data)
            of = f"{_size_of(data):,} rows"
            if not num_shared and isinstance(view, View):  # rows that are tokenized later
                num_shared, of = view.num_trained_documents, f"{len(view.documents):,} documents"
            trained += [f"{name}: {num_shared:,} of {of} are in the training too"] * (num_shared > 0)
        schedule = schedule_note(self.trainer, num_steps_of(self.trainer, self.total_rows))
        found = {"trained too": "; ".join(trained), "schedule": schedule}
        return {name: text for name, text in found.items() if text}

    @property
    def facts(self) -> dict[str, str]:
        """The checked trainer, model and data, and the versions of the software."""
        trainer, model, config, view = self.trainer, self.model.unwrapped, self.model.config, self.training
        computed = ", ".join(f"{batch.ids.shape[0]} x {batch.ids.shape[1]}" for batch in self.step.batches)
        evaluated = {
            name: each.measured if isinstance(each, Finding) else each.truth for name, each in self.evaluation.items()
        }
        own = own_callbacks(trainer)
        return {
            "trainer": f"{type(trainer).__module__.partition('.')[0]} {type(trainer).__name__}",
            "model": f"{type(model).__name__} ({getattr(config, 'model_type', 'no configuration')}), attention "
            f"{getattr(config, '_attn_implementation', 'unknown')}, {next(model.parameters()).dtype}",
            "data": f"{self.total_rows:,} rows, {len(self.rows):,} looked at, in {len(view.batches):,} batches",
            "truth": view.truth,
            **evaluated,
            "computed": f"micro-batches of {computed} tokens",
            "trained": "what the model has to write" if self.trained_roles == "assistant" else "every token",
            **self._notes,
            **({"not run": f"callbacks that may change what trains: {', '.join(own)}"} if own else {}),
            "versions": ", ".join(_versions("sftron", "torch", "transformers", self.library)),
        }


def _size_of(data: Any) -> int:
    return len(data) if hasattr(data, "__len__") else 0


def _versions(*packages: str) -> Iterator[str]:
    """Yields the installed packages with their versions; ms-swift is installed under another name."""
    for name in filter(None, packages):
        with suppress(PackageNotFoundError):
            yield f"{name} {version({'swift': 'ms-swift'}.get(name, name))}"
