"""Packing: the choice of conversations for a pack, and the layout of a pack. No conversation is split (law 4)."""

from __future__ import annotations

import sys
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from sftron.data.types import IGNORE_INDEX, LabeledConversation, Pack, Role


class PoolPacking:
    """Packs the oldest conversation with the subset of the pool that best fills the rest of the budget.

    The subset-sum is exact. `reach` is a set of integers, stored as the bits of a Python int: bit s is set if some
    subset of the conversations so far has s tokens. Adding a conversation of length l is `reach |= reach << l`. The
    search stops at the first exact fit, and the backward pass that recovers the subset prefers older conversations.
    """

    def __init__(self, pool_size: int) -> None:
        self.pool_size = pool_size

    def choose(self, lengths: Sequence[int], token_budget: int) -> list[int]:
        """Returns the indices of the conversations of the next pack, ascending.

        The first is always 0, so no conversation waits for more than pool_size packs.

        Args:
            lengths: The lengths of the pending conversations in arrival order, none longer than the budget.
            token_budget: The most tokens of a pack.
        """
        room = token_budget - lengths[0]
        within_room = (1 << (room + 1)) - 1
        reached = [1]
        for length in lengths[1:]:
            reach = reached[-1]
            reached.append(reach | (reach << length) & within_room)
            if reached[-1] >> room:
                break
        filled = reached[-1].bit_length() - 1
        chosen = []
        for index in range(len(reached) - 1, 0, -1):
            if not reached[index - 1] >> filled & 1:
                chosen.append(index)
                filled -= lengths[index]
        return [0, *reversed(chosen)]


class MinibatchPacking:
    """Packs exactly the next `conversations_per_pack` conversations.

    There is no padding between them, and an optimizer step sees the same conversations as with padded minibatches.
    """

    def __init__(self, conversations_per_pack: int) -> None:
        self.pool_size = conversations_per_pack

    def choose(self, lengths: Sequence[int], token_budget: int) -> list[int]:
        assert sum(lengths) <= token_budget
        return list(range(len(lengths)))


class BestFitPacking:
    """Packs the oldest conversation with those that best-fit decreasing puts into its pack.

    The pool must hold the rest of one epoch. The packs of an epoch come in the order of their oldest conversations, and
    a resume that knows only the rest of the epoch makes the same packs: leaving out a whole pack changes no other
    choice of best-fit decreasing.
    """

    pool_size = sys.maxsize

    def __init__(self) -> None:
        self._planned: tuple[list[int], int] = ([], 0)
        self._packs: deque[list[int]] = deque()
        self._taken: list[int] = []

    def choose(self, lengths: Sequence[int], token_budget: int) -> list[int]:
        """Returns the indices of the conversations of the next pack, ascending; the first is 0.

        A pure function of its arguments. The packs are computed once and kept while the calls follow one another.
        """
        rest, _ = self._planned
        if (lengths, token_budget) != self._planned:
            rest, self._taken = list(lengths), []
            self._planned, self._packs = (rest, token_budget), deque(best_fit_decreasing(lengths, token_budget))
        pack = self._packs.popleft()
        chosen = [index - bisect_left(self._taken, index) for index in pack]
        for index, place in zip(reversed(pack), reversed(chosen), strict=True):
            insort(self._taken, index)
            del rest[place]
        return chosen


def best_fit_decreasing(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Returns the packs of best-fit decreasing, each with ascending indices, in the order of their first indices.

    From the longest to the shortest, each conversation goes into the fullest pack that has room for it, the first of
    equally full ones. It makes at most 11/9 of the fewest possible packs, plus one (Johnson, 1973).
    """
    packs: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # of each pack the room that is left and its number, ascending
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        fullest = bisect_left(rooms, (lengths[index], 0))
        room, number = rooms.pop(fullest) if fullest < len(rooms) else (token_budget, len(packs))
        if number == len(packs):
            packs.append([])
        packs[number].append(index)
        insort(rooms, (room - lengths[index], number))
    return sorted(map(sorted, packs))


Packing = PoolPacking | MinibatchPacking | BestFitPacking
"""Chooses the next pack from a lane's pending conversations, at most `pool_size`."""


def lay_out(
    conversations: Sequence[LabeledConversation], *, token_budget: int, remove_cross_attention: bool, pad_id: int
) -> Pack:
    """Returns a pack of the conversations, one after another in one row of token_budget tokens. Padding is a document.

    Two conversations of 3 and 2 tokens in a budget of 7:

        remove_cross_attention   position_ids  0 1 2 0 1 0 1    cu_seqlens  0 3 5 7
        without                  position_ids  0 1 2 3 4 0 1    cu_seqlens  0 5 7
        both                     conversation_bounds  0 3 5
    """
    bounds = np.array([0, *accumulate(len(conversation) for conversation in conversations)], dtype=np.int32)
    num_tokens = int(bounds[-1])
    assert num_tokens <= token_budget, (num_tokens, token_budget)

    documents = bounds if remove_cross_attention or not num_tokens else bounds[[0, -1]]
    cu_seqlens = documents if num_tokens == token_budget else np.append(documents, np.int32(token_budget))
    position_ids = np.arange(token_budget, dtype=np.int32) - np.repeat(cu_seqlens[:-1], np.diff(cu_seqlens))

    def row(field: str, padding: int | float, dtype: type[np.generic]) -> np.ndarray:
        values = np.full(token_budget, padding, dtype)
        if conversations:
            np.concatenate([getattr(each, field) for each in conversations], out=values[:num_tokens])
        return values

    return Pack(
        input_ids=row("input_ids", pad_id, np.int32),
        labels=row("labels", IGNORE_INDEX, np.int32),
        loss_weights=row("loss_weights", 0.0, np.float32),
        role_ids=row("role_ids", Role.PADDING, np.uint8),
        position_ids=position_ids,
        cu_seqlens=cu_seqlens,
        conversation_bounds=bounds,
        keys=tuple(conversation.key for conversation in conversations),
        num_truncated=sum(conversation.num_truncated_turns > 0 for conversation in conversations),
    )
