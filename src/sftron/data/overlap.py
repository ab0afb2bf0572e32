"""Conversations that are evaluated on, and in the training data all the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass

from sftron.data.prepare import Preparation
from sftron.data.types import Conversation, ConversationKey, DataError, TokenizedConversation

MAX_COMPARED_ROWS = 100_000
"""Rows of the training data, evenly spread: a few seconds at the start of a run."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """Rows of an evaluation set that are also trained on."""

    num_rows: int = 0
    locations: tuple[str, str] | None = None
    """Where the first one stands, in the evaluation set and in the training data."""


def content_digest(conversation: Conversation | TokenizedConversation) -> bytes:
    """Returns a hash that is the same for the same messages, whatever file, format or column they stand in.

    White space around a text does not count. Pretokenized rows are the same where their ids are.
    """
    if isinstance(conversation, TokenizedConversation):
        content = conversation.input_ids.tobytes()
    else:
        messages = [(each.role, (each.content or "").strip(), dict(each.fields)) for each in conversation.messages]
        content = json.dumps([messages, conversation.tools], sort_keys=True, default=dict).encode("utf-8", "replace")
    return hashlib.blake2b(content, digest_size=16).digest()


def overlaps(
    evaluated: Iterable[Preparation], training: Preparation, max_rows: int = MAX_COMPARED_ROWS
) -> tuple[list[Overlap], int]:
    """Returns, for each of `evaluated`, its overlap with `training`; and the number of training rows compared.

    These are all of up to max_rows, else so many, evenly spread; none of a stream. Rows that cannot be parsed are left
    out.
    """
    sets = [[(_digest(each, key), each.location(key)) for key in each.all_keys()] for each in evaluated]
    wanted = {digest for each in sets for digest, _ in each if digest}
    found: dict[bytes | None, ConversationKey] = {}
    num_rows = 0 if training.is_streamed else training.num_rows or 0
    num_compared = min(num_rows, max_rows)
    for number in range(num_compared):
        key = training.key(number * num_rows // num_compared)
        if (digest := _digest(training, key)) in wanted:
            found.setdefault(digest, key)
    compared = []
    for rows in sets:
        shared = [(location, training.location(found[digest])) for digest, location in rows if digest in found]
        compared.append(Overlap(len(shared), shared[0] if shared else None))
    return compared, num_compared


def _digest(preparation: Preparation, key: ConversationKey) -> bytes | None:
    try:
        return content_digest(preparation.parse(key))
    except DataError:
        return None
