"""Untrusted regular expressions that select modules by name, matched as peft does but in a bounded number of steps.

The engine of `re` tries one way after another: `((([a-z_.0-9])+)+)+!` takes longer than any run for one name, and
nothing interrupts it. Here, a pattern moves the set of all positions that it can have reached, one bit for each, so
that it never tries a position twice from the same place. It matches what `re` matches, but refuses back references,
conditions and atomic groups.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Sequence
from re import _constants as ops  # pyright: ignore[reportAttributeAccessIssue]
from re import _parser as parser  # pyright: ignore[reportAttributeAccessIssue]
from typing import Any

MOST_STEPS = 1_500_000
"""The steps for all names together, of at most a few seconds; an ordinary expression takes about 700 for a name."""
MOST_CHARACTERS = 200_000
_PLAIN = r"(?:[\w./-]|\\\.)+"
_IS_SIMPLE = re.compile(rf"\^?\(?(?:\?:)?{_PLAIN}(?:\|{_PLAIN})*\)?\$?")
"""Matches a pattern that only lists names. `re` matches such a list in one way; there may be hundreds of names and
keys."""
_FLAGS = re.UNICODE.value | re.IGNORECASE.value | re.DOTALL.value | re.ASCII.value
_SETS = {
    ops.CATEGORY_DIGIT: str.isdecimal,
    ops.CATEGORY_SPACE: str.isspace,
    ops.CATEGORY_WORD: lambda each: each.isalnum() or each == "_",
}
_OTHERS = {
    ops.CATEGORY_NOT_DIGIT: ops.CATEGORY_DIGIT,
    ops.CATEGORY_NOT_SPACE: ops.CATEGORY_SPACE,
    ops.CATEGORY_NOT_WORD: ops.CATEGORY_WORD,
}


class NamePatterns:
    """Patterns, each matched against a whole name, or against its end after a dot."""

    def __init__(self, patterns: Iterable[str], *, is_end: bool = False) -> None:
        """Reads the patterns.

        Args:
            patterns: The regular expressions; all names are matched in MOST_STEPS steps together.
            is_end: Whether a pattern may match the end of a name after a dot, as peft matches `rank_pattern` and
                `alpha_pattern`: `(.*\\.)?(PATTERN)$`.

        Raises:
            ValueError: A pattern is not a regular expression, or uses an unsupported feature.
        """
        self._steps = MOST_STEPS
        prefix = r"(?:.*\.)?" if is_end else ""
        self._patterns = [
            (each, re.compile(f"{prefix}(?:{each})") if is_simple else parsed)
            for each in patterns
            for parsed, is_simple in [(_parsed(each, prefix), _IS_SIMPLE.fullmatch(each))]
        ]

    def first(self, name: str) -> str | None:
        """Returns the first pattern that matches a name. Raises ValueError if that takes more steps than are left."""
        for pattern, parsed in self._patterns:
            self._steps -= 1 + len(pattern) // 50
            if self._steps < 0:
                raise _too_many_steps(pattern)
            if isinstance(parsed, re.Pattern):
                found = parsed.fullmatch(name) is not None
            else:
                match = _Match(name, parsed.state.flags, self._steps, pattern)
                found = bool(match.ends(parsed, 1) >> len(name) & 1)
                self._steps = match.steps
            if found:
                return pattern
        return None


def _parsed(pattern: str, prefix: str) -> Any:
    if len(pattern) > MOST_CHARACTERS:
        raise ValueError(
            f"{pattern[:40]!r}... has {len(pattern)} characters, but may have at most {MOST_CHARACTERS}; list the names"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of sets that may mean something else in the future
            parser.parse(pattern)  # alone: peft's own brackets must not complete it
            parsed = parser.parse(f"{prefix}(?:{pattern})" if prefix else pattern)
        found = {*_operators(parsed)}
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{pattern[:200]!r} is not a regular expression ({error})") from error
    if unknown := sorted(map(str, found - _MATCHED)):
        raise ValueError(f"{pattern[:200]!r} has {unknown[0].lower()}, which is not supported; list the names")
    if parsed.state.flags & ~_FLAGS:
        raise ValueError(f"{pattern[:200]!r} has flags other than i, s, a and u; list the names")
    return parsed


def _too_many_steps(pattern: str) -> ValueError:
    remedy = "write it without a repeat inside a repeat, or list the names"
    return ValueError(f"{pattern[:200]!r} takes more than {MOST_STEPS} steps; {remedy}")


def _operators(items: Any) -> Iterable[Any]:
    for operator, value in items:
        yield operator
        if operator is ops.SUBPATTERN and (value[1] or value[2]):
            yield "flags in a group"
        if operator in (ops.ASSERT, ops.ASSERT_NOT) and value[0] < 0 and len({*value[1].getwidth()}) > 1:
            yield "look-behind of several widths"
        for part in value if isinstance(value, (tuple, list)) else ():
            for each in part if isinstance(part, list) else [part]:
                if isinstance(each, parser.SubPattern):
                    yield from _operators(each)


_MATCHED = {
    ops.LITERAL, ops.NOT_LITERAL, ops.ANY, ops.IN, ops.BRANCH, ops.SUBPATTERN, ops.MAX_REPEAT, ops.MIN_REPEAT, ops.AT,
    ops.ASSERT, ops.ASSERT_NOT,
}  # fmt: skip


class _Match:
    """A name and the remaining steps. Positions are the bits of a number: bit 0 is before the first character."""

    def __init__(self, name: str, flags: int, steps: int, pattern: str) -> None:
        self._name, self.steps, self._pattern = name, steps, pattern
        self._ignores_case, self._is_ascii = flags & re.IGNORECASE.value, flags & re.ASCII.value
        self._where: dict[Any, int] = {}

    def ends(self, items: Any, starts: int) -> int:
        """Returns the positions after a sequence that begins at any of these."""
        for operator, value in items:
            if not starts:
                break
            self.steps -= 1
            if self.steps < 0:
                raise _too_many_steps(self._pattern)
            starts = self._behind(operator, value, starts)
        return starts

    def _behind(self, operator: Any, value: Any, starts: int) -> int:
        if operator is ops.SUBPATTERN:
            return self.ends(value[3], starts)
        if operator is ops.BRANCH:
            found = 0
            for each in value[1]:
                found |= self.ends(each, starts)
            return found
        if operator in (ops.MAX_REPEAT, ops.MIN_REPEAT):
            return self._repeated(value[0], value[1], value[2], starts)
        if operator is ops.AT:
            return starts & self._places(value)
        if operator in (ops.ASSERT, ops.ASSERT_NOT):
            holds = sum(
                1 << at for at in range(len(self._name) + 1) if starts >> at & 1 and self._looks(value[0], value[1], at)
            )
            return holds if operator is ops.ASSERT else starts & ~holds
        return (starts & self._characters(operator, value)) << 1

    def _repeated(self, least: int, most: int, items: Any, starts: int) -> int:
        for _ in range(least):
            before, starts = starts, self.ends(items, starts)
            if starts in (before, 0):  # so will it be each time
                break
        found, new, number = starts, starts, least
        while new and number < most:
            new = self.ends(items, new) & ~found
            found, number = found | new, number + 1
        return found

    def _looks(self, direction: int, items: Any, at: int) -> bool:
        if direction > 0:
            return self.ends(items, 1 << at) != 0
        start = at - items.getwidth()[0]  # `re` allows one width alone
        return start >= 0 and bool(self.ends(items, 1 << start) >> at & 1)

    def _places(self, value: Any) -> int:
        last = len(self._name)
        if value in (ops.AT_BEGINNING, ops.AT_BEGINNING_STRING):
            return 1
        if value in (ops.AT_END, ops.AT_END_STRING):
            return 1 << last
        words = [False, *(self._is_in(ops.CATEGORY_WORD, each) for each in self._name), False]
        borders = sum(1 << at for at in range(last + 1) if words[at] != words[at + 1])
        return borders if value is ops.AT_BOUNDARY else ~borders

    def _characters(self, operator: Any, value: Any) -> int:
        """Returns the positions before the characters that one item of a pattern matches."""
        key = (operator, value if isinstance(value, int) else id(value))
        if key not in self._where:
            self.steps -= len(self._name) * (1 if isinstance(value, int) or value is None else len(value))
            self._where[key] = sum(1 << at for at, each in enumerate(self._name) if self._fits(operator, value, each))
        return self._where[key]

    def _fits(self, operator: Any, value: Any, character: str) -> bool:
        if operator is ops.ANY:
            return True  # a name has no newline
        if operator is ops.NOT_LITERAL:
            return not self._fits(ops.LITERAL, value, character)
        if operator is ops.IN and value[0][0] is ops.NEGATE:
            return not self._fits(ops.IN, value[1:], character)
        items: Sequence[Any] = value if operator is ops.IN else [(operator, value)]
        cases = (character, character.lower(), character.upper()) if self._ignores_case else (character,)
        return any(self._is_one(item, each) for item in items for each in cases)

    def _is_one(self, item: Any, character: str) -> bool:
        operator, value = item
        if operator is ops.LITERAL:
            return ord(character[0]) == value
        if operator is ops.RANGE:
            return value[0] <= ord(character[0]) <= value[1]
        return self._is_in(value, character)

    def _is_in(self, category: Any, character: str) -> bool:
        if category in _OTHERS:
            return not self._is_in(_OTHERS[category], character)
        return _SETS[category](character) and (character.isascii() or not self._is_ascii)
