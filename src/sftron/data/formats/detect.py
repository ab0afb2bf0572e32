"""The detection of a data set's format from its first rows, and what to do with rows that fit none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from math import inf
from typing import Any, Literal

import yaml

from sftron.data.formats.messages import ROLE_NAMES
from sftron.data.formats.table import FORMATS, Format, FormatSpec, RowFormat, are_turns, columns_problem
from sftron.data.formats.values import describe, empty_row, is_none, names_of, refusal
from sftron.data.json_text import excerpt, parse_json
from sftron.data.sources import RowSource
from sftron.data.types import DataError, Row

FORMAT_SAMPLE = 100
"""The number of first rows that determine a detected format."""
QUESTIONS = ("instruction", "prompt", "question", "query", "problem", "input", "inputs")
ANSWERS = ("response", "output", "answer", "completion", "solution", "target", "targets")
"""Common names of the columns with the user's and the assistant's text; an error suggests the first that a row has."""
_TURN_TEXT = {"role": {"content", "tool_calls"}, "from": {"value"}}
_PAIR = {"prompt", "completion"}
_CHATS: tuple[Format, ...] = ("messages", "sharegpt")
_TEXT_FORMATS: Mapping[Format, FormatSpec] = {
    name: spec for name, spec in FORMATS.items() if spec.required[0] in QUESTIONS
}


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
    if detected == "text":
        _refuse_chats(source, columns)
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
    known: list[Format] = [name for name, spec in FORMATS.items() if spec.is_detected]
    problems: dict[Format, str | None] = {name: columns_problem(name, columns) for name in known}
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
            error = _no_format(row, location, "fits no format", _remedy(row)) if row else empty_row(location)
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


def _refuse_chats(source: RowSource, columns: Mapping[str, str]) -> None:
    """Raises DataError if rows that are declared to be plain text hold chats, whose prompts would be trained.

    A document that is one JSON object is looked into as well. A column that `columns` names is taken at its word.
    """
    for location, row in _sample(source):
        if isinstance(row, DataError) or "text" in columns:
            continue
        text = row.get("text")
        candidates = [row]
        if isinstance(text, str) and text.lstrip().startswith("{"):
            with suppress(DataError):
                candidates.append(parse_json(text.lstrip().partition("\n")[0], location))
        for each in candidates:
            for name in _CHATS if isinstance(each, Mapping) else ():
                if each.get(column := FORMATS[name].required[0]) and RowFormat(name).fits(each):
                    problem = f"is a chat, as it has `{column}`, and format text would train its prompts"
                    remedy = f"set `format: {name}`"
                    remedy += ", and name the file .jsonl" if each is not row else ""
                    if each is row and isinstance(text, str):
                        remedy += "; if its column `text` is meant, write `columns: {text: text}`"
                    raise refusal(location, "chat_as_text", f"{problem}; {remedy}")


def unread_columns(source: RowSource, row_format: RowFormat) -> list[str]:
    """Returns the columns that have a value in one of the first rows but are not read."""
    read = {row_format.column(name) for name in FORMATS[row_format.name].columns}
    rows = [row for _, row in _sample(source) if isinstance(row, Mapping)]
    return list(dict.fromkeys(name for row in rows for name in row if name not in read and not is_none(row[name])))


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
    found = f"{problem}; columns: {', '.join(held) or 'none'}"
    return refusal(location, "no_format", f"{found}; {remedy}; known formats: {known}")


def suggested_readings(row: Row) -> list[tuple[str, dict[str, Any]]]:
    """Returns the ways to read lists of turns, or texts, in columns of other names.

    Each is what has to be true of the columns, in words, and the keys `format` and `columns` that then read them.
    Names of texts are compared in lower case and without white space around them; two texts of unknown names are read
    in either order.
    """
    formats: tuple[tuple[Format, str], ...] = (("messages", "role"), ("sharegpt", "from"))
    readings: list[tuple[str, dict[str, Any]]] = []
    if _is_one_message(row):
        return []
    for column, turns in row.items():
        for format, key in formats:
            if turns and are_turns([turns], key) and _TURN_TEXT[key] & turns[0].keys() and not row.keys() >= _PAIR:
                (name,), wanted = FORMATS[format].required, FORMATS[format].wanted.partition(", ")[2]
                readings.append((f"`{names_of([column])}` is {wanted}", {"format": format, "columns": {name: column}}))
    if readings:
        return readings
    names = [name for name, value in row.items() if isinstance(value, str)]
    texts = {name.strip().lower(): name for name in names} | {name: name for name in names}
    pairs = [spec.required for spec in _TEXT_FORMATS.values() if texts.keys() >= {*spec.required}]
    question = next((name for name in QUESTIONS if name in texts), None)
    answer = next((name for name in ANSWERS if name in texts), None)
    if not pairs and question and answer:
        pairs = [(question, answer)]
    if not pairs and len(names) == 2:
        pairs = [tuple(names), tuple(reversed(names))]
    for asked, answered in pairs:
        meaning = f"`{names_of([texts[asked]])}` is the user's text and `{names_of([texts[answered]])}` the answer"
        if (columns := _renamed_texts(asked, answered, texts)) is not None:
            readings.append((meaning, {"columns": columns}))
    return readings


def _is_one_message(row: Row) -> bool:
    """Returns whether the row is a single message instead of a conversation."""
    roles = (row.get(key) for key in ("role", "from"))
    return any(isinstance(role, str) and role.strip().lower() in ROLE_NAMES for role in roles)


def _remedy(row: Row) -> str:
    """Returns the configuration that reads the row, if there is one."""
    if _is_one_message(row):
        column, turn = ("conversations", "{from, value}") if "from" in row else ("messages", "{role, content}")
        return f"the row is one message: write all messages of a conversation into one row, {{{column}: [{turn}, ...]}}"
    remedies = []
    in_one_line = {"default_flow_style": True, "width": inf, "allow_unicode": True, "sort_keys": False}
    for meaning, keys in suggested_readings(row):
        given = f"{meaning}: set `format: {keys['format']}` and" if "format" in keys else f"if {meaning}, set"
        remedies.append(f"{given} `columns: {yaml.safe_dump(keys['columns'], **in_one_line).strip()}`")
    for name, value in row.items():
        if name in ("messages", "conversations") and isinstance(value, str):
            remedies = [f"`{name}` is a text: write the list itself"]
        elif value and are_turns([value], "role") and "parts" in value[0]:
            written = "`messages`, a list of {role, content}: role assistant for model, a first message of role system "
            written += "for systemInstruction, tool_calls for functionCall"
            remedies = [f"`{names_of([name])}` has turns of {{role, parts}}, as Gemini's: write {written}"]
    if row.keys() >= _PAIR and {list, str} == {type(row[name]) for name in _PAIR}:
        other = next(name for name in sorted(_PAIR) if isinstance(row[name], str))
        role = "assistant" if other == "completion" else "user"
        remedies = [f"write `{other}` as a list, too: [{{role: {role}, content: text}}]"]
    if not remedies and isinstance(row.get("text"), str):
        remedies = ["set `format: text` if `text` holds plain text without a chat: all of it is trained"]
    return ", or ".join(remedies) or "name columns in `columns`, or convert the rows"


def _renamed_texts(question: str, answer: str, texts: Mapping[str, str]) -> dict[str, str] | None:
    """Returns the `columns` for these texts, given the names of the texts in the data; None if no format can have them.

    For example, rows of instruction, input and response need `columns: {output: response}`.
    """
    possible: list[tuple[bool, int, dict[str, str]]] = []
    for format, spec in _TEXT_FORMATS.items():
        pair = dict(zip(spec.required, (question, answer), strict=True))
        others = {name: name for name in spec.optional if name in texts and name not in (question, answer)}
        columns = {name: texts[found] for name, found in (pair | others).items() if name != texts[found]}
        if columns_problem(format, columns) is None:
            num_renamed = sum(name != found for name, found in pair.items())
            possible.append((question not in pair, num_renamed, columns))
    # A format that has one of the two names, first the question's, is the most likely.
    return min(possible, key=lambda each: each[:2])[2] if possible else None
