"""Generation prompts: the text that a chat template writes before an answer at inference.

The model generates everything after it. Most templates append the same header to every conversation
(`ChatTemplate.has_constant_header`). It is rendered once, and then looked for in the text before each answer, so the
work is linear in the number of turns.

If a header may depend on the conversation, or does not occur exactly once before an answer, it is rendered from the
messages before the answer. This takes one more rendering per answer, so it is quadratic in the number of turns.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from sftron.data.chat.control_tokens import ControlTokens
from sftron.data.chat.template import PROBE_TOOL, ChatTemplate, TemplateError, probe
from sftron.data.chat.tracked_text import TrackedStr
from sftron.data.types import Conversation, Message, Role

_WORD = re.compile(r" ?<[^<>\s]*>| ?[^\s<]+| ?<|[^\S ]+| ")
"""Matches a tag, a word, or white space. A space is part of the word after it, as in the tokens of most models."""


class GenerationPrompt(NamedTuple):
    """The template's text from the end of the last message before an answer to the start of the generated text."""

    text: str
    header_start: int
    """The number of leading characters that close the preceding message; the answer's header follows them."""

    @property
    def header(self) -> str:
        """The header alone; "" if the text that closes the message before also serves as the header ("[/INST]")."""
        return self.text[self.header_start :] if self.header_start else ""


_USER, _ANSWER = Message(Role.USER, "Hi"), Message(Role.ASSISTANT, "Hi")
_Tools = Sequence[Mapping[str, Any]]


class GenerationPrompts:
    """The generation prompts of one template."""

    def __init__(self, template: ChatTemplate, control: ControlTokens) -> None:
        self.template, self.control = template, control
        self.header, self.reads_flag = cache(self._find_header), cache(self._find_flag)
        self._unconditional_header = cache(self._find_unconditional_header)

    def position_of_header(self, written: str, has_tools: bool) -> int:
        """Returns the position of the header, or of as many of its first words as occur, in a text of the template.

        It is -1 unless they are in the text exactly once.
        """
        words = header = self.header(has_tools)
        if header and header not in written:
            first_word = re.escape(next(self._words(header)))
            starts = [match.start() for match in re.finditer(first_word, written)]
            words = header[: max((self.common_start(header, written[start:]) for start in starts), default=0)]
        return written.index(words) if words.strip() and written.count(words) == 1 else -1

    def before(self, conversation: Conversation, message: int) -> GenerationPrompt | None:
        """Renders the messages before an answer, and returns the prompt; None if the template rejects them."""
        try:
            return self._rendered(conversation.messages[:message], conversation.tools)
        except TemplateError:
            return None

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
        followed = self._render((*messages, _ANSWER), tools)
        # A question that ends in more than an answer does ends in the header; the model generates all after it.
        num_closing = self.common_start(prompt, _end(followed))
        if messages[-1].role is Role.USER and prompt[num_closing:].strip():
            return GenerationPrompt(prompt, num_closing)
        # Otherwise what such a template writes before an answer is the header; the model generates its white space.
        answered = _before(followed, len(messages))
        shared = self.common_start(prompt, answered)
        if answered[shared:].strip():
            return GenerationPrompt(answered, shared)
        return GenerationPrompt(prompt, 0 if messages[-1].role is Role.USER else len(prompt))

    def _find_header(self, has_tools: bool) -> str:
        """Returns the header after a plain question; "" if there is none, or the template rejects the question."""
        try:
            return self._rendered((_USER,), _probe_tools(has_tools)).header
        except TemplateError:
            return ""

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

    def end_of_rounds(self) -> str:
        """Returns what the template writes after every answer, whether a question follows or not; "" if it rejects the
        probe.

        The header of the question is not part of it.
        """
        try:
            text = self._render((_USER, _ANSWER, _USER, _ANSWER), ())
            end, between = _end(text), _before(text, 2)
        except TemplateError:
            return ""
        return end[: self.common_start(end, between)]

    def _render(self, messages: Sequence[Message], tools: _Tools, *, add_generation_prompt: bool = False) -> TrackedStr:
        return self.template.render_conversation(probe(messages, tools), add_generation_prompt=add_generation_prompt)


def _probe_tools(has_tools: bool) -> _Tools:
    return (PROBE_TOOL,) if has_tools else ()


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
