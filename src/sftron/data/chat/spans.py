"""Splits a rendered text into spans with roles, finds each message's spans, and lists the texts that are missing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sftron.data.chat.control_tokens import ControlTokens
from sftron.data.chat.template import TemplateError
from sftron.data.chat.tracked_text import Origin, TrackedStr
from sftron.data.formats.messages import REASONING_FIELDS
from sftron.data.types import Conversation, Message, Role


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


class LeftOut(NamedTuple):
    """A text of the conversation that the template does not write."""

    message: int | None
    """The index of the message; None for the tools."""
    what: str


@dataclass(frozen=True, slots=True)
class StopStrings:
    """The control tokens' strings that end an assistant's turn, even after other text of the template."""

    of_answer: frozenset[str] = frozenset()
    of_call: frozenset[str] = frozenset()
    """The strings that end a tool call."""

    def are_in(self, text: str, control: ControlTokens, *, is_call: bool) -> bool:
        known = self.of_answer | self.of_call if is_call else self.of_answer
        return any(content in known for _, content in control.find(text))


@dataclass(frozen=True, slots=True)
class WrittenSpans:
    """The spans of a rendered conversation.

    Attributes:
        spans: The spans in order; they cover the text.
        turns: For each message, the indices of the spans that hold its texts.
        left_out: The texts that the template did not write.
    """

    spans: list[Span]
    turns: list[list[int]]
    left_out: list[LeftOut]


def read_spans(
    text: TrackedStr, conversation: Conversation, control: ControlTokens, stops: StopStrings
) -> WrittenSpans:
    """Returns the spans of a rendered conversation.

    Raises:
        TemplateError: The template mixes a message's texts with other messages, or does not write its tool calls.
    """
    return _SpanReader(text, conversation, control, stops).read()


class _SpanReader:
    def __init__(
        self, text: TrackedStr, conversation: Conversation, control: ControlTokens, stops: StopStrings
    ) -> None:
        self._text, self._origins = str.__getitem__(text, slice(None)), text.spans
        self._conversation, self._messages = conversation, conversation.messages
        self._control, self._stops = control, stops
        self._spans: list[Span] = []
        self._turns: list[list[int]] = [[] for _ in self._messages]
        self._written: dict[int, set[tuple[str, Role]]] = defaultdict(set)
        """The fields of each message that the template writes, with their roles."""
        self._contents: dict[int, list[Span]] = defaultdict(list)

    def read(self) -> WrittenSpans:
        current, fields, end = -1, set[str](), 0
        for length, origin in self._origins:
            start, end = end, end + length
            role, message = Role.TEMPLATE, -1
            if origin is not None and origin.field:
                role = origin.role
                self._written[origin.message].add((origin.field, role))
                if origin.message >= 0 and role is not Role.TEMPLATE:
                    if origin.message != current:
                        fields = set()
                    is_again = origin.field in fields and length > 0
                    if self._belongs_to_turn(origin, current, is_again, length):
                        message = current = origin.message
                        self._turns[message].append(len(self._spans))
                        fields.add(origin.field)
                    else:
                        role, current = Role.TEMPLATE, -1
            is_marked = origin is not None and origin.is_marked
            span = Span(start, end, role, message, origin is not None and bool(origin.field), is_marked)
            self._spans.append(span)
            if origin is not None and origin.field == "content":
                self._contents[origin.message].append(span)
        return WrittenSpans(self._spans, self._turns, self._left_out())

    def _belongs_to_turn(self, origin: Origin, current: int, is_again: bool, length: int) -> bool:
        """Returns whether a text is part of the turn of its message.

        It is not if the turn has ended, as for a tool's name that the template writes again in the header of its
        result. Raises TemplateError for any other text after the end of its turn.
        """
        turn = self._turns[origin.message]
        if not turn or self._messages[origin.message].role is not Role.ASSISTANT:
            return True
        is_call = origin.role is Role.TOOL_CALL
        between = self._text[self._spans[turn[-1]].end : self._spans[-1].end]
        has_ended = origin.message != current or (
            is_again and self._stops.are_in(between, self._control, is_call=is_call)
        )
        if has_ended and not is_call and length:
            raise TemplateError(
                f"the template mixes {message_name(self._messages, origin.message)} with other messages"
            )
        return not has_ended

    def _left_out(self) -> list[LeftOut]:
        left_out = [LeftOut(None, "tools")] if self._conversation.tools and not self._written[-1] else []
        for index, message in enumerate(self._messages):
            names = {field.partition(".")[0] for field, _ in self._written[index]}
            content, role = message.content or "", message.role.name.lower()
            if "content" not in names and content.strip():
                left_out.append(LeftOut(index, f"{role} content"))
            elif self._writes_less_of(index, content):
                left_out.append(LeftOut(index, f"{role} content in part"))
            if not message.fields and "</think>" not in content:
                continue
            if message.fields.get("tool_calls") and "tool_calls" not in names:
                raise TemplateError(
                    f"the template does not write the tool calls of {message_name(self._messages, index)}; "
                    "give one that does (tokenizer.chat_template: FILE)"
                )
            written_roles = {each for _, each in self._written[index]}
            if message.role is Role.ASSISTANT and Role.REASONING not in written_roles:
                is_inline = "</think>" in content and "content" in names
                if is_inline or any(message.fields.get(name) for name in REASONING_FIELDS):
                    left_out.append(LeftOut(index, "assistant reasoning"))
        return left_out

    def _writes_less_of(self, message: int, content: str) -> bool:
        """Returns whether a written content lacks more than white space and the tags of reasoning."""
        spans = self._contents[message]
        if sum(span.end - span.start for span in spans) >= len(content.strip()):
            return False
        if spans and all(span.role is not Role.REASONING for span in spans):
            content = content.rpartition("</think>")[2]  # missing reasoning is counted separately
        written = "".join(self._text[span.start : span.end] for span in spans)
        return len(_letters(written)) < len(_letters(content))


def message_name(messages: Sequence[Message], number: int) -> str:
    """Returns the name of a message for errors, with its number from 1."""
    return f"message {number + 1} ({messages[number].role.name.lower()})"


def _letters(text: str) -> str:
    return "".join(text.replace("<think>", "").replace("</think>", "").split())
