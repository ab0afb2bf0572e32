"""A trainer that can be checked, and its batches: what its collator makes of which rows, and the model's arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset

from sftron.data.types import IGNORE_INDEX, SeekablePacks
from sftron.verify.trainer.state import own_collator, own_dataset, restored

_LEAST_UNLIKE = 0.1
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")


def require_checkable(trainer: Any, trained_roles: str) -> Any:
    """Returns the trainer's tokenizer. Raises ValueError, with the remedy, if the trainer cannot be checked."""
    import transformers

    if not isinstance(trainer, transformers.Trainer):
        raise ValueError(f"found {type(trainer).__name__}; wanted a transformers.Trainer, such as TRL's SFTTrainer")
    if trained_roles not in ("assistant", "all"):
        raise ValueError(f"trained_roles is {trained_roles!r}; wanted 'assistant' or 'all'")
    args, config = trainer.args, getattr(trainer.model, "config", None)
    data: Any = trainer.train_dataset
    if args.n_gpu > 1 or trainer.is_deepspeed_enabled or (trainer.is_fsdp_enabled and args.world_size == 1):
        raise ValueError(
            f"the trainer has {max(1, args.n_gpu)} devices in one process, or DeepSpeed; give each device a process "
            "(torchrun), or check it in one process on one device (CUDA_VISIBLE_DEVICES=0)"
        )
    if not isinstance(data, SeekablePacks) and not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        found = "no train_dataset" if data is None else f"a streaming data set, {type(data).__name__}"
        raise ValueError(f"the trainer has {found}; give it a data set of known length, such as the first 256 rows")
    if not isinstance(data, SeekablePacks) and len(data) == 0:
        raise ValueError("the trainer's train_dataset has 0 rows")
    processor = trainer.processing_class
    if isinstance(processor, transformers.ProcessorMixin) or getattr(config, "vision_config", None) is not None:
        raise ValueError("vision models and processors are not checked; give a text model and its tokenizer")
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{type(trainer.model).__name__} is an encoder-decoder; only decoders are checked")
    tokenizer = processor or getattr(trainer.data_collator, "tokenizer", None)
    if not isinstance(tokenizer, transformers.PreTrainedTokenizerBase):
        raise ValueError("the trainer has no tokenizer; pass it as processing_class")
    return tokenizer


def require_mappings(batches: Sequence[Any]) -> None:
    """Raises ValueError if the dataloader gives something else than tensors by name, as that of TRL's GRPOTrainer."""
    for batch in batches:
        if not isinstance(batch, Mapping):
            raise ValueError(
                f"the trainer's batches are of type {type(batch).__name__}; wanted a mapping with input_ids and labels"
                ". A trainer that generates what it trains on (GRPO, RLOO, PPO) cannot be checked; give a trainer for "
                "supervised fine-tuning, such as TRL's SFTTrainer"
            )


class Recorder:
    """A data collator that records the rows that it is given; else it is the trainer's own."""

    def __init__(self, collator: Any) -> None:
        self.collator, self.features = collator, list[Sequence[Any]]()

    def __call__(self, features: Sequence[Any], *args: Any, **options: Any) -> Any:
        self.features.append([dict(each) if isinstance(each, Mapping) else each for each in features])
        return self.collator(features, *args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.collator, name)


@contextmanager
def recorded(trainer: Any, data: str, sample: Any) -> Iterator[Recorder]:
    """Gives the trainer these rows as its `train_dataset` or `eval_dataset`, and records what its collator is given.

    Batches are made in this process, as nothing could be recorded in a worker.
    """
    args, collator = trainer.args, "data_collator"
    if data == "eval_dataset" and getattr(trainer, "eval_data_collator", None) is not None:  # axolotl's
        collator = "eval_data_collator"
    recorder = Recorder(own_collator(trainer, collator))
    workers = {"dataloader_num_workers": 0, "dataloader_prefetch_factor": None, "dataloader_persistent_workers": False}
    with restored(trainer, data, collator), restored(args, *workers):
        for target, changes in ((trainer, {data: sample, collator: recorder}), (args, workers)):
            for name, value in changes.items():
                setattr(target, name, value)
        yield recorder


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
        """int64 [B, T]: the label of the token at the same index, which the model predicts from the tokens before it;
        or IGNORE_INDEX. They are those that the model is given, or those of the batch.
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
    return max(counts) - min(counts) > _LEAST_UNLIKE * max(counts)


def spans_of_rows(batch: SeenBatch) -> Iterator[tuple[int, int, int, Any]]:
    """Yields (row, start, end, feature): the tokens of a row that are no padding, or those of each of its features."""
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


def small_sizes(shortest: np.ndarray, budget: int, size: int, accumulated: int) -> tuple[int, int]:
    """Returns the rows of a micro-batch and the micro-batches of a step whose tokens are within a budget, if any are.

    Args:
        shortest: The lengths of the rows, sorted.
    """
    least = 1 if shortest[0] > budget else 2  # a long row is a pack; else rows need a neighbor
    while size > least and shortest[: size * accumulated].sum() > budget:
        size = (size + 1) // 2
    while accumulated > 2 and shortest[: size * accumulated].sum() > budget:
        accumulated //= 2
    return size, accumulated


def chosen_rows(size: int, most: int) -> np.ndarray:
    """Returns the numbers of the rows that are looked at, in order."""
    return np.sort(np.random.default_rng(0).choice(size, most, replace=False)) if size > most else np.arange(size)


def select(data: Any, chosen: np.ndarray) -> Any:
    """Returns some rows of a data set, without writing a cache file."""
    if hasattr(data, "select") and hasattr(data, "column_names"):
        return data.select(chosen.tolist(), keep_in_memory=True)
    return Subset(own_dataset(data), chosen.tolist())


def rows_of(sample: Any) -> list[Any]:
    """Returns the rows of a sample, as dictionaries if they are mappings. Raises ValueError if one holds an image."""
    rows = [dict(row) if isinstance(row := sample[n], Mapping) else row for n in range(len(sample))]
    for row in rows:
        # LLaMA-Factory gives every row such columns, which are empty for text.
        if media := [name for name in _MEDIA if isinstance(row, dict) and row.get(name)]:
            raise ValueError(f"a row of the data set has {media[0]}; only text is checked")
    return rows


def _array(value: Tensor) -> np.ndarray:
    return value.detach().cpu().numpy()
