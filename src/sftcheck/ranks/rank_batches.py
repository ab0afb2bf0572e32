"""The micro-batches of several ranks, and the whole rows of which each rank computes all or a part.

Which token of a row arrives where is measured, not assumed: the trainer is given the row once more with a number for
each token, and its call of the model shows the numbers.

    the row             t0 t1 t2 t3 t4 t5 t6        rank 0 computes    t0 t1 t4 t5
    its numbers          0  1  2  3  4  5  6        rank 1 computes    t2 t3            t6 is lost
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sftcheck.batches import SeenBatch
from sftcheck.ranks.row_map import RowMap
from sftron.data.types import IGNORE_INDEX

FIRST_NUMBER = 1 << 24
"""The number of the first token; below it are the ids of padding that a collator adds."""


def digest(value: Any) -> str:
    """Returns a short name of the content of rows, batches or tensors."""
    found = hashlib.sha256()

    def add(each: Any) -> None:
        if isinstance(each, Mapping):
            for key in sorted(each):
                found.update(repr(key).encode())
                add(each[key])
        elif isinstance(each, (list, tuple)) and not (each and isinstance(each[0], int)):
            found.update(b"[")
            for inner in each:
                add(inner)
        elif isinstance(each, (Tensor, np.ndarray)):
            add(each.tolist())
        elif isinstance(each, bytes):
            found.update(each)
        else:
            found.update(repr(each).encode())

    add(value)
    return found.hexdigest()[:16]


def clone_inputs(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a batch with tensors of its own, as torch's context parallelism cuts them in place."""
    return {name: each.clone() if isinstance(each, Tensor) else each for name, each in inputs.items()}


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What a rank computes of one micro-batch; plain arrays, which are sent to all ranks."""

    row_keys: tuple[str, ...]
    """The digests of the rows that the rank's collator was given; empty if they are not known."""
    key: str
    """The digest of the rows, or of the batch of its dataloader: equal on the ranks that share the rows."""
    given: str
    """The digest of the batch of its dataloader."""
    ids: np.ndarray
    """int64 [B, T], in the call of the model."""
    numbers: np.ndarray | None
    """int64 [B, T]: which token of the whole rows each one is, or -1; None if this could not be measured."""
    num_numbered: int
    """The number of tokens of the whole rows."""
    positions: np.ndarray | None
    labels: np.ndarray | None
    """int64 [B, T], if they are passed: the labels of the same tokens, or of the tokens after them."""
    is_shifted: bool

    @property
    def values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, each.name) for each in fields(self))

    @property
    def is_of_several(self) -> bool:
        """Whether the rank computes less than its rows."""
        return self.numbers is not None and int((self.numbers >= 0).sum()) < self.num_numbered


def numbered_batch(inputs: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """Returns a batch with a number in place of each id, and how many there are."""
    ids = inputs["input_ids"]
    numbers = torch.arange(ids.numel(), device=ids.device, dtype=ids.dtype).view_as(ids) + FIRST_NUMBER
    return {**clone_inputs(inputs), "input_ids": numbers}, ids.numel()


def numbered_rows(features: Sequence[Any]) -> tuple[list[Any], int]:
    """Returns rows with a number in place of each id, and how many there are."""
    found, at = list[Any](), FIRST_NUMBER
    for feature in features:
        size = len(feature["input_ids"])
        found.append({**feature, "input_ids": list(range(at, at + size))})
        at += size
    return found, at - FIRST_NUMBER


class SeenPart(SeenBatch):
    """What a rank computes of its rows. The labels may be in another batch, or cut in other places than the ids."""

    def __post_init__(self) -> None:
        if not isinstance(self.seen.get("input_ids"), Tensor):
            raise ValueError("the trainer calls its model without input_ids, so its documents cannot be read")


def part_of(batch: SeenPart, numbers: np.ndarray | None, num_numbered: int) -> Part:
    features = [each for each in batch.features if isinstance(each, Mapping)]
    given = digest(batch.inputs)
    shifted, labels = batch.seen.get("shift_labels"), None
    for values in (shifted, batch.seen.get("labels"), batch.inputs.get("labels")):
        if labels is None and isinstance(values, Tensor) and values.shape == batch.ids.shape:
            labels = values.detach().cpu().numpy()
    return Part(
        tuple(map(digest, features)),
        digest(features) if features else given,
        given,
        batch.ids,
        numbers,
        num_numbered,
        batch.positions,
        labels,
        isinstance(shifted, Tensor),
    )


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """One micro-batch of all ranks, as one of them holds it."""

    inputs: Mapping[str, Any]
    """The batch of this rank's dataloader."""
    whole: SeenBatch
    """The whole rows of which this rank computes all or a part, as one process would compute them."""
    parts: tuple[Part, ...]
    """Those of all ranks."""
    computed: RowMap
    """The tokens that this rank computes, in `whole`."""
    given: RowMap
    """Those of the batch of its dataloader."""
    num_lost: int
    """How many tokens of the whole rows no rank computes."""

    def group_of(self, rank: int) -> list[int]:
        """Returns the ranks that were given the same rows as this one, with itself."""
        return [each for each, part in enumerate(self.parts) if part.key == self.parts[rank].key]

    def is_split(self, rank: int) -> bool:
        """Returns whether the rank computes a part of its rows, and the others of its group the rest."""
        return self.parts[rank].is_of_several

    @property
    def first_of_groups(self) -> list[int]:
        """The first rank of each group that shares its rows in parts, and every rank that computes whole rows."""
        return [rank for rank in range(len(self.parts)) if not self.is_split(rank) or self.group_of(rank)[0] == rank]


def whole_rows(batch: SeenPart, parts: Sequence[Part], rank: int) -> MicroBatch:
    """Returns the micro-batch with the rows whole again.

    Where the dataloader gives them whole, they are its rows; where the collator has cut them, those that it was given.
    """
    own = parts[rank]
    group = [each for each, part in enumerate(parts) if part.key == own.key]
    computed = {int(n) for each in group for n in _numbers_of(parts[each])}
    num_lost = own.num_numbered - len(computed) if own.numbers is not None else 0
    if not own.is_of_several or own.numbers is None:
        whole = SeenBatch(batch.features, batch.inputs, batch.seen)
        rows = RowMap.of_whole(batch.ids.shape)
        return MicroBatch(batch.inputs, whole, tuple(parts), rows, rows, num_lost)
    if _is_given_whole(batch, own):
        shape = batch.inputs["input_ids"].shape
        layout = np.stack(np.divmod(np.arange(own.num_numbered), shape[1]), axis=-1)
        whole, given = _of_loader(batch, parts, group, layout), RowMap.of_whole(shape)
        computed = RowMap.of_numbers(own.numbers, layout)
    else:
        layout = _layout_of(batch.features, own)
        whole = _of_features(batch, parts, group, layout)
        computed = given = RowMap.of_numbers(own.numbers, layout)
    return MicroBatch(batch.inputs, whole, tuple(parts), computed, given, num_lost)


def _numbers_of(part: Part) -> np.ndarray:
    return np.empty(0) if part.numbers is None else part.numbers[part.numbers >= 0]


def _is_given_whole(batch: SeenBatch, own: Part) -> bool:
    given = batch.inputs.get("input_ids")
    return isinstance(given, Tensor) and given.numel() == own.num_numbered


def _scattered(
    parts: Sequence[Part], group: Sequence[int], layout: np.ndarray, shape: Sequence[int], of: Callable[[Part], Any]
) -> np.ndarray | None:
    """Returns [B, T] with what each part has for each of its tokens; None if a part has nothing, or a token no part."""
    found, num_found = np.zeros(tuple(shape), dtype=np.int64), 0
    for rank in group:
        part = parts[rank]
        values = of(part)
        if values is None or part.numbers is None:
            return None
        num_found += RowMap.of_numbers(part.numbers, layout).write(found, values)
    return found if num_found >= len(layout) else None


def _of_loader(batch: SeenBatch, parts: Sequence[Part], group: Sequence[int], layout: np.ndarray) -> SeenBatch:
    given = dict(batch.inputs)
    shape = given["input_ids"].shape
    seen = {
        name: value
        for name in ("input_ids", "attention_mask", "labels", "shift_labels", "position_ids")
        if isinstance(value := given.get(name), Tensor) and value.shape == shape
    }
    positions = _scattered(parts, group, layout, shape, lambda part: part.positions)
    if positions is not None:
        seen["position_ids"] = torch.from_numpy(positions).to(given["input_ids"].device)
    return SeenBatch(batch.features, {**given, **seen}, seen)


def _layout_of(features: Sequence[Any], own: Part) -> np.ndarray:
    """Returns the row and the column of each numbered token: a row for each feature, or one row for all of them."""
    sizes = [len(each["input_ids"]) for each in features]
    if len(own.ids) == len(features):
        return np.array([(row, column) for row, size in enumerate(sizes) for column in range(size)])
    return np.array([(0, column) for column in range(sum(sizes))])


def _of_features(batch: SeenBatch, parts: Sequence[Part], group: Sequence[int], layout: np.ndarray) -> SeenBatch:
    own_ids = batch.seen["input_ids"]
    device = own_ids.device
    shape = layout.max(axis=0) + 1

    def laid_out(values: Any, fill: int) -> Tensor:
        found = np.full(tuple(shape), fill, dtype=np.int64)
        found[layout[:, 0], layout[:, 1]] = values
        return torch.from_numpy(found).to(device)

    def of_features(name: str) -> list[int] | None:
        is_given = all(name in each and len(each[name]) == len(each["input_ids"]) for each in batch.features)
        return [int(n) for each in batch.features for n in each[name]] if is_given else None

    ids = of_features("input_ids") or []
    seen = {"input_ids": laid_out(ids, 0)}
    if len(own_ids) == len(batch.features):  # else one row for all, whose borders the positions show
        seen["attention_mask"] = laid_out([1] * len(ids), 0)
    labels = of_features("labels")
    if labels is not None:
        seen["labels"] = laid_out(labels, IGNORE_INDEX)
    elif (scattered := _scattered(parts, group, layout, shape, lambda part: part.labels)) is not None:
        is_shifted = parts[group[0]].is_shifted
        seen["shift_labels" if is_shifted else "labels"] = torch.from_numpy(scattered).to(device)
    positions = _scattered(parts, group, layout, shape, lambda part: part.positions)
    if positions is not None:
        seen["position_ids"] = torch.from_numpy(positions).to(device)
    return SeenBatch(batch.features, seen, seen)


def arguments_of_one_process(micro: MicroBatch, *, is_split: bool) -> dict[str, Any]:
    """Returns the arguments with which one process calls the model on the whole rows, without labels.

    Positions of a split row are those of its dataloader or of its features, or the model's own: those of the parts
    are what is checked.
    """
    arguments = micro.whole.without_labels
    if not is_split:
        return arguments
    given = micro.inputs.get("position_ids")
    if isinstance(given, Tensor) and given.shape == micro.whole.ids.shape:
        arguments["position_ids"] = given
    elif len(micro.whole.features) == len(micro.whole.ids) or not micro.whole.features:
        arguments.pop("position_ids", None)
    else:
        sizes = [len(each["input_ids"]) for each in micro.whole.features]
        restarting = torch.cat([torch.arange(size) for size in sizes])
        arguments["position_ids"] = restarting[None].to(micro.whole.seen["input_ids"].device)
        arguments.pop("attention_mask", None)
    return arguments
