"""The policy on reasoning takes away whole thoughts of the assistant, and not a character of anything else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftron.data.formats.messages import REASONING_FIELDS, apply_reasoning_policy
from sftron.data.types import Conversation, DataError, Message, Role
from tests.data.rows import CALL, assistant, parse, system, tool, user

THINKING = "<think>so\n</think>\n\n"


def contents(conversation: Conversation) -> list[tuple[str | None, dict[str, Any]]]:
    return [(message.content, dict(message.fields)) for message in conversation.messages]


def chat(*answers: dict[str, Any]) -> Conversation:
    return parse({"messages": [message for answer in answers for message in (user(THINKING + "q"), answer)]})


@pytest.mark.parametrize("field", [*REASONING_FIELDS, None])
def test_strip_takes_every_assistants_thoughts_last_all_but_the_last_ones_and_keep_none(field: str | None):
    def say(text: str, thought: str) -> dict[str, Any]:
        if field is None:
            return assistant(f"<think>{thought}</think>\n\n{text}", name="n")
        return assistant(text, name="n", **{field: thought})

    thoughtful = chat(say("a", "one"), say("b", "two"), say("c", ""))
    bare = chat(assistant("a", name="n"), assistant("b", name="n"), assistant("c", name="n"))
    assert apply_reasoning_policy(thoughtful, "keep") is thoughtful
    assert apply_reasoning_policy(thoughtful, "strip") == bare
    last = apply_reasoning_policy(thoughtful, "last")
    assert last.messages == (*bare.messages[:-1], thoughtful.messages[-1])
    assert (last.key, last.location, last.tools) == (thoughtful.key, thoughtful.location, thoughtful.tools)


def test_the_last_assistants_reasoning_is_kept_whatever_follows_it():
    called = assistant(None, reasoning="two", tool_calls=[CALL])
    conversation = parse({"messages": [user(), assistant("a", thinking="one"), user(), called, tool()]})
    assert contents(apply_reasoning_policy(conversation, "last"))[1] == ("a", {})
    assert apply_reasoning_policy(conversation, "last").messages[3] == conversation.messages[3]
    assert contents(apply_reasoning_policy(conversation, "strip"))[3] == (None, {"tool_calls": [CALL]})


@pytest.mark.parametrize(
    ("content", "left"),
    [
        ("<think>a</think>b", "b"),
        (" \n<think>a\nb</think> \n c ", "c "),
        ("<think></think>b", "b"),
        ("<think>a</think><think>b</think>c", "<think>b</think>c"),
        ("<think>a</think>b</think>c", "b</think>c"),
        ("b<think>a</think>c", "b<think>a</think>c"),
        ("<think>a", "<think>a"),
        (" b ", " b "),
        ("", ""),
    ],
)
def test_only_a_whole_block_that_begins_the_content_is_reasoning(content: str, left: str):
    stripped = apply_reasoning_policy(chat(assistant(content)), "strip")
    assert [message.content for message in stripped.messages] == [THINKING + "q", left]


@pytest.mark.parametrize("answer", [assistant(THINKING), assistant(None, reasoning="so"), assistant("", thinking="so")])
def test_a_message_of_nothing_but_reasoning_is_refused_where_that_is_taken_away(answer: dict[str, Any]):
    conversation = chat(assistant("a"), answer)
    assert apply_reasoning_policy(conversation, "last") == conversation
    with pytest.raises(DataError) as caught:
        apply_reasoning_policy(conversation, "strip")
    assert str(caught.value) == (
        "chats.jsonl:8: the assistant's message 4 is nothing but reasoning, and data.reasoning is strip; keep it, or "
        "remove the row"
    )
    assert caught.value.reason == "nothing_but_reasoning"


def test_an_answer_that_was_empty_before_is_not_refused():
    conversation = parse({"messages": [system(), user(), assistant("")]})
    assert apply_reasoning_policy(conversation, "strip") == conversation


@given(parts=st.lists(st.sampled_from(["", "<think>", "</think>", "a", " ", "<think>b</think>", "c d"]), min_size=1))
def test_what_is_left_of_the_parts_is_what_is_left_of_the_content(parts: list[str]):
    message = parse({"messages": [user(), assistant([{"type": "text", "text": part} for part in parts])]}).messages[1]
    conversation = replace(chat(assistant()), messages=(Message(Role.USER, "q"), message))
    try:
        stripped = apply_reasoning_policy(conversation, "strip").messages[1]
    except DataError:
        return
    assert "\n".join(stripped.parts) == stripped.content
    assert (message.content or "").endswith(stripped.content or "")
    assert "".join(parts).endswith("".join(stripped.parts))
