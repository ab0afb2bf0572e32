"""Determines which characters of a rendered text the model generates, and where each turn ends.

    text       <|im_start|>assistant\\n  <think>\\n  Hm.        \\n</think>\\n\\n  Yes.       <|im_end|>  \\n
    written by template                 template  reasoning  template         content    template    template
    role       TEMPLATE                 REASONING REASONING  REASONING        ASSISTANT  ASSISTANT   TEMPLATE

At inference the template writes the header, and the model generates everything after it, up to and including the stop
token. That is an assistant's turn. The header ends where the rendering and the generation prompt begin to differ. If a
template has `{% generation %}` marks, they determine the generated text instead.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from sftron.data.chat.control_tokens import ControlTokens
from sftron.data.chat.generation_prompt import GenerationPrompts
from sftron.data.chat.spans import LeftOut, Span, StopStrings, message_name, read_spans
from sftron.data.chat.template import TemplateError
from sftron.data.chat.tracked_text import TrackedStr
from sftron.data.types import Conversation, Role

MODEL_ROLES = frozenset({Role.ASSISTANT, Role.REASONING, Role.TOOL_CALL})
"""The roles of text that the model generates."""


@dataclass(frozen=True, slots=True)
class TurnSpan:
    """The characters [start, end) of a message's text in the rendered text."""

    start: int
    end: int
    stop: str | None
    """The stop token as text, or None."""
    stop_end: int
    """The end of the stop token, or of the message's text if there is none."""


@dataclass(frozen=True, slots=True)
class RenderedTurns:
    """The spans and turns of a rendered conversation.

    Attributes:
        spans: The spans in order; they cover the text, and none is empty.
        turns: One turn for each message; None for a message of which nothing is written.
        left_out: The texts that the template does not write.
    """

    spans: list[Span]
    turns: list[TurnSpan | None]
    left_out: list[LeftOut]


@dataclass(frozen=True, slots=True)
class TurnRules:
    """The properties of a template and its tokenizer by which turns are determined."""

    control: ControlTokens
    prompts: GenerationPrompts
    has_marks: bool
    """Whether the template has `{% generation %}` marks."""


def read_turns(text: TrackedStr, conversation: Conversation, rules: TurnRules, stops: StopStrings) -> RenderedTurns:
    """Determines the turns of a rendered conversation.

    Raises:
        TemplateError: The generated text of an answer cannot be determined, or no stop token follows it, so that the
            model would never learn to stop.
    """
    return _TurnReader(text, conversation, rules, stops).read()


class _TurnReader:
    """Reads one rendered conversation. The argument `turn` is the indices of the spans that hold a message's texts."""

    def __init__(self, text: TrackedStr, conversation: Conversation, rules: TurnRules, stops: StopStrings) -> None:
        self._text, self._messages = str.__getitem__(text, slice(None)), conversation.messages
        self._rules, self._control, self._stops = rules, rules.control, stops
        self._written = read_spans(text, conversation, rules.control, stops)
        self._spans = self._written.spans
        self._prompts = rules.prompts.of(conversation)
        self._question_prompt = rules.prompts.after_question(bool(conversation.tools))
        self._turns: list[TurnSpan | None] = [None] * len(self._messages)
        self._claims: list[tuple[int, int, Role, int]] = []
        """(start, end, role, message): characters [start, end) are part of a message, and template text in them has
        the role."""
        self._turn_end = 0
        """The end of the last turn that was read, including its stop token."""

    def read(self) -> RenderedTurns:
        # In the order of the text, as some templates write the system message within a later turn. A message that is
        # not written comes after the message before it.
        turns = self._written.turns
        firsts = accumulate((turn[0] if turn else -1 for turn in turns), lambda last, n: last if n < 0 else n)
        for _, message in sorted(zip(firsts, range(len(turns)), strict=True)):
            turn, is_assistant = turns[message], self._messages[message].role is Role.ASSISTANT
            if not turn:
                if is_assistant and not (self._messages[message].content or "").strip():
                    self._read_unwritten(message)
            elif not is_assistant:
                self._read_other(message, turn)
            elif self._rules.has_marks:
                self._read_marked(message, turn)
            else:
                self._read_assistant(message, turn)
        return RenderedTurns(self._claimed_spans(), self._turns, self._written.left_out)

    def _claimed_spans(self) -> list[Span]:
        """Returns the spans, divided at the bounds of the claims, with the roles of the claims."""
        spans: list[Span] = []
        claims = iter([*sorted(self._claims), (len(self._text), len(self._text), Role.TEMPLATE, -1)])
        start, end, role, message = next(claims)
        for span in self._spans:
            position = span.start
            while position < span.end:
                while end <= position and message >= 0:
                    start, end, role, message = next(claims)
                is_claimed = start <= position and message >= 0
                until = min(span.end, end if is_claimed else start)
                if span.is_text:
                    is_foreign = span.role in MODEL_ROLES and not (is_claimed and message == span.message)
                    owner = (Role.TEMPLATE if is_foreign else span.role, span.message)
                else:
                    owner = (role, message) if is_claimed else (Role.TEMPLATE, -1)
                spans.append(Span(position, until, *owner, span.is_text))
                position = until
        return spans

    # --- Turns of each kind ---

    def _read_other(self, message: int, turn: Sequence[int]) -> None:
        """Reads a message that is part of the prompt: its texts, and the control token that ends it.

        Only white space may be between the texts and that token, and the token may not be part of the next header.
        """
        start, end = self._spans[turn[0]].start, self._spans[turn[-1]].end
        template = self._text[end : self._next_text(turn[-1] + 1, or_marked=True)]
        prompt = self._prompts.get(message + 1)
        header_start = len(template) if prompt is None else min(prompt.header_start, len(template))
        stop, stop_end = None, end
        if tokens := self._control.find(template):
            position, content = tokens[0]
            if not template[:position].strip() and position < header_start:
                stop, stop_end = content, end + position + len(content)
                self._claim(end, stop_end, self._messages[message].role, message)
        self._end_turn(message, TurnSpan(start, end, stop, stop_end), stop_end)

    def _read_assistant(self, message: int, turn: Sequence[int]) -> None:
        first_role, last_role = self._outer_roles(turn)
        start, end = self._spans[turn[0]].start, self._spans[turn[-1]].end
        generated_start = self._end_of_header(message, turn[0])
        if generated_start is None:
            raise TemplateError(
                f"the header of {self._name(message)} is not the one that the template's generation prompt writes "
                "there, so what the model generates is unknown; give a template that begins answers as its generation "
                "prompt ends (tokenizer.chat_template: FILE)"
            )
        stop, stop_end = self._find_stop(end, self._next_text(turn[-1] + 1), last_role)
        if stop is None:
            raise TemplateError(
                f"no stop token follows the content of {self._name(message)}, so the model would never learn to stop; "
                "end assistant turns with a control token in the template (tokenizer.chat_template: FILE)"
            )
        for before, after in pairwise(turn):
            between = self._text[self._spans[before].end : self._spans[after].start]
            is_call = self._spans[after].role is Role.TOOL_CALL
            if not is_call and self._stops.are_in(between, self._control, is_call=False):
                raise TemplateError(f"the template mixes {self._name(message)} with other messages")
        self._claim(generated_start, start, first_role, message)
        self._claim_inside(message, turn, generated_start)
        self._claim(max(generated_start, self._spans[turn[-1]].start), stop_end, last_role, message)
        self._end_turn(message, TurnSpan(start, end, stop, stop_end), stop_end)

    def _read_marked(self, message: int, turn: Sequence[int]) -> None:
        """Reads a turn whose marked text the model generates; a turn without marks is not generated."""
        first_role, last_role = self._outer_roles(turn)
        start, end = self._spans[turn[0]].start, self._spans[turn[-1]].end
        if not any(self._spans[number].is_marked for number in turn):
            self._turns[message] = TurnSpan(start, end, None, end)
            return
        before, after = turn[0] - 1, turn[-1] + 1
        if before >= 0 and self._is_marked_template(before):
            self._claim(max(self._turn_end, self._spans[before].start), start, first_role, message)
        self._claim_inside(message, turn, only_marked=True)
        if self._spans[turn[-1]].is_marked:
            self._claim(self._spans[turn[-1]].start, end, last_role, message)
        stop = stop_end = None
        if after < len(self._spans) and self._is_marked_template(after):
            stop, stop_end = self._find_stop(end, self._spans[after].end, last_role)
        if stop is None or stop_end is None:
            # The model does not generate a stop token that is not marked.
            raise TemplateError(
                f"the stop token after {self._name(message)} is outside the template's generation marks, so the "
                "model would never learn to stop; move {% endgeneration %} after it (tokenizer.chat_template: FILE)"
            )
        self._claim(end, stop_end, last_role, message)
        self._claim(stop_end, self._spans[after].end, last_role, message)
        self._end_turn(message, TurnSpan(start, end, stop, stop_end), self._spans[after].end)

    def _read_unwritten(self, message: int) -> None:
        """Reads an empty answer, for which the template writes no text but may write a header and a stop token."""
        number = bisect_right([span.end for span in self._spans], self._turn_end)
        until = self._next_text(number)
        if self._rules.has_marks:
            marked = next((span for span in self._spans[number:] if span.start >= until or span.is_marked), None)
            if marked is None or marked.start >= until:
                return
            start, until = max(self._turn_end, marked.start), marked.end
        else:
            header_end = self._end_of_header(message, number)
            if header_end is None or header_end >= until:
                return
            start = header_end
        stop, stop_end = self._find_stop(start, until, Role.ASSISTANT)
        if stop in self._stops.of_answer:
            turn_end = until if self._rules.has_marks else stop_end
            self._claim(start, stop_end, Role.ASSISTANT, message)
            self._claim(stop_end, turn_end, Role.ASSISTANT, message)
            self._end_turn(message, TurnSpan(start, start, stop, stop_end), turn_end)

    # --- The template's text around a turn ---

    def _claim(self, start: int, end: int, role: Role, message: int) -> None:
        if start < end:
            self._claims.append((start, end, role, message))

    def _claim_inside(
        self, message: int, turn: Sequence[int], generated_start: int = 0, *, only_marked: bool = False
    ) -> None:
        """Claims the text from the first text of a turn to its last.

        Template text before a tool call gets the role of the call; other template text gets that of the text before it.
        """
        for before, after in pairwise(turn):
            for number in range(before, after):
                span, following = self._spans[number], self._spans[after].role
                is_of_call = following is Role.TOOL_CALL and number > before
                if span.is_marked or not only_marked:
                    role = following if is_of_call else self._spans[before].role
                    self._claim(max(generated_start, span.start), span.end, role, message)

    def _end_turn(self, message: int, turn: TurnSpan, end: int) -> None:
        self._turns[message], self._turn_end = turn, end

    def _outer_roles(self, turn: Sequence[int]) -> tuple[Role, Role]:
        """Returns the roles of the first and the last nonempty text; the last is ASSISTANT in place of REASONING."""
        filled = [n for n in turn if self._spans[n].end > self._spans[n].start] or turn
        last = self._spans[filled[-1]].role
        return self._spans[filled[0]].role, Role.ASSISTANT if last is Role.REASONING else last

    def _end_of_header(self, message: int, number: int) -> int | None:
        """Returns the position at which the generated text of an answer begins; span `number` holds its first text.

        It is the end of the generation prompt, or the first whole word at which the rendering differs from it. The
        result is None if they differ before the answer's header.
        """
        prompt = self._prompts[message]
        if prompt is None:
            return None
        start = next((self._spans[n].end for n in range(number - 1, -1, -1) if self._spans[n].is_text), 0)
        rendered = self._text[start : start + len(prompt.text) + 1]
        shared = self._rules.prompts.common_start(prompt.text, rendered)
        if shared < len(prompt.text) and shared <= prompt.header_start:
            # Some templates write additional text after the last question; the whole header is then searched for.
            found = self._text.find(prompt.header, max(start, self._turn_end), self._next_text(number))
            return found + len(prompt.header) if found >= 0 and prompt.header.strip() else None
        return max(start + shared, self._turn_end)

    def _find_stop(self, end: int, until: int, role: Role) -> tuple[str | None, int]:
        """Returns the stop token between the end of a turn's texts and the next text, and the end of the token."""
        template = self._text[end:until]
        tokens = self._control.find(template)
        for known in [self._stops.of_answer, self._stops.of_call][: 2 if role is Role.TOOL_CALL else 1]:
            for position, content in tokens:
                if content in known:
                    return content, end + position + len(content)
        # If a template ends its answers without a stop token, the next control token begins a header.
        if tokens:
            position, content = tokens[0]
            begins_header = self._question_prompt is not None and content in self._question_prompt.header
            if not begins_header and not template[:position].strip():
                return content, end + position + len(content)
        return None, end

    def _next_text(self, number: int, *, or_marked: bool = False) -> int:
        """Returns the start of the first span, from span `number` on, with text of the conversation.

        With `or_marked`, a marked span counts as well.
        """
        for n in range(number, len(self._spans)):
            if self._spans[n].is_text or (or_marked and self._spans[n].is_marked):
                return self._spans[n].start
        return len(self._text)

    def _is_marked_template(self, number: int) -> bool:
        return self._spans[number].is_marked and not self._spans[number].is_text

    def _name(self, message: int) -> str:
        return message_name(self._messages, message)
