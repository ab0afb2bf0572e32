"""What a chat template writes before an answer at inference, which is all that the model does not have to generate.

It is found with short conversations of the same shape as the one at hand: the roles, and which of the messages' fields
are absent, empty or filled. Each shape is rendered once, so a conversation of any length costs no rendering.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sftron.data.chat.control_tokens import ControlTokens
from sftron.data.chat.template import PROBE_ID, PROBE_TOOL, ChatTemplate, TemplateError
from sftron.data.chat.tracked_text import TrackedStr
from sftron.data.types import Conversation, ConversationKey, Message, Role

_WORD = re.compile(r" ?<[^<>\s]*>| ?[^\s<]+| ?<|[^\S ]+| ")
"""A tag, a word, or white space. A space belongs to the word after it, as in the tokens of most models."""


class GenerationPrompt(NamedTuple):
    """The text between the last text before an answer and the start of what the model generates."""

    text: str
    header_start: int
    """The number of its characters that close the message before; the answer's header follows."""

    @property
    def header(self) -> str:
        """The header by itself; "" where what closes the message before is all the header there is ("[/INST]")."""
        return self.text[self.header_start :] if self.header_start else ""


class _Shape(NamedTuple):
    """A message without its texts: all that a template may decide by."""

    key: str
    message: Message

    @classmethod
    def of(cls, message: Message) -> _Shape:
        content = message.content
        if content:
            content = " " if content.isspace() else "Hi"
        fields = {name: _probe_field(name, value) for name, value in message.fields.items() if value}
        parts = (content,) if message.parts and content is not None else ()
        probe = Message(message.role, content, fields, parts=parts, role_name=message.role_name)
        return cls(repr(probe), probe)


def _probe_field(name: str, value: Any) -> object:
    if name != "tool_calls":
        return PROBE_ID if name in ("tool_call_id", "id") else "Hi"
    calls = []
    for call in value[:2] if isinstance(value, Sequence) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        arguments = (function if isinstance(function, Mapping) else call).get("arguments")
        probe = {"name": "f", "arguments": '{"x": "y"}' if isinstance(arguments, str) else {"x": "y"}}
        calls.append({"type": "function", "id": PROBE_ID, **(probe if function is None else {"function": probe})})
    return calls


_USER, _ANSWER = _Shape.of(Message(Role.USER, "Hi")), _Shape.of(Message(Role.ASSISTANT, "Hi"))


class GenerationPrompts:
    """The generation prompts of one template."""

    def __init__(self, template: ChatTemplate, control: ControlTokens) -> None:
        self._template, self._control = template, control
        self._known: dict[tuple[object, ...], GenerationPrompt | None] = {}

    def of(self, conversation: Conversation) -> dict[int, GenerationPrompt | None]:
        """Returns the prompt before each of the assistant's messages, by their number.

        It is None where the template refuses the messages before.
        """
        has_tools = bool(conversation.tools)
        return {number: self._of_shapes(shapes, has_tools) for number, shapes in _contexts(conversation.messages)}

    def after_question(self, has_tools: bool) -> GenerationPrompt | None:
        return self._of_shapes((_USER,), has_tools)

    def common_start(self, left: str, right: str) -> int:
        """Returns the number of characters that both begin with, in whole words of `left`.

        A word is a control token, a tag, a word or white space: `<think>` and `<tool_call>` share nothing. Words may
        be divided where one text is the beginning of the other.
        """
        if right.startswith(left) or left.startswith(right):
            return min(len(left), len(right))
        length = 0
        for one, other in zip(self._words(left), self._words(right), strict=False):
            if one == other:
                length += len(one)
                continue
            if one.isspace() and one != " " and other.startswith(one):
                length += len(one)
            break
        return length

    def _words(self, text: str) -> Iterator[str]:
        start = 0
        for position, content in self._control.find(text):
            yield from _WORD.findall(text[start:position])
            yield content
            start = position + len(content)
        yield from _WORD.findall(text[start:])

    def _of_shapes(self, shapes: tuple[_Shape, ...], has_tools: bool) -> GenerationPrompt | None:
        key = (has_tools, *(shape.key for shape in shapes))
        if key not in self._known:
            try:
                self._known[key] = self._probed(shapes, has_tools)
            except TemplateError:
                self._known[key] = None
        return self._known[key]

    def _probed(self, shapes: tuple[_Shape, ...], has_tools: bool) -> GenerationPrompt:
        closed = _end(self._render(shapes, has_tools))
        prompt = _end(self._render(shapes, has_tools, add_generation_prompt=True))
        if prompt != closed:
            return GenerationPrompt(prompt, self.common_start(closed, prompt))
        if self._reads_flag(has_tools):
            return GenerationPrompt(prompt, len(prompt))  # generation continues where the last message ends
        header = self._unconditional_header(has_tools)
        if header and prompt.endswith(header):
            return GenerationPrompt(prompt, len(prompt) - len(header))
        # What such a template writes before an answer is its header, but the model generates white space.
        answered = _before(self._render((*shapes, _ANSWER), has_tools), len(shapes))
        shared = self.common_start(prompt, answered)
        if answered[shared:].strip():
            return GenerationPrompt(answered, shared)
        return GenerationPrompt(prompt, 0 if shapes[-1].message.role is Role.USER else len(prompt))

    def _reads_flag(self, has_tools: bool) -> bool:
        """Returns whether `add_generation_prompt` makes a difference after a question."""
        try:
            closed = self._render((_USER,), has_tools)
            return closed != self._render((_USER,), has_tools, add_generation_prompt=True)
        except TemplateError:
            return False

    def _unconditional_header(self, has_tools: bool) -> str:
        """Returns the header that a template writes after every conversation, whatever `add_generation_prompt` is.

        It follows the last answer, and does not come between an answer and the next question. "" if there is none.
        """
        try:
            end = _end(self._render((_USER, _ANSWER), has_tools))
            between = _before(self._render((_USER, _ANSWER, _USER), has_tools), 2)
            prompt = _end(self._render((_USER,), has_tools))
            answered = _before(self._render((_USER, _ANSWER), has_tools), 1)
        except TemplateError:
            return ""
        header = end[self.common_start(end, between) :]
        return header if answered.startswith(prompt) and prompt.endswith(header) else ""

    def _render(self, shapes: Sequence[_Shape], has_tools: bool, *, add_generation_prompt: bool = False) -> TrackedStr:
        messages = tuple(shape.message for shape in shapes)
        tools = (PROBE_TOOL,) if has_tools else ()
        conversation = Conversation(messages, ConversationKey(0, 0), "a probe", tools)
        return self._template.render_conversation(conversation, add_generation_prompt=add_generation_prompt)


def _contexts(messages: Sequence[Message]) -> Iterator[tuple[int, tuple[_Shape, ...]]]:
    """Yields the number of each of the assistant's messages, and the shapes of what may decide its prompt.

    These are the system's message, a plain round for all earlier ones, the last questions, and of the calls since then
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
    """Returns what the template writes after the last text of a conversation."""
    length = 0
    for span_length, origin in reversed(text.spans):
        if origin is not None and origin.field:
            break
        length += span_length
    return str.__getitem__(text, slice(len(text) - length, None))


def _before(text: TrackedStr, message: int) -> str:
    """Returns what the template writes before the first text of a message, after the text before that."""
    start = end = 0
    for length, origin in text.spans:
        if origin is not None and origin.field:
            if origin.message == message:
                return str.__getitem__(text, slice(start, end))
            start = end + length
        end += length
    raise TemplateError("the template does not write a plain answer")
