"""The micro-batches of a loop as the checks of a trainer see them: ids and labels at the same index."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from sftron.data.types import IGNORE_INDEX
from sftron.verify.loop.reading import Reading
from sftron.verify.trainer.batches import SeenBatch

_LEAST_RUN = 8
"""The number of equal tokens at an end of a row that are padding, whichever token it is."""


@dataclass(frozen=True, eq=False)
class LoopBatch(SeenBatch):
    """One micro-batch, with one more column than the model is given where its last target is known.

    ids of the call     <s> Hi </s> Yo            a loop may hold the last token of a row in its targets alone
    its targets         -   -   Yo  </s>
    ids                 <s> Hi </s> Yo </s>
    labels              -   -   -   Yo </s>
    """

    reading: Reading
    tokenizer: Any

    def __post_init__(self) -> None:
        """Nothing has to be read from arguments."""

    @property
    def input_ids(self) -> Tensor:
        return self.reading.call.ids

    @cached_property
    def ids(self) -> np.ndarray:
        ids, targets = self._given_ids, self.reading.targets[:, -1:]
        pad = self.tokenizer.pad_token_id
        last = np.where(self._has_last[:, None], targets, 0 if pad is None else pad)
        return np.concatenate([ids, last], axis=1) if self._has_last.any() else ids

    @cached_property
    def labels(self) -> np.ndarray:
        first = np.full((len(self._given_ids), 1), IGNORE_INDEX, dtype=np.int64)
        return np.concatenate([first, self.reading.targets], axis=1)[:, : self.ids.shape[1]]

    @cached_property
    def attended(self) -> np.ndarray:
        """[B, T], the attention mask of the call; without one, 0 for the padding that the ids show."""
        given, ids = self.reading.call.attention_mask, self._given_ids
        attended = np.stack([self._real_by_ids(row) for row in ids]) if given is None else given
        last = self._has_last[:, None] & (attended[:, -1:] != 0)
        return np.concatenate([attended, last.astype(np.int64)], axis=1)[:, : self.ids.shape[1]]

    @cached_property
    def positions(self) -> np.ndarray | None:
        if (given := self.reading.call.positions) is None:
            return None
        return np.concatenate([given, given[:, -1:] + 1], axis=1)[:, : self.ids.shape[1]]

    def claimed_starts(self, row: int) -> Iterator[int]:
        yield from super().claimed_starts(row)
        size = self._given_ids.shape[1]
        yield from (start - row * size for start in self.reading.call.starts if row * size < start < (row + 1) * size)

    @property
    def num_trained(self) -> int:
        return int((self.reading.targets != IGNORE_INDEX).sum())

    @cached_property
    def _given_ids(self) -> np.ndarray:
        return self.reading.call.ids.cpu().numpy()

    @cached_property
    def _has_last(self) -> np.ndarray:
        """Whether the last target of each row is the next token: if there is one, and if most others are, bool [B]."""
        targets, ids = self.reading.targets, self._given_ids
        is_trained = targets[:, :-1] != IGNORE_INDEX
        is_next = (targets[:, :-1] == ids[:, 1:]) & is_trained
        return (targets[:, -1] != IGNORE_INDEX) & (2 * is_next.sum() >= is_trained.sum())

    def _real_by_ids(self, row: np.ndarray) -> np.ndarray:
        """Returns 0 for tokens at the ends of a row that are repeated as only padding is."""
        real = np.ones(len(row), dtype=np.int64)
        special = {*self.tokenizer.all_special_ids}
        first, last = int(row[0]), int(row[-1])
        num_before, num_behind = _run_of(first, row), _run_of(last, row[::-1])
        if num_behind >= (2 if last in special else _LEAST_RUN):
            num_behind -= last == self.tokenizer.eos_token_id  # the first one ends the conversation
            real[len(row) - num_behind :] = 0
        # A second beginning-of-text token is a fault of the ids.
        if first != self.tokenizer.bos_token_id and num_before >= (2 if first in special else _LEAST_RUN):
            real[:num_before] = 0
        return real


def _run_of(token: int, ids: np.ndarray) -> int:
    """Returns how often ids begin with a token."""
    is_other = ids != token
    return int(np.argmax(is_other)) if is_other.any() else len(ids)


def seen_batches(batches: Sequence[Any], readings: Sequence[Reading], tokenizer: Any) -> list[LoopBatch]:
    """Returns the micro-batches of one step."""
    pairs = zip(batches, readings, strict=True)
    return [LoopBatch((), each, reading.call.seen, reading, tokenizer) for each, reading in pairs]
