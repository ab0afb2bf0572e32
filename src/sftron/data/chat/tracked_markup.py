"""Text of the conversation after the filter `safe`: a TrackedStr with the operators of markupsafe.Markup.

In a chat template, the filter does the opposite of what its name promises, because nothing else is escaped there:

    '{"x": ' + (x | tojson | safe)      {&#34;x&#34;: "y"
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, SupportsIndex

import markupsafe

from sftron.data.chat.tracked_text import OriginSpan, TrackedStr, concatenate


class TrackedMarkup(TrackedStr):
    """A TrackedStr that escapes text which is added to it, on either side, as HTML."""

    __slots__ = ()

    @classmethod
    def like(cls, text: TrackedStr) -> TrackedMarkup:
        markup = cls(text)
        markup.spans = text.spans
        return markup

    def __html__(self) -> str:
        return self

    def __str__(self) -> TrackedStr:
        return concatenate([self])

    def __add__(self, other: str) -> TrackedStr:
        return self.like(super().__add__(_escaped(other))) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> TrackedStr:
        return self.like(super().__radd__(_escaped(other))) if isinstance(other, str) else NotImplemented

    def join(self, texts: Iterable[str]) -> TrackedStr:
        return self.like(super().join([_escaped(text) for text in texts]))

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> TrackedStr:
        return self.like(super().replace(old, _escaped(new), count))


def _escaped(text: str) -> TrackedStr:
    """Returns the text with each HTML character replaced by its entity, which keeps the origin."""
    tracked = text if isinstance(text, TrackedStr) else TrackedStr.of(text, None)
    if hasattr(text, "__html__"):
        return concatenate([text])
    texts, spans, start = list[str](), list[OriginSpan](), 0
    for length, origin in tracked.spans:
        texts.append(str(markupsafe.escape(str.__getitem__(tracked, slice(start, start + length)))))
        spans.append((len(texts[-1]), origin))
        start += length
    return TrackedStr.with_spans("".join(texts), tuple(spans))


def _keeping_markup(name: str) -> Callable[..., Any]:
    def method(self: TrackedMarkup, *args: Any) -> Any:
        found = getattr(TrackedStr, name)(self, *args)
        return self.like(found) if isinstance(found, TrackedStr) else type(found)(map(self.like, found))

    return method


for _name in (
    *("__getitem__", "__mul__", "__rmul__", "strip", "lstrip", "rstrip", "removeprefix", "removesuffix"),
    *("lower", "upper", "title", "capitalize", "split", "rsplit", "splitlines", "partition", "rpartition"),
):
    setattr(TrackedMarkup, _name, _keeping_markup(_name))
