"""Conversations that the user gives with a trainer, and which of them the batches hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from sftcheck.batches import find
from sftcheck.documents.document import Document, locate
from sftcheck.documents.truth import Encoder, Truth

_BEGINNING, _LEAST_SHOWN = 24, 8
"""The tokens of a conversation that are searched for, and the fewest that identify one."""


class GivenConversations:
    """The truths of the given conversations; false if none are given."""

    def __init__(self, encoder: Encoder, truths: Iterable[Truth]) -> None:
        self._encoder, self._used = encoder, set[int]()
        self.truths = [each for truth in truths for each in (truth, truth.reference) if each is not None]

    def __bool__(self) -> bool:
        return bool(self.truths)

    def begin(self) -> None:
        """Forgets which conversations were found, before other batches are looked at."""
        self._used.clear()

    def holds(self, truths: Sequence[Truth]) -> bool:
        """Returns whether one of a row's truths is given, and notes that it was found."""
        own = {truth.ids.tobytes() for truth in truths}
        same = [id(truth.content) for truth in self.truths if truth.ids.tobytes() in own]
        self._used.update(same)
        return bool(same)

    def missing(self) -> list[Truth]:
        """Returns the conversations that were not found."""
        expected = [each for each in self.truths if not (each.is_forged or each.lacks_tools)]
        return [each for each in expected if id(each.content) not in self._used]

    def match(self, document: Document) -> Document:
        """Returns the document as one of the conversations, perhaps without the template's end; else how it differs."""
        for truth in self.truths:
            found = locate(document, truth, "conversations", self._encoder)
            if found is not None and not (found.difference or found.num_cut_before or found.is_cut_after):
                self._used.add(id(truth.content))
                return found
        source = document.source or "conversations"
        return replace(document, source=source, difference=self._difference_from_nearest(document))

    def parts(self, whole: Document) -> list[Document]:
        """Returns the parts that are given conversations one after another; empty if they are not."""
        tokenizer, found, at, size = self._encoder.tokenizer, list[tuple[int, int, Truth]](), 0, len(whole)
        padding = {tokenizer.pad_token_id, tokenizer.eos_token_id}
        while at < size:
            truth, length = self._at(whole.ids[at:], is_first=at == 0)
            if truth is not None:
                found.append((at, at + length, truth))
            elif found and set(whole.ids[at:].tolist()) <= padding:
                (start, _, truth), length = found[-1], size - at
                found[-1] = (start, size, truth)
            else:
                return []
            at += length
        parts = [locate(whole.part(start, end), truth, "conversations", self._encoder) for start, end, truth in found]
        return [each for each in parts if each is not None] if None not in parts else []

    def _difference_from_nearest(self, document: Document) -> str:
        """Describes how a document differs from the given conversation that shares most of its beginning."""

        def num_shared(truth: Truth) -> int:
            size = min(len(truth.ids), len(document))
            return int(np.cumprod(truth.ids[:size] == document.ids[:size]).sum())

        nearest = max(self.truths, key=num_shared)
        difference = nearest.difference(document.ids, self._encoder.decode)
        return f"it is none of the given conversations; of the nearest, {difference}"

    def _end_at(self, ids: np.ndarray) -> tuple[Truth | None, int]:
        """Returns the given conversation whose last few tokens begin the ids, if another one begins behind them."""
        for length in range(min(_BEGINNING, len(ids)) - 1, 0, -1):
            for truth in self.truths:
                is_end = length < len(truth.ids) and np.array_equal(truth.ids[-length:], ids[:length])
                if is_end and self._at(ids[length:], is_first=False)[0] is not None:
                    return truth, length
        return None, 0

    def _at(self, ids: np.ndarray, *, is_first: bool) -> tuple[Truth | None, int]:
        """Returns the given conversation with which the ids begin, and how many tokens are of it."""
        found = list[tuple[bool, int, Truth]]()
        for truth in self.truths:
            at = find(truth.ids, ids[:_BEGINNING])
            length = min(len(truth.ids) - at, len(ids))
            # Within a conversation begins only what was cut there.
            can_begin = at == 0 or (at > 0 and (is_first or len(ids) < _BEGINNING))
            if can_begin and np.array_equal(truth.ids[at : at + length], ids[:length]):
                found.append((at == 0, length, truth))
        if not found:
            return self._end_at(ids) if is_first else (None, 0)
        is_whole, length, truth = max(found, key=lambda each: each[:2])
        if length >= _LEAST_SHOWN:  # it may be of any of these
            self._used.update(id(each.content) for *pair, each in found if pair == [is_whole, length])
        return truth, length
