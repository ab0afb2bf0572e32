"""Ids that come one after another, as text that can be shown at once."""

from __future__ import annotations

from collections.abc import Callable

_REPLACEMENT = "\ufffd"
"""What a decoder gives for bytes that are no character yet."""


class TextStream:
    """Text is given out as soon as it is whole: a character whose bytes are spread over tokens comes with the last.

    What is given out, joined, is `decode` of all ids. Only the ids since the last text but one are decoded again: those
    before the new ones are there because a decoder may drop the space of what comes first.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._context = self._num_shown = 0

    def push(self, token_id: int) -> str:
        """The text that is whole now; may be empty."""
        self._ids.append(token_id)
        new = self._new()
        if not new or new.endswith(_REPLACEMENT):
            return ""
        self._context, self._num_shown = self._num_shown, len(self._ids)
        return new

    def rest(self) -> str:
        """What is left at the end, whole or not."""
        return self._new()

    def _new(self) -> str:
        known = self._decode(self._ids[self._context : self._num_shown])
        return self._decode(self._ids[self._context :])[len(known) :]
