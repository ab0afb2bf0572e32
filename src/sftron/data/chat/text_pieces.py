"""The pieces of a rendered text: which characters are whose; which of them make a turn; what the template left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sftron.data.chat.control_tokens import ControlTokens
from sftron.data.chat.template import TemplateError
from sftron.data.chat.template_input import REASONING_FIELDS, TOOL_CALL_FIELDS
from sftron.data.chat.tracked_text import Origin, TrackedStr
from sftron.data.types import Conversation, Message, Role


@dataclass(frozen=True, slots=True)
class StopStrings:
    """Control strings that end an assistant's answer, or tool call, even behind other text of the template."""

    of_answer: frozenset[str] = frozenset()
    of_call: frozenset[str] = frozenset()


class LeftOut(NamedTuple):
    """A text of the conversation that the template does not write: of which message (None for the tools), and what."""

    message: int | None
    what: str


class Piece(NamedTuple):
    """Characters [start, end) of the rendered text. role, message: whose they are; message is -1 for the template's."""

    start: int
    end: int
    role: Role
    message: int
    is_text: bool
    is_marked: bool


@dataclass(frozen=True, slots=True)
class Pieces:
    """pieces: in order, covering the text. turns: of each message, the numbers of the pieces that hold its texts."""

    pieces: list[Piece]
    turns: list[list[int]]
    left_out: list[LeftOut]


def read_pieces(
    text: TrackedStr, conversation: Conversation, control: ControlTokens, *, plane: int, stops: StopStrings
) -> Pieces:
    """Raises TemplateError where a message's texts are mixed with others', or its tool calls are not written."""
    return _PieceReader(text, conversation, control, plane, stops).read()


def holds_stop(text: str, control: ControlTokens, plane: int, stops: StopStrings, *, is_call: bool) -> bool:
    strings = stops.of_answer | stops.of_call if is_call else stops.of_answer
    return any(content in strings for _, content in control.rename(text, plane).tokens)


class _PieceReader:
    def __init__(
        self, text: TrackedStr, conversation: Conversation, control: ControlTokens, plane: int, stops: StopStrings
    ) -> None:
        self.text, self.runs = str.__getitem__(text, slice(None)), text.runs
        self.messages, self.tools = conversation.messages, conversation.tools
        self.control, self.plane, self.stops = control, plane, stops
        self.pieces: list[Piece] = []
        self.turns: list[list[int]] = [[] for _ in self.messages]
        self.content_lengths = [0] * len(self.messages)

    def read(self) -> Pieces:
        written: list[set[tuple[str, Role]]] = [set() for _ in self.messages]
        tools_are_written = False
        current, fields, end = -1, set[str](), 0
        for length, origin in self.runs:
            start, end = end, end + length
            role, message, is_text = Role.TEMPLATE, -1, origin is not None and bool(origin.field)
            if origin is not None and is_text:
                tools_are_written = tools_are_written or origin.message < 0
                role = origin.role
                if origin.message >= 0:
                    written[origin.message].add((origin.field, role))
                    if origin.field == "content":
                        self.content_lengths[origin.message] += length
                    if role is not Role.TEMPLATE:
                        if origin.message != current:
                            fields = set()
                        is_again = origin.field in fields and length > 0
                        if self._belongs_to_turn(origin, current, is_again, length):
                            message = current = origin.message
                            self.turns[message].append(len(self.pieces))
                            fields.add(origin.field)
                        else:
                            role, current = Role.TEMPLATE, -1
            is_marked = origin is not None and origin.is_marked
            self.pieces.append(Piece(start, end, role, message, is_text, is_marked))
        return Pieces(self.pieces, self.turns, self._left_out(written, tools_are_written))

    def _belongs_to_turn(self, origin: Origin, current: int, is_again: bool, length: int) -> bool:
        """False for a tool's name that is looked up again for the header of its result."""
        turn = self.turns[origin.message]
        if not turn or self.messages[origin.message].role is not Role.ASSISTANT:
            return True
        is_call = origin.role is Role.TOOL_CALL
        has_ended = origin.message != current or (
            is_again and self._holds_stop(self.pieces[turn[-1]].end, self.pieces[-1].end, is_call)
        )
        if has_ended and not is_call and length:
            raise TemplateError(f"the template mixes {message_name(self.messages, origin.message)} with other messages")
        return not has_ended

    def _left_out(self, written: Sequence[set[tuple[str, Role]]], tools_are_written: bool) -> list[LeftOut]:
        left_out = [] if tools_are_written or not self.tools else [LeftOut(None, "tools")]
        for index, (message, fields) in enumerate(zip(self.messages, written, strict=True)):
            names = {field.partition(".")[0] for field, _ in fields}
            content = message.content or ""
            if "content" not in names and content.strip():
                left_out.append(LeftOut(index, f"{message.role.name.lower()} content"))
            elif self._writes_less_of(index, content):
                left_out.append(LeftOut(index, f"{message.role.name.lower()} content in part"))
            if not message.fields and "</think>" not in content:
                continue
            if any(message.fields.get(name) for name in TOOL_CALL_FIELDS) and not names & set(TOOL_CALL_FIELDS):
                raise TemplateError(
                    f"the template does not write the tool calls of {message_name(self.messages, index)}; "
                    "give one that does (tokenizer.chat_template: FILE)"
                )
            if message.role is Role.ASSISTANT and Role.REASONING not in {role for _, role in fields}:
                is_inline = "</think>" in content and "content" in names
                if is_inline or any(message.fields.get(name) for name in REASONING_FIELDS):
                    left_out.append(LeftOut(index, "assistant reasoning"))
        return left_out

    def _writes_less_of(self, message: int, content: str) -> bool:
        """Whether more than white space, and the brackets of reasoning, is missing of a content that is written."""
        if self.content_lengths[message] >= len(content.strip()):
            return False
        pieces = [
            piece
            for piece, (_, origin) in zip(self.pieces, self.runs, strict=True)
            if origin is not None and origin.message == message and origin.field == "content"
        ]
        if pieces and all(piece.role is not Role.REASONING for piece in pieces):
            content = content.rpartition("</think>")[2]  # counted as reasoning that is left out
        written = "".join(self.text[piece.start : piece.end] for piece in pieces)
        return len(_letters(written)) < len(_letters(content))

    def _holds_stop(self, start: int, end: int, is_call: bool) -> bool:
        return holds_stop(self.text[start:end], self.control, self.plane, self.stops, is_call=is_call)


def message_name(messages: Sequence[Message], number: int) -> str:
    """As errors say it, counted from 1."""
    return f"message {number + 1} ({messages[number].role.name.lower()})"


def _letters(text: str) -> str:
    return "".join(text.replace("<think>", "").replace("</think>", "").split())
