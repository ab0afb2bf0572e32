"""The formats of rows: what columns each has, how its rows are told from others', and who reads them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sftron.data.formats.messages import Numbered, parse_messages, parse_sharegpt
from sftron.data.formats.row_reader import RowReader
from sftron.data.formats.single_turn import parse_alpaca, parse_prompt_completion, parse_question, prompt_template_text
from sftron.data.sources.json_text import excerpt
from sftron.data.types import DataError, Row

Format = Literal[
    "messages", "sharegpt", "prompt_completion", "query_response", "question_answer", "alpaca", "input_ids"
]


@dataclass(frozen=True, slots=True)
class RowFormat:
    """How the rows of one data set hold conversations.

    name: the format's. columns: where the data's columns have other names, the format's name of each to the data's.
    prompt_template: what makes the user's text of the query: a name of PROMPT_TEMPLATES, or a text with one {query};
        None leaves the query as it is.

    Raises DataError for columns that the format does not have, and for a prompt template that it does not read.
    """

    name: Format
    columns: Mapping[str, str] = field(default_factory=dict)
    prompt_template: str | None = None

    def __post_init__(self) -> None:
        if problem := columns_problem(self.name, self.columns):
            raise DataError(f"columns: {problem}")
        readers = [name for name, layout in LAYOUTS.items() if layout.reads_prompt_template]
        if self.prompt_template is not None and self.name not in readers:
            problem = f"prompt_template: format {self.name} does not read it, only {', '.join(readers)} do"
            raise DataError(f"{problem}; remove the key")
        prompt_template_text(self.prompt_template)

    def __str__(self) -> str:
        """On one line, and another for every other format."""
        columns = (f"{name} from column {json.dumps(data_name)}" for name, data_name in sorted(self.columns.items()))
        template = [] if self.prompt_template is None else [f"prompt template {json.dumps(self.prompt_template)}"]
        return ", ".join([self.name, *columns, *template])

    def column(self, name: str) -> str:
        """The data's name of a column of the format."""
        return self.columns.get(name, name)

    def fits(self, row: Row) -> bool:
        """Whether the row has what this format needs. A null among other values is for `parse` to refuse."""
        values = [row.get(self.column(name)) for name in LAYOUTS[self.name].required]
        is_there = all(self.column(name) in row for name in LAYOUTS[self.name].required)
        if not is_there or all(value is None for value in values) or not LAYOUTS[self.name].fits(values):
            return False
        trained = ("labels", "role_ids", "roles")
        return self.name != "input_ids" or any(row.get(self.column(name)) is not None for name in trained)

    def parse(self, row: Row, location: str) -> list[Numbered]:
        """The row's messages, their order and its other columns unread; not for input_ids. Raises DataError."""
        reader = RowReader(row, self.name, self.columns, location)
        return LAYOUTS[self.name].parse(reader, prompt_template_text(self.prompt_template))


def columns_problem(format: Format, columns: Mapping[str, str]) -> str | None:
    """Why a format cannot be read from columns of these names, or None."""
    known = LAYOUTS[format].columns
    data_names = [columns.get(name, name) for name in known]
    for name, data_name in columns.items():
        if name not in known:
            return f"{excerpt(name)} is no column of format {format}; its columns: {', '.join(known)}"
        if data_names.count(data_name) > 1:
            return f"{excerpt(data_name)} would be two columns of format {format}; its columns: {', '.join(known)}"
    return None


@dataclass(frozen=True, slots=True)
class Layout:
    """What a format's rows hold.

    required, optional: its columns. wanted: the former, in words. fits: whether values of the required columns are of
    the right kind, or None. parse: a row to messages, with the text of the prompt template.
    """

    required: tuple[str, ...]
    wanted: str
    fits: Callable[[Sequence[Any]], bool]
    parse: Callable[[RowReader, str], list[Numbered]]
    optional: tuple[str, ...] = ("tools", "system")
    reads_prompt_template: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        return self.required + self.optional


def role_key(turns: Any) -> Literal["role", "from"] | None:
    """By what key the first of a list of turns says who speaks; None where this is no such list."""
    first = turns[0] if isinstance(turns, list) and turns else None
    keys: tuple[Literal["role", "from"], ...] = ("role", "from")
    return next((key for key in keys if isinstance(first, Mapping) and key in first), None)


def _are_texts(values: Sequence[Any]) -> bool:
    return all(isinstance(value, str | None) for value in values)


def _are_turns(values: Sequence[Any], key: str) -> bool:
    return all(value is None or value == [] or role_key(value) == key for value in values)


def _no_messages(reader: RowReader, _template: str) -> list[Numbered]:
    raise AssertionError(f"{reader.location}: format {reader.format} holds ids, not messages")


LAYOUTS: Mapping[Format, Layout] = {
    "messages": Layout(
        required=("messages",),
        wanted="column `messages`, a list of {role, content}",
        fits=lambda values: _are_turns(values, "role"),
        parse=lambda reader, _: parse_messages(reader.filled_list("messages"), reader.location),
    ),
    "sharegpt": Layout(
        required=("conversations",),
        wanted="column `conversations`, a list of {from, value}",
        fits=lambda values: _are_turns(values, "from"),
        parse=lambda reader, _: parse_sharegpt(reader.filled_list("conversations"), reader.location),
    ),
    "prompt_completion": Layout(
        required=("prompt", "completion"),
        wanted="columns `prompt` and `completion`, two texts or two lists of {role, content}",
        fits=lambda values: _are_texts(values) or _are_turns(values, "role"),
        parse=lambda reader, _: parse_prompt_completion(reader),
    ),
    "query_response": Layout(
        required=("query", "response"),
        wanted="columns `query` and `response`, texts",
        fits=_are_texts,
        parse=lambda reader, template: parse_question(reader, "query", "response", template),
        reads_prompt_template=True,
    ),
    "question_answer": Layout(
        required=("question", "answer"),
        wanted="columns `question` and `answer`, texts",
        fits=_are_texts,
        parse=lambda reader, template: parse_question(reader, "question", "answer", template),
        reads_prompt_template=True,
    ),
    "alpaca": Layout(
        required=("instruction", "output"),
        wanted="columns `instruction` and `output`, texts",
        fits=_are_texts,
        parse=parse_alpaca,
        optional=("input", "history", "tools", "system"),
        reads_prompt_template=True,
    ),
    "input_ids": Layout(
        required=("input_ids",),
        wanted="column `input_ids`, a list of ids, with `labels` or `role_ids`",
        fits=lambda values: isinstance(values[0], list),
        parse=_no_messages,
        optional=("labels", "role_ids", "roles", "attention_mask", "position_ids", "token_type_ids"),
    ),
}
