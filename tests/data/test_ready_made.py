"""Rows of ids are taken as they are, or refused where they are not one whole conversation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sftron.data.formats.detect import RowFormat, parse_conversation
from sftron.data.types import DataError, Role, TokenizedConversation
from tests.data.rows import KEY, LOCATION

IDS = [1, 5, 5, 7, 2, 9]
LABELS = [-100, -100, -100, 7, 2, -100]


def parse(**columns: Any) -> TokenizedConversation:
    parsed = parse_conversation(columns, RowFormat("input_ids"), KEY, LOCATION)
    assert isinstance(parsed, TokenizedConversation)
    return parsed


def test_labels_say_what_is_the_assistants_at_their_own_place():
    """
    input_ids   1  5  5  7  2  9
    labels      -  -  -  7  2  -
    role_ids    U  U  U  A  A  U
    """
    parsed = parse(input_ids=IDS, labels=LABELS)
    assert (parsed.input_ids.dtype, parsed.role_ids.dtype) == (np.int32, np.uint8)
    assert parsed.input_ids.tolist() == IDS
    assert parsed.role_ids.tolist() == [Role.USER] * 3 + [Role.ASSISTANT] * 2 + [Role.USER]
    assert (parsed.turns, parsed.key, parsed.token_weights) == ((), KEY, None)


def test_roles_may_be_numbers_or_names_and_stand_in_either_column():
    roles = [Role.TEMPLATE, Role.SYSTEM, Role.USER, Role.REASONING, Role.TOOL_CALL, Role.TOOL]
    names = ["template", "system", "user", "reasoning", "tool_call", "tool"]
    for given in ([int(role) for role in roles], names, [*names[:3], *(int(role) for role in roles[3:])]):
        for column in ("role_ids", "roles"):
            assert parse(input_ids=IDS, **{column: given}).role_ids.tolist() == roles


def test_masks_and_positions_that_say_nothing_are_accepted():
    extra = {
        "attention_mask": [1] * 6,
        "position_ids": [*range(6)],
        "token_type_ids": [0] * 6,
        "id": "x",
        "roles": None,
    }
    plain, dressed = parse(input_ids=IDS, labels=LABELS), parse(input_ids=IDS, labels=LABELS, **extra)
    assert plain.input_ids.tolist() == dressed.input_ids.tolist()
    assert plain.role_ids.tolist() == dressed.role_ids.tolist()


@pytest.mark.parametrize(
    ("columns", "reason", "message"),
    [
        (
            {"input_ids": None, "labels": LABELS},
            "missing_column",
            "has no column `input_ids`, which format input_ids ne",
        ),
        ({"input_ids": "1 2", "labels": LABELS}, "not_a_list", '`input_ids` is the text "1 2"; wanted a list'),
        ({"input_ids": [], "labels": []}, "empty_conversation", "`input_ids` is empty; remove the row"),
        ({"input_ids": [1, -1]}, "not_ids", "`input_ids` at 1 is the number -1; wanted a whole number from 0 up"),
        ({"input_ids": [True]}, "not_ids", "`input_ids` at 0 is true; wanted"),
        ({"input_ids": [1.0]}, "not_ids", "`input_ids` at 0 is the number 1.0; wanted"),
        ({"input_ids": [2**31]}, "not_ids", "`input_ids` at 0 is the number 2147483648; wanted"),
        ({"input_ids": IDS}, "what_is_trained", "has neither labels nor role_ids beside input_ids; wanted one of"),
        (
            {"input_ids": IDS, "labels": LABELS, "roles": ["user"] * 6},
            "what_is_trained",
            "has labels and roles beside input_ids; wanted one of the two",
        ),
        (
            {"input_ids": IDS, "labels": LABELS[1:]},
            "different_lengths",
            "`labels` has 5 values for 6 input_ids; wanted",
        ),
        (
            {"input_ids": IDS, "labels": [-100, -100, 7, 2, 9, -100]},
            "shifted_labels",
            "label 2 is 7, and the id there is 5; labels must be unshifted: each -100, or the id at its own place",
        ),
        ({"input_ids": IDS, "labels": [-1] * 6}, "shifted_labels", "label 0 is -1, and the id there is 1; labels"),
        ({"input_ids": IDS, "labels": [None] * 6}, "not_ids", "`labels` at 0 is null; wanted a whole number from -100"),
        (
            {"input_ids": IDS, "roles": ["user"] * 5},
            "different_lengths",
            "`roles` has 5 values for 6 input_ids; wanted",
        ),
        (
            {"input_ids": IDS, "roles": ["User"] * 6},
            "unknown_role",
            '`roles` at 0 is the text "User"; wanted one of te',
        ),
        (
            {"input_ids": IDS, "role_ids": [0, 7]},
            "unknown_role",
            "`role_ids` at 1 is the number 7; wanted one of templ",
        ),
        ({"input_ids": IDS, "role_ids": [True]}, "unknown_role", "`role_ids` at 0 is true; wanted one of template (0)"),
        (
            {"input_ids": IDS, "labels": LABELS, "attention_mask": [1, 1, 1, 1, 1, 0]},
            "not_one_conversation",
            "`attention_mask` is not ones only: give each conversation a row, without padding",
        ),
        (
            {"input_ids": IDS, "labels": LABELS, "position_ids": [0, 1, 2, 0, 1, 2]},
            "not_one_conversation",
            "`position_ids` is not 0, 1, 2, ...: give each conversation a row",
        ),
    ],
)
def test_a_refused_row_is_told_with_column_place_and_remedy(columns: dict[str, Any], reason: str, message: str):
    with pytest.raises(DataError) as caught:
        parse(**columns)
    assert str(caught.value).startswith(f"{LOCATION}: ")
    assert message in str(caught.value)
    assert caught.value.reason == reason
