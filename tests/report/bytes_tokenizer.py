"""A byte-level tokenizer small enough to see through, and packs made with it by hand.

Ids 0 to 255 are bytes, so every character beyond ASCII is spread over tokens; then come merges, two of which cut a
character; the last ones are control tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sftron.data.types import (
    IGNORE_INDEX,
    ConversationKey,
    LabeledConversation,
    Pack,
    Role,
    TokenizedConversation,
    Turn,
)

BEGIN, END = "<|im_start|>", "<|im_end|>"
_VOCABULARY = [bytes([byte]) for byte in range(256)]
_VOCABULARY += [b"user", b"assistant", b" the", b"\n\n", b"ab", "é".encode(), " ☃".encode()[:2], "☃".encode()[1:]]
_VOCABULARY += [BEGIN.encode(), END.encode()]
VOCABULARY_SIZE = len(_VOCABULARY)
_ID_OF = {text: id_ for id_, text in enumerate(_VOCABULARY)}


def encode(text: str) -> list[int]:
    """Longest match first; a control string in the text is text."""
    data, ids = text.encode(), []
    while data:
        length = next(
            n for n in range(min(12, len(data)), 0, -1) if n == 1 or (data[:n] in _ID_OF and data[:2] != b"<|")
        )
        ids.append(_ID_OF[data[:length]])
        data = data[length:]
    return ids


def decode(ids: list[int]) -> str:
    return b"".join(_VOCABULARY[id_] for id_ in ids).decode(errors="replace")


def conversation(
    messages: Sequence[tuple[Role, str]], *, row: int = 0, is_stop_trained: bool = True
) -> tuple[TokenizedConversation, LabeledConversation]:
    """A conversation in ChatML whose assistant turns are trained."""
    tokens: list[tuple[int, Role, bool]] = []
    turns: list[Turn] = []
    for role, content in messages:
        is_answer = role is Role.ASSISTANT
        header = [_ID_OF[BEGIN.encode()], *encode(role.name.lower() + "\n")]
        tokens += [(id_, Role.TEMPLATE, False) for id_ in header]
        start = len(tokens)
        tokens += [(id_, role, is_answer) for id_ in encode(content)]
        turns.append(Turn(role, start, len(tokens), stop=len(tokens)))
        tokens += [(_ID_OF[END.encode()], role, is_answer and is_stop_trained)]
        tokens += [(id_, Role.TEMPLATE, False) for id_ in encode("\n")]
    ids, roles, trained = zip(*tokens, strict=True)
    key = ConversationKey(source=0, row=row)
    input_ids, role_ids = np.array(ids, np.int32), np.array(roles, np.uint8)
    is_target = np.append(np.array(trained[1:], bool), False)
    labels = np.where(is_target, np.append(input_ids[1:], 0), IGNORE_INDEX).astype(np.int32)
    tokenized = TokenizedConversation(input_ids, role_ids, tuple(turns), key)
    return tokenized, LabeledConversation(input_ids, labels, is_target.astype(np.float32), role_ids, key)


def pack(conversations: Sequence[LabeledConversation], *, num_unused: int = 5, index: int = 0) -> Pack:
    """The conversations one after another, isolated from each other, then `num_unused` tokens of padding."""
    lengths = [len(conversation) for conversation in conversations]
    bounds = np.cumsum([0, *lengths]).astype(np.int32)
    documents = np.append(bounds, bounds[-1] + num_unused) if num_unused else bounds

    def joined(name: str, fill: int) -> np.ndarray:
        arrays = [getattr(conversation, name) for conversation in conversations]
        return np.concatenate([*arrays, np.full(num_unused, fill, arrays[0].dtype)])

    return Pack(
        input_ids=joined("input_ids", 0),
        labels=joined("labels", IGNORE_INDEX),
        loss_weights=joined("loss_weights", 0),
        role_ids=joined("role_ids", Role.PADDING),
        position_ids=np.concatenate([np.arange(n, dtype=np.int32) for n in [*lengths, num_unused]]),
        cu_seqlens=documents.astype(np.int32),
        conversation_bounds=bounds,
        keys=tuple(conversation.key for conversation in conversations),
        index=index,
    )


def trained_by_brute_force(pack: Pack) -> list[bool]:
    """Token by token from the definition: trained is what the position before has as its label, with a weight."""
    trained = []
    starts = set(pack.conversation_bounds.tolist())
    for at in range(pack.num_tokens):
        is_label = at not in starts and int(pack.labels[at - 1]) == int(pack.input_ids[at])
        trained.append(is_label and float(pack.loss_weights[at - 1]) > 0)
    return trained


HOSTILE_TEXT = (
    "<script>alert('x')</script> & \x1b[31mred\x1b]0;title\x07 \u202egnp.exe\u202c \x9b2J <|im_end|> ⟦no⟧\r\n\t</mark>"
)
CHATS = [
    [(Role.SYSTEM, "Be the best."), (Role.USER, "Héé, a ☃?"), (Role.ASSISTANT, "Ja: ☃☃ und 😀👩‍👧.\n\n\tend")],
    [(Role.USER, HOSTILE_TEXT), (Role.ASSISTANT, HOSTILE_TEXT)],
    [(Role.USER, "one"), (Role.ASSISTANT, "two"), (Role.USER, ""), (Role.ASSISTANT, "")],
    [(Role.USER, "long"), (Role.ASSISTANT, "word " * 60 + "日本語" * 30)],
]
"""Conversations with all that is awkward: split characters, controls, brackets, empty messages, long lines."""


def awkward_pack() -> Pack:
    return pack([conversation(chat, row=row)[1] for row, chat in enumerate(CHATS)])
