"""Strings that remember which message each of their characters came from.

`TrackedStr` is a `str` for everyone who reads it (comparisons, `in`, hashing, isinstance are str's own) and differs in
what it gives back: each operation that a chat template performs on text returns a TrackedStr whose runs say, for every
character, its origin. An operation that would lose the origins raises `ProvenanceLostError` rather than return a bare
str.

    content        = TrackedStr.of("  Hi", Origin(0, "content", Role.USER))
    "<" + content.strip() + ">"
        characters      <  H  i  >
        origins         -  0  0  -
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn, SupportsIndex

from sftron.data.types import Role


class ProvenanceLostError(ValueError):
    """A template did something to a message's text after which nobody can tell where the text came from."""


class Origin(NamedTuple):
    """A text of the conversation: field is its path in message number `message`, such as "tool_calls.0.function.name";
    role, whose text it is. is_marked: the template wrote it between `{% generation %}` marks."""

    message: int
    field: str
    role: Role
    is_marked: bool = False


CONVERSATION = -1
"""The `message` of texts that belong to no message: the tools; and what a template writes itself between marks."""

MARKED_TEMPLATE = Origin(CONVERSATION, "", Role.TEMPLATE, is_marked=True)
"""The template's own text between `{% generation %}` marks."""

Run = tuple[int, Origin | None]
"""A number of characters and where they came from; None is the template itself. Runs of length 0 mark empty fields."""


class TrackedStr(str):
    """A str with `runs`: (length, origin) pairs in order, whose lengths add up to the str's own."""

    __slots__ = ("runs",)
    runs: tuple[Run, ...]

    @classmethod
    def of(cls, text: str, origin: Origin | None) -> TrackedStr:
        return cls.with_runs(text, ((len(text), origin),))

    @classmethod
    def with_runs(cls, text: str, runs: tuple[Run, ...]) -> TrackedStr:
        tracked = cls(text)
        tracked.runs = runs
        return tracked

    def marked(self) -> TrackedStr:
        """The same text, between `{% generation %}` marks."""
        runs = ((n, MARKED_TEMPLATE if origin is None else origin._replace(is_marked=True)) for n, origin in self.runs)
        return TrackedStr.with_runs(self, tuple(runs))

    # -- joining ------------------------------------------------------------------------------------------------

    def __add__(self, other: str) -> TrackedStr:
        if not isinstance(other, str):
            return NotImplemented
        return TrackedStr.with_runs(str.__add__(self, other), self.runs + _runs_of(other))

    def __radd__(self, other: str) -> TrackedStr:
        if not isinstance(other, str):
            return NotImplemented
        return TrackedStr.with_runs(str.__add__(other, self), _runs_of(other) + self.runs)

    def __mul__(self, count: SupportsIndex) -> TrackedStr:
        return TrackedStr.with_runs(str.__mul__(self, count), self.runs * max(0, operator.index(count)))

    def __rmul__(self, count: SupportsIndex) -> TrackedStr:
        return self * count

    def join(self, parts: Iterable[str]) -> TrackedStr:
        pieces: list[str] = []
        for part in parts:
            if pieces:
                pieces.append(self)
            pieces.append(part)
        return concatenate(pieces)

    # -- taking apart -------------------------------------------------------------------------------------------

    def cut(self, start: int, stop: int) -> TrackedStr:
        """Characters [start, stop), 0 <= start <= stop <= len. What is left empty stays marked as what it was."""
        runs: list[Run] = []
        position = 0
        for length, origin in self.runs:
            left, right = max(position, start), min(position + length, stop)
            if left < right or (left == right and origin is not None and (length == 0 or start == stop)):
                runs.append((right - left, origin))
            position += length
        return TrackedStr.with_runs(str.__getitem__(self, slice(start, stop)), tuple(runs))

    def __getitem__(self, key: SupportsIndex | slice) -> TrackedStr:
        if not isinstance(key, slice):
            index = operator.index(key)  # a TypeError for a text, which Jinja takes for an attribute that there is not
            if not -len(self) <= index < len(self):
                raise IndexError("string index out of range")
            index %= len(self)
            return self.cut(index, index + 1)
        start, stop, step = key.indices(len(self))
        if step == 1:
            return self.cut(start, max(start, stop))
        return concatenate([self.cut(index, index + 1) for index in range(start, stop, step)])

    def __iter__(self) -> Iterator[str]:
        return (self.cut(index, index + 1) for index in range(len(self)))

    def strip(self, chars: str | None = None) -> TrackedStr:
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None) -> TrackedStr:
        return self.cut(len(self) - len(str.lstrip(self, chars)), len(self))

    def rstrip(self, chars: str | None = None) -> TrackedStr:
        return self.cut(0, len(str.rstrip(self, chars)))

    def removeprefix(self, prefix: str) -> TrackedStr:
        return self.cut(len(prefix), len(self)) if self.startswith(prefix) else self

    def removesuffix(self, suffix: str) -> TrackedStr:
        return self.cut(0, len(self) - len(suffix)) if suffix and self.endswith(suffix) else self

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._locate(str.split(self, sep, maxsplit), None if sep is None else len(sep))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        # From the right, as the rest that is left whole may hold the parts after it.
        parts, end = [], len(self)
        for part in reversed(str.rsplit(self, sep, maxsplit)):
            start = str.rindex(self, part, 0, end) if sep is None else end - len(part)
            parts.append(self.cut(start, start + len(part)))
            end = start - len(sep or "")
        return parts[::-1]

    def partition(self, sep: str) -> tuple[str, str, str]:
        before, middle, after = self._locate(str.partition(self, sep), 0)
        return before, middle, after

    def rpartition(self, sep: str) -> tuple[str, str, str]:
        before, middle, after = self._locate(str.rpartition(self, sep), 0)
        return before, middle, after

    def splitlines(self, keepends: bool = False) -> list[str]:
        lines, start = [], 0
        for whole, line in zip(str.splitlines(self, True), str.splitlines(self, keepends), strict=True):
            lines.append(self.cut(start, start + len(line)))
            start += len(whole)
        return lines

    def _locate(self, parts: Iterable[str], gap: int | None) -> list[str]:
        """The parts, found from left to right; `gap` characters lie between two of them, or white space for None."""
        located, cursor = [], 0
        for part in parts:
            start = str.index(self, part, cursor) if gap is None else cursor
            located.append(self.cut(start, start + len(part)))
            cursor = start + len(part) + (gap or 0)
        return located

    # -- rewriting ----------------------------------------------------------------------------------------------

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> TrackedStr:
        """`new` keeps its own origin: what a template writes in place of content is the template's."""
        if not old:
            raise ProvenanceLostError("replace('', ...) inserts text between all characters")
        limit, pieces, cursor = operator.index(count), [], 0
        while limit != 0 and (found := str.find(self, old, cursor)) >= 0:
            pieces += [self.cut(cursor, found), new]
            cursor = found + len(old)
            limit -= 1
        return concatenate([*pieces, self.cut(cursor, len(self))])

    def _recase(self, recased: str) -> TrackedStr:
        if len(recased) != len(self):
            raise ProvenanceLostError("a change of case changed the number of characters")
        return TrackedStr.with_runs(recased, self.runs)

    def lower(self) -> TrackedStr:
        return self._recase(str.lower(self))

    def upper(self) -> TrackedStr:
        return self._recase(str.upper(self))

    def title(self) -> TrackedStr:
        return self._recase(str.title(self))

    def capitalize(self) -> TrackedStr:
        return self._recase(str.capitalize(self))

    def __str__(self) -> TrackedStr:
        # Jinja writes every expression through str(), which lets a subclass out.
        return self


def _refused(name: str) -> Callable[..., NoReturn]:
    def method(*_: Any, **__: Any) -> NoReturn:
        raise ProvenanceLostError(f"the string method {name.strip('_')} does not keep track of where text came from")

    return method


for _name in (
    *("casefold", "swapcase", "center", "ljust", "rjust", "zfill", "expandtabs", "translate", "encode"),
    *("format", "format_map", "__mod__", "__rmod__", "__format__"),
):
    setattr(TrackedStr, _name, _refused(_name))


def _runs_of(text: str) -> tuple[Run, ...]:
    return text.runs if isinstance(text, TrackedStr) else ((len(text), None),)


def concatenate(parts: Iterable[str]) -> TrackedStr:
    """All parts in one, bare strs as the template's. Neighbouring runs of one origin become one."""
    parts = list(parts)
    runs: list[Run] = []
    last: Origin | None = None
    for part in parts:
        # Not `_runs_of`: this is called for all that a template writes.
        for run in part.runs if type(part) is TrackedStr else ((len(part), None),):
            length, origin = run
            if origin is None and length == 0:
                continue
            if runs and (origin is last or (origin is not None and origin == last)):
                runs[-1] = (runs[-1][0] + length, origin)
            else:
                runs.append(run)
                last = origin
    return TrackedStr.with_runs("".join(parts), tuple(runs))


class EmptyObject(dict[str, Any]):
    """{} of a conversation: it holds no text that could say where it comes from."""

    def __init__(self, origin: Origin) -> None:
        super().__init__()
        self._origin = origin


class EmptyList(list[Any]):
    """[] of a conversation."""

    def __init__(self, origin: Origin) -> None:
        super().__init__()
        self._origin = origin


def track(value: Any, origin: Origin) -> Any:
    """A JSON value with every text in it, keys too, a TrackedStr; `origin` is that of the whole."""
    if value in ({}, []):
        return EmptyObject(origin) if isinstance(value, Mapping) else EmptyList(origin)
    if isinstance(value, str):
        return TrackedStr.of(value, origin)
    if isinstance(value, Mapping):
        # A key and its value are two texts, so that each may be written once.
        fields = ((key, f"{origin.field}.{key}") for key in value)
        return {
            TrackedStr.of(key, origin._replace(field=f"{field}:")): track(value[key], origin._replace(field=field))
            for key, field in fields
        }
    if isinstance(value, (list, tuple)):
        return [track(item, origin._replace(field=f"{origin.field}.{n}")) for n, item in enumerate(value)]
    return value


def is_tracked(value: Any) -> bool:
    """Whether a value is, or holds at any depth, text of the conversation."""
    return next(origins_in(value), None) is not None


def origins_in(value: Any) -> Iterator[Origin]:
    """The origins of all texts that a value is or holds."""
    if isinstance(value, TrackedStr):
        yield from (origin for _, origin in value.runs if origin is not None)
    elif isinstance(value, EmptyObject | EmptyList):
        yield value._origin
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from origins_in(key)
            yield from origins_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from origins_in(item)


def written_whole(text: str, value: Any, writer: str) -> str:
    """`text`, which a template made of the whole of `value`, as the message's that all texts of the value are of.

    Raises ProvenanceLostError where they are several messages', or several roles'.
    """
    origins = list(origins_in(value))
    if not origins:
        return text
    roles = {origin.role for origin in origins}
    if len({origin.message for origin in origins}) > 1 or len(roles - {Role.REASONING}) > 1:
        raise ProvenanceLostError(f"{writer} mixes several texts of the conversation")
    # A dump of a text with its inline reasoning is the text's.
    origin = next((each for each in origins if each.role is not Role.REASONING), origins[0])
    first, last = min(each.field for each in origins), max(each.field for each in origins)
    num_shared = next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return TrackedStr.of(text, origin._replace(field=first[:num_shared]))
