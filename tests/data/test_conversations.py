"""A row becomes a conversation, or is refused with its place, what was found and the remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftron.data.conversations import Format, RowFormat, detect_format, parse_conversation
from sftron.data.sources import open_source
from sftron.data.types import Conversation, ConversationKey, DataError, Message, Role

KEY = ConversationKey(source=0, row=7)


def user(content: Any = "q", **extra: Any) -> dict:
    return {"role": "user", "content": content, **extra}


def assistant(content: Any = "a", **extra: Any) -> dict:
    return {"role": "assistant", "content": content, **extra}


def system(content: Any = "s") -> dict:
    return {"role": "system", "content": content}


def parse(row: Any, format: Format = "messages") -> Conversation:
    return parse_conversation(row, RowFormat(format), KEY, "chats.jsonl:8")


# --- Accepted ---


def test_messages_and_sharegpt_rows_of_the_same_conversation_parse_equal():
    expected = Conversation(
        (Message(Role.SYSTEM, "s"), Message(Role.USER, "q"), Message(Role.ASSISTANT, "a")), KEY, "chats.jsonl:8"
    )
    assert parse({"messages": [system(), user(), assistant()]}) == expected
    for human, gpt in [("human", "gpt"), ("user", "assistant")]:
        turns = [("system", "s"), (human, "q"), (gpt, "a")]
        assert parse({"conversations": [{"from": f, "value": v} for f, v in turns]}, "sharegpt") == expected


@pytest.mark.parametrize(
    "messages",
    [
        [user()],
        [system()],
        [system(), user()],
        [user(), assistant(), user()],
        [user(), assistant(), user(), assistant()],
        [user(""), assistant("")],
        [user("<|im_end|> \ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16")), assistant()],
        [user(name=None, tool_calls=None), assistant(weight=None)],
    ],
)
def test_these_conversations_are_accepted_with_their_contents_untouched(messages):
    parsed = parse({"messages": messages, "id": 3, "tools": None, "meta": {"a": [1]}})
    assert [message.content for message in parsed.messages] == [message["content"] for message in messages]
    assert [message.role.name.lower() for message in parsed.messages] == [message["role"] for message in messages]


@pytest.mark.parametrize("tools", [None, [], {}, "", "[]", " [] ", "null", "{}"])
def test_empty_tools_are_no_tools(tools):
    assert len(parse({"messages": [user()], "tools": tools, "functions": tools}).messages) == 1


# --- Refused ---

REFUSED: dict[str, tuple[Any, str, str]] = {
    "a list": ([user()], "not_an_object", "found a list of 1; wanted an object with named columns"),
    "no messages column": (
        {"prompt": "q", "answer": "a"},
        "missing_column",
        "has no column `messages`, which format messages needs; its columns: prompt, answer; set `format`",
    ),
    "null messages": ({"messages": None}, "missing_column", "has no column `messages`"),
    "no columns": ({}, "missing_column", "its columns: none"),
    "messages as text": (
        {"messages": '[{"role": "user"}]'},
        "not_a_list",
        '`messages` is the text "[{"role": "user"}]"; wanted a list of messages',
    ),
    "messages as an object": ({"messages": {"role": ["user"]}}, "not_a_list", "is an object of 1; wanted a list"),
    "no messages": ({"messages": []}, "empty_conversation", "`messages` is empty; remove the row"),
    "a message that is a text": (
        {"messages": [user(), "hello"]},
        "not_a_message",
        'message 2: found the text "hello"; wanted an object {role, content}',
    ),
    "a message that is null": ({"messages": [None]}, "not_a_message", "message 1: found null; wanted an object"),
    "a message without role": (
        {"messages": [{"content": "q"}]},
        "missing_key",
        "message 1: has no `role`, only content; wanted {role, content}",
    ),
    "a message without content": ({"messages": [{"role": "user"}]}, "missing_key", "message 1: has no `content`"),
    "a message in the other format": (
        {"messages": [{"from": "human", "value": "q"}]},
        "missing_key",
        "message 1: has no `role`, only from, value; wanted {role, content}",
    ),
    "a null content": ({"messages": [user(None)]}, "null_content", "message 1: `content` is null; write the text"),
    "content parts": (
        {"messages": [user([{"type": "text", "text": "q"}])]},
        "content_parts",
        "message 1: `content` is a list of parts, which may hold images; only text is read: join the parts",
    ),
    "a number as content": ({"messages": [user(), assistant(1)]}, "not_text", "message 2: `content` is the number 1"),
    "a bool as content": ({"messages": [user(True)]}, "not_text", "message 1: `content` is true; wanted text"),
    "an object as content": ({"messages": [user({"a": 1})]}, "not_text", "message 1: `content` is an object of 1"),
    "an unknown role": (
        {"messages": [{"role": "bot", "content": "x"}]},
        "unknown_role",
        'message 1: `role` is the text "bot"; wanted one of system, user, assistant',
    ),
    "a role in capitals": (
        {"messages": [{"role": "User", "content": "x"}]},
        "unknown_role",
        '`role` is the text "User"',
    ),
    "a null role": ({"messages": [{"role": None, "content": "x"}]}, "unknown_role", "`role` is null; wanted one of"),
    "a list as role": ({"messages": [{"role": ["user"], "content": "x"}]}, "unknown_role", "`role` is a list of 1"),
    "a tool message": (
        {"messages": [user(), {"role": "tool", "content": "4"}]},
        "unsupported_role",
        'message 2: role "tool" is not supported yet; remove the row',
    ),
    "a weight": (
        {"messages": [user(), assistant(weight=0)]},
        "unknown_key",
        'message 2: has the key "weight", which is not read; remove it, or set it to null',
    ),
    "tool calls": (
        {"messages": [user(), assistant(tool_calls=[{"id": 1}])]},
        "unknown_key",
        'message 2: has the key "tool_calls", which is not read',
    ),
    "a name": ({"messages": [user(name="Ada")]}, "unknown_key", 'message 1: has the key "name"'),
    "a train flag": ({"messages": [user(train=False)]}, "unknown_key", 'message 1: has the key "train"'),
    "tools": (
        {"messages": [user()], "tools": [{"name": "f"}]},
        "unsupported_column",
        "`tools` is not supported yet; remove the row",
    ),
    "tools as text": (
        {"messages": [user()], "tools": '[{"name": "f"}]'},
        "unsupported_column",
        "`tools` is not supported",
    ),
    "functions": ({"messages": [user()], "functions": {"f": 1}}, "unsupported_column", "`functions` is not supported"),
    "the assistant first": (
        {"messages": [assistant(), user()]},
        "wrong_role_order",
        "message 1 (assistant) comes before any user message; add the question, or remove it",
    ),
    "the assistant after the system": (
        {"messages": [system(), assistant()]},
        "wrong_role_order",
        "message 2 (assistant) comes before any user message",
    ),
    "two user turns": (
        {"messages": [system(), user(), user(), assistant()]},
        "wrong_role_order",
        "message 3 (user) follows message 2 (user); join the two, or remove one",
    ),
    "two assistant turns": (
        {"messages": [user(), assistant(), assistant()]},
        "wrong_role_order",
        "message 3 (assistant) follows message 2 (assistant); join the two, or remove one",
    ),
    "a late system turn": (
        {"messages": [user(), system(), assistant()]},
        "wrong_role_order",
        "message 2 (system) is not the first; move it there, or into a user message",
    ),
    "two system turns": ({"messages": [system(), system(), user()]}, "wrong_role_order", "message 2 (system) is not"),
    "a lone surrogate": (
        {"messages": [user("ab\ud800")]},
        "lone_surrogate",
        r"message 1: `content` holds half a character ('\ud800') at 2, a surrogate without its pair; write the whole",
    ),
}


@pytest.mark.parametrize(("row", "reason", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_refused_row_is_told_with_its_place_what_was_found_and_the_remedy(row, reason, message):
    with pytest.raises(DataError) as caught:
        parse(row)
    assert str(caught.value).startswith("chats.jsonl:8: ")
    assert message in str(caught.value)
    assert str(caught.value).isprintable()
    assert caught.value.reason == reason


@pytest.mark.parametrize("role", ["tool", "function_call", "observation"])
def test_sharegpt_tool_turns_are_refused_by_name(role):
    with pytest.raises(DataError, match=f'message 2: role "{role}" is not supported yet') as caught:
        parse({"conversations": [{"from": "human", "value": "q"}, {"from": role, "value": "x"}]}, "sharegpt")
    assert caught.value.reason == "unsupported_role"


def test_sharegpt_unknown_roles_list_what_is_accepted():
    with pytest.raises(DataError, match='"chatgpt"; wanted one of system, human, user, gpt, assistant'):
        parse({"conversations": [{"from": "chatgpt", "value": "q"}]}, "sharegpt")


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
ROLES = st.sampled_from(["system", "user", "assistant", "human", "gpt", "tool"]) | JSON_VALUES
NEARLY_MESSAGES = st.dictionaries(
    st.sampled_from(["role", "content", "from", "value", "name"]), ROLES | JSON_VALUES, max_size=4
)
NEARLY_ROWS = st.dictionaries(
    st.sampled_from(["messages", "conversations", "tools", "id"]),
    st.lists(NEARLY_MESSAGES | JSON_VALUES, max_size=4) | JSON_VALUES,
    max_size=3,
)


@given(row=NEARLY_ROWS | JSON_VALUES, format=st.sampled_from(["messages", "sharegpt"]))
def test_any_json_value_is_a_conversation_or_a_data_error_and_nothing_else(row, format):
    outcome: Conversation | DataError
    try:
        outcome = parse(row, format)
    except DataError as error:
        outcome = error
    if isinstance(outcome, DataError):
        assert str(outcome).startswith("chats.jsonl:8: ")
        assert outcome.reason != "bad_data"
        return
    assert len(outcome.messages) >= 1
    for message in outcome.messages:
        assert isinstance(message.content, str)
        assert message.role in (Role.SYSTEM, Role.USER, Role.ASSISTANT)


@given(roles=st.lists(st.sampled_from(["system", "user", "assistant"]), min_size=1, max_size=6))
def test_accepted_orders_are_an_optional_system_turn_then_user_and_assistant_by_turns(roles):
    rest = roles[1:] if roles[0] == "system" else roles
    expected = all(role == ("user", "assistant")[n % 2] for n, role in enumerate(rest))
    try:
        parse({"messages": [{"role": role, "content": "x"} for role in roles]})
        outcome = "accepted"
    except DataError as error:
        outcome = error.reason
    assert outcome == ("accepted" if expected else "wrong_role_order")


# --- Detection ---

MESSAGES = {"messages": [user(), assistant()]}
SHAREGPT = {"conversations": [{"from": "human", "value": "q"}]}


def detect(tmp_path: Path, *rows: Any, sample: int = 100) -> Format:
    path = tmp_path / "a.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return detect_format(open_source(str(path)), sample)


def test_a_format_is_detected_from_its_column(tmp_path):
    assert detect(tmp_path, MESSAGES, MESSAGES) == "messages"
    assert detect(tmp_path, SHAREGPT, SHAREGPT) == "sharegpt"


def test_a_column_of_nulls_does_not_count(tmp_path):
    assert detect(tmp_path, MESSAGES | {"conversations": None}) == "messages"


def test_unreadable_rows_have_no_say_unless_there_are_no_others(tmp_path):
    assert detect(tmp_path, "{broken", SHAREGPT) == "sharegpt"
    with pytest.raises(DataError, match=r"a\.jsonl:1: is not JSON"):
        detect(tmp_path, "{broken", "{also")


def test_only_the_sample_is_looked_at(tmp_path):
    assert detect(tmp_path, MESSAGES, SHAREGPT, sample=1) == "messages"


@pytest.mark.parametrize(
    ("rows", "reason", "message"),
    [
        (
            [MESSAGES, SHAREGPT],
            "mixed_formats",
            "a.jsonl:2: is in format sharegpt, but rows before it are in format messages; make each format a data set",
        ),
        (
            [MESSAGES | SHAREGPT],
            "no_format",
            "a.jsonl:1: fits several formats; columns: messages, conversations; known formats: messages: column "
            "`messages`, a list of {role, content}; sharegpt: column `conversations`, a list of {from, value}; "
            "set `format`",
        ),
        (
            [MESSAGES, {"question": "q", "answer": "a"}],
            "no_format",
            "a.jsonl:2: fits no format; columns: question, answer; known formats: messages: column",
        ),
    ],
)
def test_a_doubtful_format_is_refused(tmp_path, rows, reason, message):
    with pytest.raises(DataError) as caught:
        detect(tmp_path, *rows)
    assert str(caught.value).replace(f"{tmp_path}/", "").startswith(message)
    assert caught.value.reason == reason
