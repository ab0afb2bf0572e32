"""A question and its answer in columns of their own: what the user says, and what is trained."""

from __future__ import annotations

from typing import Any

import pytest

from sftron.data.formats.detect import Format
from sftron.data.types import DataError, Role
from tests.data.rows import assistant, parse, system, user

ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\nq {query}\n\n### Response:"
)
COT = "q {query}\nPlease reason step by step, and put your final answer within \\boxed{}."


def texts(row: Any, format: Format, **options: Any) -> list[tuple[str, str | None]]:
    return [(m.role.name.lower(), m.content) for m in parse(row, format, **options).messages]


@pytest.mark.parametrize(
    ("format", "row"),
    [
        ("query_response", {"query": "q {query}", "response": " a\n"}),
        ("question_answer", {"question": "q {query}", "answer": " a\n"}),
        ("alpaca", {"instruction": "q {query}", "input": "", "output": " a\n"}),
    ],
)
def test_a_prompt_template_makes_the_users_text_and_leaves_the_answer(format: Format, row: dict):
    for template, asked in [(None, "q {query}"), ("cot", COT), ("alpaca", ALPACA), ("{} {query}!", "{} q {query}!")]:
        assert texts(row, format, prompt_template=template) == [("user", asked), ("assistant", " a\n")]


def test_prompt_and_completion_may_be_texts_and_know_no_template():
    row = {"prompt": "q", "completion": " a"}
    assert texts(row, "prompt_completion") == [("user", "q"), ("assistant", " a")]
    with pytest.raises(DataError, match="prompt_template: format prompt_completion does not read it"):
        parse(row, "prompt_completion", prompt_template="cot")


def test_what_the_assistant_says_in_a_prompt_of_messages_is_not_trained_unless_the_data_says_so():
    prompt, completion = [system(), user(), assistant(), user()], [assistant("b")]
    given = parse({"prompt": prompt, "completion": completion}, "prompt_completion").messages
    assert [message.content for message in given] == ["s", "q", "a", "q", "b"]
    assert [message.weight for message in given if message.role is Role.ASSISTANT] == [0.0, 1.0]
    prompt[2] = assistant(weight=0.5)
    weighted = parse({"prompt": prompt, "completion": completion}, "prompt_completion").messages
    assert [message.weight for message in weighted if message.role is Role.ASSISTANT] == [0.5, 1.0]


def test_alpacas_input_follows_its_instruction_and_its_history_goes_before():
    row = {"instruction": "q", "input": "i", "output": "a", "history": [["h", "g"], ["k", "l"]], "system": "s"}
    assert texts(row, "alpaca", prompt_template="<{query}>") == [
        ("system", "s"),
        ("user", "h"),
        ("assistant", "g"),
        ("user", "k"),
        ("assistant", "l"),
        ("user", "<q\n\ni>"),
        ("assistant", "a"),
    ]
    for nothing in ({"input": None}, {"input": ""}, {}):
        assert texts({"instruction": "q", "output": "a", "history": [], **nothing}, "alpaca") == [
            ("user", "q"),
            ("assistant", "a"),
        ]


@pytest.mark.parametrize(
    ("format", "row", "reason", "message"),
    [
        (
            "query_response",
            {"query": "q"},
            "missing_column",
            "has no column `response`, which format query_response needs; its columns: query; set `format`, or name",
        ),
        ("question_answer", {"question": "q", "answer": None}, "null_content", "`answer` is null; write the text, or"),
        ("question_answer", {"question": "q", "answer": 42}, "not_text", "`answer` is the number 42; wanted text"),
        ("query_response", {"query": ["q"], "response": "a"}, "not_text", "`query` is a list of 1; wanted text"),
        ("alpaca", {"instruction": "q", "output": "\ud800"}, "lone_surrogate", "`output` holds half a character"),
        ("alpaca", {"instruction": "q", "input": 1, "output": "a"}, "not_text", "`input` is the number 1; wanted text"),
        (
            "alpaca",
            {"instruction": "q", "output": "a", "history": "h"},
            "not_a_list",
            '`history` is the text "h"; wanted a list of [user, assistant] pairs',
        ),
        (
            "alpaca",
            {"instruction": "q", "output": "a", "history": [["h", "g"], ["h"]]},
            "bad_history",
            "pair 2 of `history` is a list of 1; wanted a list of two texts, [user, assistant]",
        ),
        ("alpaca", {"instruction": "q", "output": "a", "history": [["h", None]]}, "not_text", "`history` is null"),
        (
            "prompt_completion",
            {"prompt": [user()], "completion": "a"},
            "mixed_kinds",
            '`prompt` is a list of 1, `completion` the text "a"; wanted two texts, or two lists of messages',
        ),
        ("prompt_completion", {"prompt": [user()], "completion": None}, "missing_column", "has no column `completion`"),
        ("prompt_completion", {"prompt": [user()], "completion": []}, "empty_conversation", "`completion` is empty"),
        ("prompt_completion", {"prompt": None, "completion": "a"}, "null_content", "`prompt` is null; write the text"),
        (
            "prompt_completion",
            {"prompt": [user()], "completion": [assistant(), user(None)]},
            "null_content",
            "message 3: `content` is null",
        ),
        (
            "prompt_completion",
            {"prompt": [user()], "completion": [user()]},
            "wrong_role_order",
            "message 2 (user) follows message 1 (user)",
        ),
    ],
)
def test_a_refused_row_is_told_with_its_column(format: Format, row: dict, reason: str, message: str):
    with pytest.raises(DataError) as caught:
        parse(row, format)
    assert str(caught.value).startswith("chats.jsonl:8: ")
    assert message in str(caught.value)
    assert caught.value.reason == reason
