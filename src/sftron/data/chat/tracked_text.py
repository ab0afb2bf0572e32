"""Strings that record the origin of each of their characters: a field of a message, or the template.

A `TrackedStr` is a `str`: comparisons, `in`, hashing and isinstance are str's own. But the operations that chat
templates apply to text return a TrackedStr, whose spans hold the origin of every character. An operation that would
lose the origins raises `ProvenanceLostError` instead of returning a bare str.

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
    """A template applied an operation that loses the origin of a message's text."""


class Origin(NamedTuple):
    """The origin of a text of the conversation."""

    message: int
    """The index of the message, or CONVERSATION."""
    field: str
    """The path of the text in the message, such as "tool_calls.0.function.name"."""
    role: Role
    is_marked: bool = False
    """Whether the template wrote the text between `{% generation %}` marks."""


CONVERSATION = -1
"""The `message` of texts outside of messages: the tools, and the template's own text between marks."""

MARKED_TEMPLATE = Origin(CONVERSATION, "", Role.TEMPLATE, is_marked=True)
"""The template's own text between `{% generation %}` marks."""

OriginSpan = tuple[int, Origin | None]
"""A number of characters and their origin; the origin None is the template. A length of 0 stands for an empty field."""


class TrackedStr(str):
    """A str with `spans`: (length, origin) pairs in order, whose lengths add up to the str's own."""

    __slots__ = ("spans",)
    spans: tuple[OriginSpan, ...]

    @classmethod
    def of(cls, text: str, origin: Origin | None) -> TrackedStr:
        return cls.with_spans(text, ((len(text), origin),))

    @classmethod
    def with_spans(cls, text: str, spans: tuple[OriginSpan, ...]) -> TrackedStr:
        tracked = cls(text)
        tracked.spans = spans
        return tracked

    def marked(self) -> TrackedStr:
        """Returns the text with its spans marked as written between `{% generation %}` and `{% endgeneration %}`."""
        spans = [(n, MARKED_TEMPLATE if each is None else each._replace(is_marked=True)) for n, each in self.spans]
        return TrackedStr.with_spans(self, tuple(spans))

    def __add__(self, other: str) -> TrackedStr:
        if not isinstance(other, str) or hasattr(other, "__html__"):  # a Markup would escape this text
            return NotImplemented
        # Not `with_spans`: templates add most of their texts, so two calls less are a tenth of a rendering.
        added = TrackedStr(str.__add__(self, other))
        added.spans = self.spans + (other.spans if isinstance(other, TrackedStr) else ((len(other), None),))
        return added

    def __radd__(self, other: str) -> TrackedStr:
        if not isinstance(other, str):
            return NotImplemented
        return TrackedStr.with_spans(str.__add__(other, self), _spans_of(other) + self.spans)

    def __mul__(self, count: SupportsIndex) -> TrackedStr:
        return TrackedStr.with_spans(str.__mul__(self, count), self.spans * max(0, operator.index(count)))

    def __rmul__(self, count: SupportsIndex) -> TrackedStr:
        return self * count

    def join(self, texts: Iterable[str]) -> TrackedStr:
        joined: list[str] = []
        for text in texts:
            joined += [self, text]
        return concatenate(joined[1:])

    def cut(self, start: int, stop: int) -> TrackedStr:
        """Returns characters [start, stop), 0 <= start <= stop <= len. An empty result keeps its origin."""
        spans: list[OriginSpan] = []
        position = 0
        for length, origin in self.spans:
            left, right = max(position, start), min(position + length, stop)
            if left < right or (left == right and origin is not None and (length == 0 or start == stop)):
                spans.append((right - left, origin))
            position += length
        return TrackedStr.with_spans(str.__getitem__(self, slice(start, stop)), tuple(spans))

    def __getitem__(self, key: SupportsIndex | slice) -> TrackedStr:
        if not isinstance(key, slice):
            index = range(len(self))[key]  # raises TypeError for a str, after which Jinja tries an attribute
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
        # From the right, as the first text, which is not split further, may contain the texts after it.
        texts, end = [], len(self)
        for text in reversed(str.rsplit(self, sep, maxsplit)):
            start = str.rindex(self, text, 0, end) if sep is None else end - len(text)
            texts.append(self.cut(start, start + len(text)))
            end = start - len(sep or "")
        return texts[::-1]

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

    def _locate(self, texts: Iterable[str], gap: int | None) -> list[str]:
        """Returns the texts as parts of this one, with `gap` characters or, if it is None, any white space between."""
        located, cursor = [], 0
        for text in texts:
            start = str.index(self, text, cursor) if gap is None else cursor
            located.append(self.cut(start, start + len(text)))
            cursor = start + len(text) + (gap or 0)
        return located

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> TrackedStr:
        """Returns the text with `new` in place of `old`; `new` keeps its own origin, usually the template."""
        if not old:
            raise ProvenanceLostError("replace('', ...) inserts text between all characters")
        limit, texts, cursor = operator.index(count), list[str](), 0
        while limit != 0 and (found := str.find(self, old, cursor)) >= 0:
            texts += [self.cut(cursor, found), new]
            cursor = found + len(old)
            limit -= 1
        return concatenate([*texts, self.cut(cursor, len(self))])

    def __str__(self) -> TrackedStr:
        # Jinja converts every expression with str(), which may return a subclass.
        return self


def _recasing(name: str) -> Callable[[TrackedStr], TrackedStr]:
    def method(self: TrackedStr) -> TrackedStr:
        recased = getattr(str, name)(self)
        if len(recased) != len(self):
            raise ProvenanceLostError("a change of case changed the number of characters")
        return TrackedStr.with_spans(recased, self.spans)

    return method


def _refused(name: str) -> Callable[..., NoReturn]:
    def method(*_: Any, **__: Any) -> NoReturn:
        raise ProvenanceLostError(f"the string method {name.strip('_')} loses the origin of text")

    return method


for _name in ("lower", "upper", "title", "capitalize"):
    setattr(TrackedStr, _name, _recasing(_name))
for _name in (
    *("casefold", "swapcase", "center", "ljust", "rjust", "zfill", "expandtabs", "translate", "encode"),
    *("format", "format_map", "__mod__", "__rmod__", "__format__"),
):
    setattr(TrackedStr, _name, _refused(_name))


def _spans_of(text: str) -> tuple[OriginSpan, ...]:
    return text.spans if isinstance(text, TrackedStr) else ((len(text), None),)


def concatenate(texts: Iterable[str]) -> TrackedStr:
    """Concatenates the texts and merges neighboring spans of one origin; a bare str is the template's."""
    texts = list(texts)
    spans: list[OriginSpan] = []
    last: Origin | None = None
    for text in texts:
        # Not `_spans_of`, to save a call for every text that a template writes.
        for span in text.spans if isinstance(text, TrackedStr) else ((len(text), None),):
            length, origin = span
            if origin is None and length == 0:
                continue
            if spans and (origin is last or (origin is not None and origin == last)):
                spans[-1] = (spans[-1][0] + length, origin)
            else:
                spans.append(span)
                last = origin
    return TrackedStr.with_spans("".join(texts), tuple(spans))


class _EmptyObject(dict[str, Any]):
    origin: Origin
    """An empty object or list of a conversation holds no text, so it carries the origin itself."""


class _EmptyList(list[Any]):
    origin: Origin


def track(value: Any, origin: Origin) -> Any:
    """Returns the JSON value with every text, including keys, as a TrackedStr; `field` is then the text's path."""
    if value in ({}, []):
        empty = _EmptyObject() if isinstance(value, Mapping) else _EmptyList()
        empty.origin = origin
        return empty
    if isinstance(value, str):
        return TrackedStr.of(value, origin)
    if isinstance(value, Mapping):
        # A key and its value have different paths, as a template may write each of them once.
        fields = ((key, f"{origin.field}.{key}") for key in value)
        return {
            TrackedStr.of(key, origin._replace(field=f"{field}:")): track(value[key], origin._replace(field=field))
            for key, field in fields
        }
    if isinstance(value, (list, tuple)):
        return [track(item, origin._replace(field=f"{origin.field}.{n}")) for n, item in enumerate(value)]
    return value


def is_tracked(value: Any) -> bool:
    """Returns whether a value is or contains, at any depth, text of the conversation."""
    return next(origins_in(value), None) is not None


def origins_in(value: Any) -> Iterator[Origin]:
    """Yields the origins of all texts that a value is or contains."""
    if isinstance(value, TrackedStr):
        yield from (origin for _, origin in value.spans if origin is not None)
    elif isinstance(value, _EmptyObject | _EmptyList):
        yield value.origin
    elif isinstance(value, Mapping):
        for item in value.items():
            yield from origins_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from origins_in(item)


def written_whole(text: str, value: Any, writer: str) -> str:
    """Returns `text`, into which `writer` converted all of `value`, with the origin of the value.

    Raises ProvenanceLostError if the value's texts belong to several messages or roles.
    """
    origins = list(origins_in(value))
    if not origins:
        return text
    roles = {origin.role for origin in origins}
    if len({origin.message for origin in origins}) > 1 or len(roles - {Role.REASONING}) > 1:
        raise ProvenanceLostError(f"{writer} mixes several texts of the conversation")
    # A text with inline reasoning, written as a whole, has the role of the text.
    origin = next((each for each in origins if each.role is not Role.REASONING), origins[0])
    names = dict.fromkeys(each.field.partition(".")[0] for each in origins)
    if len(names) > 1:  # the text counts as the content's, beside which the other fields are empty
        names = dict.fromkeys(("content", *names) if "content" in names else names)
        of_fields = [origin._replace(field=name) for name in names]
        return TrackedStr.with_spans(text, ((len(text), of_fields[0]), *((0, each) for each in of_fields[1:])))
    first, last = min(each.field for each in origins), max(each.field for each in origins)
    num_shared = next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return TrackedStr.of(text, origin._replace(field=first[:num_shared]))
