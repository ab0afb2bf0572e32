"""What a chat template is given for a conversation: the dictionaries that apply_chat_template passes on."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers.utils import chat_template_utils

from sftron.data.chat.template import ChatTemplate
from sftron.data.chat.tracked_text import CONVERSATION, Origin, TrackedStr, track
from sftron.data.types import Message, Role

TEMPLATE_ROLE_NAMES = {Role.SYSTEM: "system", Role.USER: "user", Role.ASSISTANT: "assistant", Role.TOOL: "tool"}
"""How templates spell a role; from this table alone, so that no text of the data gets into a header."""

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
TOOL_CALL_FIELDS = ("tool_calls",)

_INLINE_REASONING = re.compile(r"\s*<think>.*?</think>\s*", re.DOTALL)

_alias_reasoning: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] = getattr(
    chat_template_utils, "_alias_reasoning_fields", lambda messages: messages
)
"""Newer versions of transformers give a message's reasoning under every name that templates read; as the installed."""


def plain_messages(messages: Sequence[Message], template: ChatTemplate) -> list[dict[str, Any]]:
    """Messages as apply_chat_template takes them for this template."""
    return [
        {"role": _role_name(message), **_content(message, message.content, template), **_fields(message, template)}
        for message in messages
    ]


def tracked_messages(messages: Sequence[Message], template: ChatTemplate) -> list[dict[str, Any]]:
    """The same with every text remembering where it comes from."""
    given = []
    for index, message in enumerate(messages):
        content = _content(message, _tracked_content(message, index), template)
        fields = _fields(message, template)
        tracked = {name: track(value, _field_origin(message, index, name)) for name, value in fields.items()}
        given.append({"role": _role_name(message), **content, **tracked})
    return _alias_reasoning(given) if any(message.fields for message in messages) else given


def tracked_tools(tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]] | None:
    return track(list(tools), Origin(CONVERSATION, "tools", Role.SYSTEM)) if tools else None


def _role_name(message: Message) -> str:
    return message.role_name or TEMPLATE_ROLE_NAMES[message.role]


def _content(message: Message, content: str | None, template: ChatTemplate) -> dict[str, Any]:
    """Absent rather than None, as apply_chat_template drops what is None; parts stay parts where they are read."""
    if content is None:
        return {"content": ""} if template.needs_content else {}
    if not (message.parts and template.reads_parts):
        return {"content": content}
    parts, start = [], 0
    for part in message.parts:
        parts.append({"type": "text", "text": content[start : start + len(part)]})
        start += len(part) + 1  # the newline that joins the parts
    return {"content": parts}


def _fields(message: Message, template: ChatTemplate) -> Mapping[str, Any]:
    """With the arguments of tool calls as an object where the template takes nothing else, and the data has JSON."""
    calls = message.fields.get("tool_calls")
    if not calls or not template.needs_arguments_as_object:
        return message.fields
    return {**message.fields, "tool_calls": [_with_parsed_arguments(call) for call in calls]}


def _with_parsed_arguments(call: Any) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(arguments := call.get("arguments"), str):
        try:
            return {**call, "arguments": json.loads(arguments)}
        except ValueError:
            return call  # the template refuses it with its own words
    return {**call, "function": _with_parsed_arguments(call["function"])} if "function" in call else call


def _tracked_content(message: Message, index: int) -> TrackedStr | None:
    if message.content is None:
        return None
    origin = Origin(index, "content", message.role)
    is_assistant = message.role is Role.ASSISTANT and "</think>" in message.content
    reasoning = _INLINE_REASONING.match(message.content) if is_assistant else None
    if reasoning is None:
        return TrackedStr.of(message.content, origin)
    end = reasoning.end()
    runs = ((end, origin._replace(role=Role.REASONING)), (len(message.content) - end, origin))
    return TrackedStr.with_runs(message.content, runs)


def _field_origin(message: Message, index: int, name: str) -> Origin:
    if message.role is not Role.ASSISTANT:
        return Origin(index, name, message.role)
    role = Role.REASONING if name in REASONING_FIELDS else Role.TOOL_CALL if name in TOOL_CALL_FIELDS else Role.TEMPLATE
    return Origin(index, name, role)
