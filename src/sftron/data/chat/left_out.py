"""What a chat template does not write of a conversation: counted, or refused where roles would be wrong."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from sftron.data.chat.template import ChatTemplate, TemplateError
from sftron.data.chat.tracked_text import CONVERSATION, TrackedStr
from sftron.data.formats.messages import REASONING_FIELDS
from sftron.data.types import Conversation, Role

_KNOWN_KEYS = {*REASONING_FIELDS, "tool_calls", "tool_call_id", "name", "id"}
"""Keys of messages that are checked elsewhere or do not affect training."""
_MARKED_TEXT = "\U0010f7a3 a text that nobody else writes \U0010f7a3"

_Pieces = Sequence[tuple[str, Role]]
"""The written parts of a content, and their roles."""


def find_left_out(text: TrackedStr, conversation: Conversation, template: ChatTemplate) -> tuple[str, ...]:
    """Returns what `text`, the rendering, lacks of the conversation: role and field, such as "assistant reasoning".

    Raises TemplateError if the template does not write an answer's tool calls, or writes a content without its origin.
    """
    written: dict[int, set[tuple[str, Role]]] = defaultdict(set)
    contents: dict[int, list[tuple[str, Role]]] = defaultdict(list)
    end = 0
    for length, origin in text.spans:
        start, end = end, end + length
        if origin is not None and origin.field:
            written[origin.message].add((origin.field.partition(".")[0], origin.role))
            if origin.field == "content":
                contents[origin.message].append((str.__getitem__(text, slice(start, end)), origin.role))
    left_out = ["tools"] if conversation.tools and not written[CONVERSATION] else []
    for index, message in enumerate(conversation.messages):
        names, roles = {name for name, _ in written[index]}, {role for _, role in written[index]}
        content, role = message.content or "", message.role.name.lower()
        if "content" not in names and content.strip():
            _require_left_out(conversation, index, template)
            left_out.append(f"{role} content")
        elif _is_cut(content, contents[index]):
            left_out.append(f"{role} content in part")
        if message.fields.get("tool_calls") and "tool_calls" not in names:
            raise TemplateError(
                f"the template does not write the tool calls of message {index + 1} ({role}); take one that does "
                "(tokenizer.chat_template: hermes, or FILE)"
            )
        if message.role is Role.ASSISTANT and Role.REASONING not in roles:
            is_inline = "</think>" in content and "content" in names
            if is_inline or any(message.fields.get(name) for name in REASONING_FIELDS):
                left_out.append("assistant reasoning")
    for message in conversation.messages:
        # A template cannot read a key whose name it does not contain.
        unread = [name for name in message.fields.keys() - _KNOWN_KEYS if name not in template.source]
        left_out += [f"{message.role.name.lower()} key {name}" for name in unread]
    return tuple(left_out)


def _is_cut(content: str, pieces: _Pieces) -> bool:
    """Returns whether a written content lacks more than white space and the tags of reasoning."""
    written = "".join(piece for piece, _ in pieces)
    if len(written) >= len(content.strip()):
        return False
    if pieces and all(role is not Role.REASONING for _, role in pieces):
        content = content.rpartition("</think>")[2]  # missing reasoning is counted separately
    num_written, num_given = (len("".join(re.sub("</?think>", "", each).split())) for each in (written, content))
    return num_written < num_given


def _require_left_out(conversation: Conversation, message: int, template: ChatTemplate) -> None:
    """Raises TemplateError if the template does write a content that was not found, but without its origin.

    To detect this, the content is replaced with a unique one and the conversation is rendered again. If that is then
    found, the template leaves out the content for what it is: SmolLM3's omits "/no_think" from a system message.
    """
    messages = list(conversation.messages)
    messages[message] = replace(messages[message], content=_MARKED_TEXT, parts=())
    try:
        text = template.render_conversation(replace(conversation, messages=tuple(messages)))
        is_lost = _MARKED_TEXT in text and not any(
            origin is not None and (origin.message, origin.field) == (message, "content") for _, origin in text.spans
        )
    except TemplateError:
        is_lost = True
    if is_lost:
        name = f"{messages[message].role.name.lower()} content of message {message + 1}"
        raise TemplateError(f"the template writes the {name} in a way that cannot be followed")
