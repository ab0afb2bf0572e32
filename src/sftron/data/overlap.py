"""Finds conversations that the evaluation data shares with the training data, and repeated ones."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

from sftron.data.prepare import Preparation
from sftron.data.types import ConversationKey, DataError, Document, TokenizedConversation

_MAX_COMPARED_ROWS = 100_000
"""The largest number of training rows to compare, which takes a few seconds at the start of a run."""


def overlaps(evaluated: Iterable[Preparation], training: Preparation) -> tuple[list[list[tuple[str, str]]], int]:
    """Returns the rows of each of `evaluated` that are in `training` too, and how many training rows were compared.

    Each row is given by both of its locations. Training rows are sampled evenly; a stream is not read. Bad rows are
    ignored.
    """
    sets = [[(_digest(each, key), each.location(key)) for key in each.all_keys()] for each in evaluated]
    wanted = {digest for each in sets for digest, _ in each if digest}
    found: dict[bytes | None, ConversationKey] = {}
    num_rows = 0 if training.is_streamed else training.num_rows or 0
    num_compared = min(num_rows, _MAX_COMPARED_ROWS)
    for number in range(num_compared):
        key = training.key(number * num_rows // num_compared)
        if (digest := _digest(training, key)) in wanted:
            found.setdefault(digest, key)
    shared = [
        [(location, training.location(found[digest])) for digest, location in rows if digest in found] for rows in sets
    ]
    return shared, num_compared


def repetitions(data: Preparation) -> tuple[list[tuple[str, str]], int]:
    """Returns the rows that are equal to an earlier row, with the location of either, and how many rows were compared.

    It compares the first rows of each data set, but reads no stream. Bad rows are ignored.
    """
    num_rows = 0 if data.is_streamed else min(data.num_rows or 0, _MAX_COMPARED_ROWS)
    first: dict[bytes, ConversationKey] = {}
    digests = ((key, _digest(data, key)) for key in map(data.key, range(num_rows)))
    repeated = [
        (data.location(key), data.location(earlier))
        for key, digest in digests
        if digest is not None and (earlier := first.setdefault(digest, key)) != key
    ]
    return repeated, num_rows


def _digest(preparation: Preparation, key: ConversationKey) -> bytes | None:
    """Returns a hash that is equal for equal messages, whatever their file, format or columns; None for a bad row.

    White space around a text is ignored. Pretokenized rows are compared by their ids.
    """
    try:
        conversation = preparation.parse(key)
    except DataError:
        return None
    if isinstance(conversation, TokenizedConversation):
        content = conversation.input_ids.tobytes()
    elif isinstance(conversation, Document):
        content = conversation.text.strip().encode()
    else:
        messages = [(each.role, (each.content or "").strip(), dict(each.fields)) for each in conversation.messages]
        content = json.dumps([messages, conversation.tools], sort_keys=True, default=dict).encode("utf-8", "replace")
    return hashlib.blake2b(content, digest_size=16).digest()
