"""Rendered text to segments: which characters are whose, and which of them the model itself has to say.

    text       <|im_start|>assistant\\n  <think>\\n  Hm.        \\n</think>\\n\\n  Yes.       <|im_end|>  \\n
    written by template                 template  reasoning  template         content    template    template
    role       TEMPLATE                 REASONING REASONING  REASONING        ASSISTANT  ASSISTANT   TEMPLATE

At inference the template writes the header and the model all that follows, up to and with the stop token; so that is
what an assistant's turn consists of. The header's end is where the rendering and the generation prompt part. Where a
template has `{% generation %}` marks, they say instead what is the model's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise, takewhile
from typing import NamedTuple

from sftron.data.chat.control_tokens import ControlTokens
from sftron.data.chat.generation_prompt import GenerationPrompts
from sftron.data.chat.template import TemplateError
from sftron.data.chat.text_pieces import (
    LeftOut,
    Pieces,
    StopStrings,
    holds_stop,
    message_name,
    read_pieces,
)
from sftron.data.chat.tracked_text import TrackedStr
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

    stop, stop_end: its stop token's text and the end of that, or None.
    """

    start: int
    end: int
    stop: str | None
    stop_end: int


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
    prompts: GenerationPrompts,
    has_marks: bool,
    stops: StopStrings,
) -> RenderedTurns:
    """Raises TemplateError where it cannot be told what the model has to say, or where it would never learn to stop."""
    pieces = read_pieces(text, conversation, control, plane=plane, stops=stops)
    reader = _Reader(text, pieces, conversation, control, plane, prompts, has_marks, stops)
    for message in reader.in_order_of_text():
        reader.place(message)
    return RenderedTurns(reader.segments(), reader.places, pieces.left_out)


class _Reader:
    """Reads one rendered conversation. A turn is the list of the numbers of the pieces that hold its texts."""

    def __init__(
        self,
        text: TrackedStr,
        pieces: Pieces,
        conversation: Conversation,
        control: ControlTokens,
        plane: int,
        prompts: GenerationPrompts,
        has_marks: bool,
        stops: StopStrings,
    ) -> None:
        self.text, self.messages = str.__getitem__(text, slice(None)), conversation.messages
        self.control, self.plane, self.stops, self.has_marks = control, plane, stops, has_marks
        self.pieces, self.turns = pieces.pieces, pieces.turns
        self._prompts, self._asked = prompts, prompts.of(conversation)
        self._has_tools = bool(conversation.tools)
        self.places: list[TurnPlace | None] = [None] * len(self.messages)
        self._said: list[tuple[int, int, Role, int]] = []
        """Characters [start, end) that belong to a turn, with the role of what the template writes in them."""
        self._turn_end = 0  # of the last turn that was placed, its stop token included

    def in_order_of_text(self) -> list[int]:
        """Messages as their texts stand: some templates write a system message in a later turn. What is not written
        comes behind the message before it."""
        firsts = accumulate((turn[0] if turn else -1 for turn in self.turns), lambda last, n: last if n < 0 else n)
        return [message for _, message in sorted(zip(firsts, range(len(self.turns)), strict=True))]

    def place(self, message: int) -> None:
        """Find what belongs to a turn besides its texts: for an assistant all that the model has to say."""
        turn = self.turns[message]
        if self.messages[message].role is not Role.ASSISTANT:
            if turn:
                self._place_other(message, turn)
        elif not turn:
            self._place_unwritten(message)
        elif self.has_marks:
            self._place_marked(message, turn)
        else:
            self._place_assistant(message, turn)

    def segments(self) -> list[Segment]:
        """Cut at the borders of pieces, and of what is said."""
        segments: list[Segment] = []
        said = iter([*sorted(self._said), (len(self.text), len(self.text), Role.TEMPLATE, -1)])
        start, end, role, message = next(said)
        for piece in self.pieces:
            place = piece.start
            while place < piece.end:
                while end <= place and message >= 0:
                    start, end, role, message = next(said)
                is_inside = start <= place and message >= 0
                until = min(piece.end, end if is_inside else start)
                if piece.is_text:
                    is_unsaid = piece.role in SAID_ROLES and not (is_inside and message == piece.message)
                    own = Role.TEMPLATE if is_unsaid else piece.role
                    segments.append(Segment(place, until, own, piece.message, True))
                else:
                    owner = (role, message) if is_inside else (Role.TEMPLATE, -1)
                    segments.append(Segment(place, until, *owner, False))
                place = until
        return segments

    # -- turns of each kind ------------------------------------------------------------------------------------------

    def _place_other(self, message: int, turn: Sequence[int]) -> None:
        """A message that the model reads: its texts, and the control token that ends it, if white space alone lies
        between; but not one that belongs to the header of the answer."""
        start, end = self.pieces[turn[0]].start, self.pieces[turn[-1]].end
        template = self.text[end : self._next_text(turn[-1] + 1, or_marked=True)]
        tokens = self.control.rename(template, self.plane).tokens
        stop, stop_end = None, end
        if tokens and not template[: tokens[0][0]].strip() and tokens[0][0] < self._start_of_header(message, template):
            stop, stop_end = tokens[0][1], end + tokens[0][0] + len(tokens[0][1])
            self._say(end, stop_end, self.messages[message].role, message)
        self.places[message] = TurnPlace(start, end, stop, stop_end)
        self._turn_end = stop_end

    def _place_assistant(self, message: int, turn: Sequence[int]) -> None:
        first_role, last_role = self._outer_roles(turn)
        start, end = self.pieces[turn[0]].start, self.pieces[turn[-1]].end
        cut = self._end_of_header(message, turn[0])
        if cut is None:
            raise TemplateError(
                f"the header of {self._name(message)} is not the one that the template's generation prompt writes "
                "there, so it cannot be known what the model has to write; give a template that begins answers as its "
                "generation prompt ends (tokenizer.chat_template: FILE)"
            )
        stop, stop_end = self._find_stop(end, self._next_text(turn[-1] + 1), last_role)
        if stop is None:
            raise TemplateError(
                f"no stop token follows the content of {self._name(message)}, so the model would never learn to stop; "
                "end assistant turns with a control token in the template (tokenizer.chat_template: FILE)"
            )
        self._say(cut, start, first_role, message)
        for before, after in pairwise(turn):
            role = self.pieces[after].role
            gap = self.pieces[before].end, self.pieces[after].start
            if role is not Role.TOOL_CALL and self._holds_stop(*gap, is_call=False):
                raise TemplateError(f"the template mixes {self._name(message)} with other messages")
            self._say(max(cut, self.pieces[before].start), gap[0], self.pieces[before].role, message)
            self._say(max(cut, gap[0]), gap[1], role if role is Role.TOOL_CALL else self.pieces[before].role, message)
        self._say(max(cut, self.pieces[turn[-1]].start), stop_end, last_role, message)
        self.places[message] = TurnPlace(start, end, stop, stop_end)
        self._turn_end = stop_end

    def _place_unwritten(self, message: int) -> None:
        """An empty answer of which a template writes nothing still has a header and a stop token."""
        if (self.messages[message].content or "").strip():
            return
        number = bisect_right([piece.end for piece in self.pieces], self._turn_end)
        until = self._next_text(number)
        if self.has_marks:
            before = takewhile(lambda piece: piece.start < until, islice(self.pieces, number, None))
            marked = next((piece for piece in before if piece.is_marked), None)
            if marked is None:
                return
            cut, until = max(self._turn_end, marked.start), marked.end
        else:
            cut = self._end_of_header(message, number)
            if cut is None or cut >= until:
                return
        stop, stop_end = self._find_stop(cut, until, Role.ASSISTANT)
        if stop in self.stops.of_answer:
            self._turn_end = until if self.has_marks else stop_end
            self._say(cut, stop_end, Role.ASSISTANT, message)
            self._say(stop_end, self._turn_end, Role.ASSISTANT, message)
            self.places[message] = TurnPlace(cut, cut, stop, stop_end)

    def _place_marked(self, message: int, turn: Sequence[int]) -> None:
        """The marks say what is the model's, text for text; a stop token outside of them would never be. A turn without
        any is not the model's at all."""
        first_role, last_role = self._outer_roles(turn)
        start, end = self.pieces[turn[0]].start, self.pieces[turn[-1]].end
        stop, stop_end, after = None, end, turn[-1] + 1
        if any(self.pieces[number].is_marked for number in turn):
            before = turn[0] - 1
            if before >= 0 and self._is_marked_template(before):
                self._say(max(self._turn_end, self.pieces[before].start), start, first_role, message)
            for left, right in pairwise(turn):
                for number in range(left, right):
                    role = self.pieces[right].role
                    role = role if role is Role.TOOL_CALL and number > left else self.pieces[left].role
                    if self.pieces[number].is_marked:
                        self._say(self.pieces[number].start, self.pieces[number].end, role, message)
            if self.pieces[turn[-1]].is_marked:
                self._say(self.pieces[turn[-1]].start, end, last_role, message)
            if after < len(self.pieces) and self._is_marked_template(after):
                stop, stop_end = self._find_stop(end, self.pieces[after].end, last_role)
                self._say(end, stop_end, last_role, message)
                self._say(stop_end, self.pieces[after].end, last_role, message)
                self._turn_end = self.pieces[after].end
            if stop is None:
                raise TemplateError(
                    f"the stop token after {self._name(message)} is outside the template's generation marks, so the "
                    "model would never learn to stop; move {% endgeneration %} behind it (tokenizer.chat_template: "
                    "FILE)"
                )
        self.places[message] = TurnPlace(start, end, stop, stop_end)

    # -- the template's text around a turn ---------------------------------------------------------------------------

    def _say(self, start: int, end: int, role: Role, message: int) -> None:
        if start < end:
            self._said.append((start, end, role, message))

    def _outer_roles(self, turn: Sequence[int]) -> tuple[Role, Role]:
        """Of the first and the last text of an assistant's turn that is not empty. It ends as an answer or a call."""
        spoken = [n for n in turn if self.pieces[n].end > self.pieces[n].start] or turn
        last = self.pieces[spoken[-1]].role
        return self.pieces[spoken[0]].role, Role.ASSISTANT if last is Role.REASONING else last

    def _end_of_header(self, message: int, number: int) -> int | None:
        """Where the model goes on that writes the answer whose texts begin with piece `number`: where the rendering and
        the prompt that asks for the answer part, in whole words; None if they part before its header."""
        prompt = self._asked[message]
        if prompt is None:
            return None
        start = next((self.pieces[n].end for n in range(number - 1, -1, -1) if self.pieces[n].is_text), 0)
        rendered = self.text[start : start + len(prompt.text) + 1]
        shared = self._prompts.common_start(prompt.text, rendered)
        if shared < len(prompt.text) and shared <= prompt.header_start:
            # Some templates write more behind the last question; the header is then known where it stands whole.
            found = self.text.find(prompt.header, max(start, self._turn_end), self._next_text(number))
            return found + len(prompt.header) if found >= 0 and prompt.header.strip() else None
        return max(start + shared, self._turn_end)

    def _start_of_header(self, message: int, template: str) -> int:
        """Where in the template's text after a message the header of an answer begins; its length if none does."""
        prompt = self._asked.get(message + 1)
        return len(template) if prompt is None else min(prompt.header_start, len(template))

    def _find_stop(self, end: int, until: int, role: Role) -> tuple[str | None, int]:
        """The stop token between the end of a turn's texts and the next text, and where it ends."""
        template = self.text[end:until]
        tokens = self.control.rename(template, self.plane).tokens
        strings = [self.stops.of_answer, self.stops.of_call] if role is Role.TOOL_CALL else [self.stops.of_answer]
        for known in strings:
            if found := next((token for token in tokens if token[1] in known), None):
                return found[1], end + found[0] + len(found[1])
        # Where a template ends its answers with nothing, the next token begins a header.
        prompt = self._prompts.after_a_question(self._has_tools)
        begins_header = bool(tokens) and prompt is not None and tokens[0][1] in prompt.header
        if tokens and not begins_header and not template[: tokens[0][0]].strip():
            return tokens[0][1], end + tokens[0][0] + len(tokens[0][1])
        return None, end

    def _holds_stop(self, start: int, end: int, is_call: bool) -> bool:
        return holds_stop(self.text[start:end], self.control, self.plane, self.stops, is_call=is_call)

    def _next_text(self, number: int, *, or_marked: bool = False) -> int:
        """Where the first text of the conversation from piece `number` on begins, or what is marked."""
        for piece in map(self.pieces.__getitem__, range(number, len(self.pieces))):
            if piece.is_text or (or_marked and piece.is_marked):
                return piece.start
        return len(self.text)

    def _is_marked_template(self, number: int) -> bool:
        return self.pieces[number].is_marked and not self.pieces[number].is_text

    def _name(self, message: int) -> str:
        return message_name(self.messages, message)
