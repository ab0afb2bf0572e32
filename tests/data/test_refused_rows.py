"""A row that cannot be read is refused with its location, what was found where, and a reason to be counted under."""

from __future__ import annotations

import datetime
import json
from typing import Any

import pytest

from sftron.data.formats.table import Format, RowFormat, parse_conversation
from sftron.data.types import DataError
from tests.data.rows import CALL, KEY, LOCATION, assistant, system, tool, turns, user

NAN, DEEP = float("nan"), json.loads("[" * 100 + "]" * 100)
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
CALL_TEXT = '{"name": "f", "arguments": {}}'
FLAT = {"name": "add", "parameters": {"properties": {"a": {}}}}
IDS, LABELS = [1, 5, 7], [-100, 5, 7]

MESSAGES: list[tuple[Any, str, str]] = [
    ({"prompt": "q", "answer": "a"}, "missing_column", "column `messages`, which format messages needs; its columns:"),
    ({"messages": None}, "missing_column", "has no column `messages`"),
    ({"messages": '[{"role": "user"}]'}, "not_a_list", '`messages` is the text "[{"role": "user"}]"; wanted a list'),
    ({"messages": []}, "empty_conversation", "`messages` is empty"),
    ([user(), "hello"], "not_a_message", 'message 2: found the text "hello"; wanted an object {role, content}'),
    ([{"content": "q"}], "missing_key", "message 1: has no `role`, only content; wanted {role, content}"),
    (
        [{"from": "human", "value": "q"}],
        "missing_key",
        "only from, value; wanted {role, content}, or `format: sharegpt`",
    ),
    ([{"role": "user"}], "null_content", "message 1: has no `content`, only role"),
    ([user(None)], "null_content", "message 1: `content` is null"),
    ([user(), assistant(None, tool_calls=[])], "null_content", "message 2: `content`"),
    ([user(), assistant(1)], "not_text", "message 2: `content` is the number 1; wanted text"),
    ([user([{"type": "text", "text": "see"}, IMAGE])], "unsupported_part", 'part 2 of `content`: is of type "image'),
    ([user([{"text": "x"}])], "unsupported_part", 'part 1 of `content`: is of type "None"'),
    ([user(["a", "b"])], "unsupported_part", 'part 1 of `content`: is the text "a"; only parts {type: text, '),
    ([user([{"type": "text", "text": "x", "cache_control": {}}])], "bad_part", "has cache_control in addition"),
    ([user([{"type": "text", "value": "x"}])], "bad_part", "has value but no text; rename it to text"),
    ([user([{"type": "text", "text": None}])], "not_text", "`text` is null"),
    ([{"role": "bot", "content": "x"}], "unknown_role", '"bot"; wanted one of system, developer, user, '),
    ([{"role": "User", "content": "x"}], "unknown_role", '`role` is the text "User"'),
    ([{"role": ["user"], "content": "x"}], "unknown_role", "`role` is a list of 1"),
    ([{"role": "function", "content": "x"}], "unknown_role", '`role` is the text "function"'),
    ([user(), assistant(weight=True)], "bad_weight", "message 2: `weight` is true"),
    ([user(weight=NAN)], "bad_weight", "`weight` is the number nan"),
    ([user(weight=10**400)], "bad_weight", "`weight` is the number 1000"),
    ([user(), assistant(train=False)], "training_key", 'message 2: has the key "train", which is not read; '),
    ([user(), assistant(loss_weight=0.5)], "training_key", "rename it to `weight`"),
    ([user(), assistant(function_call={"name": "f"})], "function_call", "message 2: has the key `function_call`"),
    ([user(tool_calls=[CALL])], "bad_tool_calls", "message 1: has tool_calls, and its role is user"),
    ([user(), assistant(reasoning=["a"])], "not_text", "`reasoning` is a list of 1"),
    ([user(score=NAN)], "not_json", "`score` (the number nan) is not JSON"),
    ([user(meta=[datetime.date(2024, 1, 1)])], "not_json", "`meta` (a list of 1) is not JSON: Object of type date"),
    ([user(meta=DEEP)], "not_json", "is not JSON: it is nested deeper than 64 levels"),
    ([user("ab\ud800")], "lone_surrogate", r"message 1: `content` holds half a character ('\ud800')"),
    ([user([{"type": "text", "text": "\ud800"}])], "lone_surrogate", "part 1 of `content`: `text` holds half"),
    ([user(meta=[{"a": "\ud800"}])], "lone_surrogate", "`meta` holds half a character"),
    ([user(meta=[{"\ud800": 1}])], "lone_surrogate", "`meta` holds half"),
    ([user(**{"\ud800": 1})], "lone_surrogate", "`a key` holds half"),
    ({"messages": [user()], "system": "\ud800"}, "lone_surrogate", "`system` holds"),
    ({"messages": [user()], "system": 1}, "not_text", "`system` is the number 1"),
    ({"messages": [system(), user()], "system": "t"}, "two_system_texts", "`system` and message 1 (system) differ"),
    ([assistant(), user()], "wrong_role_order", "message 1 (assistant) is the first; wanted system or user"),
    ([system(), assistant()], "wrong_role_order", "message 2 (assistant) follows message 1 (system); wanted user"),
    ([user(), user()], "wrong_role_order", "message 2 (user) follows message 1 (user); wanted assistant"),
    ([user(), system(), assistant()], "wrong_role_order", "message 2 (system) follows message 1 (user)"),
    (
        [system(), {"role": "developer", "content": "x"}],
        "wrong_role_order",
        "message 2 (developer) follows message 1 (system)",
    ),
    (
        [user(), assistant(None, tool_calls=[CALL]), assistant()],
        "wrong_role_order",
        "follows message 2 (assistant), which has tool_calls; wanted tool",
    ),
    ([user(), assistant(), tool()], "wrong_role_order", "message 3 (tool) follows message 2 (assistant); wanted user"),
    (
        [user(), assistant(None, tool_calls=[CALL]), tool(), user()],
        "wrong_role_order",
        "follows message 3 (tool); wanted tool or assistant",
    ),
    ({"messages": [user()], "functions": [FLAT]}, "unsupported_column", "`functions` is not read; rename it to tools"),
    ({"messages": [user()], "functions": "f(x)"}, "unsupported_column", "`functions` is not read; rename it to tools"),
]
SHAREGPT: list[tuple[Any, str, str]] = [
    (turns(("narrator", "x")), "unknown_role", 'message 1: `from` is the text "narrator"; wanted one of system, human'),
    (turns(("human", None)), "null_content", "message 1: `value` is null"),
    ({"conversations": [{"from": "human"}]}, "null_content", "message 1: has no `value`, only from"),
    (turns(("human", ["a"])), "not_text", "message 1: `value` is a list of 1"),
    (turns(("human", "\ud800")), "lone_surrogate", "`value` holds half a character"),
    ({"conversations": []}, "empty_conversation", "`conversations` is empty"),
    ({"conversations": [user()]}, "missing_key", "has no `from`, only role, content"),
    ({"conversations": [{"from": "human", "value": "q", "content": "r"}]}, "two_names", "message 1: has `content`"),
    (turns(("human", "q"), ("function_call", "f(1)")), "broken_json", "message 2: `value`: is not JSON"),
    (turns(("human", "q"), ("function_call", "[]")), "bad_tool_calls", "message 2: `value`: is an empty list"),
    (turns(("human", "q"), ("function_call", "[1]")), "bad_tool_calls", 'message 2: `value`: call 1: is "1"; wanted'),
    (
        {
            "conversations": [
                *turns(("human", "q"), ("gpt", "a"))["conversations"],
                {"from": "function_call", "value": CALL_TEXT, "weight": 0},
            ]
        },
        "turns_differ",
        "message 3: `weight` is the number 0.0 here and the number 1.0 before",
    ),
    (turns(("human", "q"), ("function_call", CALL_TEXT), ("gpt", "a")), "wrong_role_order", "message 3 (assistant) "),
    (
        turns(("human", "q"), ("gpt", "a"), ("function_call", CALL_TEXT), ("human", "r")),
        "wrong_role_order",
        "message 4 (user) follows message 2 (assistant), which has tool_calls; wanted tool",
    ),
]
TOOLS: list[tuple[Any, str, str]] = [
    ('[{"name": "f"', "broken_json", "is not JSON: Expecting ',' delimiter at character 14"),
    ('[{"name": NaN}]', "broken_json", "is not plain JSON: NaN is not JSON"),
    ('[{"name": "f", "name": "g"}]', "broken_json", 'is not plain JSON: the key "name" occurs twice'),
    (FLAT, "bad_tools", "is an object of 2; wanted a list of JSON schemas, or its JSON text"),
    ([FLAT, "add"], "bad_tools", 'tool 2 is the text "add"'),
    ([{}], "bad_tools", "tool 1 is an object of 0"),
    (r'[{"name": "\ud800"}]', "lone_surrogate", "`tool 1` holds half a character"),
    ([{"name": NAN}], "not_json", "`tool 1` (an object of 1) is not JSON"),
    ([{"name": "f", "parameters": {"properties": {"b": None}}}], "filled_with_null", 'tool 1 has the parameter "b"'),
]
CALLS: list[tuple[Any, str, str]] = [
    ("add(1)", "bad_tool_calls", '`tool_calls` is the text "add(1)"; wanted a list of calls'),
    (["f"], "bad_tool_calls", "call 1: is"),
    ([CALL, {}], "bad_tool_calls", 'call 2: is "{}"; wanted {type: function, function: {name, arguments}} or {name'),
    ([{"function": "f"}], "bad_tool_calls", 'call 1: is "{"function": "f"}"'),
    ([{"name": "", "arguments": {}}], "bad_tool_calls", "call 1: is"),
    ([CALL | {"name": "f"}], "bad_tool_calls", "call 1: is"),
    ([CALL | {"type": "custom"}], "bad_tool_calls", "call 1: is"),
    ([CALL | {"id": 7}], "bad_tool_calls", "call 1: is"),
    ([{"name": "f"}], "bad_tool_calls", "call 1: is"),
    ([{"name": "f", "arguments": "[1]"}], "bad_tool_calls", "call 1: is"),
    ([{"name": "f", "arguments": ""}], "broken_json", "call 1: `arguments`: is not JSON"),
    ([{"name": "f", "arguments": r'{"a": "\ud800"}'}], "lone_surrogate", "call 1: `arguments` holds half a"),
    ([{"name": "f", "arguments": {"a": float("inf")}}], "not_json", "`tool_calls` (a list of 1) is not JSON"),
]
SINGLE_TURN: list[tuple[Format, Any, str, str]] = [
    ("query_response", {"query": "q"}, "missing_column", "has no column `response`"),
    ("query_response", {"query": None, "response": "a"}, "null_content", "`query` is null"),
    ("question_answer", {"question": 1, "answer": "a"}, "not_text", "`question` is the number 1"),
    ("alpaca", {"instruction": "q", "output": "a", "input": 1}, "not_text", "`input` is the number 1"),
    ("alpaca", {"instruction": "q", "output": "a", "history": "h"}, "bad_history", '`history` holds the text "h"'),
    ("alpaca", {"instruction": "q", "output": "a", "history": [["h"]]}, "bad_history", "`history` holds a list of 1"),
    ("alpaca", {"instruction": "q", "output": "a", "history": [["h", None]]}, "not_text", "`history` is null"),
    ("prompt_completion", {"prompt": [user()], "completion": "a"}, "mixed_kinds", "`prompt` is a list of 1, "),
    ("prompt_completion", {"prompt": [user()], "completion": [user()]}, "wrong_role_order", "message 2 (user) follows"),
]
PRETOKENIZED: list[tuple[Any, str, str]] = [
    ({"labels": LABELS}, "missing_column", "has no column `input_ids`"),
    ({"input_ids": "1 2", "labels": LABELS}, "not_a_list", '`input_ids` is the text "1 2"'),
    ({"input_ids": [], "labels": []}, "empty_conversation", "`input_ids` is empty"),
    ({"input_ids": [1, -1]}, "not_ids", "`input_ids` at 1 is the number -1"),
    ({"input_ids": [2**31]}, "not_ids", "`input_ids` at 0 is the number 2147483648"),
    ({"input_ids": IDS}, "what_is_trained", "has neither labels nor role_ids"),
    ({"input_ids": IDS, "labels": LABELS[1:]}, "different_lengths", "`labels` has 2 values for 3 input_ids"),
    ({"input_ids": IDS, "labels": [-100, 7, 5]}, "shifted_labels", "label 1 is 7, and the id there is 5"),
    ({"input_ids": IDS, "roles": ["User"] * 3}, "unknown_role", '`roles` at 0 is the text "User"'),
    ({"input_ids": IDS, "role_ids": [0, 7, 0]}, "unknown_role", "`role_ids` at 1 is the number 7"),
    ({"input_ids": IDS, "labels": LABELS, "attention_mask": [1, 1, 0]}, "not_one_conversation", "`attention_mask`"),
    ({"input_ids": IDS, "labels": LABELS, "position_ids": [0, 1, 0]}, "not_one_conversation", "`position_ids` is not"),
]


def _cases() -> list[tuple[Format, Any, str, str]]:
    """Every row with its format, its reason, and what its message holds."""
    rows = [*SINGLE_TURN]
    rows.append(("messages", [user()], "not_an_object", "found a list of 1; wanted an object"))
    rows += [("messages", {"messages": r} if isinstance(r, list) else r, *rest) for r, *rest in MESSAGES]
    rows += [("sharegpt", *each) for each in SHAREGPT]
    rows += [("messages", {"messages": [user()], "tools": t}, reason, f"`tools`: {text}") for t, reason, text in TOOLS]
    for calls, reason, text in CALLS:
        row = {"messages": [user(), assistant(None, tool_calls=calls)]}
        rows.append(("messages", row, reason, f"message 2: {text}"))
    return rows + [("input_ids", *each) for each in PRETOKENIZED]


@pytest.mark.parametrize(("format", "row", "reason", "text"), _cases())
def test_a_row_is_refused_with_its_location_what_was_found_and_a_reason(
    format: Format, row: Any, reason: str, text: str
) -> None:
    with pytest.raises(DataError) as caught:
        parse_conversation(row, RowFormat(format), KEY, LOCATION)
    assert str(caught.value).startswith(f"{LOCATION}: ")
    assert str(caught.value).isprintable()
    assert text in str(caught.value)
    assert caught.value.reason == reason
