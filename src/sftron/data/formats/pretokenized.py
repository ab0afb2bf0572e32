"""Rows of token ids: conversations that are tokenized already, and say themselves what is trained."""

from __future__ import annotations

from typing import Any

import numpy as np

from sftron.data.formats.row_reader import RowReader, describe
from sftron.data.types import IGNORE_INDEX, ConversationKey, Role, TokenizedConversation

_ROLE_NUMBERS = {role.name.lower(): int(role) for role in Role if role is not Role.PADDING}
_LARGEST_ID = 2**31 - 1


def parse_ready_made(reader: RowReader, key: ConversationKey) -> TokenizedConversation:
    """`input_ids`, with `labels` that are not shifted, or with the role of every token in `role_ids` or `roles`.

    A token with a label is the assistant's, one without is the user's. Raises DataError.
    """
    ids = _numbers(reader, "input_ids", 0, _LARGEST_ID)
    given = [name for name in ("labels", "role_ids", "roles") if reader.get(name) is not None]
    if len(given) != 1:
        problem = f"has {' and '.join(given) or 'neither labels nor role_ids'} beside input_ids; wanted one of the two"
        raise reader.refusal("what_is_trained", problem)
    role_ids = _from_labels(reader, ids) if given == ["labels"] else _from_roles(reader, given[0], ids)
    _check_whole(reader, ids)
    return TokenizedConversation(np.array(ids, np.int32), role_ids, (), key)


def _from_labels(reader: RowReader, ids: list[int]) -> np.ndarray:
    labels = _numbers(reader, "labels", IGNORE_INDEX, _LARGEST_ID, length=len(ids))
    for index, (label, token_id) in enumerate(zip(labels, ids, strict=True)):
        if label not in (IGNORE_INDEX, token_id):
            found = f"label {index} is {label}, and the id there is {token_id}"
            remedy = f"labels must be unshifted: each {IGNORE_INDEX}, or the id at its own place"
            raise reader.refusal("shifted_labels", f"{found}; {remedy}")
    return np.where(np.array(labels) == IGNORE_INDEX, Role.USER, Role.ASSISTANT).astype(np.uint8)


def _from_roles(reader: RowReader, name: str, ids: list[int]) -> np.ndarray:
    roles = [_ROLE_NUMBERS.get(role, role) if isinstance(role, str) else role for role in reader.filled_list(name)]
    for index, role in enumerate(roles):
        if type(role) is not int or role not in _ROLE_NUMBERS.values():
            known = ", ".join(f"{name} ({number})" for name, number in _ROLE_NUMBERS.items())
            found = f"`{reader.column(name)}` at {index} is {describe(role)}"
            raise reader.refusal("unknown_role", f"{found}; wanted one of {known}")
    _check_length(reader, name, len(roles), len(ids))
    return np.array(roles, np.uint8)


def _check_whole(reader: RowReader, ids: list[int]) -> None:
    """That nothing in the row is padding, or several documents: bounds and positions are the packer's to make."""
    for name, expected in (("attention_mask", [1] * len(ids)), ("position_ids", list(range(len(ids))))):
        if reader.get(name) not in (None, expected):
            wanted = "ones only" if name == "attention_mask" else "0, 1, 2, ..."
            problem = f"`{reader.column(name)}` is not {wanted}: give each conversation a row, without padding"
            raise reader.refusal("not_one_conversation", problem)


def _numbers(reader: RowReader, name: str, lowest: int, highest: int, length: int | None = None) -> list[int]:
    values: list[Any] = reader.filled_list(name)
    for index, value in enumerate(values):
        if type(value) is not int or not lowest <= value <= highest:
            problem = f"`{reader.column(name)}` at {index} is {describe(value)}; wanted a whole number from {lowest} up"
            raise reader.refusal("not_ids", problem)
    _check_length(reader, name, len(values), length)
    return values


def _check_length(reader: RowReader, name: str, found: int, wanted: int | None) -> None:
    if wanted not in (None, found):
        problem = f"`{reader.column(name)}` has {found} values for {wanted} input_ids; wanted one for each"
        raise reader.refusal("different_lengths", problem)
