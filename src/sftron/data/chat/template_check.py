"""Law 1 on the user's own rows: our ids against the tokenizer's own apply_chat_template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sftron.data.chat.template_input import plain_messages
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.types import Conversation, DataError, Message, TokenizedConversation


def require_own_ids(chat_tokenizer: ChatTokenizer, conversation: Conversation, ours: TokenizedConversation) -> None:
    """Raises DataError showing the first difference.

    Text that spells a control token has to differ; such a conversation is compared without these strings.
    """
    if ours.holds_control_text:
        conversation = without_control_text(chat_tokenizer, conversation)
        ours = chat_tokenizer.encode(conversation)
    theirs = own_ids(chat_tokenizer, conversation)
    our_ids = ours.input_ids.tolist()
    if our_ids == theirs:
        return
    differing = (i for i, (a, b) in enumerate(zip(our_ids, theirs, strict=False)) if a != b)
    place = next(differing, min(len(our_ids), len(theirs)))
    decode = chat_tokenizer.decode
    raise DataError(
        f"{conversation.location}: the ids differ from apply_chat_template at token {place}: "
        f"ours {our_ids[place : place + 4]} {decode(our_ids[place : place + 4])!r}, "
        f"the tokenizer's {theirs[place : place + 4]} {decode(theirs[place : place + 4])!r}, "
        f"after {decode(our_ids[max(0, place - 8) : place])!r}. This tokenizer cannot be followed exactly; please "
        "report it with this message",
        reason="ids_differ",
    )


def own_ids(
    chat_tokenizer: ChatTokenizer, conversation: Conversation, *, add_generation_prompt: bool = False
) -> list[int]:
    """The ids that the tokenizer's own apply_chat_template gives."""
    template = chat_tokenizer.template_for(conversation)
    return chat_tokenizer.tokenizer.apply_chat_template(  # pyright: ignore[reportReturnType]
        plain_messages(conversation.messages, template),
        tools=[dict(tool) for tool in conversation.tools] or None,
        chat_template=template.source,
        add_generation_prompt=add_generation_prompt,
        tokenize=True,
        return_dict=False,
    )


def own_marks(chat_tokenizer: ChatTokenizer, conversation: Conversation) -> list[int]:
    """The tokens that the template's own `{% generation %}` marks give the model, as transformers has them."""
    template = chat_tokenizer.template_for(conversation)
    rendered = chat_tokenizer.tokenizer.apply_chat_template(
        plain_messages(conversation.messages, template),
        tools=[dict(tool) for tool in conversation.tools] or None,
        chat_template=template.source,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    return rendered["assistant_masks"]  # pyright: ignore[reportCallIssue, reportArgumentType, reportReturnType]


def without_control_text(chat_tokenizer: ChatTokenizer, conversation: Conversation) -> Conversation:
    """The conversation with a space for each string in it that spells a control token."""

    def cleaned(value: Any) -> Any:
        if isinstance(value, str):
            return chat_tokenizer.without_control_text(value)
        if isinstance(value, Mapping):
            return {cleaned(key): cleaned(item) for key, item in value.items()}
        return [cleaned(item) for item in value] if isinstance(value, (list, tuple)) else value

    def clean(message: Message) -> Message:
        parts = tuple(cleaned(part) for part in message.parts)
        content = "\n".join(parts) if parts else cleaned(message.content)
        return replace(message, content=content, parts=parts, fields=cleaned(message.fields))

    messages = tuple(clean(message) for message in conversation.messages)
    return replace(conversation, messages=messages, tools=tuple(cleaned(conversation.tools)))
