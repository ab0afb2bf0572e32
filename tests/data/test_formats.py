"""The format of rows is declared or detected, never guessed; each format's columns become the same conversation."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from sftron.data.formats.detect import ANSWERS, FORMAT_SAMPLE, QUESTIONS, detect_format, resolve_format, unread_columns
from sftron.data.formats.table import Format, RowFormat, parse_conversation
from sftron.data.formats.values import names_of
from sftron.data.sources import open_source
from sftron.data.types import Conversation, DataError, Role, TokenizedConversation
from tests.data.rows import KEY, LOCATION, assistant, parse, system, turns, user, write_jsonl

MESSAGES = {"messages": [user(), assistant()]}
SHAREGPT = turns(("human", "q"), ("gpt", "a"))
OF_EACH: dict[Format, dict[str, Any]] = {
    "messages": MESSAGES,
    "sharegpt": SHAREGPT,
    "prompt_completion": {"prompt": "q", "completion": "a"},
    "query_response": {"query": "q", "response": "a"},
    "question_answer": {"question": "q", "answer": "a"},
    "alpaca": {"instruction": "q", "output": "a"},
    "input_ids": {"input_ids": [5, 6], "labels": [-100, 6]},
}
"""A row of each format that is detected; format text has to be declared (test_text.py)."""


def detect(tmp_path: Path, *rows: Any, columns: dict[str, str] | None = None) -> Format:
    return detect_format(open_source(str(write_jsonl(tmp_path / "a.jsonl", *rows))), columns)


def refused(tmp_path: Path, *rows: Any, reason: str = "no_format") -> str:
    with pytest.raises(DataError) as caught:
        detect(tmp_path, *rows)
    assert str(caught.value).startswith(f"{tmp_path}/a.jsonl:{len(rows)}: ")
    assert caught.value.reason == reason
    return str(caught.value)


# --- Parsing ---


@pytest.mark.parametrize("format", [name for name in OF_EACH if name != "input_ids"])
def test_the_same_question_and_answer_parse_equal_in_every_format(format: Format):
    assert parse(OF_EACH[format], format) == parse(MESSAGES)
    conversation = parse(OF_EACH[format] | {"system": "be brief", "tools": '[{"name": "f"}]', "functions": []}, format)
    assert [message.role for message in conversation.messages] == [Role.SYSTEM, Role.USER, Role.ASSISTANT]
    assert (conversation.messages[0].content, conversation.tools) == ("be brief", ({"name": "f"},))


@pytest.mark.parametrize("format", OF_EACH)
def test_columns_of_other_names_are_read_as_those_of_the_format(tmp_path: Path, format: Format):
    row = OF_EACH[format]
    renamed, columns = {f"my {name}": value for name, value in row.items()}, {name: f"my {name}" for name in row}
    assert detect(tmp_path, renamed, columns=columns) == format
    parsed = parse_conversation(renamed, RowFormat(format, columns), KEY, LOCATION)
    if isinstance(parsed, TokenizedConversation):
        assert parsed.role_ids.tolist() == [Role.USER, Role.ASSISTANT]
    else:
        assert parsed == parse(row, format)
    with pytest.raises(DataError, match=f"has no column `my {next(iter(row))}`, which format {format} needs"):
        parse_conversation(row, RowFormat(format, columns), KEY, LOCATION)


def test_a_column_of_functions_may_be_declared_to_hold_the_tools():
    row = MESSAGES | {"functions": [{"name": "f"}]}
    assert parse(row, columns={"tools": "functions"}).tools == ({"name": "f"},)


# --- A format and its options ---


def test_another_option_is_another_text_for_the_fingerprint_and_it_is_one_line():
    columns = [{}, {"query": "q"}, {"query": "r"}, {"response": "q"}, {"query": "a, response from column b"}]
    templates = [None, "cot", "alpaca", "{query}", "{query}\n", "{query}\\n", '{query}"']
    formats = [RowFormat("query_response", c, t) for c in columns for t in templates]
    texts = [str(each) for each in formats]
    assert len(set(texts)) == len(formats)
    assert all(text.isprintable() for text in texts)
    one, other = {"input": "i", "output": "o"}, {"output": "o", "input": "i"}
    assert str(RowFormat("alpaca", one)) == str(RowFormat("alpaca", other))
    assert all(pickle.loads(pickle.dumps(each)) == each for each in formats)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"columns": {"mesages": "m"}}, 'columns: "mesages" is no column of format messages; its columns: messages, '),
        ({"columns": {"messages": "system"}}, 'columns: "system" would be two columns of format messages'),
        ({"columns": {"system": "promt"}}, 'none of the first 1 rows has a column "promt"; the first one\'s columns:'),
        ({"name": "auto", "columns": {"messages": "a", "query": "b"}}, 'no format has them all: "query" is no column'),
        ({"prompt_template": "cot"}, "format messages does not read it, only query_response, question_answer, alpaca"),
        ({"name": "alpaca", "prompt_template": "cott"}, 'prompt_template: "cott" is not the name of a template'),
        ({"name": "alpaca", "prompt_template": "{query} {query}"}, "has {query} 2 times"),
    ],
)
def test_an_option_that_the_format_cannot_use_is_an_error_that_lists_what_it_can(
    tmp_path: Path, options: dict[str, Any], message: str
):
    source = open_source(str(write_jsonl(tmp_path / "a.jsonl", MESSAGES)))
    with pytest.raises(DataError) as caught:
        resolve_format(source, **{"name": "messages"} | options)
    assert str(caught.value).startswith(f"{source.name}: ")
    assert message in str(caught.value)


def test_columns_that_hold_something_and_are_not_read_are_named(tmp_path: Path):
    rows = [MESSAGES | {"id": 0, "tools": None, "none": None, "empty": ""}, MESSAGES | {"id": 3, "system_prompt": "s"}]
    source = open_source(str(write_jsonl(tmp_path / "a.jsonl", "{broken", *rows)))
    assert unread_columns(source, RowFormat("messages")) == ["id", "system_prompt"]
    assert unread_columns(source, RowFormat("messages", {"system": "system_prompt"})) == ["id"]


# --- Detection ---


@pytest.mark.parametrize(
    ("row", "format"),
    [
        *((row | {"id": 3, "turns": [1, 2], "tools": None}, format) for format, row in OF_EACH.items()),
        (MESSAGES | {"prompt": "q", "prompt_id": "1"}, "messages"),  # UltraChat
        (MESSAGES | {"problem": "q", "solution": "a", "answer": "7"}, "messages"),  # NuminaMath, OpenR1
        ({"query": "q", "response": "a", "original_question": "q", "type": "GSM"}, "query_response"),  # MetaMathQA
        ({"instruction": "q", "input": "", "output": "a", "text": "all of it"}, "alpaca"),  # Alpaca
        ({"prompt": [user()], "completion": [assistant()]}, "prompt_completion"),  # TRL's conversational form
        (MESSAGES | {"input_ids": [5, 6], "attention_mask": [1, 1]}, "messages"),  # trained tokens are not declared
        (MESSAGES | {"conversations": None, "question": None, "answer": None}, "messages"),
        ({"question": "q", "answer": None}, "question_answer"),
        ({"messages": []}, "messages"),
    ],
)
def test_a_format_is_detected_from_its_columns_and_what_they_hold(tmp_path: Path, row: Any, format: str):
    assert detect(tmp_path, row, row) == format


def test_unreadable_rows_do_not_count_unless_there_are_no_others_and_only_the_first_rows_are_read(tmp_path: Path):
    assert detect(tmp_path, "{broken", SHAREGPT) == "sharegpt"
    assert "is not JSON" in refused(tmp_path, "{broken", reason="broken_json")
    assert detect(tmp_path, *[MESSAGES] * FORMAT_SAMPLE, SHAREGPT) == "messages"


def test_rows_that_fit_several_formats_or_none_or_disagree_are_refused(tmp_path: Path):
    for other in OF_EACH:
        if other != "messages":
            message = refused(tmp_path, MESSAGES, MESSAGES | OF_EACH[other])
            assert f"fits several formats (messages, {other}); columns: messages (a list of 2), " in message
            assert "; set `format`; known formats: " in message
    disagree = refused(tmp_path, MESSAGES, SHAREGPT | {"id": 1}, reason="mixed_formats")
    assert "is in format sharegpt, but rows before it are in format messages; its columns: conv" in disagree
    message = refused(tmp_path, MESSAGES, {"question": "q", "answer": 7, "text": None})
    assert "fits no format; columns: question (text), answer (the number 7), text (null); name columns" in message
    assert "known formats: messages: column `messages`, a list of {role, content}; sharegpt: column" in message


@pytest.mark.parametrize(
    ("row", "format", "columns"),
    [
        ({"messages": SHAREGPT["conversations"]}, "sharegpt", {"conversations": "messages"}),
        ({"conversations": MESSAGES["messages"]}, "messages", {"messages": "conversations"}),
        ({"id": 1, "chat": MESSAGES["messages"]}, "messages", {"messages": "chat"}),
    ],
)
def test_turns_in_a_column_of_another_name_get_the_configuration_that_reads_them(
    tmp_path: Path, row: dict[str, Any], format: Format, columns: dict[str, str]
):
    ((name, data_name),) = columns.items()
    remedy = f"set `format: {format}` and `columns: {{{name}: {data_name}}}`"
    assert f"{remedy}; known formats: " in refused(tmp_path, row)
    assert resolve_format(open_source(str(tmp_path / "a.jsonl")), columns=columns) == RowFormat(format, columns)
    assert parse(row, format, columns=columns) == parse(MESSAGES)


def test_every_pair_of_names_of_a_question_and_its_answer_is_read_or_offered_with_its_columns(tmp_path: Path):
    for question, answer in itertools.product(QUESTIONS, ANSWERS):
        row = {question: "q", answer: "a", "id": 7, "source": "x"}
        try:
            detected, columns = detect(tmp_path, row), {}
        except DataError as error:
            offered = str(error).partition("; known formats: ")[0].rpartition("; ")[2]
            assert offered.startswith(f"if `{question}` is the user's text and `{answer}` the answer, set `columns: {{")
            columns = dict(pair.split(": ") for pair in offered.split("{")[1].split("}")[0].split(", "))
            detected = detect(tmp_path, row, columns=columns)
        conversation = parse_conversation(row, RowFormat(detected, columns), KEY, LOCATION)
        assert isinstance(conversation, Conversation)
        assert [message.content for message in conversation.messages] == ["q", "a"]
    offered = refused(tmp_path, {"instruction": "q", "input": "", "response": "a"})
    assert ", set `columns: {output: response}`; known" in offered
    assert "set `columns" not in refused(tmp_path, {"prompt": "q", "chosen": "a", "rejected": "b"})


@pytest.mark.parametrize(
    ("names", "read_as", "columns"),
    [
        (("Question", "Answer"), ("Question", "Answer"), "{question: Question, answer: Answer}"),
        (("question", " ANSWER "), ("question", '" ANSWER "'), "{answer: ' ANSWER '}"),
        (("Prompt", "Completion", "Answer"), ("Prompt", "Completion"), "{prompt: Prompt, completion: Completion}"),
        (("Prompt", "Response"), ("Prompt", "Response"), "{prompt: Prompt, completion: Response}"),
        (
            ("Instruction", "Output", "Input"),
            ("Instruction", "Output"),
            "{instruction: Instruction, output: Output, input: Input}",
        ),
    ],
)
def test_names_in_another_case_or_with_blanks_around_them_get_the_columns_that_read_them(
    tmp_path: Path, names: tuple[str, ...], read_as: tuple[str, str], columns: str
):
    row = dict(zip(names, "qab", strict=False))
    message = refused(tmp_path, row)
    assert f"columns: {', '.join(f'{names_of([name])} (text)' for name in names)}; if" in message
    remedy = f"if `{read_as[0]}` is the user's text and `{read_as[1]}` the answer, set `columns: {columns}`"
    assert f"; {remedy}; known formats: " in message
    declared = yaml.safe_load(columns)
    asked = "q\n\nb" if "Input" in names else "q"
    assert texts(row, detect(tmp_path, row, columns=declared), columns=declared) == [
        ("user", asked),
        ("assistant", "a"),
    ]


# --- A question and its answer ---

ALPACA_TEXT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\nq {query}\n\n### Response:"
)
COT_TEXT = "q {query}\nPlease reason step by step, and put your final answer within \\boxed{}."


def texts(row: Any, format: Format, **options: Any) -> list[tuple[str, str | None]]:
    return [(m.role.name.lower(), m.content) for m in parse(row, format, **options).messages]


@pytest.mark.parametrize(
    ("format", "question", "answer"),
    [
        ("query_response", "query", "response"),
        ("question_answer", "question", "answer"),
        ("alpaca", "instruction", "output"),
    ],
)
def test_a_prompt_template_makes_the_users_text_and_leaves_the_answer(format: Format, question: str, answer: str):
    asked_by = {None: "q {query}", "cot": COT_TEXT, "alpaca": ALPACA_TEXT, "{} {query}!": "{} q {query}!"}
    for template, asked in asked_by.items():
        row = {question: "q {query}", answer: " a\n"}
        assert texts(row, format, prompt_template=template) == [("user", asked), ("assistant", " a\n")]


def test_the_assistant_in_a_prompt_of_messages_is_not_trained_unless_the_data_declares_it():
    prompt, completion = [system(), user(), assistant(), user()], [assistant("b")]
    for weight, expected in ((None, 0.0), (0.5, 0.5)):
        prompt[2] = assistant(weight=weight)
        messages = parse({"prompt": prompt, "completion": completion}, "prompt_completion").messages
        assert [message.content for message in messages] == ["s", "q", "a", "q", "b"]
        assert [message.weight for message in messages if message.role is Role.ASSISTANT] == [expected, 1.0]


def test_alpacas_input_follows_its_instruction_and_its_history_goes_before():
    """
    history       [h, g], [k, l]
    instruction   q
    input         i
    """
    row = {"instruction": "q", "input": "i", "output": "a", "history": [["h", "g"], ["k", "l"]]}
    pairs = [("user", "h"), ("assistant", "g"), ("user", "k"), ("assistant", "l")]
    expected = [*pairs, ("user", "<q\n\ni>"), ("assistant", "a")]
    assert texts(row, "alpaca", prompt_template="<{query}>") == expected
    for nothing in ({"input": None}, {"input": ""}, {}):
        row = {"instruction": "q", "output": "a", "history": [], **nothing}
        assert texts(row, "alpaca") == [("user", "q"), ("assistant", "a")]


# --- Rows of ids ---

IDS = [1, 5, 5, 7, 2, 9]
LABELS = [-100, -100, -100, 7, 2, -100]


def parse_ids(**columns: Any) -> TokenizedConversation:
    parsed = parse_conversation({"input_ids": IDS, **columns}, RowFormat("input_ids"), KEY, LOCATION)
    assert isinstance(parsed, TokenizedConversation)
    return parsed


def test_labels_declare_what_is_the_assistants_at_their_own_index():
    """
    input_ids   1  5  5  7  2  9
    labels      -  -  -  7  2  -
    role_ids    U  U  U  A  A  U
    """
    ignored = {"attention_mask": [1] * 6, "position_ids": [*range(6)], "token_type_ids": [0] * 6, "roles": None}
    for extra in ({}, ignored):
        parsed = parse_ids(labels=LABELS, **extra)
        assert (parsed.input_ids.dtype, parsed.role_ids.dtype) == (np.int32, np.uint8)
        assert parsed.input_ids.tolist() == IDS
        assert parsed.role_ids.tolist() == [Role.USER] * 3 + [Role.ASSISTANT] * 2 + [Role.USER]
        assert (parsed.turns, parsed.key, parsed.token_weights) == ((), KEY, None)


def test_roles_may_be_numbers_or_names_and_stand_in_either_column():
    roles = [Role.TEMPLATE, Role.SYSTEM, Role.USER, Role.REASONING, Role.TOOL_CALL, Role.TOOL]
    names = ["template", "system", "user", "reasoning", "tool_call", "tool"]
    for spelled in ([int(role) for role in roles], names, [*names[:3], *(int(role) for role in roles[3:])]):
        for column in ("role_ids", "roles"):
            assert parse_ids(**{column: spelled}).role_ids.tolist() == roles


LIST = [{"role": "user", "content": "q"}]
ADVICE: list[tuple[dict, str]] = [
    ({"messages": "[]", "tools": "[]"}, "`messages` is a text: write the list itself"),
    ({"conversations": "[]", "system": "s"}, "`conversations` is a text: write the list itself"),
    ({"tools": "[]", "system": "s"}, "name columns in `columns`, or convert the rows"),
    ({"prompt": LIST, "completion": "a"}, "write `completion` as a list, too: [{role: assistant, content: text}]"),
    ({"prompt": "q", "completion": LIST}, "write `prompt` as a list, too: [{role: user, content: text}]"),
    ({"contents": [{"role": "user", "parts": [{"text": "q"}]}]}, "`contents` has turns of {role, parts}, as Gemini's"),
    *(
        ({"id": "1", "role": role, "content": "q"}, "the row is one message: write all messages of a conversation into")
        for role in ("user", "Assistant", "system", "model")
    ),
    ({"from": "human", "value": "q"}, "one message: write all messages of a conversation into one row, {conversations"),
    ({"turns": [{"role": "user", "text": "q"}]}, "name columns in `columns`, or convert the rows"),
]


@pytest.mark.parametrize(("row", "advice"), ADVICE)
def test_rows_that_no_columns_can_read_get_the_rewriting_that_does(tmp_path: Path, row: dict, advice: str) -> None:
    with pytest.raises(DataError) as caught:
        resolve_format(open_source(str(write_jsonl(tmp_path / "a.jsonl", row))))
    assert str(caught.value).startswith(f"{tmp_path}/a.jsonl:1: fits no format; ")
    assert advice in str(caught.value)
    assert "set `" not in str(caught.value)
