"""The table of formats, and the parser of one row in a given format.

Parsing is strict: a row or column that is not understood raises DataError with its name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sftron.data.formats.messages import (
    Numbered,
    check_order,
    parse_messages,
    parse_sharegpt,
    with_system,
)
from sftron.data.formats.pretokenized import parse_pretokenized
from sftron.data.formats.single_turn import parse_alpaca, parse_prompt_completion, parse_question, prompt_template_text
from sftron.data.formats.text import parse_text
from sftron.data.formats.tools import check_null_arguments, parse_tools
from sftron.data.formats.values import NamedRow, describe, empty_row, parse_template_kwargs, refusal
from sftron.data.json_text import excerpt
from sftron.data.types import Conversation, ConversationKey, DataError, Document, Documents, Row, TokenizedConversation

Format = Literal[
    "messages", "sharegpt", "prompt_completion", "query_response", "question_answer", "alpaca", "input_ids", "text"
]
_TEMPLATE_KWARGS = "chat_template_kwargs"
Parsed = Conversation | TokenizedConversation | Document
"""What a row holds, by its format."""


@dataclass(frozen=True, slots=True)
class RowFormat:
    """The format of the rows of one data set.

    Raises DataError if the format does not have one of the columns, or does not read a prompt template.
    """

    name: Format
    columns: Mapping[str, str] = field(default_factory=dict)
    """A mapping of the format's column names to the data's, where they differ."""
    prompt_template: str | None = None
    """The template of the user's text: a name of PROMPT_TEMPLATES, or a text with one {query}. With None, the query is
    the user's text."""
    documents: Documents | None = None
    """What is a document, if the rows are those of .txt files."""

    def __post_init__(self) -> None:
        if problem := columns_problem(self.name, self.columns):
            raise DataError(f"columns: {problem}")
        readers = [name for name, spec in FORMATS.items() if spec.reads_prompt_template]
        if self.prompt_template is not None and self.name not in readers:
            problem = f"prompt_template: format {self.name} does not read it, only {', '.join(readers)} do"
            raise DataError(f"{problem}; remove the key")
        prompt_template_text(self.prompt_template)

    def __str__(self) -> str:
        """Returns one line, which is different for any two different formats."""
        columns = (f"{name} from column {json.dumps(data_name)}" for name, data_name in sorted(self.columns.items()))
        template = [] if self.prompt_template is None else [f"prompt template {json.dumps(self.prompt_template)}"]
        documents = [f"each {self.documents} a document"] if self.documents else []
        return ", ".join([self.name, *columns, *template, *documents])

    def column(self, name: str) -> str:
        return self.columns.get(name, name)

    def fits(self, row: Row) -> bool:
        """Returns whether the row has the columns of this format. A null among other values fails only in parsing."""
        required = [self.column(name) for name in FORMATS[self.name].required]
        values = [row.get(name) for name in required]
        is_there = all(name in row for name in required) and any(value is not None for value in values)
        if not is_there or not FORMATS[self.name].fits(values):
            return False
        trained = ("labels", "role_ids", "roles")
        return self.name != "input_ids" or any(row.get(self.column(name)) is not None for name in trained)


@dataclass(frozen=True, slots=True)
class FormatSpec:
    """The columns of a format and the parser of its rows."""

    required: tuple[str, ...]
    """The columns that every row has."""
    wanted: str
    """A description of these columns, for error messages."""
    fits: Callable[[Sequence[Any]], bool]
    """Returns whether each value of the required columns is of the right type or None."""
    parse: Callable[[NamedRow, str], list[Numbered]] | None = None
    """Parses a row's messages, given the text of the prompt template; None for rows without messages."""
    parse_whole: Callable[[NamedRow, ConversationKey], TokenizedConversation | Document] | None = None
    """Parses a row without messages."""
    optional: tuple[str, ...] = ("tools", "system", _TEMPLATE_KWARGS)
    """The other columns that are read."""
    reads_prompt_template: bool = False
    is_detected: bool = True
    """Whether rows may be read in this format unless it is declared."""

    @property
    def columns(self) -> tuple[str, ...]:
        return self.required + self.optional


def _are_texts(values: Sequence[Any]) -> bool:
    return all(isinstance(value, str | None) for value in values)


def are_turns(values: Sequence[Any], key: str) -> bool:
    """Returns whether each value is None, an empty list, or a list of turns that begins with one that has the key."""
    return all(
        value is None or value == [] or (isinstance(value, list) and isinstance(value[0], Mapping) and key in value[0])
        for value in values
    )


def _question_format(question: str, answer: str) -> FormatSpec:
    return FormatSpec(
        required=(question, answer),
        wanted=f"columns `{question}` and `{answer}`, texts",
        fits=_are_texts,
        parse=lambda row, template: parse_question(row, question, answer, template),
        reads_prompt_template=True,
    )


FORMATS: Mapping[Format, FormatSpec] = {
    "messages": FormatSpec(
        required=("messages",),
        wanted="column `messages`, a list of {role, content}",
        fits=lambda values: are_turns(values, "role"),
        parse=lambda row, _: parse_messages(row.filled_list("messages"), row.location),
    ),
    "sharegpt": FormatSpec(
        required=("conversations",),
        wanted="column `conversations`, a list of {from, value}",
        fits=lambda values: are_turns(values, "from"),
        parse=lambda row, _: parse_sharegpt(row.filled_list("conversations"), row.location),
    ),
    "prompt_completion": FormatSpec(
        required=("prompt", "completion"),
        wanted="columns `prompt` and `completion`, two texts or two lists of {role, content}",
        fits=lambda values: _are_texts(values) or are_turns(values, "role"),
        parse=lambda row, _: parse_prompt_completion(row),
    ),
    "query_response": _question_format("query", "response"),
    "question_answer": _question_format("question", "answer"),
    "alpaca": FormatSpec(
        required=("instruction", "output"),
        wanted="columns `instruction` and `output`, texts",
        fits=_are_texts,
        parse=parse_alpaca,
        optional=("input", "history", "tools", "system", _TEMPLATE_KWARGS),
        reads_prompt_template=True,
    ),
    "input_ids": FormatSpec(
        required=("input_ids",),
        wanted="column `input_ids`, a list of ids, with `labels` or `role_ids`",
        fits=lambda values: isinstance(values[0], list),
        parse_whole=parse_pretokenized,
        optional=("labels", "role_ids", "roles", "attention_mask", "position_ids", "token_type_ids"),
    ),
    "text": FormatSpec(
        required=("text",),
        wanted="column `text`, a document of plain text",
        fits=_are_texts,
        parse_whole=parse_text,
        optional=(),
        is_detected=False,  # a column `text` may hold a chat as a template wrote it, of which no part would be a prompt
    ),
}


def columns_problem(format: Format, columns: Mapping[str, str]) -> str | None:
    """Returns why a format cannot have this mapping of column names, or None if it can."""
    known = FORMATS[format].columns
    data_names = [columns.get(name, name) for name in known]
    for name, data_name in columns.items():
        if name not in known:
            return f"{excerpt(name)} is no column of format {format}; its columns: {', '.join(known)}"
        if data_names.count(data_name) > 1:
            return f"{excerpt(data_name)} would be two columns of format {format}; its columns: {', '.join(known)}"
    return None


def parse_conversation(row: Row, row_format: RowFormat, key: ConversationKey, location: str) -> Parsed:
    """Parses and checks the row's messages, its ids in the format `input_ids`, or its document in the format `text`.

    A conversation may end in a user turn, or have no assistant turn at all. Raises DataError with the location, the
    problem and the remedy.
    """
    if not isinstance(row, Mapping):
        raise refusal(location, "not_an_object", f"found {describe(row)}; wanted an object with named columns")
    if not row:
        raise empty_row(location)
    named = NamedRow(row, row_format.name, row_format.columns, location)
    spec = FORMATS[row_format.name]
    if spec.parse is None:
        assert spec.parse_whole is not None
        return spec.parse_whole(named, key)
    is_empty = str(row.get("functions") or "").strip() in ("", "[]", "{}", "null", '""')
    if not is_empty and "functions" not in row_format.columns.values():
        raise refusal(location, "unsupported_column", "`functions` is not read; rename it to tools")
    numbered = with_system(spec.parse(named, prompt_template_text(row_format.prompt_template)), named)
    check_order(numbered, location)
    tools = parse_tools(named.get("tools"), named.column("tools"), location)
    checked = tuple(message for _, message in numbered)
    if tools:
        check_null_arguments(checked, tools, location)
    column = named.column(_TEMPLATE_KWARGS)
    template_kwargs = parse_template_kwargs(named.get(_TEMPLATE_KWARGS), column, location)
    return Conversation(checked, key, location, tools, template_kwargs)
