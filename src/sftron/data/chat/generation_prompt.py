"""Generation prompts: the text that a chat template writes before an answer at inference.

The model generates everything after it. Most templates append the same header to every conversation
(`ChatTemplate.has_constant_header`). Only the text that closes the message before can then vary, and the prompt is
found by rendering a short conversation of the same shape: the same roles, and the same fields of messages absent, empty
or filled. Each shape is rendered once, so further conversations of a known shape, of any length, cost no rendering.

A header that may depend on the texts or the number of messages, and a prompt that is not found in the rendered
conversation, are rendered from the messages before the answer. This is one more rendering for each answer, so it is
quadratic in the number of turns.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from sftron.data.chat.control_tokens import ControlTokens
from sftron.data.chat.template import PROBE_ID, PROBE_TOOL, ChatTemplate, TemplateError, probe
from sftron.data.chat.tracked_text import TrackedStr
from sftron.data.types import Conversation, Message, Role

_WORD = re.compile(r" ?<[^<>\s]*>| ?[^\s<]+| ?<|[^\S ]+| ")
"""Matches a tag, a word, or white space. A space is part of the word after it, as in the tokens of most models."""


class GenerationPrompt(NamedTuple):
    """The template's text from the end of the last message before an answer to the start of the generated text."""

    text: str
    header_start: int
    """The number of its first characters that close the message before; the answer's header follows them."""

    @property
    def header(self) -> str:
        """The header alone; "" if the text that closes the message before also serves as the header ("[/INST]")."""
        return self.text[self.header_start :] if self.header_start else ""


_Shape = tuple[str, Message]
"""A message with its texts replaced by short ones, on which alone a template's text may depend; and its repr, a key."""


def _shape(message: Message) -> _Shape:
    content = message.content
    if content:
        content = " " if content.isspace() else "Hi"
    fields = {name: _probe_field(name, value) for name, value in message.fields.items() if value}
    parts = (content,) if message.parts and content is not None else ()
    shape = Message(message.role, content, fields, parts=parts, role_name=message.role_name)
    return repr(shape), shape


def _probe_field(name: str, value: Any) -> object:
    if name != "tool_calls":
        return PROBE_ID if name in ("tool_call_id", "id") else "Hi"
    calls = []
    for call in value[:2]:
        function = call.get("function")
        arguments = (call if function is None else function).get("arguments")
        short = {"name": "f", "arguments": '{"x": "y"}' if isinstance(arguments, str) else {"x": "y"}}
        calls.append({"type": "function", "id": PROBE_ID, **(short if function is None else {"function": short})})
    return calls


_USER, _ANSWER = Message(Role.USER, "Hi"), Message(Role.ASSISTANT, "Hi")
_Tools = Sequence[Mapping[str, Any]]


class GenerationPrompts:
    """The generation prompts of one template."""

    def __init__(self, template: ChatTemplate, control: ControlTokens) -> None:
        self.template, self.control = template, control
        self._known: dict[tuple[object, ...], GenerationPrompt | None] = {}
        self.reads_flag, self._unconditional_header = cache(self._find_flag), cache(self._find_unconditional_header)

    def of(self, conversation: Conversation) -> dict[int, GenerationPrompt | None]:
        """Returns the prompt of the shape before each of the assistant's messages, by index.

        It is None if the template rejects the shape.
        """
        has_tools = bool(conversation.tools)
        return {number: self._of_shapes(shapes, has_tools) for number, shapes in _contexts(conversation.messages)}

    def determines(self, prompt: GenerationPrompt | None, written: str) -> bool:
        """Returns whether the prompt of a shape shows where the model begins in `written`, the text before an answer.

        This is so if the header is always the same, and `written` has it, or its first words, after the text that
        closes the message before, and nowhere else.
        """
        if prompt is None or not self.template.has_constant_header:
            return False
        header = prompt.text[prompt.header_start : self.common_start(prompt.text, written)]
        return bool(header.strip()) and written.count(header) == 1

    def before(self, conversation: Conversation, message: int) -> GenerationPrompt | None:
        """Renders the messages before an answer, and returns the prompt; None if the template rejects them."""
        try:
            return self._rendered(conversation.messages[:message], conversation.tools)
        except TemplateError:
            return None

    def after_question(self, has_tools: bool) -> GenerationPrompt | None:
        return self._of_shapes((_shape(_USER),), has_tools)

    def common_start(self, left: str, right: str) -> int:
        """Returns the length of the common prefix, in characters, of whole words of `left`.

        A word is a control token, a tag, a word or white space, so `<think>` and `<tool_call>` share nothing. If one
        text is a prefix of the other, the common prefix is that text, even if it ends within a word.
        """
        if right.startswith(left) or left.startswith(right):
            return min(len(left), len(right))
        length = 0
        for one, other in zip(self._words(left), self._words(right), strict=False):
            if one == other or (one.isspace() and one != " " and other.startswith(one)):
                length += len(one)
            if one != other:
                break
        return length

    def _words(self, text: str) -> Iterator[str]:
        start = 0
        for position, content in self.control.find(text):
            yield from _WORD.findall(text[start:position])
            yield content
            start = position + len(content)
        yield from _WORD.findall(text[start:])

    def _of_shapes(self, shapes: tuple[_Shape, ...], has_tools: bool) -> GenerationPrompt | None:
        key = (has_tools, *(name for name, _ in shapes))
        if key not in self._known:
            try:
                self._known[key] = self._rendered([message for _, message in shapes], _probe_tools(has_tools))
            except TemplateError:
                self._known[key] = None
        return self._known[key]

    def _rendered(self, messages: Sequence[Message], tools: _Tools) -> GenerationPrompt:
        closed = _end(self._render(messages, tools))
        prompt = _end(self._render(messages, tools, add_generation_prompt=True))
        if prompt != closed:
            return GenerationPrompt(prompt, self.common_start(closed, prompt))
        if self.reads_flag(bool(tools)):
            return GenerationPrompt(prompt, len(prompt))  # generation continues at the end of the last message
        header = self._unconditional_header(bool(tools))
        if header and prompt.endswith(header):
            return GenerationPrompt(prompt, len(prompt) - len(header))
        # What such a template writes before an answer is the header, except that the model generates white space.
        answered = _before(self._render((*messages, _ANSWER), tools), len(messages))
        shared = self.common_start(prompt, answered)
        if answered[shared:].strip():
            return GenerationPrompt(answered, shared)
        return GenerationPrompt(prompt, 0 if messages[-1].role is Role.USER else len(prompt))

    def _find_flag(self, has_tools: bool) -> bool:
        """Returns whether `add_generation_prompt` changes the text after a question."""
        tools = _probe_tools(has_tools)
        try:
            return self._render((_USER,), tools) != self._render((_USER,), tools, add_generation_prompt=True)
        except TemplateError:
            return False

    def _find_unconditional_header(self, has_tools: bool) -> str:
        """Returns the header that the template writes after every conversation, whatever `add_generation_prompt` is.

        Such a header, "" if there is none, follows the last answer, but not an answer before another question.
        """
        tools = _probe_tools(has_tools)
        try:
            end = _end(self._render((_USER, _ANSWER), tools))
            between = _before(self._render((_USER, _ANSWER, _USER), tools), 2)
            prompt = _end(self._render((_USER,), tools))
            answered = _before(self._render((_USER, _ANSWER), tools), 1)
        except TemplateError:
            return ""
        header = end[self.common_start(end, between) :]
        return header if answered.startswith(prompt) and prompt.endswith(header) else ""

    def _render(self, messages: Sequence[Message], tools: _Tools, *, add_generation_prompt: bool = False) -> TrackedStr:
        return self.template.render_conversation(probe(messages, tools), add_generation_prompt=add_generation_prompt)


def _probe_tools(has_tools: bool) -> _Tools:
    return (PROBE_TOOL,) if has_tools else ()


def _contexts(messages: Sequence[Message]) -> Iterator[tuple[int, tuple[_Shape, ...]]]:
    """Yields the index of each of the assistant's messages, and the shapes on which its prompt may depend.

    These are the system message, one plain question and answer in place of all earlier rounds, the last two questions
    before the answer, and the last two tool calls since then, with at most two results each.
    """
    system: tuple[_Shape, ...] = ()
    earlier: tuple[_Shape, ...] = ()
    questions: tuple[_Shape, ...] = ()
    rounds: tuple[tuple[_Shape, ...], ...] = ()
    for number, message in enumerate(messages):
        shape = _shape(message)
        if message.role is Role.ASSISTANT:
            yield number, (*system, *earlier, *questions, *(each for one in rounds for each in one))
            rounds = (*rounds[-1:], (shape,))
        elif message.role is Role.TOOL and rounds:
            rounds = (*rounds[:-1], (*rounds[-1][:2], shape))
        elif number == 0 and message.role is Role.SYSTEM:
            system = (shape,)
        else:
            if rounds:
                earlier, questions, rounds = (_shape(_USER), _shape(_ANSWER)), (), ()
            questions = (*questions[-1:], shape)


def _end(text: TrackedStr) -> str:
    """Returns the template's text after the last text of a conversation."""
    length = 0
    for span_length, origin in reversed(text.spans):
        if origin is not None and origin.field:
            break
        length += span_length
    return str.__getitem__(text, slice(len(text) - length, None))


def _before(text: TrackedStr, message: int) -> str:
    """Returns the template's text between the first text of a message and the text of the conversation before it.

    Raises TemplateError if the message is not written.
    """
    start = end = 0
    for length, origin in text.spans:
        if origin is not None and origin.field:
            if origin.message == message:
                return str.__getitem__(text, slice(start, end))
            start = end + length
        end += length
    raise TemplateError("the template does not write a plain answer")
