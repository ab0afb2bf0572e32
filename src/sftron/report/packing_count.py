"""What packing does to the data, counted over packs: how full they are, and what padding would have cost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from sftron.data.lanes import Waits
from sftron.data.types import Pack


class PackingCount:
    """Sums over packs; docs/packing.md has each formula. Packs without a conversation are not counted.

    sequence_length: what padding to a fixed length would pad to; None leaves that comparison out.
    waits: of the stream that the packs come from, which goes on counting; None leaves it out.
    """

    def __init__(self, sequence_length: int | None = None, waits: Waits | None = None) -> None:
        self._sequence_length, self._waits = sequence_length, waits
        self.num_packs = 0
        self.num_positions = 0
        self.num_conversations = 0
        self.num_tokens = 0
        self._sum_of_squares = 0
        self._whole_pack_squares = 0
        self._num_padded_to_longest = 0

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

    @property
    def fill(self) -> float:
        """The share of the packs' positions that hold a token of a conversation."""
        return self.num_tokens / max(self.num_positions, 1)

    @property
    def attention_share(self) -> float:
        """The work of attention within conversations, as a share of that over whole packs."""
        return self._sum_of_squares / max(self._whole_pack_squares, 1)

    @property
    def padding_to_longest(self) -> float:
        """How many times the packs' positions the same conversations take, padded to the longest of each pack."""
        return self._num_padded_to_longest / max(self.num_positions, 1)

    @property
    def padding_to_sequence_length(self) -> float | None:
        if self._sequence_length is None:
            return None
        return self.num_conversations * self._sequence_length / max(self.num_positions, 1)

    def as_dict(self) -> dict[str, Any]:
        waits = self._waits
        return {
            "num_packs": self.num_packs,
            "num_conversations": self.num_conversations,
            "num_positions": self.num_positions,
            "fill": self.fill,
            "mean_length_before": self.num_tokens / max(self.num_conversations, 1),
            "mean_length_after": self.num_tokens / max(self.num_packs, 1),
            "attention_share": self.attention_share,
            "padding_to_longest": self.padding_to_longest,
            "padding_to_sequence_length": self.padding_to_sequence_length,
            "packs_waited": None if waits is None else {"mean": waits.mean, "longest": waits.longest},
        }

    def facts(self) -> Iterator[tuple[str, str]]:
        """(name, value) for people; nothing where there is no pack."""
        if not self.num_packs:
            return
        of_pack = self.num_conversations / self.num_packs
        before, after = self.num_tokens / self.num_conversations, self.num_tokens / self.num_packs
        yield "conversations to packs", f"{self.num_conversations:,} to {self.num_packs:,}, {of_pack:,.1f} a pack"
        yield "mean effective length", f"{before:,.1f} to {after:,.1f} tokens"
        yield "pack fill", f"{100 * self.fill:.2f}%"
        yield "attention work of one document a pack", f"{100 * self.attention_share:.1f}%"
        yield "positions if padded to the longest", f"{self.padding_to_longest:.2f} times"
        if self._sequence_length is not None and self.padding_to_sequence_length is not None:
            yield f"positions if padded to {self._sequence_length:,}", f"{self.padding_to_sequence_length:.2f} times"
        if self._waits is not None:
            yield "packs waited in the pool", f"{self._waits.mean:.1f} on average, {self._waits.longest} at most"
