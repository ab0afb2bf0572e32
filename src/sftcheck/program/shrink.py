"""Takes away what a program does not need to show its fault: rows, texts, tokens, options, and parts of the model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import getitem
from typing import Any, Protocol

from sftcheck.program.program import FIXED, Program, Rows, run_here
from sftcheck.program.rebuild import SMALL

_MOST_TRIES, _MOST_SECONDS = 200, 240
_SMALL_NUMBERS = (1, 2, 8, 16, 32, 64, 128)
_COUNTS = {"gradient_accumulation_steps": (2,), "per_device_train_batch_size": (1, 2), "max_length": (16, 32, 64, 128)}
"""Smaller values that are tried for an argument; a step that accumulates needs two micro-batches."""


class HasText(Protocol):
    @property
    def text(self) -> str: ...


@dataclass
class Search:
    """Runs programs, up to a number and a time, and remembers what they did."""

    most_tries: int = _MOST_TRIES
    seconds: float = _MOST_SECONDS
    errors: list[str] = field(default_factory=list)
    _known: dict[str, bool] = field(default_factory=dict)
    _started: float = field(default_factory=time.monotonic)

    def shows(self, program: HasText) -> bool:
        """Returns whether a program shows its fault; no, if the tries are used up."""
        try:
            text = program.text
        except ValueError as error:
            self.errors.append(str(error))
            return False
        if text not in self._known:
            if len(self._known) >= self.most_tries or time.monotonic() - self._started > self.seconds:
                return False
            outcome = run_here(text)
            self._known[text] = outcome.shows_fault
            if outcome.status is None:
                self.errors.append(" ".join(outcome.output.split())[:300])
        return self._known[text]


def shrunk(
    program: Program, search: Search, parts: Sequence[str], *, keeps_texts: bool, kept: Sequence[str]
) -> Program:
    """Returns the smallest program that was found.

    Args:
        program: One that shows its fault.
        parts: The names of the parts that may be left out.
        keeps_texts: Whether its rows have to stay as they are.
        kept: The arguments that the measurement needs.
    """
    for part in parts:
        program = without_parts(program, part, search, kept)
    program = _with_small_numbers(program, search)
    for name in ("rows", "evaluation") if not keeps_texts else ():
        if getattr(program, name) is not None:
            program = _with_small_rows(program, name, search)
    return program


def without_parts(program: Any, part: str, search: Search, kept: Sequence[str]) -> Any:
    """Returns the program without the arguments or lines of a part that it does not need."""
    names = list(getattr(program, part))
    if part == "tokenizer":
        names = names[1:]
    names = [each for each in names if each not in kept and not (part == "config" and each in {*SMALL, "vocab_size"})]

    def without(left: Sequence[str]) -> Any:
        value, dropped = getattr(program, part), set(names) - set(left)
        if isinstance(value, Mapping):
            return replace(program, **{part: {name: each for name, each in value.items() if name not in dropped}})
        return replace(program, **{part: tuple(line for line in value if line not in dropped)})

    def still(left: Sequence[str]) -> bool:
        candidate = without(left)
        return (part != "config" or candidate.is_small) and search.shows(candidate)

    return without(fewest(names, still))


def _with_small_numbers(program: Program, search: Search) -> Program:
    for name, smaller in _COUNTS.items():
        for number in smaller:
            own = program.arguments.get(name, "")
            if own.isdigit() and number < int(own):
                candidate = replace(program, arguments={**program.arguments, name: str(number)})
                if search.shows(candidate):
                    program = candidate
                    break
    return program


def fewest(items: Sequence[Any], still: Callable[[Sequence[Any]], bool]) -> list[Any]:
    """Returns items without those that are not needed: none, or else without halves, quarters and so on to single ones.

    Args:
        still: Whether some of the items suffice.
    """
    left = list(items)
    if left and still([]):
        return []
    size = len(left) // 2
    while size:
        at = 0
        while at < len(left):
            fewer = left[:at] + left[at + size :]
            if fewer and len(fewer) < len(left) and still(fewer):
                left = fewer
            else:
                at += size
        size //= 2
    return left


# -- rows --------------------------------------------------------------------------------------------------------------


def _with_small_rows(program: Program, name: str, search: Search) -> Program:
    rows: Rows = getattr(program, name)

    def having(changed: Sequence[Any]) -> Program:
        return replace(program, **{name: replace(rows, rows=tuple(changed))})

    kept = list(rows.rows)
    if len(kept) > 1:
        kept = fewest(kept, lambda left: bool(left) and search.shows(having(left)))
    for at in range(len(kept)):

        def with_row(row: Any, at: int = at) -> Program:
            return having([*kept[:at], row, *kept[at + 1 :]])

        shorter = _shorter_ids if rows.is_ids else _shorter_texts
        kept[at] = shorter(kept[at], lambda row, at=at: search.shows(with_row(row, at)))
    return having(kept)


def _shorter_ids(row: Sequence[Mapping[str, Sequence[int]]], still: Callable[[Any], bool]) -> Any:
    """Returns a row with fewer columns and tokens; a token is taken from all columns."""
    others = [name for name in row[0] if name not in ("input_ids", FIXED)]
    documents = _with_columns(row, fewest(others, lambda left: still(_with_columns(row, left))))
    for at in range(len(documents)):
        documents = _with_short_document(documents, at, still)
    return documents


def _with_short_document(documents: tuple[Any, ...], at: int, still: Callable[[Any], bool]) -> tuple[Any, ...]:
    fixed = documents[at][FIXED]
    free = [n for n, is_fixed in enumerate(fixed) if not is_fixed]

    def having(left: Sequence[int]) -> tuple[Any, ...]:
        dropped = set(free) - set(left)
        columns = documents[at].items()
        shorter = {name: [each for n, each in enumerate(values) if n not in dropped] for name, values in columns}
        return (*documents[:at], shorter, *documents[at + 1 :])

    return having(fewest(free, lambda left: (len(left) > 0 or any(fixed)) and still(having(left))))


def _with_columns(row: Sequence[Mapping[str, Any]], names: Sequence[str]) -> tuple[dict[str, Any], ...]:
    return tuple({name: document[name] for name in ("input_ids", *names, FIXED)} for document in row)


def _shorter_texts(row: Mapping[str, Any], still: Callable[[Any], bool]) -> Any:
    """Returns a row with fewer columns, messages and words."""
    columns = fewest(list(row), lambda left: bool(left) and still({name: row[name] for name in left}))
    row = {name: row[name] for name in columns}
    for name, value in list(row.items()):
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            row = {**row, name: _fewer_messages(row, name, still)}
    for place in list(_texts(row)):
        row = _with_fewer_words(row, place, still)
    return row


def _fewer_messages(row: Mapping[str, Any], name: str, still: Callable[[Any], bool]) -> list[Any]:
    is_asked = _is_asked(row[name])

    def suffice(left: Sequence[Any]) -> bool:
        return bool(left) and _is_asked(left) >= is_asked and still({**row, name: list(left)})

    return fewest(row[name], suffice)


def _is_asked(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether a question comes before the first answer; without one, a row would look like another fault."""
    roles = [each.get("role") for each in messages]
    return "assistant" in roles and "user" in roles[: roles.index("assistant")]


def _texts(value: Any, *place: Any) -> Iterator[tuple[Any, ...]]:
    """Yields the places of all texts in a row: the keys and the numbers that lead to each."""
    if isinstance(value, str):
        yield place
    elif isinstance(value, (Mapping, list)):
        for key in value if isinstance(value, Mapping) else range(len(value)):
            yield from _texts(value[key], *place, key)


def _having(value: Any, place: Sequence[Any], text: str) -> Any:
    """Returns the value with another text at this place."""
    if not place:
        return text
    changed = dict(value) if isinstance(value, Mapping) else list(value)
    changed[place[0]] = _having(value[place[0]], place[1:], text)
    return changed


def _with_fewer_words(row: Any, place: Sequence[Any], still: Callable[[Any], bool]) -> Any:
    def having(words: Sequence[str]) -> Any:
        return _having(row, place, " ".join(words))

    words = reduce(getitem, place, row).split(" ")
    for short in (words[:1], words[:2]):
        if len(short) < len(words) and short[0] and still(having(short)):
            return having(short)
    return having(fewest(words, lambda left: bool(left) and still(having(left))))
