"""Rendered text to segments: which characters are whose, and which of them the model itself has to say.

    text       <|im_start|>assistant\\n  <think>\\n  Hm.        \\n</think>\\n\\n  Yes.       <|im_end|>  \\n
    written by template                 template  reasoning  template         content    template    template
    role       TEMPLATE                 REASONING REASONING  REASONING        ASSISTANT  ASSISTANT   TEMPLATE

At inference the template writes the header and the model all that follows, up to and with the stop token; so that is
what an assistant's turn consists of. The header's end is what `add_generation_prompt` writes. Where a template has
`{% generation %}` marks, they say instead what is the model's.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from sftron.data.chat_template import PromptHeader, TemplateError
from sftron.data.control_tokens import ControlTokens
from sftron.data.template_input import REASONING_FIELDS, TOOL_CALL_FIELDS
from sftron.data.tracked_text import Origin, TrackedStr
from sftron.data.types import Conversation, Role

SAID_ROLES = frozenset({Role.ASSISTANT, Role.REASONING, Role.TOOL_CALL})
"""Of text that the model itself has to say."""


class Segment(NamedTuple):
    """Characters [start, end) of the rendered text. message: whose turn they are part of, -1 for the template's.

    is_text: the conversation's, so that control strings in it mean nothing; else the template wrote them.
    """

    start: int
    end: int
    role: Role
    message: int
    is_text: bool


@dataclass(frozen=True, slots=True)
class TurnPlace:
    """Where a message's text stands in the rendered text: [start, end).

    stop, stop_end: its stop token's text and the end of that, or None. is_excluded: the template has marks, and none
    around this turn.
    """

    start: int
    end: int
    stop: str | None
    stop_end: int
    is_excluded: bool = False


class LeftOut(NamedTuple):
    """A text of the conversation that the template does not write: of which message (None for the tools), and what."""

    message: int | None
    what: str


@dataclass(frozen=True, slots=True)
class RenderedTurns:
    """segments: in order, covering the text; none is empty. places: one for each message, None where nothing of it is
    written."""

    segments: list[Segment]
    places: list[TurnPlace | None]
    left_out: list[LeftOut]


def read_turns(
    text: TrackedStr,
    conversation: Conversation,
    control: ControlTokens,
    *,
    plane: int,
    header: PromptHeader | None,
    stop_strings: Collection[str],
) -> RenderedTurns:
    """Raises TemplateError where it cannot be told what the model has to say, or where it would never learn to stop.

    stop_strings: control strings that end a turn even behind other text of the template, as behind a tool call.
    """
    reader = _Reader(text, conversation, control, plane)
    left_out = reader.find_turns()
    for message, turn in enumerate(reader.turns):
        if turn is not None:
            reader.place(message, turn, header, stop_strings)
    return RenderedTurns(reader.segments(), reader.places, left_out)


@dataclass(slots=True)
class _Turn:
    """The first and the last piece that hold text of a message."""

    first: int
    last: int


class _Piece(NamedTuple):
    """A run of the rendered text with its place."""

    start: int
    end: int
    origin: Origin | None

    @property
    def is_template(self) -> bool:
        return self.origin is None or not self.origin.field

    @property
    def is_marked(self) -> bool:
        return self.origin is not None and self.origin.is_marked


class _Reader:
    def __init__(self, text: TrackedStr, conversation: Conversation, control: ControlTokens, plane: int) -> None:
        self.text, self.messages, self.conversation = (
            str.__getitem__(text, slice(None)),
            conversation.messages,
            conversation,
        )
        self.control, self.plane = control, plane
        self.pieces: list[_Piece] = []
        start = 0
        for length, origin in text.runs:
            self.pieces.append(_Piece(start, start + length, origin))
            start += length
        self.has_marks = any(piece.is_marked for piece in self.pieces)
        self.turns: list[_Turn | None] = [None] * len(self.messages)
        self.places: list[TurnPlace | None] = [None] * len(self.messages)
        self._roles: dict[int, tuple[Role, int]] = {}
        """By piece: whose it is, and in which message's turn."""
        self._said: dict[int, list[Segment]] = {}
        """Parts of the template's pieces that belong to a turn, in order."""

    def find_turns(self) -> list[LeftOut]:
        """Note the pieces of every turn. Returns what the template leaves out."""
        written: list[set[tuple[str, Role]]] = [set() for _ in self.messages]
        tools_are_written, current, fields = False, -1, set[str]()
        for number, (start, end, origin) in enumerate(self.pieces):
            if origin is None or not origin.field:
                continue
            if origin.message < 0:
                tools_are_written = True
                self._roles[number] = (origin.role, -1)
                continue
            message = origin.message
            written[message].add((origin.field.partition(".")[0], origin.role))
            if origin.role is Role.TEMPLATE:
                continue
            turn = self.turns[message]
            if turn is None:
                current, fields = message, set()
                self.turns[message] = _Turn(number, number)
            elif message == current and not (origin.role is Role.TOOL_CALL and origin.field in fields and end > start):
                turn.last = number
            elif origin.role is Role.TOOL_CALL:
                # A tool's name, looked up again for the header of its result.
                current = -1
                continue
            elif self.messages[message].role is Role.ASSISTANT and end > start:
                raise TemplateError(f"the template mixes {self._name(message)} with other messages")
            fields.add(origin.field)
            self._roles[number] = (origin.role, message)
        return self._left_out(written, tools_are_written)

    def _left_out(self, written: Sequence[set[tuple[str, Role]]], tools_are_written: bool) -> list[LeftOut]:
        left_out = [] if tools_are_written or not self.conversation.tools else [LeftOut(None, "tools")]
        for index, (message, fields) in enumerate(zip(self.messages, written, strict=True)):
            names = {name for name, _ in fields}
            content = (message.content or "").strip()
            if content and "content" not in names:
                left_out.append(LeftOut(index, f"{message.role.name.lower()} content"))
            if any(message.fields.get(name) for name in TOOL_CALL_FIELDS) and not names & set(TOOL_CALL_FIELDS):
                raise TemplateError(
                    f"the template does not write the tool calls of {self._name(index)}; give one that does "
                    "(tokenizer.chat_template: FILE)"
                )
            if message.role is Role.ASSISTANT and Role.REASONING not in {role for _, role in fields}:
                is_inline = "</think>" in content and "content" in names
                if is_inline or any(message.fields.get(name) for name in REASONING_FIELDS):
                    left_out.append(LeftOut(index, "assistant reasoning"))
        return left_out

    def place(self, message: int, turn: _Turn, header: PromptHeader | None, stop_strings: Collection[str]) -> None:
        """Find what belongs to a turn besides its texts: for an assistant all that the model has to say."""
        texts = range(turn.first, turn.last + 1)
        own = [number for number in texts if self._roles.get(number, (None, -1))[1] == message]
        spoken = [n for n in own if self.pieces[n].end > self.pieces[n].start] or own[:1]
        first_role, last_role = self._roles[spoken[0]][0], self._roles[spoken[-1]][0]
        if last_role is Role.REASONING:
            last_role = Role.ASSISTANT
        is_assistant = self.messages[message].role is Role.ASSISTANT
        is_excluded = is_assistant and self.has_marks and not self.pieces[turn.last].is_marked
        stop, stop_end = self._give_stop(message, turn, stop_strings if is_assistant else (), last_role)
        if is_assistant:
            for before, after in pairwise(own):
                role = self._roles[after][0]
                if role is not Role.TOOL_CALL and self._holds_stop(range(before + 1, after), stop_strings):
                    raise TemplateError(f"the template mixes {self._name(message)} with other messages")
                self._give(
                    range(before + 1, after), role if role is Role.TOOL_CALL else self._roles[before][0], message
                )
            if not self.has_marks:
                self._give_said_header(message, turn, header, first_role)
            elif not is_excluded:
                self._give(range(max(0, turn.first - 1), turn.first), first_role, message)
            if stop is None and not is_excluded:
                raise TemplateError(self._no_stop(message))
        start, end = self.pieces[turn.first].start, self.pieces[turn.last].end
        self.places[message] = TurnPlace(start, end, stop, stop_end, is_excluded)

    def segments(self) -> list[Segment]:
        segments = []
        for number, piece in enumerate(self.pieces):
            if piece.is_template:
                start = piece.start
                for said in self._said.get(number, ()):
                    segments += [Segment(start, said.start, Role.TEMPLATE, -1, False), said]
                    start = said.end
                segments.append(Segment(start, piece.end, Role.TEMPLATE, -1, False))
            else:
                role, message = self._roles.get(number, (Role.TEMPLATE, -1))
                segments.append(Segment(piece.start, piece.end, role, message, True))
        return [segment for segment in segments if segment.end > segment.start]

    # -- the template's text around a turn ---------------------------------------------------------------------------

    def _give_stop(
        self, message: int, turn: _Turn, stop_strings: Collection[str], role: Role
    ) -> tuple[str | None, int]:
        """The stop token of a turn and its end; it and what the template writes before it become part of the turn."""
        number = turn.last + 1
        if number >= len(self.pieces) or not (piece := self.pieces[number]).is_template:
            return None, 0
        text = self.text[piece.start : piece.end]
        tokens = self.control.rename(text, self.plane).tokens
        found = next((token for token in tokens if token[1] in stop_strings), tokens[0] if tokens else None)
        if found is None or (found[1] not in stop_strings and text[: found[0]].strip()):
            return None, 0
        end = piece.start + found[0] + len(found[1])
        if self.messages[message].role is Role.ASSISTANT and self.has_marks and not piece.is_marked:
            return None, 0  # the marks say what is said, and a stop token outside of them never would be
        self._said.setdefault(number, []).append(Segment(piece.start, end, role, message, False))
        if piece.is_marked and end < piece.end:
            self._said[number].append(Segment(end, piece.end, role, message, False))
        return found[1], end

    def _holds_stop(self, numbers: range, stop_strings: Collection[str]) -> bool:
        template = "".join(self.text[self.pieces[n].start : self.pieces[n].end] for n in numbers)
        return any(content in stop_strings for _, content in self.control.rename(template, self.plane).tokens)

    def _give_said_header(self, message: int, turn: _Turn, header: PromptHeader | None, role: Role) -> None:
        """What the template writes between the end of the generation prompt and the turn's first text."""
        number = turn.first - 1
        if header is None or number < 0 or not self.pieces[number].is_template:
            return
        start, end, _ = self.pieces[number]
        text = self.text[start:end]
        said = self._said.setdefault(number, [])
        stop_end = said[-1].end - start if said else 0
        after = self._after_previous(number, header)
        if after and text.startswith(after) and len(after) >= stop_end:
            cut = len(after)
        elif header.of_assistant.strip() and (found := text.find(header.of_assistant, stop_end)) >= 0:
            cut = found + len(header.of_assistant)
        elif header.said_space and text[stop_end:] == header.said_space:
            cut = stop_end
        else:
            return
        if start + cut < end:
            said.append(Segment(start + cut, end, role, message, False))

    def _after_previous(self, number: int, header: PromptHeader) -> str:
        """What the generation prompt writes after the message before the template's piece."""
        _, message = self._roles.get(number - 1, (Role.TEMPLATE, -1))
        is_tool = message >= 0 and self.messages[message].role is Role.TOOL
        return header.after_tool if is_tool else header.after_user

    def _give(self, numbers: range, role: Role, message: int) -> None:
        for number in numbers:
            piece = self.pieces[number]
            if piece.is_template and number not in self._said and (piece.is_marked or not self.has_marks):
                self._said[number] = [Segment(piece.start, piece.end, role, message, False)]

    # -- words for people --------------------------------------------------------------------------------------------

    def _name(self, message: int) -> str:
        return f"message {message + 1} ({self.messages[message].role.name.lower()})"

    def _no_stop(self, message: int) -> str:
        if self.has_marks:
            return (
                f"the stop token after {self._name(message)} is outside the template's generation marks, so the model "
                "would never learn to stop; move {% endgeneration %} behind it (tokenizer.chat_template: FILE)"
            )
        return (
            f"no stop token follows the content of {self._name(message)}, so the model would never learn to stop; "
            "end assistant turns with a control token in the template (tokenizer.chat_template: FILE)"
        )
