"""The steps of a trainer as its training loop gets them: its dataloader, its collator, and the calls of its model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from torch.utils.data import SequentialSampler

from sftcheck.batches import SeenBatch, Step
from sftcheck.restore import restored
from sftcheck.trainer.called_model import CalledModel
from sftcheck.trainer.recording import recorded, require_mappings
from sftron.errors import place_of

MOST_TOKENS = 400_000


class TrainerBatches:
    """The batches of a trainer, within `restore_after`.

    Attributes:
        total_rows: The number of rows of its data set.
    """

    def __init__(self, trainer: Any, total_rows: int) -> None:
        self.trainer, self.total_rows = trainer, total_rows
        self._needs_all_rows = False  # whether the trainer's own sampler numbers rows that a sample does not have

    @cached_property
    def model(self) -> CalledModel:
        return CalledModel(self.trainer)

    def _steps(self, sample: Any) -> list[Step]:
        """Returns the trainer's accumulations over some of its rows, as its training loop gets them."""
        try:
            return list(self.accumulations(sample))
        except ValueError:
            if self._needs_all_rows or len(sample) == self.total_rows:
                raise
        self._needs_all_rows = True
        return list(self.accumulations(sample))

    def accumulations(self, sample: Any) -> Iterator[Step]:
        trainer, args = self.trainer, self.trainer.args
        with recorded(trainer, "train_dataset", sample) as recorder, restored(trainer, "_get_train_sampler"):
            if self._needs_all_rows:
                trainer._get_train_sampler = lambda *_: SequentialSampler(sample)
            loader, num_tokens = iter(trainer.get_train_dataloader()), 0
            while num_tokens <= MOST_TOKENS:
                try:
                    batches, num_items = trainer.get_batch_samples(
                        loader, args.gradient_accumulation_steps, args.device
                    )
                except Exception as error:
                    problem = f"the trainer cannot make its batches: {place_of(error)}: {type(error).__name__}: {error}"
                    raise ValueError(f"{problem} (with {len(sample):,} of {self.total_rows:,} rows)") from error
                if not batches:
                    return
                features = [recorder.features.pop(0) if recorder.features else [] for _ in batches]
                step = self._seen_step(batches, features, num_items)
                num_tokens += sum(batch.ids.size for batch in step.batches)
                yield step

    def _seen_step(self, batches: Sequence[Any], features: Sequence[Any], num_items: Any) -> Step:
        require_mappings(batches)
        self.trainer.current_gradient_accumulation_steps = len(batches)
        return Step(tuple(map(self._see, batches, features, [num_items] * len(batches))), num_items)

    def _see(self, inputs: Any, features: Sequence[Any], num_items: Any) -> SeenBatch:
        """Returns the batch with the arguments of the model's call in `training_step`."""
        module = self.model.module
        seen = self.model.arguments(lambda: self.trainer.training_step(module, dict(inputs), num_items))
        return SeenBatch(features, dict(inputs), seen or dict(inputs), is_called=bool(seen))
