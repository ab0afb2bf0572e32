"""Rows to conversations. Strict: a format is declared or detected, and what is not understood is refused by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from sftron.data.formats.messages import check_order, with_system
from sftron.data.formats.pretokenized import parse_ready_made
from sftron.data.formats.row_formats import LAYOUTS, Format, RowFormat, columns_problem, role_key
from sftron.data.formats.row_reader import RowReader, describe, names_of, refusal
from sftron.data.formats.tool_calls import check_null_arguments, parse_tools
from sftron.data.sources import RowSource
from sftron.data.sources.json_text import excerpt
from sftron.data.types import Conversation, ConversationKey, DataError, Row, TokenizedConversation

FORMAT_SAMPLE = 100
"""So many first rows are looked at."""
_KNOWN_FORMATS = "; ".join(f"{name}: {layout.wanted}" for name, layout in LAYOUTS.items())
QUESTIONS = ("instruction", "prompt", "question", "query", "problem", "input", "inputs")
ANSWERS = ("response", "output", "answer", "completion", "solution", "target", "targets")
"""What other data sets call the user's text and the assistant's; the first that a row has is taken."""
_TREE_REMEDY = (
    "each way from a root to a leaf is a conversation: write it as one row, its messages in order under `messages`"
)


def settle_format(
    source: RowSource,
    name: Format | Literal["auto"] = "auto",
    columns: Mapping[str, str] | None = None,
    prompt_template: str | None = None,
    *,
    skip_bad_rows: bool = False,
) -> RowFormat:
    """The format as declared, or as the first rows have it. Raises DataError by the name of the source or row.

    skip_bad_rows: rows that fit no format have no say; whoever reads them counts them.
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
    source: RowSource,
    columns: Mapping[str, str] | None = None,
    sample: int = FORMAT_SAMPLE,
    *,
    skip_bad_rows: bool = False,
) -> Format:
    """The format that the first `sample` rows share; rows that cannot be read have no say, nor, with `skip_bad_rows`,
    those that fit no format.

    columns: as in RowFormat; only formats that have them all are thought of. Raises DataError where the rows disagree,
    or a row fits no format, or several.
    """
    columns = columns or {}
    problems: dict[Format, str | None] = {name: columns_problem(name, columns) for name in LAYOUTS}
    candidates = [RowFormat(name, columns) for name, problem in problems.items() if problem is None]
    if not candidates:
        raise DataError(f"{source.name}: columns: no format has them all: {'; '.join(filter(None, problems.values()))}")
    found: Format | None = None
    unreadable: DataError | None = None
    for location, row in _sample(source, sample):
        if isinstance(row, DataError):
            unreadable = unreadable or row
            continue
        fitting: list[Format] = [candidate.name for candidate in candidates if candidate.fits(row)]
        if len(fitting) != 1:
            if fitting:
                problem, remedy = f"fits several formats ({', '.join(fitting)})", "set `format`"
            elif _is_of_a_tree(row):
                problem, remedy = "is part of a tree of messages, not a conversation", _TREE_REMEDY
            else:
                problem = "fits no format"
                remedy = _renaming(row) or "name columns in `columns`, or convert the rows"
            known = f"known formats: {_KNOWN_FORMATS}; {remedy}"
            refused = refusal(location, "no_format", f"{problem}; columns: {_kinds(row)}; {known}")
            if fitting or not skip_bad_rows:
                raise refused
            unreadable = unreadable or refused
            continue
        if found not in (None, fitting[0]):
            problem = f"is in format {fitting[0]}, but rows before it are in format {found}"
            remedy = "make each format a data set of its own"
            raise refusal(location, "mixed_formats", f"{problem}; its columns: {names_of(row)}; {remedy}")
        found = fitting[0]
    if found is None:
        raise unreadable or DataError(f"{source.name}: no rows to detect a format from; set `format`")
    return found


def unread_columns(source: RowSource, row_format: RowFormat) -> list[str]:
    """Columns of the first rows that hold something, and that no conversation is made of."""
    read = {row_format.column(name) for name in LAYOUTS[row_format.name].columns}
    rows = [row for _, row in _sample(source) if isinstance(row, Mapping)]
    nothing = (None, "", [], {})
    return list(dict.fromkeys(name for row in rows for name in row if name not in read and row[name] not in nothing))


def parse_conversation(
    row: Row, row_format: RowFormat, key: ConversationKey, location: str
) -> Conversation | TokenizedConversation:
    """The row's messages, checked; or its ids, where it holds these. A conversation may end in a user turn, or have no
    assistant turn at all.

    Raises DataError with the location, what was found, and the remedy.
    """
    if not isinstance(row, Mapping):
        raise refusal(location, "not_an_object", f"found {describe(row)}; wanted an object with named columns")
    reader = RowReader(row, row_format.name, row_format.columns, location)
    if row_format.name == "input_ids":
        return parse_ready_made(reader, key)
    if "functions" not in row_format.columns.values() and _holds_something(row.get("functions")):
        raise refusal(location, "unsupported_column", "`functions` is not read; rename it to tools")
    system = reader.optional_text("system")
    numbered = with_system(row_format.parse(row, location), system, reader.column("system"), location)
    check_order(numbered, location)
    messages = tuple(message for _, message in numbered)
    tools = parse_tools(reader.get("tools"), reader.column("tools"), location)
    if tools:
        check_null_arguments(messages, tools, location)
    return Conversation(messages, key, location, tools)


def _sample(source: RowSource, size: int = FORMAT_SAMPLE) -> Iterator[tuple[str, Row | DataError]]:
    """The first rows, or why they cannot be read, with their locations."""
    for index in range(min(size, len(source))):
        try:
            row: Row | DataError = source[index]
        except DataError as error:
            row = error
        yield source.locate(index), row


def _kinds(row: Row) -> str:
    """The row's columns and what they hold."""
    kinds = {names_of({name: value}): value for name, value in list(row.items())[:20]}
    return ", ".join(f"{name} ({'text' if isinstance(v, str) else describe(v)})" for name, v in kinds.items()) or "none"


def _is_of_a_tree(row: Row) -> bool:
    """Whether the row is a message that names the one before it, or a tree of messages with their replies."""
    values = [row, *row.values()] if isinstance(row, Mapping) else []
    return any(isinstance(each, Mapping) and not each.keys().isdisjoint(("parent_id", "replies")) for each in values)


def _renaming(row: Row) -> str:
    """The configuration for lists of turns, or for a question and its answer, in columns of other names."""
    found = []
    for column, turns in row.items():
        match role_key(turns):
            case "role":
                found.append(("messages", "messages", column, "{role, content}"))
            case "from":
                found.append(("sharegpt", "conversations", column, "{from, value}"))
    lists = ", or ".join(
        f"`{column}` is a list of {turns}: set `format: {format}` and `columns: {{{own}: {column}}}`"
        for format, own, column, turns in found
    )
    return lists or _renaming_of_texts(row)


def _renaming_of_texts(row: Row) -> str:
    """`set columns: {output: response}` for rows of instruction, input and response; empty where no name is known."""
    texts = [name for name, value in row.items() if isinstance(value, str)]
    question = next((name for name in QUESTIONS if name in texts), None)
    answer = next((name for name in ANSWERS if name in texts), None)
    if question is None or answer is None:
        return ""
    pairs: dict[Format, tuple[str, ...]] = {
        name: each.required for name, each in LAYOUTS.items() if each.required[0] in QUESTIONS
    }
    likely = sorted(pairs.items(), key=lambda item: (item[1][0] != question, item[1][1] != answer))
    columns = next(
        columns for name, pair in likely if not columns_problem(name, columns := _renamed(pair, (question, answer)))
    )
    names = (f"{name}: {column}" for name, column in columns.items())
    return f"if `{question}` is the user's text and `{answer}` the answer, set `columns: {{{', '.join(names)}}}`"


def _renamed(names: Sequence[str], columns: Sequence[str]) -> dict[str, str]:
    return {name: column for name, column in zip(names, columns, strict=True) if name != column}


def _holds_something(value: Any) -> bool:
    """Functions may be given as JSON in a text, so an empty list may be the text "[]"."""
    if isinstance(value, str):
        return value.strip() not in ("", "[]", "{}", "null")
    return value not in (None, [], {})
