"""What a chat template writes before an answer at inference, which is all that the model does not have to generate.

A template is asked with short conversations of the same shape as the one at hand: the roles, and which of the messages'
fields are absent, empty or filled. Each shape is rendered once, so a conversation of any length costs no rendering.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sftron.data.chat.control_tokens import ControlTokens
from sftron.data.chat.template import PROBED_ID, PROBED_TOOL, ChatTemplate, TemplateError
from sftron.data.chat.template_input import tracked_messages, tracked_tools
from sftron.data.chat.tracked_text import TrackedStr
from sftron.data.types import Conversation, Message, Role

_WORD = re.compile(r" ?<[^<>\s]*>| ?[^\s<]+| ?<|[^\S ]+| ")
"""A tag, a word, or a run of white space. A space belongs to the word behind it, as in the tokens of most models."""


class GenerationPrompt(NamedTuple):
    """The text between the last text before an answer and the place where the model goes on.

    text: its characters. header_start: how many of them close the message before; the answer's header follows.
    """

    text: str
    header_start: int

    @property
    def header(self) -> str:
        """The header by itself; "" where what closes the message before is all the header there is ("[/INST]")."""
        return self.text[self.header_start :] if self.header_start else ""


class _Shape(NamedTuple):
    """What of a message a template may decide by; its texts are left out."""

    role: Role
    role_name: str
    content: str | None
    is_in_parts: bool
    fields: tuple[tuple[str, tuple[str, ...]], ...]
    """The other fields that are filled: the name, and how each tool call is spelled, of two at most."""

    @classmethod
    def of(cls, message: Message) -> _Shape:
        content = message.content
        if content:
            content = " " if content.isspace() else "Hi"
        filled = ((name, value) for name, value in message.fields.items() if value)
        fields = tuple((name, _spelling(value) if name == "tool_calls" else ()) for name, value in filled)
        return cls(message.role, message.role_name, content, bool(message.parts), fields)

    def message(self) -> Message:
        """A message of this shape."""
        fields = {name: _probed_field(name, spelling) for name, spelling in self.fields}
        parts = (self.content,) if self.is_in_parts and self.content is not None else ()
        return Message(self.role, self.content, fields, parts=parts, role_name=self.role_name)


def _spelling(calls: Any) -> tuple[str, ...]:
    """Of each of the first two calls, whether it has a "function", and whether its arguments are an object."""
    spelling = []
    for call in calls[:2] if isinstance(calls, Sequence) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        arguments = (function if isinstance(function, Mapping) else call).get("arguments")
        spelling.append(f"{'flat' if function is None else 'function'} {'text' if isinstance(arguments, str) else ''}")
    return tuple(spelling)


def _probed_field(name: str, spelling: Sequence[str]) -> object:
    if name != "tool_calls":
        return PROBED_ID if name in ("tool_call_id", "id") else "Hi"
    calls = []
    for each in spelling:
        function = {"name": "f", "arguments": '{"x": "y"}' if each.endswith("text") else {"x": "y"}}
        call = function if each.startswith("flat") else {"function": function}
        calls.append({"type": "function", "id": PROBED_ID, **call})
    return calls


_USER, _ANSWER = _Shape.of(Message(Role.USER, "Hi")), _Shape.of(Message(Role.ASSISTANT, "Hi"))
_Key = tuple[tuple[_Shape, ...], bool]


class GenerationPrompts:
    """The generation prompts of one template, each shape of conversation rendered once."""

    def __init__(self, template: ChatTemplate, control: ControlTokens) -> None:
        self._template, self._control = template, control
        self._known: dict[_Key, GenerationPrompt | None] = {}

    def of(self, conversation: Conversation) -> dict[int, GenerationPrompt | None]:
        """The prompt before each of an assistant's messages, by their number; None where the template refuses what
        stands before it."""
        has_tools = bool(conversation.tools)
        return {number: self._of_shapes(shapes, has_tools) for number, shapes in _contexts(conversation.messages)}

    def after_a_question(self, has_tools: bool) -> GenerationPrompt | None:
        return self._of_shapes((_USER,), has_tools)

    def common_start(self, left: str, right: str) -> int:
        """The number of characters that both begin with, in whole control tokens, tags, words and runs of white space
        of `left`, unless one text is the whole beginning of the other: `<think>` and `<tool_call>` share nothing."""
        if right.startswith(left) or left.startswith(right):
            return min(len(left), len(right))
        length = 0
        for one, other in zip(self._words(left), self._words(right), strict=False):
            if one != other and not (one.isspace() and one != " " and other.startswith(one)):
                break
            length += len(one)
            if one != other:
                break
        return length

    def _words(self, text: str) -> Iterator[str]:
        start = 0
        for control in self._control.pattern.finditer(text):
            yield from _WORD.findall(text[start : control.start()])
            yield control.group()
            start = control.end()
        yield from _WORD.findall(text[start:])

    def _of_shapes(self, shapes: tuple[_Shape, ...], has_tools: bool) -> GenerationPrompt | None:
        key = shapes, has_tools
        if key not in self._known:
            try:
                self._known[key] = self._probed(shapes, has_tools)
            except TemplateError:
                self._known[key] = None
        return self._known[key]

    def _probed(self, shapes: tuple[_Shape, ...], has_tools: bool) -> GenerationPrompt:
        closed = _end(self._render(shapes, has_tools))
        asked = _end(self._render(shapes, has_tools, add_generation_prompt=True))
        if asked != closed:
            return GenerationPrompt(asked, self.common_start(closed, asked))
        if self._reads_the_flag(has_tools):
            return GenerationPrompt(asked, len(asked))  # the model goes on where the last message ends
        header = self._header_that_is_always_written(has_tools)
        if header and asked.endswith(header):
            return GenerationPrompt(asked, len(asked) - len(header))
        # What such a template writes before an answer is its header; but white space is the model's to write.
        answered = _before(self._render((*shapes, _ANSWER), has_tools), len(shapes))
        shared = self.common_start(asked, answered)
        if answered[shared:].strip():
            return GenerationPrompt(answered, shared)
        return GenerationPrompt(asked, 0 if shapes[-1].role is Role.USER else len(asked))

    def _reads_the_flag(self, has_tools: bool) -> bool:
        """Whether `add_generation_prompt` makes a difference after a question."""
        try:
            closed = self._render((_USER,), has_tools)
            return closed != self._render((_USER,), has_tools, add_generation_prompt=True)
        except TemplateError:
            return False

    def _header_that_is_always_written(self, has_tools: bool) -> str:
        """The header that a template writes behind every conversation, whatever `add_generation_prompt` says: what
        stands behind the last answer and not between an answer and the next question. "" if it does not."""
        try:
            end = _end(self._render((_USER, _ANSWER), has_tools))
            between = _before(self._render((_USER, _ANSWER, _USER), has_tools), 2)
            asked = _end(self._render((_USER,), has_tools))
            answered = _before(self._render((_USER, _ANSWER), has_tools), 1)
        except TemplateError:
            return ""
        header = end[self.common_start(end, between) :]
        return header if answered.startswith(asked) and asked.endswith(header) else ""

    def _render(self, shapes: Sequence[_Shape], has_tools: bool, *, add_generation_prompt: bool = False) -> TrackedStr:
        messages = tracked_messages([shape.message() for shape in shapes], self._template)
        tools = tracked_tools([PROBED_TOOL]) if has_tools else None
        return self._template.render(messages, tools, add_generation_prompt=add_generation_prompt)


def _contexts(messages: Sequence[Message]) -> Iterator[tuple[int, tuple[_Shape, ...]]]:
    """The number of each of an assistant's messages, and the shapes of what a template may look at for its prompt.

    That is the system's message, a plain round for all earlier ones, the last questions, and of the calls since then
    the last two with two results each.
    """
    system: tuple[_Shape, ...] = ()
    earlier: tuple[_Shape, ...] = ()
    questions: tuple[_Shape, ...] = ()
    rounds: tuple[tuple[_Shape, ...], ...] = ()
    for number, message in enumerate(messages):
        shape = _Shape.of(message)
        if message.role is Role.ASSISTANT:
            yield number, (*system, *earlier, *questions, *(each for one in rounds for each in one))
            rounds = (*rounds[-1:], (shape,))
        elif message.role is Role.TOOL and rounds:
            rounds = (*rounds[:-1], (*rounds[-1][:2], shape))
        elif number == 0 and message.role is Role.SYSTEM:
            system = (shape,)
        else:
            if rounds:
                earlier, questions, rounds = (_USER, _ANSWER), (), ()
            questions = (*questions[-1:], shape)


def _end(text: TrackedStr) -> str:
    """What the template writes behind the last text of a conversation."""
    length = 0
    for run_length, origin in reversed(text.runs):
        if origin is not None and origin.field:
            break
        length += run_length
    return str.__getitem__(text, slice(len(text) - length, None))


def _before(text: TrackedStr, message: int) -> str:
    """What the template writes before the first text of a message, behind the text before that."""
    start = end = 0
    for length, origin in text.runs:
        if origin is not None and origin.field:
            if origin.message == message:
                return str.__getitem__(text, slice(start, end))
            start = end + length
        end += length
    raise TemplateError("the template does not write a plain answer")
