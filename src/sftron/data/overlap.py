"""Finds conversations of the evaluation data that are in the training data as well."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass

from sftron.data.prepare import Preparation
from sftron.data.types import ConversationKey, DataError, TokenizedConversation

MAX_COMPARED_ROWS = 100_000
"""The largest number of training rows that are compared, which takes a few seconds at the start of a run."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """The rows of one evaluation set that are also in the training data."""

    num_rows: int = 0
    locations: tuple[str, str] | None = None
    """The locations of the first such row in the evaluation set and in the training data."""


def overlaps(
    evaluated: Iterable[Preparation], training: Preparation, max_rows: int = MAX_COMPARED_ROWS
) -> tuple[list[Overlap], int]:
    """Returns the overlap of each of `evaluated` with `training`, and the number of training rows compared.

    At most `max_rows` training rows are compared, evenly spread over the data; of a stream, none. Rows that cannot be
    parsed are ignored.
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
    shared = [
        [(location, training.location(found[digest])) for digest, location in rows if digest in found] for rows in sets
    ]
    return [Overlap(len(rows), rows[0] if rows else None) for rows in shared], num_compared


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
    else:
        messages = [(each.role, (each.content or "").strip(), dict(each.fields)) for each in conversation.messages]
        content = json.dumps([messages, conversation.tools], sort_keys=True, default=dict).encode("utf-8", "replace")
    return hashlib.blake2b(content, digest_size=16).digest()
