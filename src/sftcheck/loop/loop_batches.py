"""The micro-batches of a loop as the checks of a trainer see them: ids and labels at the same index."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sftcheck.batches import SeenBatch
from sftcheck.loop.reading import Reading
from sftron.data.types import IGNORE_INDEX

_LEAST_RUN = 8
"""The number of equal tokens at an end of a row that are padding, whichever token it is."""


@dataclass(frozen=True, eq=False)
class LoopBatch(SeenBatch):
    """One micro-batch, plus one column if the last target is not among the model's inputs.

    ids of the call     <s> Hi </s> Yo   <s> Bye          a loop may shift each document by itself,
    its targets         -   -   Yo  </s>  -   -           so its last token is in the targets alone
    ids                 <s> Hi </s> Yo </s> <s> Bye
    labels              -   -   -   Yo </s> -   -
    """

    reading: Reading
    tokenizer: Any

    def __post_init__(self) -> None:
        """Nothing has to be read from arguments."""

    @property
    def input_ids(self) -> Tensor:
        return torch.from_numpy(self.ids).to(self.reading.call.ids.device)

    @cached_property
    def ids(self) -> np.ndarray:
        pad = self.tokenizer.pad_token_id
        return self._extended(self._given_ids, self.reading.targets, 0 if pad is None else pad)

    @cached_property
    def labels(self) -> np.ndarray:
        return self.at_labels(self.reading.targets, IGNORE_INDEX)

    def at_labels(self, values: np.ndarray, filling: int) -> np.ndarray:
        """Returns values [B, T] of the call's tokens in the shape of `ids`, each at the token that is predicted."""
        shifted = np.full(values.shape, filling, dtype=values.dtype)
        shifted[:, 1:] = np.where(self._is_behind, filling, values)[:, :-1]
        return self._extended(shifted, values, filling)

    @cached_property
    def attended(self) -> np.ndarray:
        """[B, T], the attention mask of the call; without one, 0 for the padding that the ids show."""
        given = self.reading.call.attention_mask
        attended = np.stack([self._real_by_ids(row) for row in self._given_ids]) if given is None else given
        return self._extended(attended, attended, 0)

    @cached_property
    def positions(self) -> np.ndarray | None:
        given = self.reading.call.positions
        return None if given is None else self._extended(given, given + 1, 0)

    @cached_property
    def is_input(self) -> np.ndarray:
        return self._extended(np.ones(self._given_ids.shape, dtype=bool), np.zeros(self._given_ids.shape), 0)

    @property
    def passes_bounds(self) -> bool:
        return super().passes_bounds or bool(self.reading.call.starts)

    def claimed_starts(self, row: int) -> Iterator[int]:
        yield from super().claimed_starts(row)
        size = self._given_ids.shape[1]
        starts = [start - row * size for start in self.reading.call.starts]
        yield from (start + int(self._is_behind[row, :start].sum()) for start in starts if 0 < start < size)

    @property
    def num_trained(self) -> int:
        return int((self.reading.targets != IGNORE_INDEX).sum())

    def given(self, ids: Tensor) -> Tensor:
        """Returns the ids [B, T] of a call: ids in the shape of `ids`, without the extra columns."""
        return ids[torch.from_numpy(self.is_input).to(ids.device)].reshape(self.reading.call.ids.shape)

    def shown(self, hidden: Tensor) -> Tensor:
        """Returns hidden states [B, T, H] of a call, with zeros in the extra columns."""
        shown = hidden.new_zeros((*self.ids.shape, hidden.shape[-1]))
        shown[torch.from_numpy(self.is_input).to(hidden.device)] = hidden.flatten(0, 1)
        return shown

    # -- the extra columns ---------------------------------------------------------------------------------------------

    @cached_property
    def _given_ids(self) -> np.ndarray:
        return self.reading.call.ids.cpu().numpy()

    @cached_property
    def _is_behind(self) -> np.ndarray:
        """Whether the target of a token is the end of its document, bool [B, T]: there is one, the next token is that
        of another document or there is none, and most other targets are the next token.
        """
        targets, ids, call = self.reading.targets, self._given_ids, self.reading.call
        is_trained = targets != IGNORE_INDEX
        is_next = np.pad(targets[:, :-1] == ids[:, 1:], ((0, 0), (0, 1)))
        ends = np.zeros(ids.shape, dtype=bool)
        ends[:, -1] = True
        if call.positions is not None:
            ends[:, :-1] |= np.diff(call.positions) <= 0
        ends.reshape(-1)[[start - 1 for start in call.starts if start]] = True
        within = is_trained & ~ends
        return ends & is_trained & ~is_next & (2 * (is_next & within).sum() >= within.sum())

    def _extended(self, values: np.ndarray, behind: np.ndarray, filling: int) -> np.ndarray:
        """Inserts the values of `behind` after the ends of documents, and fills rows [B, T] to one length."""
        rows = [np.insert(*each) for each in zip(values, *self._inserted(behind), strict=True)]
        width = max(map(len, rows))
        return np.stack([np.pad(row, (0, width - len(row)), constant_values=filling) for row in rows])

    def _inserted(self, behind: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
        places = [np.flatnonzero(row) for row in self._is_behind]
        return [each + 1 for each in places], [row[each] for row, each in zip(behind, places, strict=True)]

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
