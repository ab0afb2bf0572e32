"""Counts for an audit: tokens by role, turns by stop token, conversations by length, and the fill of packs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from sftron.data.labels import Targets
from sftron.data.lanes.lane import PoolDelay
from sftron.data.types import Pack, Role, TokenizedConversation
from sftron.visible_text import counted

QUANTILES = {"shortest": 0.0, "median": 0.5, "p90": 0.9, "p99": 0.99, "longest": 1.0}
"""The reported quantiles of conversation lengths."""


@dataclass(slots=True)
class SourceCount:
    """The rows of one data set: read, kept, and dropped by reason; token counts include only kept rows."""

    num_rows: int = 0
    num_kept: int = 0
    num_tokens: int = 0
    num_trained_tokens: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__} | {"dropped": dict(self.dropped)}


@dataclass(slots=True)
class TurnCount:
    """The model's turns, counted by whether they are trained and by their stop token."""

    num_turns: int = 0
    """Turns whose text is to be trained up to its end, including the stop token."""
    num_stop_trained: int = 0
    """The number of these turns whose stop token is a label with a weight."""
    num_empty: int = 0
    """The number of these turns in which only the stop token is trained."""
    num_left_out_by_template: int = 0
    """Assistant turns that the template omits; not included in num_turns."""
    num_not_trained: int = 0
    """Other assistant turns: those with weight 0, or before the last one with train_on_turns: last."""

    def add(self, tokenized: TokenizedConversation, trained: np.ndarray, targets: Targets) -> int | None:
        """Adds the turns of a conversation; returns the index of the first without a trained stop token, or None.

        Args:
            trained: Whether each token of the conversation is trained, bool [n].
            targets: The tokens that the run is configured to train.
        """
        first, is_target = None, targets.mask_of(tokenized)
        for index, turn in enumerate(tokenized.turns):
            is_text_trained = bool(trained[turn.start : turn.end].any())
            if turn.role is not Role.ASSISTANT and not (turn.role is Role.TOOL_CALL and is_text_trained):
                continue
            if turn.start == turn.end and turn.stop is None:
                self.num_left_out_by_template += 1
                continue
            last = turn.stop if turn.stop is not None and turn.end == turn.start else turn.end - 1
            if not is_target[last]:
                self.num_not_trained += 1
                continue
            is_stop_trained = turn.stop is not None and bool(trained[turn.stop])
            self.num_turns += 1
            self.num_stop_trained += is_stop_trained
            self.num_empty += is_stop_trained and not is_text_trained
            if not is_stop_trained and first is None:
                first = index
        return first

    @property
    def num_stop_not_trained(self) -> int:
        return self.num_turns - self.num_stop_trained

    def as_dict(self) -> dict[str, int]:
        return asdict(self) | {"num_stop_not_trained": self.num_stop_not_trained}


class LengthCount(Counter[int]):
    """The exact number of conversations of each length in tokens; memory grows only with the number of lengths."""

    def quantile(self, share: float) -> int:
        """Returns the smallest length that at least `share` of the conversations do not exceed; 0 without
        conversations."""
        ordered = sorted(self)
        sums = accumulate(self[length] for length in ordered)
        num_needed = share * self.total()
        return next((length for length, num in zip(ordered, sums, strict=True) if num >= num_needed), 0)

    def quantiles(self) -> dict[str, int]:
        return {name: self.quantile(share) for name, share in QUANTILES.items()}

    def buckets(self) -> list[list[int]]:
        """Returns a histogram by powers of two (1, 2, 3-4, 5-8, ...): [lowest, highest length, conversations]."""
        exponents = Counter[int]()
        for length, count in self.items():
            exponents[max(length - 1, 0).bit_length()] += count
        return [
            [2**exponent // 2 + 1 if exponent else 0, 2**exponent, exponents[exponent]]
            for exponent in range(min(exponents, default=0), max(exponents, default=-1) + 1)
        ]


class PackingCount:
    """Sums over packs; docs/packing.md has each formula. Packs without a conversation are not counted.

    Args:
        sequence_length: The length for a comparison with padding to a fixed length; None omits the comparison.
        pool_delay: The delay counter of the stream that provides the packs, updated by that stream; None omits it.
    """

    def __init__(self, sequence_length: int | None = None, pool_delay: PoolDelay | None = None) -> None:
        self._sequence_length, self._pool_delay = sequence_length, pool_delay
        self.num_packs = self.num_positions = self.num_conversations = self.num_tokens = 0
        self._sum_of_squares = self._whole_pack_squares = self._num_padded_to_longest = 0

    def add(self, pack: Pack) -> None:
        if not pack.keys:
            return
        lengths = np.diff(pack.conversation_bounds).astype(np.int64)
        self.num_packs += 1
        self.num_positions += len(pack.input_ids)
        self.num_conversations += len(lengths)
        self.num_tokens += pack.num_tokens
        self._sum_of_squares += int((lengths**2).sum())
        self._whole_pack_squares += len(pack.input_ids) ** 2
        self._num_padded_to_longest += len(lengths) * int(lengths.max())

    def as_dict(self) -> dict[str, Any]:
        positions, length, delay = max(self.num_positions, 1), self._sequence_length, self._pool_delay
        return {
            "num_packs": self.num_packs,
            "num_conversations": self.num_conversations,
            "num_positions": self.num_positions,
            "fill": self.num_tokens / positions,
            "mean_length_before": self.num_tokens / max(self.num_conversations, 1),
            "mean_length_after": self.num_tokens / max(self.num_packs, 1),
            "attention_share": self._sum_of_squares / max(self._whole_pack_squares, 1),
            "padding_to_longest": self._num_padded_to_longest / positions,
            "padding_to_sequence_length": None if length is None else self.num_conversations * length / positions,
            "packs_waited": None if delay is None else {"mean": delay.mean, "longest": delay.longest},
        }

    def facts(self) -> Iterator[tuple[str, str]]:
        """Yields (name, value) as text for people; nothing without packs."""
        if not self.num_packs:
            return
        counts, per_pack = self.as_dict(), self.num_conversations / self.num_packs
        packs = counted(self.num_packs, "packs")
        yield "conversations", f"{self.num_conversations:,} in {packs}, {per_pack:,.1f} a pack"
        before, after = counts["mean_length_before"], counts["mean_length_after"]
        yield "mean effective length", f"{before:,.1f} tokens before packing, {after:,.1f} after"
        yield "pack fill", f"{100 * counts['fill']:.2f}%"
        yield "attention work of one document a pack", f"{100 * counts['attention_share']:.1f}%"
        yield "positions if padded to the longest", f"{counts['padding_to_longest']:.2f} times"
        if self._sequence_length is not None:
            times = counts["padding_to_sequence_length"]
            yield f"positions if padded to {self._sequence_length:,}", f"{times:.2f} times"
        if waited := counts["packs_waited"]:
            yield "wait in the pool, in packs", f"{waited['mean']:.1f} on average, {waited['longest']} at most"
