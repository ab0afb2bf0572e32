"""A pack as one SVG: who says each token, which tokens are trained and where their labels stand, who sees whom.

    the pack              ▏conversation 0   ▏conversation 1 ▏ ...
    its shortest one      position  token  label  role  weight, one line a token
    who sees whom         with `remove_cross_attention: false`, and with true

All text is text. The colours are those of the HTML pages, light and dark, on a ground of the picture's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from sftron.data.types import IGNORE_INDEX, Pack, Role
from sftron.report.page import escaped, resource
from sftron.report.pieces import Decode
from sftron.report.transcript import conversation_ranges, key_text, pack_trained_tokens, role_name

WIDTH = 1000
_MARGIN = 30
_LINE = 19
"""Pixels from one token's line to the next."""
_MASK = 225
"""Pixels of a mask's side."""
_RUN = 7
"""Longer runs of one role are shown by their first and last three tokens."""
_NUM_LINES = 34
"""Lines of the token table; what follows is counted."""
_LONGEST_TEXT = 16
"""Characters of a token that are shown."""

_STAYS_WHITE_SPACE = str.maketrans({"\n": "↵", "\t": "⇥", " ": "·"})


def pack_picture(pack: Pack, decode: Decode, *, source_names: Sequence[str]) -> str:
    """The SVG's text. `decode` is as in `pieces`; the shortest conversation is the one shown token by token."""
    ranges = list(conversation_ranges(pack))
    shown = min(range(len(ranges)), key=lambda number: ranges[number][1] - ranges[number][0])
    table, table_height = _token_table(pack, decode, *ranges[shown])
    top = 190
    height = top + max(table_height, 2 * (_MASK + 90) - 40) + _MARGIN
    where = f"Conversation {shown}, {key_text(pack.keys[shown], source_names)}"
    palette = resource("page.css").partition("\n* {")[0]  # the colours of all pages stand before their first rule
    roles = "".join(f".{_class(role)} {{ --role: var(--{_class(role)}); }}\n" for role in _roles(pack))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'role="img" aria-label="A pack: the role of each token, what is trained, and which tokens see which">\n'
        f"<style>{palette}\n{roles}{resource('picture.css')}</style>\n"
        f'<rect class="paper" width="{WIDTH}" height="{height}" rx="8"/>\n'
        + _strip(pack, ranges)
        + _text(_MARGIN, top - 14, where, "title")
        + f'<g transform="translate({_MARGIN} {top})">{table}</g>\n'
        + f'<g transform="translate({WIDTH - _MARGIN - _MASK} {top - 14})">{_masks(pack, ranges)}</g>\n'
        + "</svg>\n"
    )


def _strip(pack: Pack, ranges: Sequence[tuple[int, int]]) -> str:
    """The whole pack: tokens by role, trained ones filled."""
    scale = (WIDTH - 2 * _MARGIN) / len(pack.input_ids)
    title = (
        f"Pack {pack.index}: {len(ranges)} conversations, {pack.num_tokens} of {len(pack.input_ids)} tokens, "
        f"{pack.num_trained_tokens} trained"
    )
    drawn = [_text(_MARGIN, 40, title, "title")]
    trained = pack_trained_tokens(pack).tolist()
    runs = zip(pack.role_ids.tolist(), trained, strict=True)
    at = 0
    for (role, is_trained), group in groupby(runs):
        width = len(list(group))
        if role != Role.PADDING:
            drawn.append(
                f'<rect class="token {_class(role)}{" trained" * is_trained}" x="{_MARGIN + at * scale:.1f}" y="75" '
                f'width="{width * scale:.1f}" height="34"/>'
            )
        at += width
    for number, (start, end) in enumerate(ranges):
        x = _MARGIN + start * scale
        drawn.append(f'<path class="border" d="M{x:.1f} 70V114"/>')
        drawn.append(_text(x + 4, 66, f"{number}: {end - start} tokens", "soft"))
    legend = _MARGIN
    for role in _roles(pack):
        drawn.append(f'<rect class="token {_class(role)}" x="{legend}" y="124" width="16" height="14"/>')
        drawn.append(_text(legend + 22, 136, role_name(role), "soft"))
        legend += 44 + 7 * len(role_name(role))
    drawn.append(f'<rect class="token trained assistant" x="{legend}" y="124" width="16" height="14"/>')
    drawn.append(_text(legend + 22, 136, "filled: trained", "soft"))
    return "".join(drawn) + "\n"


def _token_table(pack: Pack, decode: Decode, start: int, end: int) -> tuple[str, int]:
    """The tokens [start, end) as lines, an arrow from each label to the token that it is; and the height of all."""
    position, token, label, role, weight = 40, 62, 262, 440, 590
    drawn = [
        _text(position + 12, 14, "position", "soft end"),
        _text(token, 14, "token", "soft"),
        _text(label, 14, "label: to say next", "soft"),
        _text(role, 14, "role of the token", "soft"),
        _text(weight, 14, "weight", "soft end"),
    ]
    trained = pack_trained_tokens(pack)
    y = 20
    for line, at in enumerate(_with_gaps(pack.role_ids[start:end].tolist())):
        y += _LINE
        if line == _NUM_LINES and at is not None:
            drawn.append(_text(token + 8, y, f"… {end - start - at} tokens more", "soft"))
            break
        if at is None:
            drawn.append(_text(token + 8, y, "…", "soft"))
            continue
        at += start
        kind = _class(pack.role_ids[at])
        is_trained = bool(trained[at])
        drawn.append(
            f'<rect class="token {kind}{" trained" * is_trained}" x="{token}" y="{y - 14}" width="150" '
            f'height="{_LINE - 2}" rx="2"/>'
        )
        drawn.append(_text(position, y, str(pack.position_ids[at]), "soft end"))
        drawn.append(_text(token + 8, y, _shown(decode, int(pack.input_ids[at])), "on" * is_trained))
        if pack.labels[at] == IGNORE_INDEX:
            drawn.append(_text(label, y, "-", "soft"))
        else:
            drawn.append(_text(label, y, _shown(decode, int(pack.labels[at]))))
            to_next = f"L{token + 154} {y + _LINE - 6}l5.5 .5m-5.5 -.5l3 -5"
            drawn.append(f'<path class="arrow" d="M{label - 5} {y - 4}{to_next}"/>')
        drawn.append(_text(role, y, role_name(Role(int(pack.role_ids[at]))), f"name {kind}"))
        drawn.append(_text(weight, y, f"{pack.loss_weights[at]:g}", "soft end"))
    return "".join(drawn), y


def _with_gaps(role_ids: Sequence[int]) -> Iterator[int | None]:
    """Indices of the tokens to show; None where some of a long run of one role are left out."""
    at = 0
    for _, group in groupby(role_ids):
        length = len(list(group))
        if length <= _RUN:
            yield from range(at, at + length)
        else:
            yield from (*range(at, at + 3), None, *range(at + length - 3, at + length))
        at += length


def _masks(pack: Pack, ranges: Sequence[tuple[int, int]]) -> str:
    """Both settings of `remove_cross_attention` below each other, whichever the pack was laid out for."""
    own = sum(length * (length + 1) // 2 for length in (end - start for start, end in ranges))
    share = own / (pack.num_tokens * (pack.num_tokens + 1) // 2)
    plain = _mask(pack, ranges, "remove_cross_attention: false", "every token sees all before it", is_plain=True)
    alone = _mask(pack, ranges, "remove_cross_attention: true", f"its own conversation alone: {share:.0%} of the pairs")
    return f'{plain}<g transform="translate(0 {_MASK + 90})">{alone}</g>'


def _mask(pack: Pack, ranges: Sequence[tuple[int, int]], title: str, says: str, *, is_plain: bool = False) -> str:
    """A row for each token that looks, a column for each that is seen; what crosses conversations in another colour."""
    scale = _MASK / pack.num_tokens
    drawn = [
        _text(_MASK, 0, title, "title end"),
        _text(_MASK, 19, says, "soft end"),
        f'<g transform="translate(0 30)"><rect class="card" width="{_MASK}" height="{_MASK}"/>',
    ]
    if is_plain:
        drawn.append(f'<path class="crosses" d="M0 0V{_MASK}H{_MASK}z"/>')
    for start, end in ranges:
        corner = f"M{start * scale:.1f} {start * scale:.1f}V{end * scale:.1f}H{end * scale:.1f}z"
        drawn.append(f'<path class="card" d="{corner}"/><path class="sees" d="{corner}"/>')
    drawn += [f'<path class="grid" d="M0 {end * scale:.1f}H{_MASK}M{end * scale:.1f} 0V{_MASK}"/>' for _, end in ranges]
    drawn.append("</g>")
    if is_plain:
        drawn.append(_text(8, 30 + _MASK - 10, "other conversations", "soft"))
    drawn.append(_text(_MASK / 2, _MASK + 46, "the tokens that are seen", "soft middle"))
    drawn.append(
        f'<text class="soft middle" transform="translate(-8 {30 + _MASK / 2}) rotate(-90)">the token that looks</text>'
    )
    return "".join(drawn)


def _text(x: float, y: float, text: str, names: str = "") -> str:
    of_class = f' class="{names}"' if names else ""
    return f'<text x="{x:g}" y="{y:g}"{of_class}>{escaped(text)}</text>'


def _shown(decode: Decode, token_id: int) -> str:
    text = decode([token_id]).translate(_STAYS_WHITE_SPACE)
    return text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 1] + "…"


def _roles(pack: Pack) -> list[Role]:
    return [role for role in Role if role is not Role.PADDING and role in pack.role_ids]


def _class(role: int) -> str:
    return Role(role).name.lower()
