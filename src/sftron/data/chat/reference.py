"""The reference for ids and texts: transformers' own `apply_chat_template`."""

from __future__ import annotations

from typing import Any

from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.types import Conversation


def reference_ids(chat_tokenizer: ChatTokenizer, conversation: Conversation, **options: Any) -> list[int]:
    """Returns the ids of the tokenizer's own apply_chat_template with these options."""
    return apply_chat_template(chat_tokenizer, conversation, **options)["input_ids"]


def apply_chat_template(chat_tokenizer: ChatTokenizer, conversation: Conversation, **options: Any) -> Any:
    template = chat_tokenizer.template_for(conversation)
    return chat_tokenizer.tokenizer.apply_chat_template(
        template.plain_messages(conversation.messages),
        tools=[dict(tool) for tool in conversation.tools] or None,
        chat_template=template.source,
        return_dict=True,
        **template.kwargs,
        **options,
    )
