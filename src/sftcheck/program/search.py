"""The search for the smallest program that shows the fault of a failed row: which are tried, and what is taken away."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from sftcheck.program.evidence import EVIDENCE, Evidence
from sftcheck.program.program import Program, confirmed, run_here
from sftcheck.program.quoting import literal
from sftcheck.program.rebuild import SMALL, Materials, with_sizes
from sftcheck.program.rows import Rows
from sftcheck.program.seen import Suspect, rows_for
from sftron.checks.report import EVALUATION, Check

_MOST_ALONE, _MOST_TRIES, _MOST_SECONDS = 4, 200, 240
_PARTS = ("arguments", "options", "after", "model_lines", "model_options", "tokenizer", "config")
_OF_THE_MODEL = ("isolation", "positions", "loss", "gradients", "padding", "adapters")
"""The rows whose faults do not depend on the tokenizer; with another template, others would be other faults."""
_OF_LABELS = ("trained tokens", "stop tokens", "forgery")
"""The rows whose labels may be the user's, so that the ids of a packed row are not made again from conversations."""


class HasText(Protocol):
    @property
    def text(self) -> str: ...


@dataclass
class Search:
    """Runs programs, up to a number and a time, and remembers what they did."""

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
            if len(self._known) >= _MOST_TRIES or time.monotonic() - self._started > _MOST_SECONDS:
                return False
            outcome = run_here(text)
            self._known[text] = outcome.shows_fault
            if outcome.status is None:
                self.errors.append(" ".join(outcome.output.split())[:300])
        return self._known[text]


def script_of(materials: Any, checks: Sequence[Check], name: str | None) -> str:
    """Returns the smallest program that was found for a failed row, by default the first one.

    Raises:
        ValueError: None was found; the message says why.
    """
    failed = [each for each in checks if each.passed is False]
    check = next((each for each in failed if name in (None, each.name)), None)
    if check is None:
        names = ", ".join(each.name for each in failed) or "none"
        raise ValueError(f"no row {name!r} has failed; failed: {names}" if name else "no row has failed")
    if not isinstance(materials, Materials):
        raise ValueError(f"{check.name}: {materials}")
    search, is_evaluation = Search(), check.part == EVALUATION
    for program in candidates(materials, check.name, check.faults, is_evaluation=is_evaluation):
        if search.shows(program):
            return confirmed(_smallest(program, search, check.name).text)
    reasons = [*materials.problems, *dict.fromkeys(search.errors)][:3]
    raise ValueError("; ".join([f"{check.name}: no program of the trainer's parts shows the fault", *reasons]))


# -- which programs are tried ------------------------------------------------------------------------------------------


def candidates(
    materials: Materials, name: str, faults: Collection[str] = (), *, is_evaluation: bool = False
) -> Iterator[Program]:
    """Yields the programs that may show the fault of a row, those with a small model and few rows first.

    Args:
        faults: The names of the faults that the check has found; what shows one of them comes first.
    """

    def order(evidence: Evidence) -> int:
        return 1 if not evidence.faults else 0 if any(each.name in faults for each in evidence.faults) else 2

    suspects = materials.suspects.get((name, is_evaluation), ())
    ways = [each for each in materials.ways if not (each == "conversations" and name in _OF_LABELS)]
    if "columns" in ways:
        has_columns = rows_for(suspects[:1], "columns", "", completion_only=False) is not None
        ways = ["columns"] if has_columns else ways[1:]
    for is_reduced in (True, False):
        base = with_sizes(materials, is_small=is_reduced)
        for evidence in sorted(EVIDENCE[name], key=order):
            for way in ways:
                for chosen in _choices(suspects, evidence.num_rows):
                    program = _candidate(base, materials, evidence, way, chosen, is_evaluation)
                    if program is not None and (is_reduced or program.is_small):
                        yield program


def _choices(suspects: Sequence[Suspect], numbers: Sequence[int]) -> Iterator[Sequence[Suspect]]:
    for number in numbers:
        if number == 1:
            yield from ([each] for each in suspects[:_MOST_ALONE])
        elif number <= len(suspects):
            yield suspects[:number]


def _candidate(
    base: Program, materials: Materials, evidence: Evidence, way: str, chosen: Sequence[Suspect], is_evaluation: bool
) -> Program | None:
    """Returns the program with these rows; None if it cannot be made, or if the evidence measures nothing in it."""
    completion_only, is_single = materials.completion_only, evidence.num_rows == (1,)
    if is_single and way == "conversations":  # of a pack, the first one
        chosen = [replace(chosen[0], contents=chosen[0].contents[:1])]
    rows = rows_for(chosen, way, "eval_" * is_evaluation, completion_only=completion_only)
    training = rows
    if is_evaluation:
        training = rows_for(materials.training_rows[:2], way, "", completion_only=completion_only)
    if rows is None or training is None or not evidence.fits(base.facts, rows):
        return None
    has_own = rows.has_conversations and not base.facts.is_text
    has_own &= way == "conversations" or not any(each.is_given for each in chosen)
    conversations = ""
    if evidence.compares and not has_own:
        contents = [content for each in chosen for content in each.contents]
        messages = [content["messages"] for content in contents if isinstance(content, Mapping)]
        if len(messages) < len(contents) or (is_single and len(messages) > 1):
            return None
        conversations = f"conversations = {literal(messages)}"
    return replace(
        base,
        rows=training,
        evaluation=rows if is_evaluation else None,
        arguments={**base.arguments, **evidence.given},
        conversations=conversations,
        evidence=evidence,
    )


# -- what is taken away ------------------------------------------------------------------------------------------------


def _smallest(program: Program, search: Search, name: str) -> Program:
    """Returns the smallest program that was found, of one that shows the fault of a row."""
    for part in _PARTS:
        if part != "tokenizer" or name in _OF_THE_MODEL:
            program = without_parts(program, part, search, ("use_cpu", "bf16", *program.evidence.given))
    for rows in ("rows", "evaluation") if not program.conversations else ():
        if getattr(program, rows) is not None:
            program = _with_small_rows(program, rows, search)
    return program


def without_parts(program: Any, part: str, search: Search, kept: Collection[str]) -> Any:
    """Returns the program without the arguments or lines of a part that it does not need."""
    value = getattr(program, part)
    kept = {*kept, *((*SMALL, "vocab_size") if part == "config" else ())}
    names = [each for each in list(value)[1 if part == "tokenizer" else 0 :] if each not in kept]

    def without(left: Sequence[str]) -> Any:
        dropped = {*names} - {*left}
        if isinstance(value, Mapping):
            return replace(program, **{part: {name: each for name, each in value.items() if name not in dropped}})
        return replace(program, **{part: tuple(line for line in value if line not in dropped)})

    def shows(smaller: Any) -> bool:
        return (part != "config" or smaller.is_small) and search.shows(smaller)

    return smallest(names, without, shows)


def smallest(
    items: Sequence[Any], made: Callable[[list[Any]], Any], still: Callable[[Any], bool], *, least: int = 0
) -> Any:
    """Returns what is made of the items that are needed: drops ever smaller chunks while the rest still suffices.

    Args:
        made: Makes something of some of the items.
        still: Whether that suffices, as what is made of all items does.
        least: The fewest items of which something can be made.
    """
    left = list(items)
    if left and not least and still(made([])):
        return made([])
    size = len(left) // 2
    while size:
        at = 0
        while at < len(left):
            fewer = left[:at] + left[at + size :]
            if fewer and len(fewer) < len(left) and still(made(fewer)):
                left = fewer
            else:
                at += size
        size //= 2
    return made(left)


def _with_small_rows(program: Program, name: str, search: Search) -> Program:
    rows: Rows = getattr(program, name)

    def having(changed: Sequence[Any]) -> Program:
        return replace(program, **{name: replace(rows, rows=tuple(changed))})

    kept = list(getattr(smallest(rows.rows, having, search.shows, least=1), name).rows)
    for at, row in enumerate(kept):

        def suffices(smaller: Any, at: int = at) -> bool:
            return search.shows(having([*kept[:at], smaller, *kept[at + 1 :]]))

        kept[at] = (_fewer_columns if rows.is_ids else _fewer_texts)(row, suffices)
    return having(kept)


def _fewer_columns(row: Sequence[Mapping[str, Sequence[int]]], still: Callable[[Any], bool]) -> Any:
    """Returns a row of ids, by document, with fewer columns."""

    def having(names: Sequence[str]) -> tuple[dict[str, Sequence[int]], ...]:
        return tuple({name: document[name] for name in ("input_ids", *names)} for document in row)

    return smallest([name for name in row[0] if name != "input_ids"], having, still)


def _fewer_texts(row: Mapping[str, Any], still: Callable[[Any], bool]) -> Any:
    """Returns a row with fewer columns and messages; a question stays before the first answer.

    Without one, a row would look like another fault.
    """
    row = smallest(list(row), lambda names: {name: row[name] for name in names}, still, least=1)
    for name, value in list(row.items()):
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            row = _fewer_messages(row, name, still)
    return row


def _fewer_messages(row: Mapping[str, Any], name: str, still: Callable[[Any], bool]) -> Any:
    is_asked = _is_asked(row[name])

    def suffices(smaller: Mapping[str, Any]) -> bool:
        return _is_asked(smaller[name]) >= is_asked and still(smaller)

    return smallest(row[name], lambda left: {**row, name: left}, suffices, least=1)


def _is_asked(messages: Sequence[Mapping[str, Any]]) -> bool:
    roles = [each.get("role") for each in messages]
    return "assistant" in roles and "user" in roles[: roles.index("assistant")]
