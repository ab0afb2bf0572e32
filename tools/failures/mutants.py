"""One fault for each row of verify_trainer's report, for any trainer: what a row that passed must find.

A mutant changes attributes of the trainer or of its model, which `restore_after` puts back. Those of batches change
what its collator gives.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sftcheck.faults import Fault

Batch = dict[str, Any]


class _Changed:
    """A collator whose batches are changed in place; `change` gets the batch and the tokenizer."""

    def __init__(self, trainer: Any, change: Callable[[Batch, Any], None]) -> None:
        self.collator, self.change = trainer.data_collator, change
        self.tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)

    def __call__(self, features: Any, *given: Any, **options: Any) -> Batch:
        batch = dict(self.collator(features, *given, **options))
        self.change(batch, self.tokenizer)
        return batch


def _changes_batches(change: Callable[[Batch, Any], None]) -> Callable[[Any], None]:
    def mutant(trainer: Any) -> None:
        trainer.data_collator = _Changed(trainer, change)

    mutant.__doc__ = change.__doc__
    return mutant


def _num_real(batch: Batch, row: int) -> int:
    """Returns the number of tokens of a row before its padding on the right."""
    mask = batch.get("attention_mask")
    real = torch.ones_like(batch["input_ids"][row]) if mask is None or mask.ndim != 2 else mask[row]
    return int(real.nonzero()[-1]) + 1


def _another_token(batch: Batch, _: Any) -> None:
    """a token in the middle of each row is another one"""
    for row, ids in enumerate(batch["input_ids"]):
        at = _num_real(batch, row) // 2
        ids[at] = ids[at] + 1 if ids[at] < 700 else ids[at] - 1
        if batch["labels"][row, at] != -100:
            batch["labels"][row, at] = ids[at]


def _other_labels(batch: Batch, _: Any) -> None:
    """a token that had no label has one; where all have one, one has none"""
    for row, labels in enumerate(batch["labels"]):
        size = _num_real(batch, row)
        untrained = (labels[4:size] == -100).nonzero()
        if len(untrained):
            labels[4 + int(untrained[0])] = batch["input_ids"][row, 4 + int(untrained[0])]
        else:
            labels[size // 2] = -100


def _stops_masked(batch: Batch, tokenizer: Any) -> None:
    """the stop tokens have no label"""
    batch["labels"][batch["input_ids"] == tokenizer.eos_token_id] = -100


def _run_on(batch: Batch, _: Any) -> None:
    """positions run on through a packed row; in others, they count by two"""
    ids = batch["input_ids"]
    positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
    is_packed = "position_ids" in batch and bool(
        (batch["position_ids"][..., 1:] < batch["position_ids"][..., :-1]).any()
    )
    batch["position_ids"] = positions if is_packed else 2 * positions


def _cut(batch: Batch, _: Any) -> None:
    """each batch has the first half of its columns"""
    width = batch["input_ids"].shape[1]
    for name, value in batch.items():
        if isinstance(value, Tensor) and value.ndim > 1 and value.shape[-1] == width:
            half = value[..., : width // 2]
            batch[name] = half[..., : width // 2, :] if value.ndim == 4 else half


def _padding_labeled(batch: Batch, _: Any) -> None:
    """padding has labels"""
    for row, labels in enumerate(batch["labels"]):
        labels[_num_real(batch, row) :] = batch["input_ids"][row, _num_real(batch, row) :]


def _mask_of_ones(batch: Batch, _: Any) -> None:
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])


def _mixed(trainer: Any) -> None:
    """packed rows get an attention mask of ones; in others, the mean of the batch is added to each embedding"""
    batch = next(iter(trainer.get_train_dataloader()))
    if "position_ids" in batch and "attention_mask" not in batch:
        trainer.data_collator = _Changed(trainer, _mask_of_ones)
        return
    embeddings = trainer.model.get_input_embeddings()
    embeddings.register_forward_hook(lambda _module, _arguments, output: output + output.mean((0, 1), keepdim=True))


def _weighted_by_size(trainer: Any) -> None:
    """each micro-batch's loss is multiplied by its number of labels"""
    original = trainer.compute_loss

    def compute_loss(model: Any, inputs: Any, *given: Any, **options: Any) -> Any:
        size = int((inputs["labels"] != -100).sum()) if "labels" in inputs else 1
        loss = original(model, inputs, *given, **options)
        return (loss[0] * size / 16, *loss[1:]) if isinstance(loss, tuple) else loss * size / 16

    trainer.compute_loss = compute_loss


def _half_the_gradient(trainer: Any) -> None:
    """each micro-batch leaves half of what its loss adds to the gradients"""
    original = trainer.training_step

    def training_step(*given: Any, **options: Any) -> Any:
        named = [each for each in trainer.model.parameters() if each.requires_grad]
        before = [None if each.grad is None else each.grad.clone() for each in named]
        loss = original(*given, **options)
        for each, kept in zip(named, before, strict=True):
            if each.grad is not None:
                each.grad = (each.grad + (0 if kept is None else kept)) / 2
        return loss

    trainer.training_step = training_step


def _without_gradient(trainer: Any) -> None:
    """one trainable tensor gets no gradient"""
    original, named = trainer.training_step, dict(trainer.model.named_parameters())
    tensor = next(each for each in reversed(named.values()) if each.requires_grad)

    def training_step(*given: Any, **options: Any) -> Any:
        loss = original(*given, **options)
        tensor.grad = None
        return loss

    trainer.training_step = training_step


def _other_end(trainer: Any) -> None:
    """the saved generation_config.json ends generation at another token"""
    original = trainer.save_model

    def save_model(folder: str, *given: Any, **options: Any) -> None:
        original(folder, *given, **options)
        path = Path(folder) / "generation_config.json"
        if path.exists():
            path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": 5}))
        else:
            trainer.model.generation_config.eos_token_id = 5

    trainer.save_model = save_model


MUTANTS: dict[Fault, Callable[[Any], None]] = {
    Fault.OTHER_FORMAT: _changes_batches(_another_token),
    Fault.HEADERS_TRAINED: _changes_batches(_other_labels),
    Fault.STOP_MASKED: _changes_batches(_stops_masked),
    Fault.MASK_OF_ONES: _mixed,
    Fault.ROWS_MIXED: _mixed,
    Fault.POSITIONS_RUN_ON: _changes_batches(_run_on),
    Fault.POSITIONS_OUT_OF_ORDER: _changes_batches(_run_on),
    Fault.ROWS_CUT: _changes_batches(_cut),
    Fault.MEAN_OF_MEANS: _weighted_by_size,
    Fault.GRADIENT_SCALED: _half_the_gradient,
    Fault.PADDING_TRAINED: _changes_batches(_padding_labeled),
    Fault.NOT_LEARNING: _without_gradient,
    Fault.NO_END: _other_end,
    Fault.FORGED: lambda _: None,
}
"""By the fault that the row finds; a mutant with two has the first in packed rows. The mutant of FORGED is another
trainer: one with a row that spells control tokens."""


def faults_of(row: str) -> list[Fault]:
    """Returns the faults of the mutants of a row, of which it must find one."""
    return [fault for fault in MUTANTS if row in fault.entry.rows]
