"""Lists of messages become a conversation as templates read it; a policy on reasoning takes away whole thoughts."""

from __future__ import annotations

import datetime
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftron.data.formats.messages import REASONING_FIELDS, apply_reasoning_policy
from sftron.data.types import Conversation, DataError, Message, Role
from tests.data.rows import CALL, assistant, parse, system, tool, turns, user

RESULT = tool(tool_call_id="c1")


def messages_of(*messages: Any, **columns: Any) -> tuple[Message, ...]:
    return parse({"messages": [*messages], **columns}).messages


# --- Messages ---


@pytest.mark.parametrize(
    "messages",
    [
        [system(), user()],
        [user(), assistant(), user(), assistant()],
        [user(""), assistant("")],
        [user("<|im_end|> \U0001f600"), assistant()],
        [user(), assistant(None, tool_calls=[CALL, CALL]), RESULT, assistant("b", tool_calls=[CALL]), tool()],
        [user(), assistant(None, reasoning_content="because")],
        [user(), assistant(name="Ada", id=7, nested={"a": [None, True, 0.5, "x"]}, thinking="t")],
    ],
)
def test_contents_and_other_keys_reach_the_template_as_they_are(messages: list[dict]):
    parsed = messages_of(*messages, id=3, tools=None, system="", meta={"a": [1]})
    assert [message.content for message in parsed] == [message["content"] for message in messages]
    assert [message.role.name.lower() for message in parsed] == [message["role"] for message in messages]
    others = [{k: v for k, v in message.items() if k not in ("role", "content")} for message in messages]
    assert json.dumps([message.fields for message in parsed]) == json.dumps(others)


def test_a_developers_message_is_a_system_message_under_its_own_name():
    first, second = messages_of({"role": "developer", "content": "s"}, user())
    assert first == Message(Role.SYSTEM, "s", role_name="developer")
    assert second == Message(Role.USER, "q")


def test_a_null_key_is_absent_and_a_value_that_json_lacks_is_what_transformers_makes_of_it():
    """WildChat's messages have a date of Parquet each."""
    date = datetime.datetime(2024, 1, 1)
    (_, message) = messages_of(user(), assistant(refusal=None, train=None, function_call=None, timestamp=date))
    assert message == Message(Role.ASSISTANT, "a", {"timestamp": "<datetime>"})


EMPTY_KEYS = [
    *("tool_calls", "function_call", "functions", "tools", *REASONING_FIELDS, "name", "annotations", "audio"),
    *("refusal", "train"),
]


@pytest.mark.parametrize("key", EMPTY_KEYS)
@pytest.mark.parametrize("empty", [None, "", [], {}], ids=repr)
def test_an_empty_key_is_absent_in_every_format(key: str, empty: Any):
    """LangChain and OpenAI's exports write `tool_calls: []`, which some templates write as an empty call."""
    (question, answer), bare = (user(), assistant()), messages_of(user(), assistant())
    assert messages_of(question | {key: empty}, answer | {key: empty}) == bare
    prompted = parse({"prompt": [question], "completion": [answer | {key: empty}]}, "prompt_completion")
    assert prompted.messages[1] == bare[1]
    shared = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a", key: empty}]
    assert parse({"conversations": shared}, "sharegpt").messages == bare
    part = {"type": "text", "text": "a"}
    assert messages_of(question, assistant([part | {key: empty}])) == messages_of(question, assistant([part]))
    call = {"from": "function_call", "value": json.dumps(CALL["function"])}
    called = [parse({"conversations": [shared[0], each]}, "sharegpt") for each in (call, call | {key: empty})]
    assert called[0] == called[1]


@pytest.mark.parametrize(("weight", "expected"), [(0, 0.0), (1, 1.0), (0.25, 0.25), (None, 1.0)])
def test_a_weight_is_the_messages_and_no_field(weight: Any, expected: float):
    message = Message(Role.ASSISTANT, "a", {"name": "n"}, weight=expected)
    assert messages_of(user(), assistant(weight=weight, name="n"))[1] == message
    turn = {"from": "gpt", "value": "a", "weight": weight, "name": "n"}
    assert parse({"conversations": [{"from": "human", "value": "q"}, turn]}, "sharegpt").messages[1] == message


def test_parts_of_text_are_one_content_and_stay_apart_as_parts():
    content = [{"type": "text", "text": text} for text in ("a", "b\n", "c")]
    content[2]["image_url"] = None
    (message,) = messages_of(user(content))
    assert message == Message(Role.USER, "a\nb\n\nc", parts=("a", "b\n", "c"))


def test_a_system_column_is_the_first_message_unless_the_list_has_one():
    assert messages_of(user(), system="s") == messages_of(system(), user())
    assert messages_of(system(), user(), system="s") == messages_of(system(), user())
    for nothing in (None, "", " \n"):
        assert messages_of(user(), system=nothing) == messages_of(user())


# --- ShareGPT ---


def test_messages_and_sharegpt_turns_of_the_same_conversation_parse_equal():
    expected = parse({"messages": [system(), user(), assistant()]})
    for human in ("human", "user"):
        for gpt in ("gpt", "assistant", "chatgpt", "model", "bing", "bard"):
            assert parse(turns(("system", "s"), (human, "q"), (gpt, "a")), "sharegpt") == expected


@pytest.mark.parametrize("call", ["function_call", "tool_call"])
@pytest.mark.parametrize("result", ["observation", "tool", "function_response", "tool_response"])
@pytest.mark.parametrize("arguments", [{"a": 1}, '{"a": 1}'])
def test_calls_and_results_of_sharegpt_are_an_assistants_tool_calls_and_tool_messages(
    call: str, result: str, arguments: Any
):
    one, other = {"name": "add", "arguments": arguments}, {"name": "add", "arguments": {}}
    called = [{"type": "function", "function": each} for each in (one, other)]
    end = [tool(), assistant()]
    several = parse({"messages": [user(), assistant(None, tool_calls=called), *end]})
    for values in ([json.dumps([one, other])], [json.dumps(one), json.dumps(other)], [json.dumps(c) for c in called]):
        row = turns(("human", "q"), *((call, value) for value in values), (result, "t"), ("gpt", "a"))
        assert parse(row, "sharegpt") == several
    row = turns(("human", "q"), ("gpt", "let me see"), (call, json.dumps(one)), (result, "t"), ("gpt", "a"))
    joined = parse({"messages": [user(), assistant("let me see", tool_calls=called[:1]), *end]})
    assert parse(row, "sharegpt") == joined


# --- Order ---

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


# --- Reasoning ---

THINKING = "<think>so\n</think>\n\n"


def chat(*answers: dict[str, Any]) -> Conversation:
    return parse({"messages": [message for answer in answers for message in (user(THINKING + "q"), answer)]})


@pytest.mark.parametrize("field", [*REASONING_FIELDS, None])
def test_strip_takes_every_assistants_thoughts_last_all_but_the_last_ones_and_keep_none(field: str | None):
    def turn(text: str, thought: str) -> dict[str, Any]:
        if field is None:
            return assistant(f"<think>{thought}</think>\n\n{text}", name="n")
        return assistant(text, name="n", **{field: thought})

    thoughtful = chat(turn("a", "one"), turn("b", "two"), turn("c", ""))
    bare = chat(*(assistant(text, name="n") for text in "abc"))
    assert apply_reasoning_policy(thoughtful, "keep") is thoughtful
    assert apply_reasoning_policy(thoughtful, "strip") == bare
    last = apply_reasoning_policy(thoughtful, "last")
    assert last == replace(thoughtful, messages=(*bare.messages[:-1], thoughtful.messages[-1]))


def test_the_last_assistants_reasoning_is_kept_whatever_follows_it():
    called = assistant(None, reasoning="two", tool_calls=[CALL])
    conversation = parse({"messages": [user(), assistant("a", thinking="one"), user(), called, tool()]})
    last, stripped = (apply_reasoning_policy(conversation, policy).messages for policy in ("last", "strip"))
    assert last[1] == stripped[1] == Message(Role.ASSISTANT, "a")
    assert last[3] == conversation.messages[3]
    assert stripped[3] == Message(Role.ASSISTANT, None, {"tool_calls": [CALL]})


@pytest.mark.parametrize(
    ("content", "left"),
    [
        (" \n<think>a\nb</think> \n c ", "c "),
        ("<think></think>b", "b"),
        ("<think>a</think><think>b</think>c", "c"),
        ("<think>a</think>\n\n<think>b\n</think>\n\nc", "c"),
        ("<think>a</think>b\n<think>c</think>\nd", "b\nd"),
        ("<think>the user wrote </think> here</think>c", "c"),
        ("<think>the user wrote <think> here\n</think>c", "c"),
        ("<think>a</think>`<think>` opens and `</think>` closes", "`<think>` opens and `</think>` closes"),
        ("<think> a </think> b", "b"),
        ("<think> a </think> <think> b </think> c", "c"),
        ("<think>a</think> </think> c", "c"),
        ("Two and two.\n</think>\n\nIt is 4.", "It is 4."),
        ("Two and two.</think>It is 4.", "It is 4."),
        ("they ask for <think> tags\n</think>\nc", "c"),
        ("</think>\n\nc", "c"),
        ("use </think> to close", "use </think> to close"),
        ("Write `</think>`.", "Write `</think>`."),
        ("b<think>a</think>c", "b<think>a</think>c"),
        ("<think>a", "<think>a"),
        ("", ""),
    ],
)
def test_reasoning_begins_the_content_and_ends_where_no_thought_closes_after_it(content: str, left: str):
    stripped = apply_reasoning_policy(chat(assistant(content)), "strip")
    assert [message.content for message in stripped.messages] == [THINKING + "q", left]


@pytest.mark.parametrize(
    "answer",
    [assistant(THINKING), assistant("so\n</think>\n"), assistant(None, reasoning="so"), assistant("", thinking="so")],
)
def test_a_message_of_nothing_but_reasoning_is_refused_where_that_is_taken_away(answer: dict[str, Any]):
    conversation = chat(assistant("a"), answer)
    assert apply_reasoning_policy(conversation, "last") == conversation
    with pytest.raises(DataError) as caught:
        apply_reasoning_policy(conversation, "strip")
    assert str(caught.value).startswith("chats.jsonl:8: the assistant's message 4 is nothing but reasoning")
    assert caught.value.reason == "nothing_but_reasoning"


@given(parts=st.lists(st.sampled_from(["", "<think>", "</think>", "a", " ", "<think>b</think>", "c d"]), min_size=1))
def test_what_is_left_of_the_parts_is_what_is_left_of_the_content(parts: list[str]):
    conversation = parse({"messages": [user(), assistant([{"type": "text", "text": part} for part in parts])]})
    try:
        stripped = apply_reasoning_policy(conversation, "strip").messages[1]
    except DataError:
        return
    assert "\n".join(stripped.parts) == stripped.content
    rest = iter("".join(parts))
    assert all(character in rest for character in "".join(stripped.parts))
    again = apply_reasoning_policy(replace(conversation, messages=(conversation.messages[0], stripped)), "strip")
    assert again.messages[1] == stripped
