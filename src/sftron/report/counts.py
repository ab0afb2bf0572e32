"""What an audit counts: tokens by role, turns by their stop token, conversations by length."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from sftron.data.labels import Targets
from sftron.data.types import Role, TokenizedConversation


@dataclass(slots=True)
class RoleCount:
    """Tokens by role, and those of them that are trained."""

    tokens: Counter[Role] = field(default_factory=Counter)
    trained: Counter[Role] = field(default_factory=Counter)

    def add(self, role_ids: np.ndarray, trained: np.ndarray) -> None:
        """role_ids (uint8) and trained (bool) are [n], of the same tokens."""
        for counter, ids in ((self.tokens, role_ids), (self.trained, role_ids[trained])):
            values, counts = np.unique(ids, return_counts=True)
            counter.update({Role(int(value)): int(count) for value, count in zip(values, counts, strict=True)})

    @property
    def num_tokens(self) -> int:
        return self.tokens.total()

    @property
    def num_trained_tokens(self) -> int:
        return self.trained.total()

    def as_dict(self) -> dict[str, Any]:
        return {
            "num_tokens": self.num_tokens,
            "num_trained_tokens": self.num_trained_tokens,
            "by_role": {
                role.name.lower(): {"num_tokens": self.tokens[role], "num_trained_tokens": self.trained[role]}
                for role in sorted(self.tokens)
            },
        }


@dataclass(slots=True)
class SourceCount:
    """The rows read of one data set. num_tokens, num_trained_tokens: of those kept. dropped: rows by reason."""

    num_rows: int = 0
    num_kept: int = 0
    num_tokens: int = 0
    num_trained_tokens: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def as_dict(self) -> dict[str, Any]:
        return {
            "num_rows": self.num_rows,
            "num_kept": self.num_kept,
            "num_tokens": self.num_tokens,
            "num_trained_tokens": self.num_trained_tokens,
            "dropped": dict(self.dropped),
        }


@dataclass(slots=True)
class TurnCount:
    """The model's turns by what becomes of the token that ends them.

    num_turns: those whose text is to be trained to its end, and so their stop token as well.
    num_stop_trained: those whose stop token is a label with a weight.
    num_empty: those of them that train nothing but it.
    num_left_out: assistant turns that the template does not write at all; not among num_turns.
    num_not_trained: other assistant turns, as of weight 0, or before the last with train_on_turns: last.
    """

    num_turns: int = 0
    num_stop_trained: int = 0
    num_empty: int = 0
    num_left_out: int = 0
    num_not_trained: int = 0

    def add(self, tokenized: TokenizedConversation, trained: np.ndarray, targets: Targets) -> int | None:
        """Count a conversation's turns; the index of its first whose stop token is not trained, or None.

        trained: bool [n], of the conversation's tokens. targets: what the run means to train.
        """
        first, is_target = None, targets.of(tokenized)
        for index, turn in enumerate(tokenized.turns):
            is_assistant = turn.role is Role.ASSISTANT
            if not is_assistant and not (turn.role is Role.TOOL_CALL and trained[turn.start : turn.end].any()):
                continue
            if turn.start == turn.end and turn.stop is None:
                self.num_left_out += 1
                continue
            last = turn.stop if turn.stop is not None and turn.end == turn.start else turn.end - 1
            if not is_target[last]:
                self.num_not_trained += 1
                continue
            is_stop_trained = turn.stop is not None and bool(trained[turn.stop])
            self.num_turns += 1
            self.num_stop_trained += is_stop_trained
            self.num_empty += is_stop_trained and not trained[turn.start : turn.end].any()
            if not is_stop_trained and first is None:
                first = index
        return first

    @property
    def num_stop_not_trained(self) -> int:
        return self.num_turns - self.num_stop_trained

    def as_dict(self) -> dict[str, int]:
        return {
            "num_turns": self.num_turns,
            "num_stop_trained": self.num_stop_trained,
            "num_stop_not_trained": self.num_stop_not_trained,
            "num_empty": self.num_empty,
            "num_left_out_by_template": self.num_left_out,
            "num_not_trained": self.num_not_trained,
        }


@dataclass(frozen=True, slots=True)
class LengthBucket:
    """`count` conversations have from `low` to `high` tokens, both included."""

    low: int
    high: int
    count: int


@dataclass(slots=True)
class LengthCount:
    """Conversations by their number of tokens, exactly; memory grows with the different lengths only."""

    lengths: Counter[int] = field(default_factory=Counter)

    def add(self, num_tokens: int) -> None:
        self.lengths[num_tokens] += 1

    def quantile(self, share: float) -> int:
        """The shortest length that at least `share` of the conversations do not exceed; 0 if there are none."""
        if not self.lengths:
            return 0
        ordered = sorted(self.lengths)
        num_needed = share * self.lengths.total()
        sums = accumulate(self.lengths[length] for length in ordered)
        return next(length for length, num_so_far in zip(ordered, sums, strict=True) if num_so_far >= num_needed)

    def buckets(self) -> list[LengthBucket]:
        """A histogram by powers of two (1, 2, 3-4, 5-8, ...), from the first bucket in use to the last.

        Lengths of conversations are spread over decades; equal widths would put nearly all of them into one bar.
        """
        exponents = Counter[int]()
        for length, count in self.lengths.items():
            exponents[max(length - 1, 0).bit_length()] += count
        if not exponents:
            return []
        return [
            LengthBucket(low=2**exponent // 2 + 1 if exponent else 0, high=2**exponent, count=exponents[exponent])
            for exponent in range(min(exponents), max(exponents) + 1)
        ]

    def as_dict(self) -> dict[str, Any]:
        return {
            "quantiles": {name: self.quantile(share) for name, share in QUANTILES.items()},
            "buckets": [[bucket.low, bucket.high, bucket.count] for bucket in self.buckets()],
        }


QUANTILES = {"shortest": 0.0, "median": 0.5, "p90": 0.9, "p99": 0.99, "longest": 1.0}
"""Shares of the conversations at which a length is reported."""
