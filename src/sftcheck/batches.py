"""Micro-batches as a training step sees them: ids, labels, and the arguments of the model's call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sftcheck.tolerances import UNLIKE
from sftron.data.types import IGNORE_INDEX


@dataclass(frozen=True, eq=False)
class SeenBatch:
    """One micro-batch. Raises ValueError if it cannot be read."""

    features: Sequence[Any]
    """The rows that the collator was given; empty if the trainer does not use its `data_collator`."""
    inputs: Mapping[str, Any]
    """The batch of the trainer's dataloader."""
    seen: Mapping[str, Any]
    """The keyword arguments of the model's call in the trainer's step."""
    is_called: bool = field(default=True, kw_only=True)
    """Whether the step calls the model; else `seen` are the inputs."""

    def __post_init__(self) -> None:
        if not isinstance(self.seen.get("input_ids"), Tensor):
            raise ValueError("the trainer calls its model without input_ids, so its documents cannot be read")
        _ = self.labels

    @cached_property
    def ids(self) -> np.ndarray:
        """int64 [B, T]."""
        return _array(self.seen["input_ids"])

    @property
    def input_ids(self) -> Tensor:
        """The ids [B, T] that the trainer's dataloader gives."""
        return self.inputs["input_ids"]

    @cached_property
    def labels(self) -> np.ndarray:
        """int64 [B, T]: the label of the token at the same index, or IGNORE_INDEX.

        The model predicts it from the tokens before. The model's arguments come first, then the batch.
        """
        if isinstance(shifted := self.seen.get("shift_labels"), Tensor):
            first = np.full((len(self.ids), 1), IGNORE_INDEX, dtype=np.int64)
            return np.concatenate([first, _array(shifted)[:, :-1]], axis=1)
        for labels in (self.seen.get("labels"), self.inputs.get("labels")):
            if isinstance(labels, Tensor) and labels.shape == self.ids.shape:
                return _array(labels)
        raise ValueError("the trainer's batches have no labels of the shape of input_ids, so nothing would be trained")

    @cached_property
    def attended(self) -> np.ndarray | None:
        """[B, T], the attention mask, if it has one number for each token; 0 for padding."""
        return self._of_tokens("attention_mask")

    @cached_property
    def positions(self) -> np.ndarray | None:
        """[B, T], the position ids, if they are passed."""
        found = self._of_tokens("position_ids")
        return found if found is None else np.broadcast_to(found, self.ids.shape)

    @property
    def passes_bounds(self) -> bool:
        """Whether the model is told where documents begin."""
        return self.positions is not None

    def claimed_starts(self, row: int) -> Iterator[int]:
        """Yields where documents of a row begin by what is passed: positions, or a mask of document numbers."""
        if self.positions is not None:
            yield from (np.flatnonzero(np.diff(self.positions[row]) <= 0) + 1).tolist()
        if self.attended is not None and self.attended[row].max(initial=0) > 1:
            yield from (np.flatnonzero(np.diff(self.attended[row])) + 1).tolist()

    @property
    def without_labels(self) -> dict[str, Any]:
        """The arguments of the model's call without labels, for the logits of all tokens.

        With logits_to_keep, as ms-swift passes it, there would be logits for a part of the labels alone.
        """
        left_out = ("labels", "shift_labels", "num_items_in_batch", "fused_lm_head", "logits_to_keep")
        return {name: value for name, value in self.seen.items() if name not in left_out}

    def _of_tokens(self, name: str) -> np.ndarray | None:
        value = self.seen.get(name)
        return _array(value) if isinstance(value, Tensor) and value.ndim == 2 else None

    @property
    def is_input(self) -> np.ndarray:
        """Whether the model is given the token, bool [B, T]; the last one of a loop's row may be a target alone."""
        return np.ones(self.ids.shape, dtype=bool)

    @property
    def num_trained(self) -> int:
        """The number of labels from which the loss is computed; no token precedes the first of a row."""
        return int((self.labels[:, 1:] != IGNORE_INDEX).sum())


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """The micro-batches of one optimizer step, and the number by which the trainer divides their loss."""

    batches: tuple[SeenBatch, ...]
    num_items: Any
    """`num_items_in_batch` of `get_batch_samples`; None if the trainer counts nothing."""

    @property
    def is_unlike(self) -> bool:
        """Whether the micro-batches' numbers of labels differ, so that a mean of their means is not the ratio."""
        return are_unlike([batch.num_trained for batch in self.batches])


def are_unlike(counts: Sequence[int]) -> bool:
    return max(counts) - min(counts) > UNLIKE * max(counts)


def spans_of_rows(batch: SeenBatch) -> Iterator[tuple[int, int, int, Any]]:
    """Yields (row, start, end, feature): the tokens of a row without padding, or the tokens of each of its features."""
    num_rows, features, ids = len(batch.ids), list(batch.features), batch.ids.astype(np.int32)
    lists = [ids_of(feature) for feature in features]
    if len(features) == num_rows:
        for row, (feature, own) in enumerate(zip(features, lists, strict=True)):
            at = -1 if own is None else find(ids[row], own)
            start, end = _real(batch, row) if at < 0 or own is None else (at, at + len(own))
            yield row, start, end, feature
        return
    found, at = list[tuple[int, int, int, Any]](), 0
    for feature, own in zip(features, lists, strict=True) if num_rows == 1 else ():
        start = -1 if own is None else find(ids[0, at:], own)
        if start < 0 or own is None:
            break
        found.append((0, at + start, at + start + len(own), feature))
        at += start + len(own)
    is_flat = num_rows == 1 and len(found) == len(features) > 0
    yield from found if is_flat else ((row, *_real(batch, row), None) for row in range(num_rows))


def ids_of(feature: Any) -> np.ndarray | None:
    ids = feature.get("input_ids") if isinstance(feature, Mapping) else None
    return None if ids is None else np.asarray(ids, dtype=np.int32).reshape(-1)


def _real(batch: SeenBatch, row: int) -> tuple[int, int]:
    """Returns the range of a row without its padding, as the attention mask shows it."""
    if batch.attended is None:
        return 0, batch.ids.shape[1]
    real = np.flatnonzero(batch.attended[row] != 0)
    return (int(real[0]), int(real[-1]) + 1) if len(real) else (0, 0)


def find(inside: np.ndarray, wanted: np.ndarray) -> int:
    """Returns the first index at which `wanted` occurs in `inside`, both int32; -1 if it does not."""
    data, sought, at = inside.tobytes(), wanted.tobytes(), -1
    while sought and (at := data.find(sought, at + 1)) >= 0:
        if at % inside.itemsize == 0:
            return at // inside.itemsize
    return -1


def with_fewer_labels(batch: SeenBatch, num_kept: int | None = None) -> dict[str, Any]:
    """Returns what the dataloader gives for a batch, with the first labels alone: by default, half of them.

    The labels stay as they are if there are fewer than two, or if the dataloader does not give them.
    """
    inputs = dict(batch.inputs)
    positions = np.flatnonzero(np.pad(batch.labels[:, 1:] != IGNORE_INDEX, ((0, 0), (1, 0))))
    if len(positions) < 2:
        return inputs
    first = int(positions[len(positions) // 2 if num_kept is None else num_kept])
    for name, begin in (("labels", first), ("shift_labels", first - 1)):
        labels = inputs.get(name)
        if isinstance(labels, Tensor) and labels.shape == batch.labels.shape:
            is_kept = torch.arange(labels.numel(), device=labels.device).view(labels.shape) < begin
            inputs[name] = labels.where(is_kept, torch.full_like(labels, IGNORE_INDEX))
    return inputs


def _array(value: Tensor) -> np.ndarray:
    return value.detach().cpu().numpy()
