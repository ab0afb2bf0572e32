"""A row that cannot be read is refused with its location, what was found where, and a reason to be counted under."""

from __future__ import annotations

import datetime
import json
from typing import Any

import pytest

from sftron.data.formats.table import Format, RowFormat, parse_conversation
from sftron.data.types import DataError
from tests.data.rows import CALL, KEY, LOCATION, assistant, system, turns, user

NAN, DEEP = float("nan"), json.loads("[" * 100 + "]" * 100)
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
CALL_TEXT = '{"name": "f", "arguments": {}}'
FLAT = {"name": "add", "parameters": {"properties": {"a": {}}}}
IDS, LABELS = [1, 5, 7], [-100, 5, 7]
ANSWERED = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
CALLED = {"from": "function_call", "value": CALL_TEXT}

MESSAGES: list[tuple[Any, str, str]] = [
    ({"prompt": "q", "answer": "a"}, "missing_column", "`messages`"),
    ({"messages": None}, "missing_column", "`messages`"),
    ({"messages": '[{"role": "user"}]'}, "not_a_list", "`messages`"),
    ({"messages": []}, "empty_conversation", "`messages`"),
    ([user(), "hello"], "not_a_message", "message 2"),
    ([{"content": "q"}], "missing_key", "message 1"),
    ([{"from": "human", "value": "q"}], "missing_key", "`format: sharegpt`"),
    ([{"role": "user"}], "null_content", "message 1"),
    ([user(None)], "null_content", "message 1"),
    ([user(), assistant(None, tool_calls=[])], "null_content", "message 2"),
    ([user(), assistant(1)], "not_text", "message 2"),
    ([user([{"type": "text", "text": "see"}, IMAGE])], "unsupported_part", "message 1: part 2"),
    ([user(["a", "b"])], "unsupported_part", "message 1: part 1"),
    ([user([{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}])], "bad_part", "message 1: part 1"),
    ([user([{"type": "text", "value": "x"}])], "bad_part", "message 1: part 1"),
    ([user([{"type": "text", "text": None}])], "not_text", "message 1: part 1"),
    ([{"role": "User", "content": "x"}], "unknown_role", "message 1"),
    ([{"role": ["user"], "content": "x"}], "unknown_role", "message 1"),
    ([user(), assistant(weight=True)], "bad_weight", "message 2"),
    ([user(weight=NAN)], "bad_weight", "message 1"),
    ([user(weight=10**400)], "bad_weight", "message 1"),
    ([user(), assistant(train=False)], "training_key", 'message 2: has the key "train"'),
    ([user(), assistant(loss_weight=0.5)], "training_key", "`weight`"),
    ([user(), assistant(function_call={"name": "f"})], "function_call", "message 2"),
    ([user(tool_calls=[CALL])], "bad_tool_calls", "message 1"),
    ([user(), assistant(reasoning=["a"])], "not_text", "`reasoning`"),
    ([user(score=NAN)], "not_json", "`score`"),
    ([user(meta=[datetime.date(2024, 1, 1)])], "not_json", "`meta`"),
    ([user(meta=DEEP)], "not_json", "`meta`"),
    ([user("ab\ud800")], "lone_surrogate", "message 1: `content`"),
    ([user([{"type": "text", "text": "\ud800"}])], "lone_surrogate", "part 1"),
    ([user(meta=[{"\ud800": 1}])], "lone_surrogate", "`meta`"),
    ([user(**{"\ud800": 1})], "lone_surrogate", "`a key`"),
    ({"messages": [user()], "system": "\ud800"}, "lone_surrogate", "`system`"),
    ({"messages": [user()], "system": 1}, "not_text", "`system`"),
    ({"messages": [system(), user()], "system": "t"}, "two_system_texts", "`system`"),
    ([assistant(), user()], "wrong_role_order", "message 1"),
    ([user(), assistant(None, tool_calls=[CALL]), assistant()], "wrong_role_order", "message 3"),
    ({"messages": [user()], "functions": [FLAT]}, "unsupported_column", "`functions`"),
    ({"messages": [user()], "functions": "f(x)"}, "unsupported_column", "`functions`"),
]
SHAREGPT: list[tuple[Any, str, str]] = [
    (turns(("narrator", "x")), "unknown_role", "message 1"),
    (turns(("human", None)), "null_content", "message 1"),
    ({"conversations": [{"from": "human"}]}, "null_content", "message 1"),
    (turns(("human", ["a"])), "not_text", "message 1"),
    (turns(("human", "\ud800")), "lone_surrogate", "`value`"),
    ({"conversations": []}, "empty_conversation", "`conversations`"),
    ({"conversations": [user()]}, "missing_key", "message 1"),
    ({"conversations": [{"from": "human", "value": "q", "content": "r"}]}, "two_names", "message 1"),
    (turns(("human", "q"), ("function_call", "f(1)")), "broken_json", "message 2: `value`"),
    (turns(("human", "q"), ("function_call", "[]")), "bad_tool_calls", "message 2: `value`"),
    (turns(("human", "q"), ("function_call", "[1]")), "bad_tool_calls", "message 2: `value`: call 1"),
    ({"conversations": [*ANSWERED, {**CALLED, "weight": 0}]}, "turns_differ", "message 3: `weight`"),
    ({"conversations": [ANSWERED[0], CALLED, ANSWERED[1]]}, "wrong_role_order", "message 3"),
    (
        turns(("human", "q"), ("gpt", "<tool_call>\n{}\n</tool_call>"), ("tool", "t")),
        "wrong_role_order",
        "`tool_calls`",
    ),
]
TOOLS: list[tuple[Any, str, str]] = [
    ('[{"name": "f"', "broken_json", ""),
    ('[{"name": NaN}]', "broken_json", ""),
    ('[{"name": "f", "name": "g"}]', "broken_json", ""),
    (FLAT, "bad_tools", ""),
    ([FLAT, "add"], "bad_tools", "tool 2"),
    ([{}], "bad_tools", "tool 1"),
    (r'[{"name": "\ud800"}]', "lone_surrogate", "`tool 1`"),
    ([{"name": NAN}], "not_json", "`tool 1`"),
    ([{"name": "f", "parameters": {"properties": {"b": None}}}], "filled_with_null", "tool 1"),
]
CALLS: list[tuple[Any, str, str]] = [
    ("add(1)", "bad_tool_calls", "`tool_calls`"),
    *(
        ([call], "bad_tool_calls", "call 1")
        for call in (
            *("f", {}, {"function": "f"}, {"name": "", "arguments": {}}, CALL | {"name": "f"}, CALL | {"id": 7}),
            *(CALL | {"type": "custom"}, {"name": "f"}, {"name": "f", "arguments": "[1]"}),
        )
    ),
    (
        [{"name": "f", "arguments": '"{}"'}],
        "bad_tool_calls",
        "call 1: `arguments` was encoded as JSON twice",
    ),
    (
        [{"function": {"name": "f", "arguments": '"x"'}}],
        "bad_tool_calls",
        "call 1: `arguments` was encoded as JSON twice",
    ),
    ([{"name": "f", "arguments": ""}], "broken_json", "call 1: `arguments`"),
    ([{"name": "f", "arguments": r'{"a": "\ud800"}'}], "lone_surrogate", "call 1: `arguments`"),
    ([{"name": "f", "arguments": {"a": float("inf")}}], "not_json", "`tool_calls`"),
]
SINGLE_TURN: list[tuple[Format, Any, str, str]] = [
    ("query_response", {"query": "q"}, "missing_column", "`response`"),
    ("query_response", {"query": None, "response": "a"}, "null_content", "`query`"),
    ("question_answer", {"question": 1, "answer": "a"}, "not_text", "`question`"),
    ("alpaca", {"instruction": "q", "output": "a", "input": 1}, "not_text", "`input`"),
    ("alpaca", {"instruction": "q", "output": "a", "history": "h"}, "bad_history", "`history`"),
    ("alpaca", {"instruction": "q", "output": "a", "history": [["h"]]}, "bad_history", "`history`"),
    ("alpaca", {"instruction": "q", "output": "a", "history": [["h", None]]}, "not_text", "`history`"),
    ("prompt_completion", {"prompt": [user()], "completion": "a"}, "mixed_kinds", "`prompt`"),
    ("prompt_completion", {"prompt": [user()], "completion": [user()]}, "wrong_role_order", "message 2"),
]
PRETOKENIZED: list[tuple[Any, str, str]] = [
    ({"labels": LABELS}, "missing_column", "`input_ids`"),
    ({"input_ids": "1 2", "labels": LABELS}, "not_a_list", "`input_ids`"),
    ({"input_ids": [], "labels": []}, "empty_conversation", "`input_ids`"),
    ({"input_ids": [1, -1]}, "not_ids", "`input_ids` at 1"),
    ({"input_ids": [2**31]}, "not_ids", "`input_ids` at 0"),
    ({"input_ids": IDS}, "what_is_trained", "input_ids"),
    ({"input_ids": IDS, "labels": LABELS[1:]}, "different_lengths", "`labels`"),
    ({"input_ids": IDS, "labels": [-100, 7, 5]}, "shifted_labels", "label 1"),
    ({"input_ids": IDS, "roles": ["User"] * 3}, "unknown_role", "`roles` at 0"),
    ({"input_ids": IDS, "role_ids": [0, 7, 0]}, "unknown_role", "`role_ids` at 1"),
    ({"input_ids": IDS, "labels": LABELS, "attention_mask": [1, 1, 0]}, "not_one_conversation", "`attention_mask`"),
    ({"input_ids": IDS, "labels": LABELS, "position_ids": [0, 1, 0]}, "not_one_conversation", "`position_ids`"),
]


def _cases() -> list[tuple[Format, Any, str, str]]:
    """Every row with its format, its reason, and the place that its message names."""
    rows = [*SINGLE_TURN]
    rows.append(("messages", [user()], "not_an_object", ""))
    rows += [("messages", {"messages": r} if isinstance(r, list) else r, *rest) for r, *rest in MESSAGES]
    rows += [("sharegpt", *each) for each in SHAREGPT]
    rows += [("messages", {"messages": [user()], "tools": t}, reason, f"`tools`: {text}") for t, reason, text in TOOLS]
    for calls, reason, text in CALLS:
        row = {"messages": [user(), assistant(None, tool_calls=calls)]}
        rows.append(("messages", row, reason, f"message 2: {text}"))
    return rows + [("input_ids", *each) for each in PRETOKENIZED]


@pytest.mark.parametrize(("format", "row", "reason", "text"), _cases())
def test_a_row_is_refused_with_its_location_the_place_in_it_and_a_reason(
    format: Format, row: Any, reason: str, text: str
) -> None:
    with pytest.raises(DataError) as caught:
        parse_conversation(row, RowFormat(format), KEY, LOCATION)
    assert str(caught.value).startswith(f"{LOCATION}: ")
    assert str(caught.value).isprintable()
    assert text in str(caught.value)
    assert caught.value.reason == reason
