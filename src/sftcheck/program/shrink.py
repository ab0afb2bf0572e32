"""Removes what a program does not need to show its fault: rows, columns, messages, options, and parts of the model."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from sftcheck.program.program import Program, Rows, run_here
from sftcheck.program.rebuild import SMALL

_MOST_TRIES, _MOST_SECONDS = 200, 240


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


def fewest(items: Sequence[Any], still: Callable[[Sequence[Any]], bool]) -> list[Any]:
    """Returns the items that are needed, by delta debugging: drops ever smaller chunks while the rest still suffices.

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

        smaller = _fewer_columns if rows.is_ids else _fewer_texts
        kept[at] = smaller(kept[at], lambda row, at=at: search.shows(with_row(row, at)))
    return having(kept)


def _fewer_columns(row: Sequence[Mapping[str, Sequence[int]]], still: Callable[[Any], bool]) -> Any:
    """Returns a row of ids, by document, with fewer columns."""

    def having(names: Sequence[str]) -> tuple[dict[str, Sequence[int]], ...]:
        return tuple({name: document[name] for name in ("input_ids", *names)} for document in row)

    others = [name for name in row[0] if name != "input_ids"]
    return having(fewest(others, lambda left: still(having(left))))


def _fewer_texts(row: Mapping[str, Any], still: Callable[[Any], bool]) -> Any:
    """Returns a row with fewer columns and messages."""
    columns = fewest(list(row), lambda left: bool(left) and still({name: row[name] for name in left}))
    row = {name: row[name] for name in columns}
    for name, value in list(row.items()):
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            row = {**row, name: _fewer_messages(row, name, still)}
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
