"""A pack as one SVG: who says each token, which tokens are trained and where their labels stand, who sees whom.

    the pack              ▏conversation 0   ▏conversation 1 ▏ ...
    its shortest one      position  token  label  role  weight, one line a token
    who sees whom         with `remove_cross_attention: false`, and with true

All text is text. The colors are those of the HTML pages, light and dark, on a ground of the picture's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from sftron.data.types import IGNORE_INDEX, Pack, Role
from sftron.report.page import asset, render, spans
from sftron.report.tokens import Decode, conversation_ranges, key_text, pack_trained_tokens

_RUN = 7
"""Longer spans of one role are shown by their first and last three tokens."""
_NUM_LINES = 34
"""Lines of the token table; what follows is counted."""
_LONGEST_TEXT = 16
"""Characters of a token that are shown."""
_VISIBLE_SPACE = str.maketrans({"\n": "↵", "\t": "⇥", " ": "·"})


def pack_picture(pack: Pack, decode: Decode, *, source_names: Sequence[str]) -> str:
    """Returns the SVG's text; the shortest conversation is the one shown token by token."""
    ranges = list(conversation_ranges(pack))
    number, (start, end) = min(enumerate(ranges), key=lambda each: each[1][1] - each[1][0])
    trained = pack_trained_tokens(pack).tolist()
    own = sum(length * (length + 1) // 2 for length in (end - start for start, end in ranges))
    return render(
        "pack.svg.jinja",
        pack=pack,
        ranges=ranges,
        roles=[role for role in Role if role is not Role.PADDING and role in pack.role_ids],
        spans=[
            (Role(role), is_trained, at, length)
            for (role, is_trained), at, length in spans(list(zip(pack.role_ids.tolist(), trained, strict=True)))
            if role != Role.PADDING
        ],
        heading=f"Conversation {number}, {key_text(pack.keys[number], source_names)}",
        lines=list(_lines(pack, decode, trained, start, end)),
        share=own / (pack.num_tokens * (pack.num_tokens + 1) // 2),
        palette=asset("page.css").partition("\n* {")[0],  # the colors of all pages stand before their first rule
    )


def _lines(pack: Pack, decode: Decode, trained: Sequence[bool], start: int, end: int) -> Iterator[dict[str, Any] | str]:
    """Yields the lines of the table of tokens [start, end): a token, or what is left out."""
    for line, index in enumerate(_with_gaps(pack.role_ids[start:end].tolist())):
        if line == _NUM_LINES and index is not None:
            yield f"… {end - start - index} tokens more"
            return
        if index is None:
            yield "…"
            continue
        at = start + index
        label = int(pack.labels[at])
        yield {
            "position": int(pack.position_ids[at]),
            "text": _shown(decode, int(pack.input_ids[at])),
            "label": None if label == IGNORE_INDEX else _shown(decode, label),
            "role": Role(int(pack.role_ids[at])),
            "is_trained": trained[at],
            "weight": f"{pack.loss_weights[at]:g}",
        }


def _with_gaps(role_ids: Sequence[int]) -> Iterator[int | None]:
    """Yields the indices of the tokens to show, and None where the middle of a long span of one role is left out."""
    for _, at, length in spans(role_ids):
        if length <= _RUN:
            yield from range(at, at + length)
        else:
            yield from (*range(at, at + 3), None, *range(at + length - 3, at + length))


def _shown(decode: Decode, token_id: int) -> str:
    text = decode([token_id]).translate(_VISIBLE_SPACE)
    return text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 1] + "…"
