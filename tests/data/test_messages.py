"""Lists of messages become a conversation as templates read it, or are refused with place, finding and remedy."""

from __future__ import annotations

import datetime
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftron.data.types import DataError, Message, Role
from tests.data.rows import CALL, assistant, parse, system, tool, turns, user

RESULT = tool(tool_call_id="c1")
NAN, DEEP = float("nan"), json.loads("[" * 100 + "]" * 100)


def messages_of(*messages: Any, **columns: Any) -> tuple[Message, ...]:
    return parse({"messages": [*messages], **columns}).messages


# --- Accepted ---


@pytest.mark.parametrize(
    "messages",
    [
        [user()],
        [system()],
        [system(), user()],
        [user(), assistant(), user()],
        [user(), assistant(), user(), assistant()],
        [user(""), assistant("")],
        [user("<|im_end|> \U0001f600"), assistant()],
        [user(), assistant(None, tool_calls=[CALL]), RESULT, tool("u"), assistant(), user()],
        [user(), assistant(None, tool_calls=[CALL, CALL]), RESULT, assistant("b", tool_calls=[CALL]), tool()],
        [user(), assistant(None, reasoning_content="because")],
    ],
)
def test_these_conversations_are_accepted_with_their_contents_untouched(messages: list[dict]):
    parsed = messages_of(*messages, id=3, tools=None, system="", meta={"a": [1]})
    assert [message.content for message in parsed] == [message["content"] for message in messages]
    assert [message.role.name.lower() for message in parsed] == [message["role"] for message in messages]
    others = [{k: v for k, v in message.items() if k not in ("role", "content")} for message in messages]
    assert [message.fields for message in parsed] == others


def test_a_developers_message_is_a_system_message_under_its_own_name():
    first, second = messages_of({"role": "developer", "content": "s"}, user())
    assert first == Message(Role.SYSTEM, "s", role_name="developer")
    assert second == Message(Role.USER, "q")


def test_other_keys_reach_the_template_as_they_are_and_nulls_do_not():
    extra = {"name": "Ada", "id": 7, "nested": {"a": [None, True, 0.5, "x"]}, "tool_calls": [], "thinking": "t"}
    (_, message) = messages_of(user(), assistant(**extra, refusal=None, weight=None, train=None, function_call=None))
    assert message == Message(Role.ASSISTANT, "a", extra)
    assert json.dumps(message.fields) == json.dumps(extra)


def test_a_value_that_json_has_no_word_for_is_to_templates_what_transformers_makes_of_it():
    """WildChat's messages have a date of Parquet each."""
    (message,) = messages_of(user(timestamp=datetime.datetime(2024, 1, 1)))
    assert message.fields == {"timestamp": "<datetime>"}


@pytest.mark.parametrize(("weight", "expected"), [(0, 0.0), (1, 1.0), (0.25, 0.25), (None, 1.0)])
def test_a_weight_is_the_messages_and_no_field(weight: Any, expected: float):
    (_, message) = messages_of(user(), assistant(weight=weight))
    assert message == Message(Role.ASSISTANT, "a", weight=expected)


def test_parts_of_text_are_one_content_and_stay_apart_as_parts():
    content = [{"type": "text", "text": text} for text in ("a", "b\n", "c")]
    content[2]["image_url"] = None
    (message,) = messages_of(user(content))
    assert message == Message(Role.USER, "a\nb\n\nc", parts=("a", "b\n", "c"))
    assert messages_of(user("a"))[0].parts == ()


def test_a_system_column_is_the_first_message_unless_the_list_has_one():
    assert messages_of(user(), system="s") == messages_of(system(), user())
    assert messages_of(system(), user(), system="s") == messages_of(system(), user())
    for nothing in (None, "", " \n"):
        assert messages_of(user(), system=nothing) == messages_of(user())
    with pytest.raises(DataError, match=r'column `system` and message 1 \(system\) differ: "other", "s"; keep one'):
        messages_of(system(), user(), system="other")


# --- ShareGPT ---


def test_messages_and_sharegpt_turns_of_the_same_conversation_parse_equal():
    expected = parse({"messages": [system(), user(), assistant()]})
    for human in ("human", "user"):
        for gpt in ("gpt", "assistant", "chatgpt", "model", "bing", "bard"):
            assert parse(turns(("system", "s"), (human, "q"), (gpt, "a")), "sharegpt") == expected
    assert parse(turns((human, "q"), (gpt, "a"), system="s"), "sharegpt") == expected


@pytest.mark.parametrize("call", ["function_call", "tool_call"])
@pytest.mark.parametrize("result", ["observation", "tool", "function_response", "tool_response"])
def test_calls_and_results_of_sharegpt_are_an_assistants_tool_calls_and_tool_messages(call: str, result: str):
    one, other = ({"name": "add", "arguments": {"a": n}} for n in (1, 2))
    called = [{"type": "function", "function": each} for each in (one, other)]
    end = [RESULT | {"tool_call_id": None}, assistant()]
    several = parse({"messages": [user(), assistant(None, tool_calls=called), *end]})
    for values in ([json.dumps([one, other])], [json.dumps(one), json.dumps(other)], [json.dumps(c) for c in called]):
        row = turns(("human", "q"), *((call, value) for value in values), (result, "t"), ("gpt", "a"))
        assert parse(row, "sharegpt") == several
    row = turns(("human", "q"), ("gpt", "let me see"), (call, json.dumps(one)), (result, "t"), ("gpt", "a"))
    said = parse({"messages": [user(), assistant("let me see", tool_calls=called[:1]), *end]})
    assert parse(row, "sharegpt") == said


@pytest.mark.parametrize("arguments", [{"a": 1}, '{"a": 1}', {}, "{}"])
def test_arguments_stay_the_object_or_the_text_that_they_are(arguments: Any):
    row = turns(("human", "q"), ("function_call", json.dumps({"name": "f", "arguments": arguments})))
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    assert parse(row, "sharegpt") == parse({"messages": [user(), assistant(None, tool_calls=[call])]})


def test_a_turns_weight_and_other_keys_are_the_messages():
    row = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a", "weight": 0, "name": "n"}]}
    assert parse(row, "sharegpt").messages[1] == Message(Role.ASSISTANT, "a", {"name": "n"}, weight=0.0)


CALL_TURN = {"from": "function_call", "value": '{"name": "f", "arguments": {}}'}


@pytest.mark.parametrize(
    ("row", "reason", "message"),
    [
        (
            turns(("narrator", "x")),
            "unknown_role",
            'message 1: `from` is the text "narrator"; wanted one of system, human',
        ),
        (turns(("human", None)), "null_content", "message 1: `value` is null; write the text, or remove the row"),
        (
            {"conversations": [{"from": "human"}]},
            "null_content",
            "message 1: has no `value`, only from; write the text",
        ),
        (turns(("human", ["a"])), "not_text", "message 1: `value` is a list of 1; wanted text"),
        (turns(("human", "\ud800")), "lone_surrogate", "`value` holds half a character"),
        ({"conversations": []}, "empty_conversation", "`conversations` is empty"),
        (
            {"conversations": [user()]},
            "missing_key",
            "message 1: has no `from`, only role, content; wanted {from, value}; for turns of {role, ...} set "
            "`format: messages`",
        ),
        (
            {"conversations": [{"from": "human", "value": "q", "content": "r"}]},
            "two_names",
            "message 1: has `content` beside from and value; keep one",
        ),
        (
            {"conversations": [{"from": "human", "value": "q"}, CALL_TURN | {"tool_calls": []}]},
            "two_names",
            "message 2: has `tool_calls` beside from and value",
        ),
        (
            turns(("human", "q"), ("function_call", "f(1)")),
            "broken_json",
            'message 2: `value`: is not JSON: Expecting value at character 1, near "f(1)"; write a call {name, arg',
        ),
        (turns(("human", "q"), ("function_call", "[]")), "bad_tool_calls", "message 2: `value`: is an empty list"),
        (
            turns(("human", "q"), ("function_call", "[1]")),
            "bad_tool_calls",
            "message 2: `value`: call 1: is the number 1; wanted {type, function: {name, arguments}} or {name, arg",
        ),
        (
            {
                "conversations": [
                    {"from": "human", "value": "q"},
                    {"from": "gpt", "value": "a", "weight": 0},
                    CALL_TURN,
                ]
            },
            "turns_differ",
            "message 3: `weight` is the number 1.0 here and the number 0.0 before; they are one message: give both",
        ),
        (
            turns(("human", "q"), ("function_call", CALL_TURN["value"]), ("gpt", "a")),
            "wrong_role_order",
            "message 3 (assistant) follows message 2 (assistant), whose tool_calls it does not answer: the tool result "
            "is missing; add a tool message",
        ),
        (
            turns(("human", "q"), ("gpt", "a"), ("function_call", CALL_TURN["value"]), ("human", "r")),
            "wrong_role_order",
            "message 4 (user) follows message 2 (assistant), whose tool_calls",
        ),
    ],
)
def test_a_refused_sharegpt_row_is_told_with_its_turn(row: Any, reason: str, message: str):
    with pytest.raises(DataError) as caught:
        parse(row, "sharegpt")
    assert message in str(caught.value)
    assert caught.value.reason == reason


# --- Refused ---

ACCEPTED_ROLES = "wanted one of system, developer, user, assistant, tool"
REFUSED: dict[str, tuple[Any, str, str]] = {
    "no messages column": (
        {"prompt": "q", "answer": "a"},
        "missing_column",
        "has no column `messages`, which format messages needs; its columns: prompt, answer; set `format`, or name",
    ),
    "null messages": ({"messages": None}, "missing_column", "has no column `messages`"),
    "no columns": ({}, "missing_column", "its columns: none"),
    "messages as text": (
        {"messages": '[{"role": "user"}]'},
        "not_a_list",
        '`messages` is the text "[{"role": "user"}]"; wanted a list',
    ),
    "messages as an object": ({"messages": {"role": ["user"]}}, "not_a_list", "is an object of 1; wanted a list"),
    "no messages": ({"messages": []}, "empty_conversation", "`messages` is empty; remove the row"),
    "a message that is a text": (
        [user(), "hello"],
        "not_a_message",
        'message 2: found the text "hello"; wanted an object {role, content}',
    ),
    "a message that is null": ([None], "not_a_message", "message 1: found null; wanted an object"),
    "a message without role": (
        [{"content": "q"}],
        "missing_key",
        "message 1: has no `role`, only content; wanted {role, content}",
    ),
    "a message in the other format": (
        [{"from": "human", "value": "q"}],
        "missing_key",
        "wanted {role, content}; for turns of {from, ...} set `format: sharegpt`",
    ),
    "a message without content": ([{"role": "user"}], "null_content", "message 1: has no `content`, only role; write"),
    "a null content": ([user(None)], "null_content", "message 1: `content` is null; write the text, or remove the row"),
    "a null answer": ([user(), assistant(None)], "null_content", "message 2: `content` is null"),
    "a null answer with no calls": ([user(), assistant(None, tool_calls=[])], "null_content", "`content` is null"),
    "a null answer with empty reasoning": ([user(), assistant(None, thinking="")], "null_content", "is null"),
    "no parts": ([user([])], "null_content", "message 1: `content` is null"),
    "a number as content": ([user(), assistant(1)], "not_text", "message 2: `content` is the number 1; wanted text"),
    "a bool as content": ([user(True)], "not_text", "message 1: `content` is true; wanted text"),
    "an object as content": ([user({"a": 1})], "not_text", "message 1: `content` is an object of 1"),
    "an image": (
        [user([{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "x"}}])],
        "unsupported_part",
        'message 1: part 2 of `content`: is of type "image_url"; only parts of type text are read: remove the row',
    ),
    "a part without type": ([user([{"text": "x"}])], "unsupported_part", "part 1 of `content`: is of type null"),
    "parts that are texts": ([user(["a", "b"])], "bad_part", '1 of `content`: is the text "a"; wanted {type, text}'),
    "a part that is a number": ([user([1])], "bad_part", "part 1 of `content`: is the number 1; wanted {type, text}"),
    "a part with something else": (
        [user([{"type": "text", "text": "x", "cache_control": {}}])],
        "bad_part",
        "part 1 of `content`: has cache_control in addition to its text; remove that",
    ),
    "a part whose text has another name": (
        [user([{"type": "text", "value": "x"}])],
        "bad_part",
        "part 1 of `content`: has no `text`, only type, value; rename `value` to text",
    ),
    "a part whose text may be one of two": (
        [user([{"type": "text", "text": None, "value": "x", "content": "y"}])],
        "bad_part",
        "part 1 of `content`: has no `text`, only type, text, value, content; write it",
    ),
    "a part with null text": ([user([{"type": "text", "text": None}])], "not_text", "`text` is null; wanted text"),
    "an unknown role": ([{"role": "bot", "content": "x"}], "unknown_role", f'the text "bot"; {ACCEPTED_ROLES}'),
    "a role in capitals": ([{"role": "User", "content": "x"}], "unknown_role", '`role` is the text "User"'),
    "a null role": ([{"role": None, "content": "x"}], "unknown_role", "`role` is null; wanted one of"),
    "a list as role": ([{"role": ["user"], "content": "x"}], "unknown_role", "`role` is a list of 1"),
    "role function": ([{"role": "function", "content": "x"}], "unknown_role", f"{ACCEPTED_ROLES}; rename it to tool"),
    "role ipython": ([{"role": "ipython", "content": "x"}], "unknown_role", "; rename it to tool"),
    "a bool weight": ([user(), assistant(weight=True)], "bad_weight", "`weight` is true; wanted a number from 0 to"),
    "a negative weight": ([user(), assistant(weight=-1)], "bad_weight", "`weight` is the number -1; wanted"),
    "a weight without bounds": ([user(weight=float("inf"))], "bad_weight", "`weight` is the number inf"),
    "a weight that is none": ([user(weight=NAN)], "bad_weight", "`weight` is the number nan"),
    "a weight of 400 digits": ([user(weight=10**400)], "bad_weight", "`weight` is the number 1000"),
    "a text as weight": ([user(weight="0")], "bad_weight", '`weight` is the text "0"'),
    "a train flag": (
        [user(), assistant(train=False)],
        "training_key",
        'message 2: has the key "train", which is not read; write `weight: 0` to leave a message out of the loss, '
        "`weight: 1` to train it",
    ),
    "a loss mask": ([user(Loss_Mask=1)], "training_key", 'has the key "Loss_Mask", which is not read'),
    "a weight of another name": (
        [user(), assistant(loss_weight=0.5)],
        "training_key",
        'message 2: has the key "loss_weight", which is not read; rename it to `weight`, the factor of the message\'s '
        "share of the loss",
    ),
    "a function call": (
        [user(), assistant(function_call={"name": "f"})],
        "function_call",
        "message 2: has the key `function_call`; write it as tool_calls, a list of calls",
    ),
    "a user's call": ([user(tool_calls=[CALL])], "bad_tool_calls", "message 1: has tool_calls, and its role is user"),
    "reasoning that is no text": ([user(), assistant(reasoning=["a"])], "not_text", "`reasoning` is a list of 1"),
    "a field that is NaN": (
        [user(score=NAN)],
        "not_json",
        "`score` holds the number nan, which is no JSON; write null",
    ),
    "a date deep in a field": (
        [user(meta=[datetime.date(2024, 1, 1)])],
        "not_json",
        "`meta` holds a date, which is no",
    ),
    "a deep field": ([user(meta=DEEP)], "not_json", "`meta` is nested deeper than 64 levels; flatten it"),
    "a lone surrogate": (
        [user("ab\ud800")],
        "lone_surrogate",
        r"message 1: `content` holds half a character ('\ud800') at 2, a surrogate without its pair; write the whole",
    ),
    "a lone surrogate in a part": (
        [user([{"type": "text", "text": "\ud800"}])],
        "lone_surrogate",
        "part 1 of `content`: `text` holds half a char",
    ),
    "a lone surrogate in a field": ([user(meta=[{"a": "\ud800"}])], "lone_surrogate", "`meta` holds half a character"),
    "a lone surrogate in a deep key": ([user(meta=[{"\ud800": 1}])], "lone_surrogate", "`a key of meta` holds half"),
    "a lone surrogate as a key": ([user(**{"\ud800": 1})], "lone_surrogate", "`a key` holds half a character"),
    "a lone surrogate in reasoning": (
        [user(), assistant(thinking="\ud800")],
        "lone_surrogate",
        "`thinking` holds half",
    ),
    "a lone surrogate in the system": ({"messages": [user()], "system": "\ud800"}, "lone_surrogate", "`system` holds"),
    "a number as system": ({"messages": [user()], "system": 1}, "not_text", "`system` is the number 1; wanted text"),
    "the assistant first": (
        [assistant(), user()],
        "wrong_role_order",
        "message 1 (assistant) comes before any user message; add the question, or remove it",
    ),
    "the assistant after the system": (
        [system(), assistant()],
        "wrong_role_order",
        "message 2 (assistant) comes before any user message",
    ),
    "two user turns": (
        [system(), user(), user(), assistant()],
        "wrong_role_order",
        "message 3 (user) follows message 2 (user); join the two, or remove one",
    ),
    "two assistant turns": (
        [user(), assistant(), assistant()],
        "wrong_role_order",
        "message 3 (assistant) follows message 2 (assistant); join the two, or remove one",
    ),
    "a late system turn": (
        [user(), system(), assistant()],
        "wrong_role_order",
        "message 2 (system) is not the first; move it there, or into a user message",
    ),
    "a developer after the system": (
        [system(), {"role": "developer", "content": "x"}, user()],
        "wrong_role_order",
        "message 2 (developer) is not the first",
    ),
    "a call without result": (
        [user(), assistant(None, tool_calls=[CALL]), assistant()],
        "wrong_role_order",
        "message 3 (assistant) follows message 2 (assistant), whose tool_calls it does not answer: the tool result is "
        "missing; add a tool message",
    ),
    "a result without call": (
        [user(), assistant(), tool()],
        "wrong_role_order",
        "message 3 (tool) follows message 2 (assistant), which has no tool_calls; write the call as tool_calls",
    ),
    "a user after a result": (
        [user(), assistant(None, tool_calls=[CALL]), tool(), user()],
        "wrong_role_order",
        "message 4 (user) follows message 3 (tool); add what the assistant says to the result",
    ),
}


@pytest.mark.parametrize(("row", "reason", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_refused_row_is_told_with_its_place_what_was_found_and_the_remedy(row: Any, reason: str, message: str):
    with pytest.raises(DataError) as caught:
        parse({"messages": row} if isinstance(row, list) else row)
    assert str(caught.value).startswith("chats.jsonl:8: ")
    assert message in str(caught.value)
    assert str(caught.value).isprintable()
    assert caught.value.reason == reason


OF_KIND = {
    "s": system(), "u": user(), "a": assistant(), "c": assistant(None, tool_calls=[CALL]), "t": tool()
}  # fmt: skip
AFTER = {"": "su", "s": "u", "u": "ac", "a": "u", "c": "t", "t": "tac"}


@given(order=st.text("suact", min_size=1, max_size=7))
def test_an_order_is_accepted_exactly_where_each_message_may_follow_the_one_before(order: str):
    """s system, u user, a assistant, c assistant with tool_calls, t tool."""
    expected = all(kind in AFTER[before] for before, kind in zip(["", *order], order, strict=False))
    try:
        outcome = len(messages_of(*(OF_KIND[kind] for kind in order)))
    except DataError as error:
        outcome = error.reason
    assert outcome == (len(order) if expected else "wrong_role_order")
