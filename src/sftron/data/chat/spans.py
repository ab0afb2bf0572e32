"""The spans and turns of a rendered conversation: characters, the role of each span, and where each turn ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sftron.data.types import Role

MODEL_ROLES = frozenset({Role.ASSISTANT, Role.REASONING, Role.TOOL_CALL})
"""The roles of text that the model generates."""


class Span(NamedTuple):
    """Characters [start, end) of a rendered text."""

    start: int
    end: int
    role: Role
    message: int
    """The index of the message whose turn the span is part of; -1 for the template."""
    is_text: bool
    """Whether the span is text of the conversation, in which a control token's string is plain text."""
    is_marked: bool = False
    """Whether the span is between `{% generation %}` marks."""


class StopStrings(NamedTuple):
    """The control tokens' strings that end an assistant's turn, even after other text of the template."""

    of_answer: frozenset[str] = frozenset()
    of_call: frozenset[str] = frozenset()


class TurnSpan(NamedTuple):
    """The characters [start, end) of a message's text in the rendered text."""

    start: int
    end: int
    stop: str | None
    """The stop token as text, or None."""
    stop_end: int
    """The end of the stop token, or of the message's text if there is none."""


@dataclass(frozen=True, slots=True)
class RenderedTurns:
    """The spans and turns of a rendered conversation."""

    spans: list[Span]
    """The spans in order; they cover the text, and none is empty."""
    turns: list[TurnSpan | None]
    """One turn for each message; None for a message of which nothing is written."""
    left_out: list[tuple[int | None, str]]
    """The texts that the template does not write: the index of the message, or None for the tools, and a name."""
