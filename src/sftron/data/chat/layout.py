"""The spans and turns of a rendered conversation, and from them the role of every token.

Most rows of a data set are messages of plain text, and a template writes the same words around them. The roles of the
spans then depend only on these words, the frame. So they are determined once for all conversations with that frame:

    text    <|im_start|>user\\n  Why?   <|im_end|>\\n<|im_start|>assistant\\n  So.    <|im_end|>\\n
    frame   <|im_start|>user\\n  (user) <|im_end|>\\n<|im_start|>assistant\\n  (asst) <|im_end|>\\n

A conversation has no frame if its roles may depend on one of its texts: under a template whose header may, and with a
text that spells a control token or the end of reasoning, is white space, or is written only in part, twice, or out of
order. Nor does a conversation with tools, tool calls or reasoning have a frame.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from sftron.data.chat.control_tokens import Tokens, num_bytes
from sftron.data.chat.template import TemplateError
from sftron.data.chat.tracked_text import TrackedStr
from sftron.data.types import Conversation, Message, Role, TokenizedConversation, Turn

_LONGEST_SHOWN = 60
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


@dataclass(slots=True, eq=False)
class Layout:
    """A rendered conversation, ready to tokenize. Everything but its texts is the same for all conversations of one
    frame.

    Attributes:
        texts: The text of each span, with private names in place of control tokens.
        roles: uint8 [spans], the role of each span.
        messages: The index of the message that each span belongs to; -1 for the template.
        turns: For each message, the first span of its text, the span after the last, and the span after its stop token
            or None; None for a message that the template does not write.
        text_spans: The indices of the spans that hold text of the conversation.
        generated_starts: The indices of the model-generated spans that follow a span of the template.
        left_out: The texts that the template does not write.
        has_second_thought: Whether the template adds its own reasoning to an answer whose content has some.
        num_control: The number of control tokens.
        holds_control_text: Whether a text of the conversation spells a control token.
    """

    texts: list[str]
    roles: np.ndarray
    messages: tuple[int, ...]
    turns: tuple[tuple[int, int, int | None] | None, ...]
    text_spans: tuple[int, ...]
    generated_starts: tuple[int, ...]
    left_out: tuple[str, ...]
    has_second_thought: bool
    num_control: int
    holds_control_text: bool

    @classmethod
    def of(
        cls,
        spans: Sequence[Span],
        turns: Sequence[TurnSpan | None],
        texts: list[str],
        left_out: tuple[str, ...],
        has_second_thought: bool,
        num_control: int,
        holds_control_text: bool,
    ) -> Layout:
        number_at = {span.start: number for number, span in enumerate(spans)}
        number_at[spans[-1].end if spans else 0] = len(spans)
        roles = [span.role for span in spans]
        return cls(
            texts=texts,
            roles=np.array(roles, dtype=np.uint8),
            messages=tuple(span.message for span in spans),
            turns=tuple(
                turn and (number_at[turn.start], number_at[turn.end], number_at[turn.stop_end] if turn.stop else None)
                for turn in turns
            ),
            text_spans=tuple(number for number, span in enumerate(spans) if span.is_text),
            generated_starts=tuple(
                number
                for number, (before, role) in enumerate(pairwise([Role.TEMPLATE, *roles]))
                if before is Role.TEMPLATE and role in MODEL_ROLES
            ),
            left_out=left_out,
            has_second_thought=has_second_thought,
            num_control=num_control,
            holds_control_text=holds_control_text,
        )

    def with_texts(self, contents: Iterable[str]) -> Layout:
        """Returns the layout with these contents in place of the texts of the conversation."""
        texts = self.texts.copy()
        for span, content in zip(self.text_spans, contents, strict=True):
            texts[span] = content
        return replace(self, texts=texts)


def assign_roles(tokens: Tokens, layout: Layout, conversation: Conversation) -> TokenizedConversation:
    """Returns the tokenized conversation, in which every token has the role of the span in which it begins.

    Raises TemplateError if the tokenizer finds a different number of control tokens, or returns tokens out of order.
    """
    if not len(tokens.ids):
        raise TemplateError(
            "the template writes no text of this conversation; remove the row, or give another template"
        )
    if (num_control := int(tokens.is_control.sum())) != layout.num_control:
        raise TemplateError(
            f"the template writes {layout.num_control} control tokens here, but the tokenizer finds {num_control}"
        )
    # The first byte and the first token of each span, and of the end of the text.
    starts = list(accumulate(map(num_bytes, layout.texts), initial=0))
    first = [*tokens.starts.searchsorted(starts[:-1]).tolist(), len(tokens.ids)]
    first[0] = 0  # white space that a tokenizer adds before the text has no position in it
    counts = [after - before for before, after in pairwise(first)]
    if min(counts, default=0) < 0:
        raise TemplateError("the tokenizer returns its tokens out of order")
    # A token that begins in the template and ends in content is a merge that never occurs at inference.
    generated = [span for span in layout.generated_starts if first[span] > 0]
    num_boundary_tokens = sum(bool(tokens.ends[first[span] - 1] > starts[span]) for span in generated)
    return TokenizedConversation(
        tokens.ids,
        layout.roles.repeat(np.array(counts, dtype=np.int64)),
        _turns(layout, first, conversation.messages),
        conversation.key,
        num_boundary_tokens,
        layout.holds_control_text,
        token_weights=_token_weights(layout, conversation.messages, counts),
        left_out=layout.left_out,
        has_second_thought=layout.has_second_thought,
        template_kwargs=tuple(map(kwarg_in_words, conversation.template_kwargs.items())),
    )


def kwarg_in_words(item: tuple[str, Any]) -> str:
    """Returns the name and the value of a template's variable; the name alone for a long value."""
    text = f"{item[0]}: {json.dumps(item[1], ensure_ascii=False)}"
    return text if len(text) <= _LONGEST_SHOWN else item[0]


def _turns(layout: Layout, first: Sequence[int], messages: Sequence[Message]) -> tuple[Turn, ...]:
    """Returns the turn of each message; first[i] is the first token of span i."""
    turns, end = [], 0
    for message, turn in zip(messages, layout.turns, strict=True):
        if turn is None:
            turns.append(Turn(message.role, end, end, None))
            continue
        start, end = first[turn[0]], first[turn[1]]
        turns.append(Turn(message.role, start, end, None if turn[2] is None else first[turn[2]] - 1))
    return tuple(turns)


def _token_weights(layout: Layout, messages: Sequence[Message], counts: Sequence[int]) -> np.ndarray | None:
    """Returns the weight of each token's message, float32 [n], or None if all weights are 1."""
    weights = [message.weight for message in messages]
    if all(weight == 1.0 for weight in weights):
        return None
    weights.append(1.0)  # for message -1, the template
    return np.repeat(np.array([weights[message] for message in layout.messages], dtype=np.float32), counts)


def frame_of(text: TrackedStr, contents: Sequence[str]) -> tuple[list[str], list[str]] | None:
    """Returns the template's text before, between and after the contents, and the contents as written.

    The result is None unless each is written once, in order, and in full except for white space at its ends.
    """
    plain = str.__getitem__(text, slice(None))
    gaps, texts, start = [""], list[str](), 0
    for length, origin in text.spans:
        written = plain[start : start + length]
        start += length
        if origin is None:
            gaps[-1] += written
            continue
        number = len(texts)
        if origin.message != number or number == len(contents) or origin.field != "content" or origin.is_marked:
            return None
        if length < len(contents[number].strip()):
            return None
        texts.append(written)
        gaps.append("")
    return (gaps, texts) if len(texts) == len(contents) else None
