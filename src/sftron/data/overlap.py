"""Conversations that occur in two places: evaluated on, and trained on all the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sftron.data.prepare import Preparation
from sftron.data.types import Conversation, ConversationKey, DataError, TokenizedConversation

MAX_COMPARED_ROWS = 100_000
"""Of the training data, evenly spread: some seconds at the start of a run."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """num_rows: rows of an evaluation set that are also trained on. places: of the first one, there and in training."""

    num_rows: int = 0
    places: tuple[str, str] | None = None


def content_digest(conversation: Conversation | TokenizedConversation) -> bytes:
    """The same for the same messages, whatever file, format or column they stand in; white space around a text does not
    count. Rows of ids are the same where their ids are."""
    if isinstance(conversation, TokenizedConversation):
        content = conversation.input_ids.tobytes()
    else:
        messages = [(each.role, (each.content or "").strip(), dict(each.fields)) for each in conversation.messages]
        content = json.dumps([messages, conversation.tools], sort_keys=True, default=dict).encode("utf-8", "replace")
    return hashlib.blake2b(content, digest_size=16).digest()


def overlaps(
    evaluated: Iterable[Preparation], training: Preparation, max_rows: int = MAX_COMPARED_ROWS
) -> tuple[list[Overlap], int]:
    """For each of `evaluated`, how many of its rows `training` holds; and how many rows of `training` were compared.

    All of up to max_rows, else so many, evenly spread; of streams none. Rows that cannot be parsed are passed over.
    """
    sets = [[(digest, places.location(key)) for key, digest in _digests(places)] for places in evaluated]
    wanted = {digest for each in sets for digest, _ in each}
    found: dict[bytes, ConversationKey] = {}
    num_rows = 0 if training.is_streamed else training.num_rows or 0
    num_compared = min(num_rows, max_rows)
    for number in range(num_compared):
        key = training.key(number * num_rows // num_compared)
        digest = _digest_or_none(training, key)
        if digest in wanted:
            found.setdefault(digest, key)
    return [_overlap(each, found, training) for each in sets], num_compared


def _overlap(rows: list[tuple[bytes, str]], found: dict[bytes, ConversationKey], training: Preparation) -> Overlap:
    shared = [(digest, place) for digest, place in rows if digest in found]
    if not shared:
        return Overlap()
    digest, place = shared[0]
    return Overlap(len(shared), (place, training.location(found[digest])))


def _digests(preparation: Preparation) -> Iterator[tuple[ConversationKey, bytes]]:
    for key in preparation.all_keys():
        digest = _digest_or_none(preparation, key)
        if digest is not None:
            yield key, digest


def _digest_or_none(preparation: Preparation, key: ConversationKey) -> bytes | None:
    try:
        return content_digest(preparation.parse(key))
    except DataError:
        return None
