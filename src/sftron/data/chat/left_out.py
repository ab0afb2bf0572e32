"""What a chat template leaves out of a conversation, or adds to it: counted, or refused if roles would be wrong."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from sftron.data.chat.template import ChatTemplate, TemplateError
from sftron.data.chat.tracked_text import CONVERSATION, TrackedStr
from sftron.data.formats.messages import (
    CALL_FIELDS,
    CLOSES_REASONING,
    OPENS_REASONING,
    REASONING_FIELDS,
    reasoning_spans,
)
from sftron.data.types import Conversation, Role

_KNOWN_KEYS = {*REASONING_FIELDS, *CALL_FIELDS, "tool_call_id", "name", "id"}
"""Keys of messages that are checked elsewhere or do not affect training."""
_MARKED_TEXT = "\U0010f7a3 a text that nobody else writes \U0010f7a3"
_TAGS = re.compile("</?think>")

_Pieces = Sequence[tuple[str, Role]]
"""The written parts of a content, and their roles."""


def find_left_out(text: TrackedStr, conversation: Conversation, template: ChatTemplate) -> tuple[str, ...]:
    """Returns what `text`, the rendering, lacks of the conversation: role and field, such as "assistant reasoning".

    Raises TemplateError if the template does not write an answer's tool calls, or writes a content without its origin.
    """
    written: dict[int, set[str]] = defaultdict(set)
    contents: dict[int, list[tuple[str, Role]]] = defaultdict(list)
    end = 0
    for length, origin in text.spans:
        start, end = end, end + length
        if origin is not None and origin.field:
            written[origin.message].add(origin.field.partition(".")[0])
            if origin.field == "content":
                contents[origin.message].append((str.__getitem__(text, slice(start, end)), origin.role))
    left_out = ["tools"] if conversation.tools and "tools" not in written[CONVERSATION] else []
    for index, message in enumerate(conversation.messages):
        names = written[index]
        content, role = message.content or "", message.role.name.lower()
        if "content" not in names and content.strip():
            _require_left_out(conversation, index, template)
            left_out.append(f"{role} content")
        elif _is_cut(content, contents[index]):
            left_out.append(f"{role} content in part")
        if any(message.fields.get(name) and name not in names for name in CALL_FIELDS):
            raise TemplateError(
                f"the template does not write the tool calls of message {index + 1} ({role}); use one that does "
                "(tokenizer.chat_template: hermes, or FILE)"
            )
        if message.role is Role.ASSISTANT:
            lacks_field = any(message.fields.get(name) for name in REASONING_FIELDS) and not names & {*REASONING_FIELDS}
            if lacks_field or ("content" in names and _lacks_reasoning(content, contents[index])):
                left_out.append("assistant reasoning")
    for message in conversation.messages:
        # A template cannot read a key whose name it does not contain.
        unread = [name for name in message.fields.keys() - _KNOWN_KEYS if name not in template.source]
        left_out += [f"{message.role.name.lower()} key {name}" for name in unread]
    return tuple(left_out)


def has_second_thought(text: TrackedStr, conversation: Conversation) -> bool:
    """Returns whether the template writes a tag of reasoning before a content that has the same tag itself.

    Some templates write empty reasoning before every content, and read reasoning only from a field.
    """
    template, before, current, end = "", "", CONVERSATION, 0
    for length, origin in text.spans:
        start, end = end, end + length
        piece = str.__getitem__(text, slice(start, end))
        if origin is None or not origin.field:
            template += piece
            continue
        if origin.message != current:
            before, template, current = template, "", origin.message
        else:
            before, template = before + template, ""
        is_thought = origin.field == "content" and origin.role is Role.REASONING
        if is_thought and any(tag in before and tag in piece for tag in (OPENS_REASONING, CLOSES_REASONING)):
            return True
    return False


def _lacks_reasoning(content: str, pieces: _Pieces) -> bool:
    """Returns whether the template drops all reasoning in a content; as JSON, a whole content has a single role."""
    thoughts = "".join(content[start:end] for start, end in reasoning_spans(content))
    is_whole = sum(len(piece) for piece, _ in pieces) >= len(content.strip())
    return bool(_TAGS.sub("", thoughts).strip()) and not is_whole and not _has_thought(pieces)


def _has_thought(pieces: _Pieces) -> bool:
    return any(role is Role.REASONING and piece.strip() for piece, role in pieces)


def _is_cut(content: str, pieces: _Pieces) -> bool:
    """Returns whether a written content lacks more than white space and the tags of reasoning."""
    written = "".join(piece for piece, _ in pieces)
    if len(written) >= len(content.strip()):
        return False
    if pieces and not _has_thought(pieces):
        for start, end in reversed(reasoning_spans(content)):  # missing reasoning is counted separately
            content = content[:start] + content[end:]
    num_written, num_given = (len("".join(_TAGS.sub("", each).split())) for each in (written, content))
    return num_written < num_given


def _require_left_out(conversation: Conversation, message: int, template: ChatTemplate) -> None:
    """Raises TemplateError if the template writes a content that was not found, but without its origin.

    To detect this, the content is replaced with a unique one and the conversation is rendered again. If that content is
    found, the template omitted the original because of what it says: SmolLM3's omits "/no_think" from a system message.
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
        raise TemplateError(f"the template rewrites the {name}, so sftron cannot trace its text; give another template")
