"""The format of rows is declared or detected, never guessed, and any value is a conversation or a clear refusal."""

from __future__ import annotations

import itertools
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftron.data.formats.detect import (
    ANSWERS,
    FORMAT_SAMPLE,
    FORMATS,
    QUESTIONS,
    Format,
    RowFormat,
    detect_format,
    parse_conversation,
    resolve_format,
    unread_columns,
)
from sftron.data.sources import open_source
from sftron.data.types import Conversation, DataError, Role, TokenizedConversation
from tests.data.rows import CALL, KEY, LOCATION, assistant, parse, system, tool, turns, user, write_jsonl

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


def detect(tmp_path: Path, *rows: Any, columns: dict[str, str] | None = None) -> Format:
    return detect_format(open_source(str(write_jsonl(tmp_path / "a.jsonl", *rows))), columns)


def refused(tmp_path: Path, *rows: Any, **options: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        detect(tmp_path, *rows, **options)
    assert str(caught.value).startswith(f"{tmp_path}/a.jsonl:")
    return caught.value


# --- Parsing ---


@pytest.mark.parametrize("format", [name for name in FORMATS if name != "input_ids"])
def test_the_same_question_and_answer_parse_equal_in_every_format(format: Format):
    assert parse(OF_EACH[format], format) == parse(MESSAGES)
    wrapped = OF_EACH[format] | {"system": "be brief", "tools": '[{"name": "f"}]', "functions": []}
    conversation = parse(wrapped, format)
    assert [message.role for message in conversation.messages] == [Role.SYSTEM, Role.USER, Role.ASSISTANT]
    assert conversation.messages[0].content == "be brief"
    assert conversation.tools == ({"name": "f"},)


@pytest.mark.parametrize("format", FORMATS)
def test_the_examples_whose_parts_are_exchanged_below_are_accepted(format: Format):
    parse_conversation(RICH[format], RowFormat(format), KEY, LOCATION)


@pytest.mark.parametrize("format", FORMATS)
def test_columns_of_other_names_are_read_as_those_of_the_format(format: Format):
    row = OF_EACH[format]
    renamed = {f"my {name}": value for name, value in row.items()}
    columns = {name: f"my {name}" for name in row}
    as_named, as_renamed = (
        parse_conversation(each, RowFormat(format, names), KEY, LOCATION)
        for each, names in ((row, {}), (renamed, columns))
    )
    if isinstance(as_named, TokenizedConversation):
        assert isinstance(as_renamed, TokenizedConversation)
        assert as_named.role_ids.tolist() == as_renamed.role_ids.tolist() == [Role.USER, Role.ASSISTANT]
    else:
        assert as_named == as_renamed
    with pytest.raises(DataError, match=f"has no column `my {next(iter(row))}`, which format {format} needs"):
        parse_conversation(row, RowFormat(format, columns), KEY, LOCATION)


def test_a_column_of_functions_is_refused_unless_it_is_said_to_hold_the_tools():
    row = MESSAGES | {"functions": [{"name": "f"}]}
    with pytest.raises(DataError, match="`functions` is not read; rename it to tools") as caught:
        parse(row)
    assert caught.value.reason == "unsupported_column"
    declared = parse_conversation(row, RowFormat("messages", {"tools": "functions"}), KEY, LOCATION)
    assert isinstance(declared, Conversation)
    assert declared.tools == ({"name": "f"},)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
TURNS = [
    system([{"type": "text", "text": "s"}]),
    user(name="Ada"),
    assistant(None, tool_calls=[CALL, {"id": "c", "name": "f", "arguments": '{"b": null}'}], reasoning_content="r"),
    tool(tool_call_id="c", weight=0),
    assistant(weight=0.5),
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"b": {}}}}}]
CALLED = [("human", "q"), ("gpt", "so"), ("function_call", json.dumps(CALL)), ("observation", "t"), ("gpt", "a")]
RICH: dict[Format, dict[str, Any]] = {
    "messages": {"messages": TURNS, "tools": TOOLS, "system": "s"},
    "sharegpt": turns(*CALLED, tools=json.dumps(TOOLS), system="s"),
    "prompt_completion": {"prompt": TURNS[:2], "completion": TURNS[2:], "tools": TOOLS},
    "query_response": {"query": "q", "response": "a", "system": "s"},
    "question_answer": {"question": "q", "answer": "a", "tools": TOOLS},
    "alpaca": {"instruction": "q", "input": "i", "output": "a", "history": [["q", "a"]], "system": "s"},
    "input_ids": {"input_ids": [5, 6], "labels": [-100, 6], "attention_mask": [1, 1], "position_ids": [0, 1]},
}
KEYS = sorted(
    {name for layout in FORMATS.values() for name in layout.columns}
    | {"role", "content", "from", "value", "type", "text", "functions", "function_call", "name", "arguments", "train"}
)


def paths_in(value: Any, path: tuple = ()) -> list[tuple]:
    """The path of every value in a row, its own first."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(inner for key, item in items for inner in paths_in(item, (*path, key)))]


def replaced(value: Any, path: tuple, new: Any) -> Any:
    if not path:
        return new
    copied = value.copy()
    copied[path[0]] = replaced(copied[path[0]], path[1:], new)
    return copied


def value_at(value: Any, path: tuple) -> Any:
    return value_at(value[path[0]], path[1:]) if path else value


VALUES = [value_at(row, path) for row in RICH.values() for path in paths_in(row)]


@given(format=st.sampled_from(sorted(FORMATS)), data=st.data())
def test_a_row_with_anything_in_any_place_is_a_conversation_or_a_data_error(format: Format, data: st.DataObject):
    row: Any = RICH[format]
    for _ in range(data.draw(st.integers(0, 3), label="changes")):
        path = data.draw(st.sampled_from(paths_in(row)[1:] or [()]), label="path")
        new = data.draw(st.sampled_from(VALUES) | JSON_VALUES, label="new")
        if isinstance(old := value_at(row, path), dict):
            new = data.draw(st.sampled_from([new, old | {data.draw(st.sampled_from(KEYS)): new}]))
        row = replaced(row, path, new)
    outcome: Conversation | TokenizedConversation | DataError
    try:
        outcome = parse_conversation(row, RowFormat(format), KEY, LOCATION)
    except DataError as error:
        outcome = error
    if isinstance(outcome, DataError):
        assert str(outcome).startswith(f"{LOCATION}: ")
        assert str(outcome).isprintable()
        assert outcome.reason != "bad_data"
        return
    if isinstance(outcome, TokenizedConversation):
        assert len(outcome.input_ids) == len(outcome.role_ids) > 0
        return
    assert outcome.messages
    for message in outcome.messages:
        assert isinstance(message.content, str) or message.role is Role.ASSISTANT
        assert message.role in (Role.SYSTEM, Role.USER, Role.ASSISTANT, Role.TOOL)
        assert 0 <= message.weight < float("inf")
        assert not {"role", "content", "weight"} & set(message.fields)
    pickle.dumps(outcome)


# --- A format and its options ---


def test_another_option_is_another_text_for_the_fingerprint_and_it_is_one_line():
    columns = [{}, {"query": "q"}, {"query": "r"}, {"response": "q"}, {"query": "a, response from column b"}]
    templates = [None, "cot", "alpaca", "{query}", "{query}\n", "{query}\\n", '{query}"']
    formats = [RowFormat("query_response", c, t) for c in columns for t in templates]
    texts = [str(each) for each in formats]
    assert len(set(texts)) == len(formats) == len(columns) * len(templates)
    assert all(text.isprintable() for text in texts)
    assert str(RowFormat("messages")) == "messages"
    assert str(RowFormat("alpaca", {"input": "i", "output": "o"})) == str(
        RowFormat("alpaca", {"output": "o", "input": "i"})
    )
    assert all(pickle.loads(pickle.dumps(each)) == each for each in formats)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"columns": {"mesages": "m"}}, 'columns: "mesages" is no column of format messages; its columns: messages, '),
        ({"columns": {"messages": "system"}}, 'columns: "system" would be two columns of format messages'),
        ({"prompt_template": "cot"}, "format messages does not read it, only query_response, question_answer, alpaca"),
        ({"name": "alpaca", "prompt_template": "cott"}, 'prompt_template: "cott" is no name of a template'),
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


def test_a_declared_column_that_no_row_has_is_an_error_with_those_there_are(tmp_path: Path):
    rows = [MESSAGES, MESSAGES | {"prompt": "s"}]
    source = open_source(str(write_jsonl(tmp_path / "a.jsonl", *rows)))
    assert resolve_format(source, columns={"system": "prompt"}) == RowFormat("messages", {"system": "prompt"})
    with pytest.raises(
        DataError, match='none of the first 2 rows has a column "promt"; the first one\'s columns: mess'
    ):
        resolve_format(source, columns={"system": "promt"})


def test_columns_that_hold_something_and_are_not_read_are_named(tmp_path: Path):
    rows = [MESSAGES | {"id": 0, "tools": None, "none": None, "empty": ""}, MESSAGES | {"id": 3, "system_prompt": "s"}]
    source = open_source(str(write_jsonl(tmp_path / "a.jsonl", "{broken", *rows)))
    assert unread_columns(source, RowFormat("messages")) == ["id", "system_prompt"]
    assert unread_columns(source, RowFormat("messages", {"system": "system_prompt"})) == ["id"]


# --- Detection ---


@pytest.mark.parametrize("format", FORMATS)
def test_a_format_is_detected_from_its_columns_and_what_they_hold(tmp_path: Path, format: Format):
    others = {"id": 3, "source": "x", "turns": [1, 2], "tools": None}
    assert detect(tmp_path, OF_EACH[format] | others, OF_EACH[format]) == format
    row = OF_EACH[format]
    renamed = {f"my {name}": value for name, value in row.items()}
    assert detect(tmp_path, renamed, columns={name: f"my {name}" for name in row}) == format


@pytest.mark.parametrize(
    ("row", "format"),
    [
        (MESSAGES | {"prompt": "q", "prompt_id": "1"}, "messages"),  # UltraChat
        (MESSAGES | {"problem": "q", "solution": "a", "answer": "7"}, "messages"),  # NuminaMath, OpenR1
        ({"query": "q", "response": "a", "original_question": "q", "type": "GSM"}, "query_response"),  # MetaMathQA
        ({"instruction": "q", "input": "", "output": "a", "text": "all of it"}, "alpaca"),  # Alpaca
        ({"prompt": [user()], "completion": [assistant()]}, "prompt_completion"),  # TRL's conversational form
        (
            MESSAGES | {"input_ids": [5, 6], "attention_mask": [1, 1]},
            "messages",
        ),  # tokenized, nothing declared of training
        (MESSAGES | {"conversations": None}, "messages"),
        (MESSAGES | {"question": None, "answer": None}, "messages"),
        ({"question": "q", "answer": None}, "question_answer"),
        ({"messages": []}, "messages"),
    ],
)
def test_columns_that_only_look_like_another_format_do_not_hide_the_one_that_fits(
    tmp_path: Path, row: Any, format: str
):
    assert detect(tmp_path, row) == format


def test_unreadable_rows_have_no_say_unless_there_are_no_others(tmp_path: Path):
    assert detect(tmp_path, "{broken", SHAREGPT) == "sharegpt"
    with pytest.raises(DataError, match=r"a\.jsonl:1: is not JSON"):
        detect(tmp_path, "{broken", "{also")


def test_only_the_first_rows_are_read(tmp_path: Path):
    assert detect(tmp_path, *[MESSAGES] * FORMAT_SAMPLE, SHAREGPT) == "messages"


@pytest.mark.parametrize("other", [name for name in FORMATS if name != "messages"])
def test_a_row_that_fits_two_formats_is_refused_by_both_names(tmp_path: Path, other: Format):
    error = refused(tmp_path, MESSAGES, MESSAGES | OF_EACH[other])
    assert error.reason == "no_format"
    assert f"a.jsonl:2: fits several formats (messages, {other}); columns: messages (a list of 2), " in str(error)
    assert str(error).endswith("; set `format`")


def test_rows_that_disagree_are_refused_with_the_row_and_its_columns(tmp_path: Path):
    error = refused(tmp_path, MESSAGES, SHAREGPT | {"id": 1})
    assert "a.jsonl:2: is in format sharegpt, but rows before it are in format messages; its col" in str(error)
    assert error.reason == "mixed_formats"


def test_a_row_that_fits_nothing_is_refused_with_what_it_holds_and_what_is_known(tmp_path: Path):
    error = refused(tmp_path, MESSAGES, {"question": "q", "answer": 7, "text": None})
    assert "a.jsonl:2: fits no format; columns: question (text), answer (the number 7), text (null); known" in str(
        error
    )
    assert "known formats: messages: column `messages`, a list of {role, content}; sharegpt: column" in str(error)
    assert error.reason == "no_format"


@pytest.mark.parametrize(
    ("row", "remedy"),
    [
        (
            {"messages": SHAREGPT["conversations"]},
            "`messages` is a list of {from, value}: set `format: sharegpt` and `columns: {conversations: messages}`",
        ),
        (
            {"conversations": MESSAGES["messages"]},
            "`conversations` is a list of {role, content}: set `format: messages` and "
            "`columns: {messages: conversations}`",
        ),
        ({"id": 1, "chat": MESSAGES["messages"]}, "set `format: messages` and `columns: {messages: chat}`"),
    ],
)
def test_turns_in_a_column_of_another_name_get_the_configuration_that_reads_them(
    tmp_path: Path, row: dict[str, Any], remedy: str
):
    assert str(refused(tmp_path, row)).endswith(remedy)
    format, columns = remedy.split("`")[-4].split(": ")[1], remedy.split("`")[-2].removeprefix("columns: ").strip("{}")
    source = open_source(str(tmp_path / "a.jsonl"))
    own, data_name = columns.split(": ")
    resolved = resolve_format(source, columns={own: data_name})
    assert resolved == RowFormat(format, {own: data_name})
    assert parse_conversation(source[0], resolved, KEY, LOCATION) == parse(MESSAGES)


def test_every_pair_of_names_of_a_question_and_its_answer_is_read_or_offered_with_its_columns(tmp_path: Path):
    for question, answer in itertools.product(QUESTIONS, ANSWERS):
        row = {question: "q", answer: "a", "id": 7, "source": "x"}
        try:
            detected, columns = detect(tmp_path, row), {}
        except DataError as error:
            offered = str(error).rpartition("; ")[2]
            assert offered.startswith(f"if `{question}` is the user's text and `{answer}` the answer, set `columns: {{")
            columns = dict(pair.split(": ") for pair in offered.split("{")[1].split("}")[0].split(", "))
            detected = detect(tmp_path, row, columns=columns)
        conversation = parse_conversation(row, RowFormat(detected, columns), KEY, LOCATION)
        assert isinstance(conversation, Conversation)
        assert [message.content for message in conversation.messages] == ["q", "a"]


def test_the_columns_offered_for_rows_of_other_trainers_are_theirs(tmp_path: Path):
    for row, columns in (
        ({"instruction": "q", "input": "", "response": "a"}, "{output: response}"),
        ({"prompt": "q", "response": "a"}, "{completion: response}"),
        ({"problem": "q", "solution": "a"}, "{prompt: problem, completion: solution}"),
    ):
        assert str(refused(tmp_path, row)).endswith(f", set `columns: {columns}`")
    assert "set `columns" not in str(refused(tmp_path, {"prompt": "q", "chosen": "a", "rejected": "b"}))


def test_a_row_of_a_tree_of_messages_is_named_as_one(tmp_path: Path):
    for row in (
        {"message_id": "b", "parent_id": "a", "text": "hello", "role": "assistant", "lang": "en"},
        {"message_tree_id": "a", "prompt": {"text": "hi", "role": "prompter", "replies": [{"text": "hello"}]}},
    ):
        error = refused(tmp_path, row)
        assert "a.jsonl:1: is part of a tree of messages, not a conversation; columns: message_" in str(error)
        assert "each way from a root to a leaf is a conversation" in str(error)
        assert error.reason == "no_format"


def test_columns_that_no_format_has_together_are_refused_with_those_of_each(tmp_path: Path):
    path = write_jsonl(tmp_path / "a.jsonl", MESSAGES)
    with pytest.raises(DataError, match='no format has them all: "query" is no column of format messages; its'):
        detect_format(open_source(str(path)), {"messages": "a", "query": "b"})


# --- A question and its answer ---

ALPACA_TEXT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\nq {query}\n\n### Response:"
)
COT_TEXT = "q {query}\nPlease reason step by step, and put your final answer within \\boxed{}."


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
    asked_by = {None: "q {query}", "cot": COT_TEXT, "alpaca": ALPACA_TEXT, "{} {query}!": "{} q {query}!"}
    for template, asked in asked_by.items():
        assert texts(row, format, prompt_template=template) == [("user", asked), ("assistant", " a\n")]


def test_prompt_and_completion_may_be_texts_and_know_no_template():
    row = {"prompt": "q", "completion": " a"}
    assert texts(row, "prompt_completion") == [("user", "q"), ("assistant", " a")]


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


# --- Rows of ids ---

IDS = [1, 5, 5, 7, 2, 9]
LABELS = [-100, -100, -100, 7, 2, -100]


def parse_ids(**columns: Any) -> TokenizedConversation:
    parsed = parse_conversation(columns, RowFormat("input_ids"), KEY, LOCATION)
    assert isinstance(parsed, TokenizedConversation)
    return parsed


def test_labels_declare_what_is_the_assistants_at_their_own_index():
    """
    input_ids   1  5  5  7  2  9
    labels      -  -  -  7  2  -
    role_ids    U  U  U  A  A  U
    """
    parsed = parse_ids(input_ids=IDS, labels=LABELS)
    assert (parsed.input_ids.dtype, parsed.role_ids.dtype) == (np.int32, np.uint8)
    assert parsed.input_ids.tolist() == IDS
    assert parsed.role_ids.tolist() == [Role.USER] * 3 + [Role.ASSISTANT] * 2 + [Role.USER]
    assert (parsed.turns, parsed.key, parsed.token_weights) == ((), KEY, None)


def test_roles_may_be_numbers_or_names_and_stand_in_either_column():
    roles = [Role.TEMPLATE, Role.SYSTEM, Role.USER, Role.REASONING, Role.TOOL_CALL, Role.TOOL]
    names = ["template", "system", "user", "reasoning", "tool_call", "tool"]
    for spelled in ([int(role) for role in roles], names, [*names[:3], *(int(role) for role in roles[3:])]):
        for column in ("role_ids", "roles"):
            assert parse_ids(input_ids=IDS, **{column: spelled}).role_ids.tolist() == roles


def test_masks_and_positions_that_say_nothing_are_accepted():
    extra = {
        "attention_mask": [1] * 6,
        "position_ids": [*range(6)],
        "token_type_ids": [0] * 6,
        "id": "x",
        "roles": None,
    }
    plain, dressed = parse_ids(input_ids=IDS, labels=LABELS), parse_ids(input_ids=IDS, labels=LABELS, **extra)
    assert plain.input_ids.tolist() == dressed.input_ids.tolist()
    assert plain.role_ids.tolist() == dressed.role_ids.tolist()
