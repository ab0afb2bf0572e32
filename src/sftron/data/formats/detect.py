"""The table of formats, the detection of a data set's format, and the parser of one row in a given format.

Parsing is strict: a row or column that is not understood raises DataError with its name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sftron.data.formats.messages import (
    Numbered,
    check_null_arguments,
    check_order,
    parse_messages,
    parse_sharegpt,
    parse_tools,
    with_system,
)
from sftron.data.formats.pretokenized import parse_pretokenized
from sftron.data.formats.single_turn import parse_alpaca, parse_prompt_completion, parse_question, prompt_template_text
from sftron.data.formats.values import NamedRow, describe, names_of, refusal
from sftron.data.sources import RowSource
from sftron.data.sources.jsonl import excerpt
from sftron.data.types import Conversation, ConversationKey, DataError, Row, TokenizedConversation

Format = Literal[
    "messages", "sharegpt", "prompt_completion", "query_response", "question_answer", "alpaca", "input_ids"
]
FORMAT_SAMPLE = 100
"""The number of first rows that determine a detected format."""
QUESTIONS = ("instruction", "prompt", "question", "query", "problem", "input", "inputs")
ANSWERS = ("response", "output", "answer", "completion", "solution", "target", "targets")
"""Common names of the columns with the user's and the assistant's text; an error suggests the first that a row has."""


# --- Formats ---


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
        return ", ".join([self.name, *columns, *template])

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
    parse: Callable[[NamedRow, str], list[Numbered]] | None
    """Parses a row's messages, given the text of the prompt template; None for rows of ids."""
    optional: tuple[str, ...] = ("tools", "system")
    """The other columns that are read."""
    reads_prompt_template: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        return self.required + self.optional


def _are_texts(values: Sequence[Any]) -> bool:
    return all(isinstance(value, str | None) for value in values)


def _are_turns(values: Sequence[Any], key: str) -> bool:
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
        fits=lambda values: _are_turns(values, "role"),
        parse=lambda row, _: parse_messages(row.filled_list("messages"), row.location),
    ),
    "sharegpt": FormatSpec(
        required=("conversations",),
        wanted="column `conversations`, a list of {from, value}",
        fits=lambda values: _are_turns(values, "from"),
        parse=lambda row, _: parse_sharegpt(row.filled_list("conversations"), row.location),
    ),
    "prompt_completion": FormatSpec(
        required=("prompt", "completion"),
        wanted="columns `prompt` and `completion`, two texts or two lists of {role, content}",
        fits=lambda values: _are_texts(values) or _are_turns(values, "role"),
        parse=lambda row, _: parse_prompt_completion(row),
    ),
    "query_response": _question_format("query", "response"),
    "question_answer": _question_format("question", "answer"),
    "alpaca": FormatSpec(
        required=("instruction", "output"),
        wanted="columns `instruction` and `output`, texts",
        fits=_are_texts,
        parse=parse_alpaca,
        optional=("input", "history", "tools", "system"),
        reads_prompt_template=True,
    ),
    "input_ids": FormatSpec(
        required=("input_ids",),
        wanted="column `input_ids`, a list of ids, with `labels` or `role_ids`",
        fits=lambda values: isinstance(values[0], list),
        parse=None,
        optional=("labels", "role_ids", "roles", "attention_mask", "position_ids", "token_type_ids"),
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


# --- One row ---


def parse_conversation(
    row: Row, row_format: RowFormat, key: ConversationKey, location: str
) -> Conversation | TokenizedConversation:
    """Parses and checks the row's messages, or its ids in the format `input_ids`.

    A conversation may end in a user turn, or have no assistant turn at all. Raises DataError with the location, the
    problem and the remedy.
    """
    if not isinstance(row, Mapping):
        raise refusal(location, "not_an_object", f"found {describe(row)}; wanted an object with named columns")
    named = NamedRow(row, row_format.name, row_format.columns, location)
    parse_row = FORMATS[row_format.name].parse
    if parse_row is None:
        return parse_pretokenized(named, key)
    is_empty = str(row.get("functions") or "").strip() in ("", "[]", "{}", "null")
    if not is_empty and "functions" not in row_format.columns.values():
        raise refusal(location, "unsupported_column", "`functions` is not read; rename it to tools")
    numbered = with_system(parse_row(named, prompt_template_text(row_format.prompt_template)), named)
    check_order(numbered, location)
    tools = parse_tools(named.get("tools"), named.column("tools"), location)
    checked = tuple(message for _, message in numbered)
    if tools:
        check_null_arguments(checked, tools, location)
    return Conversation(checked, key, location, tools)


# --- The format of a data set ---


def resolve_format(
    source: RowSource,
    name: Format | Literal["auto"] = "auto",
    columns: Mapping[str, str] | None = None,
    prompt_template: str | None = None,
    *,
    skip_bad_rows: bool = False,
) -> RowFormat:
    """Returns the declared format, or with "auto" the format that the first rows have.

    `columns` and `prompt_template` are those of RowFormat. With `skip_bad_rows`, detection ignores rows that fit no
    format; they are counted when they are read.

    Raises:
        DataError: The format does not fit the data, or cannot be detected. The message gives the source or the row.
    """
    columns = columns or {}
    detected = detect_format(source, columns, skip_bad_rows=skip_bad_rows) if name == "auto" else name
    try:
        row_format = RowFormat(detected, columns, prompt_template)
    except DataError as error:
        raise DataError(f"{source.name}: {error}") from error
    rows = [row for _, row in _sample(source) if isinstance(row, Mapping)] if columns else []
    for column in columns.values():
        if rows and not any(column in row for row in rows):
            problem = f"columns: none of the first {len(rows)} rows has a column {excerpt(column)}"
            raise DataError(f"{source.name}: {problem}; the first one's columns: {names_of(rows[0])}")
    return row_format


def detect_format(
    source: RowSource, columns: Mapping[str, str] | None = None, *, skip_bad_rows: bool = False
) -> Format:
    """Returns the format that the first rows share, among the formats that have all `columns`.

    Rows that cannot be read are ignored; with `skip_bad_rows`, rows that fit no format are ignored as well.

    Raises:
        DataError: Rows have different formats, a row fits no format or several, or no row is left.
    """
    columns = columns or {}
    problems: dict[Format, str | None] = {name: columns_problem(name, columns) for name in FORMATS}
    candidates = [RowFormat(name, columns) for name, problem in problems.items() if problem is None]
    if not candidates:
        raise DataError(f"{source.name}: columns: no format has them all: {'; '.join(filter(None, problems.values()))}")
    found: Format | None = None
    ignored: DataError | None = None
    for location, row in _sample(source):
        if isinstance(row, DataError):
            ignored = ignored or row
            continue
        fitting: list[Format] = [candidate.name for candidate in candidates if candidate.fits(row)]
        if len(fitting) > 1:
            raise _no_format(row, location, f"fits several formats ({', '.join(fitting)})", "set `format`")
        if not fitting:
            error = _fits_nothing(row, location)
            if not skip_bad_rows:
                raise error
            ignored = ignored or error
        elif found in (None, fitting[0]):
            found = fitting[0]
        else:
            problem = f"is in format {fitting[0]}, but rows before it are in format {found}"
            remedy = "make each format a data set of its own"
            raise refusal(location, "mixed_formats", f"{problem}; its columns: {names_of(row)}; {remedy}")
    if found is None:
        raise ignored or DataError(f"{source.name}: no rows to detect a format from; set `format`")
    return found


def unread_columns(source: RowSource, row_format: RowFormat) -> list[str]:
    """Returns the columns that have a value in one of the first rows but are not read."""
    read = {row_format.column(name) for name in FORMATS[row_format.name].columns}
    rows = [row for _, row in _sample(source) if isinstance(row, Mapping)]
    nothing = (None, "", [], {})
    return list(dict.fromkeys(name for row in rows for name in row if name not in read and row[name] not in nothing))


def _sample(source: RowSource) -> Iterator[tuple[str, Row | DataError]]:
    """Yields the location of each of the first rows, with the row or the error that reading it raised."""
    for index in range(min(FORMAT_SAMPLE, len(source))):
        try:
            row: Row | DataError = source[index]
        except DataError as error:
            row = error
        yield source.locate(index), row


# --- Errors for rows that fit no format ---


def _no_format(row: Row, location: str, problem: str, remedy: str) -> DataError:
    held = [
        f"{names_of([name])} ({'text' if isinstance(value, str) else describe(value)})"
        for name, value in list(row.items())[:20]
    ]
    known = "; ".join(f"{name}: {spec.wanted}" for name, spec in FORMATS.items())
    found = f"{problem}; columns: {', '.join(held) or 'none'}; known formats: {known}"
    return refusal(location, "no_format", f"{found}; {remedy}")


def _fits_nothing(row: Row, location: str) -> DataError:
    nested = [each for each in (row, *row.values()) if isinstance(each, Mapping)]
    if any(not each.keys().isdisjoint(("parent_id", "replies")) for each in nested):
        remedy = "write each way from the root to a leaf as one row, its messages in order under `messages`"
        return _no_format(row, location, "is part of a tree of messages, not a conversation", remedy)
    return _no_format(row, location, "fits no format", _remedy(row))


def suggested_readings(row: Row) -> list[tuple[str, dict[str, Any]]]:
    """Returns the ways to read lists of turns, or texts, in columns of other names.

    Each is what has to be true of the columns, in words, and the keys `format` and `columns` that then read them.
    """
    formats: tuple[tuple[Format, str], ...] = (("messages", "role"), ("sharegpt", "from"))
    readings: list[tuple[str, dict[str, Any]]] = []
    for column, turns in row.items():
        for format, key in formats:
            if turns and _are_turns([turns], key):
                (name,), wanted = FORMATS[format].required, FORMATS[format].wanted.partition(", ")[2]
                readings.append((f"`{column}` is {wanted}", {"format": format, "columns": {name: column}}))
    texts = [name for name, value in row.items() if isinstance(value, str)]
    question = next((name for name in QUESTIONS if name in texts), None)
    answer = next((name for name in ANSWERS if name in texts), None)
    if not readings and question and answer:
        meaning = f"`{question}` is the user's text and `{answer}` the answer"
        readings.append((meaning, {"columns": _renamed_texts(question, answer)}))
    return readings


def _remedy(row: Row) -> str:
    """Returns the configuration that reads the row, if there is one."""
    remedies = []
    for meaning, keys in suggested_readings(row):
        columns = ", ".join(f"{name}: {column}" for name, column in keys["columns"].items())
        given = f"{meaning}: set `format: {keys['format']}` and" if "format" in keys else f"if {meaning}, set"
        remedies.append(f"{given} `columns: {{{columns}}}`")
    separator = next((each for each in (";", "\t", "|") if len(row) == 1 and each in next(iter(row))), None)
    if separator:
        remedies.append(
            f"if these are several columns, write the file with commas between its cells, not {separator!r}"
        )
    return ", or ".join(remedies) or "name columns in `columns`, or convert the rows"


def _renamed_texts(question: str, answer: str) -> dict[str, str]:
    """Returns the `columns` for texts in these columns, which are those of no format.

    For example, rows of instruction, input and response need `columns: {output: response}`.
    """
    possible: list[dict[str, str]] = []
    formats: list[Format] = [name for name, spec in FORMATS.items() if spec.required[0] in QUESTIONS]
    for format in formats:
        pair = zip(FORMATS[format].required, (question, answer), strict=True)
        columns = {name: found for name, found in pair if name != found}
        if columns_problem(format, columns) is None:
            possible.append(columns)
    # A format that has one of the two names, first the question's, is the most likely.
    return min(possible, key=lambda each: (question in each.values(), len(each)))
