"""Law 1 on the user's own rows: our ids against the tokenizer's own apply_chat_template."""

from __future__ import annotations

from dataclasses import replace

from sftron.data.chat_tokenizer import TEMPLATE_ROLE_NAMES, ChatTokenizer
from sftron.data.types import Conversation, DataError, TokenizedConversation


def require_own_ids(chat_tokenizer: ChatTokenizer, conversation: Conversation, ours: TokenizedConversation) -> None:
    """Raises DataError showing the first difference.

    Text that spells a control token has to differ; such a conversation is compared without these strings.
    """
    if ours.holds_control_text:
        messages = tuple(
            replace(m, content=chat_tokenizer.without_control_text(m.content)) for m in conversation.messages
        )
        conversation = replace(conversation, messages=messages)
        ours = chat_tokenizer.encode(conversation)
    theirs: list[int] = chat_tokenizer.tokenizer.apply_chat_template(  # pyright: ignore[reportAssignmentType]
        [{"role": TEMPLATE_ROLE_NAMES[m.role], "content": m.content} for m in conversation.messages],
        chat_template=chat_tokenizer.template.source,
        tokenize=True,
        return_dict=False,
    )
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
