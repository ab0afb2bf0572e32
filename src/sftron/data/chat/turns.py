"""Determines the role of each span of a rendered text, what the model generates, and where each turn ends.

    text       <|im_start|>assistant\\n  <think>\\n  Hm.        \\n</think>\\n\\n  Yes.       <|im_end|>  \\n
    written by template                 template  reasoning  template         content    template    template
    role       TEMPLATE                 REASONING REASONING  REASONING        ASSISTANT  ASSISTANT   TEMPLATE

At inference the template writes the header, and the model generates everything after it, up to and including the stop
token. That is an assistant's turn. The header ends where the rendering and the generation prompt begin to differ. If a
template has `{% generation %}` marks, they determine the generated text instead.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate, pairwise

from sftron.data.chat.generation_prompt import GenerationPrompts
from sftron.data.chat.layout import MODEL_ROLES, Span, StopStrings, TurnSpan
from sftron.data.chat.template import TemplateError
from sftron.data.chat.tracked_text import Origin, TrackedStr
from sftron.data.types import Conversation, Role


class TurnReader:
    """Reads one rendered conversation. The argument `turn` holds the indices of the spans with a message's texts."""

    def __init__(
        self, text: TrackedStr, conversation: Conversation, prompts: GenerationPrompts, stops: StopStrings
    ) -> None:
        self._text, self._origins = str.__getitem__(text, slice(None)), text.spans
        self._conversation, self._messages = conversation, conversation.messages
        self._prompts, self._control, self._stops = prompts, prompts.control, stops
        self._has_marks, self._has_tools = prompts.template.has_marks, bool(conversation.tools)
        self._spans: list[Span] = []
        self._texts: list[list[int]] = [[] for _ in self._messages]
        """For each message, the indices of the spans that hold its texts."""
        self._turns: list[TurnSpan | None] = [None] * len(self._messages)
        self._claims: list[tuple[int, int, Role, int]] = []
        """(start, end, role, message): characters [start, end) are part of a message, and template text in them has
        the role."""
        self._turn_end = 0
        """The end of the last turn that was read, including its stop token."""

    def read(self) -> tuple[list[Span], list[TurnSpan | None]]:
        """Returns the spans, all nonempty, which cover the text, and one turn for each message.

        The turn is None for a message that the template does not write. Raises TemplateError if the template mixes a
        message's texts with other messages, if the generated text of an answer cannot be determined, or if no stop
        token follows it.
        """
        self._read_spans()
        # In the order of the text, as some templates write the system message within a later turn. A message that is
        # not written comes after the message before it.
        firsts = accumulate((turn[0] if turn else -1 for turn in self._texts), lambda last, n: last if n < 0 else n)
        for _, message in sorted(zip(firsts, range(len(self._texts)), strict=True)):
            turn, is_assistant = self._texts[message], self._messages[message].role is Role.ASSISTANT
            if not turn:
                if is_assistant and not (self._messages[message].content or "").strip():
                    self._read_unwritten(message)
            elif not is_assistant:
                self._read_other(message, turn)
            elif self._has_marks:
                self._read_marked(message, turn)
            else:
                self._read_assistant(message, turn)
        return self._claimed_spans(), self._turns

    def _read_spans(self) -> None:
        current, fields, end = -1, set[str](), 0
        for length, origin in self._origins:
            start, end = end, end + length
            role, message, is_text = Role.TEMPLATE, -1, False
            if origin is not None and origin.field:
                role, message, is_text = origin.role, origin.message, True
                if origin.message >= 0 and role is not Role.TEMPLATE:
                    if origin.message != current:
                        fields = set()
                    if self._belongs_to_turn(origin, current, origin.field in fields and length > 0, length):
                        current = origin.message
                        self._texts[message].append(len(self._spans))
                        fields.add(origin.field)
                    else:
                        role, message, current = Role.TEMPLATE, -1, -1
            self._spans.append(Span(start, end, role, message, is_text, origin is not None and origin.is_marked))

    def _belongs_to_turn(self, origin: Origin, current: int, is_again: bool, length: int) -> bool:
        """Returns whether a text is part of its message's turn, even if that has ended.

        A tool's name may then be written again in the header of its result. Raises TemplateError for any other text.
        """
        turn = self._texts[origin.message]
        if not turn or self._messages[origin.message].role is not Role.ASSISTANT:
            return True
        is_call = origin.role is Role.TOOL_CALL
        has_ended = origin.message != current or (
            is_again and self._holds_stop(self._spans[turn[-1]].end, self._spans[-1].end, is_call=is_call)
        )
        if has_ended and not is_call and length:
            raise self._mixed(origin.message)
        return not has_ended

    def _claimed_spans(self) -> list[Span]:
        """Returns the spans, divided at the bounds of turns and claims, with the roles of the claims."""
        claims = sorted(self._claims)
        bounds = {len(self._text), *(span.start for span in self._spans)}
        bounds.update(bound for claim in claims for bound in claim[:2])
        bounds.update(bound for turn in self._turns if turn for bound in (turn.start, turn.end, turn.stop_end))
        starts, claim_starts = [span.start for span in self._spans], [claim[0] for claim in claims]
        spans = []
        for start, end in pairwise(sorted(bounds)):
            span = self._spans[bisect_right(starts, start) - 1]
            number = bisect_right(claim_starts, start) - 1
            is_claimed = number >= 0 and start < claims[number][1]
            role, message = claims[number][2:] if is_claimed else (Role.TEMPLATE, -1)
            # Another field of the answer itself, such as its name, counts as the template's text around it.
            if span.is_text and span.role is Role.TEMPLATE:
                if span.message != message:
                    role, message = Role.TEMPLATE, -1
            elif span.is_text:
                is_foreign = span.role in MODEL_ROLES and message != span.message
                role, message = Role.TEMPLATE if is_foreign else span.role, span.message
            spans.append(Span(start, end, role, message, span.is_text))
        return spans

    # --- Turns of each kind ---

    def _read_other(self, message: int, turn: Sequence[int]) -> None:
        """Reads a message that is part of the prompt: its texts, and the control token that ends it.

        Only white space may be between the texts and that token, and the token may not be part of the next header.
        """
        start, end, _, _ = self._bounds(turn)
        template = self._text[end : self._next_text(turn[-1] + 1, or_marked=True)]
        role, following = self._messages[message].role, self._messages[message + 1 : message + 2]
        stop, stop_end = None, end
        if tokens := self._control.find(template):
            position, content = tokens[0]
            header = self._prompts.header(self._has_tools)
            # Without a header, the token that closes a question is the beginning of the answer, as Mistral's [/INST].
            begins_answer = content in header if header else role is Role.USER
            is_before_answer = bool(following) and following[0].role is Role.ASSISTANT
            if not template[:position].strip() and not (is_before_answer and begins_answer):
                stop, stop_end = content, end + position + len(content)
                self._claim(end, stop_end, role, message)
        self._turns[message], self._turn_end = TurnSpan(start, end, stop, stop_end), stop_end

    def _read_assistant(self, message: int, turn: Sequence[int]) -> None:
        start, end, first_role, last_role = self._bounds(turn)
        generated_start = self._end_of_header(message, turn[0])
        if generated_start is None:
            raise TemplateError(
                f"the header of {self._name(message)} differs from the template's generation prompt there, so the "
                "start of the generated text is unknown; give a template whose answers begin as its generation "
                "prompt ends (tokenizer.chat_template: FILE)"
            )
        stop, stop_end = self._find_stop(end, self._next_text(turn[-1] + 1), last_role)
        if stop is None:
            raise TemplateError(
                f"no stop token follows the content of {self._name(message)}, so the model would never learn to stop; "
                "end assistant turns with a control token in the template (tokenizer.chat_template: FILE)"
            )
        for before, after in pairwise(self._spans[number] for number in turn):
            if after.role is not Role.TOOL_CALL and self._holds_stop(before.end, after.start):
                raise self._mixed(message)
        self._claim(generated_start, start, first_role, message)
        self._claim_inside(message, turn, generated_start)
        self._claim(max(generated_start, self._spans[turn[-1]].start), stop_end, last_role, message)
        self._turns[message], self._turn_end = TurnSpan(start, end, stop, stop_end), stop_end

    def _read_marked(self, message: int, turn: Sequence[int]) -> None:
        """Reads a turn whose marked text the model generates; a turn without marks is not generated."""
        start, end, first_role, last_role = self._bounds(turn)
        if not any(self._spans[number].is_marked for number in turn):
            self._turns[message] = TurnSpan(start, end, None, end)
            return
        first = turn[0]
        while first and self._spans[first - 1].is_marked and self._spans[first - 1].role is Role.TEMPLATE:
            first -= 1
        self._claim(max(self._turn_end, self._spans[first].start), start, first_role, message)
        self._claim_inside(message, turn)
        if self._spans[turn[-1]].is_marked:
            self._claim(self._spans[turn[-1]].start, end, last_role, message)
        after = self._marked_template(turn[-1] + 1)
        stop, stop_end = self._find_stop(end, after.end, last_role) if after else (None, end)
        if after is None or stop is None:
            raise TemplateError(
                f"the stop token after {self._name(message)} is outside the template's generation marks, so the "
                "model would never learn to stop; move {% endgeneration %} after it (tokenizer.chat_template: FILE)"
            )
        self._claim(end, after.end, last_role, message)
        self._turns[message], self._turn_end = TurnSpan(start, end, stop, stop_end), after.end

    def _read_unwritten(self, message: int) -> None:
        """Reads an empty answer, for which the template writes no text but may write a header and a stop token."""
        number = bisect_right([span.end for span in self._spans], self._turn_end)
        start, until = self._turn_end, self._next_text(number)
        if self._has_marks:
            marked = next((span for span in self._spans[number:] if span.is_marked and span.start < until), None)
            if marked is None:
                return
            start, until = max(start, marked.start), marked.end
        else:
            header_end = self._end_of_header(message, number)
            if header_end is None or header_end >= until:
                return
            start = header_end
        stop, stop_end = self._find_stop(start, until, Role.ASSISTANT)
        if stop in self._stops.of_answer:
            turn_end = until if self._has_marks else stop_end
            self._claim(start, turn_end, Role.ASSISTANT, message)
            self._turns[message], self._turn_end = TurnSpan(start, start, stop, stop_end), turn_end

    # --- The template's text around a turn ---

    def _claim(self, start: int, end: int, role: Role, message: int) -> None:
        if start < end:
            self._claims.append((start, end, role, message))

    def _claim_inside(self, message: int, turn: Sequence[int], generated_start: int = 0) -> None:
        """Claims everything from a turn's first text to its last.

        Template text before a tool call gets the role of the call; other template text gets the role of the text before
        it.
        """
        for before, after in pairwise(turn):
            for number in range(before, after):
                span, following = self._spans[number], self._spans[after].role
                is_of_call = following is Role.TOOL_CALL and number > before
                if span.is_marked or not self._has_marks:
                    role = following if is_of_call else self._spans[before].role
                    self._claim(max(generated_start, span.start), span.end, role, message)

    def _bounds(self, turn: Sequence[int]) -> tuple[int, int, Role, Role]:
        """Returns the bounds of a turn's texts, and the roles of its first and last nonempty text.

        The last role is ASSISTANT in place of REASONING.
        """
        spans = [self._spans[number] for number in turn]
        filled = [span for span in spans if span.end > span.start] or spans
        last_role = Role.ASSISTANT if filled[-1].role is Role.REASONING else filled[-1].role
        return spans[0].start, spans[-1].end, filled[0].role, last_role

    def _end_of_header(self, message: int, number: int) -> int | None:
        """Returns the position at which the generated text of an answer begins; span `number` holds its first text.

        It is the end of the generation prompt, or the first whole word at which the rendering differs from it. The
        result is None if they differ before the answer's header.
        """
        start = next((self._spans[n].end for n in range(number - 1, -1, -1) if self._spans[n].is_text), 0)
        first = self._next_text(number)
        if self._prompts.template.has_constant_header:
            position = self._prompts.position_of_header(self._text[start:first], self._has_tools)
            if position >= 0:
                start += position
                header = self._prompts.header(self._has_tools)
                rendered = self._text[start : start + len(header) + 1]
                return max(start + self._prompts.common_start(header, rendered), self._turn_end)
        if (end := self._end_of_whole_prompt(message, first)) is not None:
            return max(end, self._turn_end)
        prompt = self._prompts.before(self._conversation, message)
        if prompt is None:
            return None
        rendered = self._text[start : start + len(prompt.text) + 1]
        shared = self._prompts.common_start(prompt.text, rendered)
        if shared < len(prompt.text) and shared <= prompt.header_start:
            # Some templates write additional text after the last question; the whole header is then searched for.
            found = self._text.find(prompt.header, max(start, self._turn_end), self._next_text(number))
            return found + len(prompt.header) if found >= 0 and prompt.header.strip() else None
        return max(start + shared, self._turn_end)

    def _end_of_whole_prompt(self, message: int, first: int) -> int | None:
        """Returns the end of the generation prompt of an answer if the rendering begins with all of it, or None.

        If the template does not distinguish prompts, text that it writes from there to `first`, the start of the
        answer's first text, may be a header. The result is then None as well.
        """
        try:
            prompt = self._render_prompt(message)
        except TemplateError:
            return None
        is_prompt = self._prompts.reads_flag(self._has_tools)
        is_whole = self._text.startswith(prompt) and (is_prompt or not self._text[len(prompt) : first].strip())
        return len(prompt) if is_whole else None

    @cached_property
    def _render_prompt(self) -> Callable[[int], str]:
        return self._prompts.template.prompt_renderer(self._conversation)

    def _find_stop(self, end: int, until: int, role: Role) -> tuple[str | None, int]:
        """Returns the stop token between the end of a turn's texts and the next text, and the end of the token."""
        template = self._text[end:until]
        tokens = self._control.find(template)
        for known in self._stops[: 2 if role is Role.TOOL_CALL else 1]:
            for position, content in tokens:
                if content in known:
                    return content, end + position + len(content)
        # If a template ends its answers without a stop token, the next control token begins a header.
        if tokens:
            position, content = tokens[0]
            if content not in self._prompts.header(self._has_tools) and not template[:position].strip():
                return content, end + position + len(content)
        return None, end

    def _holds_stop(self, start: int, end: int, *, is_call: bool = False) -> bool:
        known = self._stops.of_answer | self._stops.of_call if is_call else self._stops.of_answer
        return any(content in known for _, content in self._control.find(self._text[start:end]))

    def _next_text(self, number: int, *, or_marked: bool = False) -> int:
        """Returns the start of the first span, from span `number` on, with text of the conversation (or marked).

        An empty field outside every turn, such as a name, counts as missing from the row.
        """
        following = (self._spans[n] for n in range(number, len(self._spans)))
        texts = (span for span in following if span.is_text or (or_marked and span.is_marked))
        starts = (span.start for span in texts if span.end > span.start or span.role is not Role.TEMPLATE)
        return next(starts, len(self._text))

    def _marked_template(self, number: int) -> Span | None:
        """Returns a span if it is the template's text between marks."""
        span = self._spans[number] if 0 <= number < len(self._spans) else None
        return span if span and span.is_marked and not span.is_text else None

    def _mixed(self, message: int) -> TemplateError:
        return TemplateError(f"the template mixes {self._name(message)} with other messages")

    def _name(self, message: int) -> str:
        """Returns the name of a message for errors, with its number from 1."""
        return f"message {message + 1} ({self._messages[message].role.name.lower()})"
