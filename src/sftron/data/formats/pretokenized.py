"""The parser of pretokenized rows: token ids with labels or roles, which declare the trained tokens."""

from __future__ import annotations

import numpy as np

from sftron.data.formats.values import NamedRow, describe
from sftron.data.types import IGNORE_INDEX, ConversationKey, Role, TokenizedConversation

_ROLE_NUMBERS = {role.name.lower(): int(role) for role in Role if role is not Role.PADDING}
_LARGEST_ID = 2**31 - 1


def parse_pretokenized(row: NamedRow, key: ConversationKey) -> TokenizedConversation:
    """Parses `input_ids` with unshifted `labels`, or with the role of every token in `role_ids` or `roles`.

    With labels, a token that has one gets the role ASSISTANT, and any other token gets USER. Raises DataError.
    """
    ids = _numbers(row, "input_ids", 0)
    given = [name for name in ("labels", "role_ids", "roles") if row.get(name) is not None]
    if len(given) != 1:
        found = " and ".join(given) or "neither labels nor role_ids"
        raise row.refusal("what_is_trained", f"has {found} in addition to input_ids; wanted one of the two")
    if (found := len(row.filled_list(given[0]))) != len(ids):
        problem = f"`{row.column(given[0])}` has {found} values for {len(ids)} input_ids; wanted one for each"
        raise row.refusal("different_lengths", problem)
    role_ids = _from_labels(row, ids) if given == ["labels"] else _from_roles(row, given[0])
    # A row is one whole conversation, as packing computes bounds and positions.
    for name, expected, wanted in (
        ("attention_mask", [1] * len(ids), "ones only"),
        ("position_ids", list(range(len(ids))), "0, 1, 2, ..."),
    ):
        if row.get(name) not in (None, expected):
            problem = f"`{row.column(name)}` is not {wanted}: give each conversation a row, without padding"
            raise row.refusal("not_one_conversation", problem)
    return TokenizedConversation(np.array(ids, np.int32), role_ids, (), key)


def _from_labels(row: NamedRow, ids: list[int]) -> np.ndarray:
    labels = _numbers(row, "labels", IGNORE_INDEX)
    for index, (label, token_id) in enumerate(zip(labels, ids, strict=True)):
        if label not in (IGNORE_INDEX, token_id):
            found = f"label {index} is {label}, and the id there is {token_id}"
            remedy = f"labels must be unshifted: each {IGNORE_INDEX}, or the id at its own index"
            raise row.refusal("shifted_labels", f"{found}; {remedy}")
    return np.where(np.array(labels) == IGNORE_INDEX, Role.USER, Role.ASSISTANT).astype(np.uint8)


def _from_roles(row: NamedRow, name: str) -> np.ndarray:
    roles = [_ROLE_NUMBERS.get(role, role) if isinstance(role, str) else role for role in row.filled_list(name)]
    for index, role in enumerate(roles):
        if type(role) is not int or role not in _ROLE_NUMBERS.values():
            known = ", ".join(f"{name} ({number})" for name, number in _ROLE_NUMBERS.items())
            found = f"`{row.column(name)}` at {index} is {describe(role)}"
            raise row.refusal("unknown_role", f"{found}; wanted one of {known}")
    return np.array(roles, np.uint8)


def _numbers(row: NamedRow, name: str, lowest: int) -> list[int]:
    values = row.filled_list(name)
    for index, value in enumerate(values):
        if type(value) is not int or not lowest <= value <= _LARGEST_ID:
            problem = f"`{row.column(name)}` at {index} is {describe(value)}"
            raise row.refusal("not_ids", f"{problem}; wanted a whole number from {lowest} to {_LARGEST_ID}")
    return values
