"""Which of an assistant's reasoning the chat template gets."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Literal

from sftron.data.chat.template_input import REASONING_FIELDS
from sftron.data.formats.row_reader import refusal
from sftron.data.types import Conversation, Message, Role

ReasoningPolicy = Literal["keep", "last", "strip"]

_INLINE = re.compile(r"\s*<think>.*?</think>\s*", re.DOTALL)


def apply_reasoning_policy(conversation: Conversation, policy: ReasoningPolicy) -> Conversation:
    """keep: the same conversation. strip: without the reasoning of any assistant message, be it in fields or a block
    <think>...</think> that begins its content. last: that of the last assistant message is kept.

    Raises DataError where a message consists of nothing else.
    """
    numbers = [number for number, message in enumerate(conversation.messages) if message.role is Role.ASSISTANT]
    if policy == "last":
        numbers = numbers[:-1]
    if policy == "keep" or not numbers:
        return conversation
    messages = list(conversation.messages)
    for number in numbers:
        messages[number] = stripped = _without_reasoning(message := messages[number])
        if stripped is not message and not stripped.content and not stripped.fields.get("tool_calls"):
            problem = f"the assistant's message {number + 1} is nothing but reasoning, and data.reasoning is {policy}"
            raise refusal(conversation.location, "nothing_but_reasoning", f"{problem}; keep it, or remove the row")
    return replace(conversation, messages=tuple(messages))


def _without_reasoning(message: Message) -> Message:
    fields = {key: value for key, value in message.fields.items() if key not in REASONING_FIELDS}
    block = _INLINE.match(message.content or "")
    if block is None:
        return message if len(fields) == len(message.fields) else replace(message, fields=fields)
    content = (message.content or "")[block.end() :]
    return replace(message, fields=fields, content=content, parts=_without_start(message.parts, block.end()))


def _without_start(parts: tuple[str, ...], length: int) -> tuple[str, ...]:
    """Parts of a content that loses its first `length` characters; the content is the parts, joined by newlines."""
    for number, part in enumerate(parts):
        if length <= len(part):
            return (part[length:], *parts[number + 1 :])
        length -= len(part) + 1
    return ()
