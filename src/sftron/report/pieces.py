"""Token ids as pieces of text that can be shown one by one and that together are exactly the decoded text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Decode = Callable[[list[int]], str]
"""Ids to text with nothing left out or tidied: for a Hugging Face tokenizer,
`partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)`."""

_NUM_CONTEXT_PIECES = 2
"""Pieces decoded in front of a token: SentencePiece strips the space of what comes first, so nothing may come first."""

# Characters that a reader would not see, or that act on the screen instead of standing on it: controls (ESC begins an
# escape sequence), bidirectional overrides, zero-width spaces, line separators, tags, lone surrogates.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e01ef]"
)


@dataclass(frozen=True, slots=True)
class Piece:
    """The shortest text that can be shown for some tokens: one token, or those that share a character.

    text: never empty, unless all the ids together decode to nothing.
    num_tokens: at least 1; more where a character's bytes are spread over tokens, or where a token has no text.
    """

    text: str
    num_tokens: int


def token_pieces(decode: Decode, ids: Sequence[int]) -> list[Piece]:
    """Split the decoded text into pieces: their texts joined are `decode(ids)`, their num_tokens sum to `len(ids)`.

        ids      5      6      7    8      9        bytes  "a"  E2     98     83   "b"
        pieces   "a"(1) "☃"(3)             "b"(1)

    A boundary is set after a token when the text up to it is a prefix of the whole text; a character of which only some
    bytes were read decodes to U+FFFD and is not. The work is linear in `ids`, because only the last pieces are decoded
    again with each token. A decoder that rewrites text across tokens costs finer pieces, never exactness.
    """
    ids = list(ids)
    text = decode(ids)
    pieces: list[Piece] = []
    starts: list[int] = []
    num_read = start = 0  # characters of `text`, and tokens, that the pieces hold so far
    for end in range(1, len(ids) + 1):
        context = starts[-_NUM_CONTEXT_PIECES] if len(starts) >= _NUM_CONTEXT_PIECES else 0
        piece = _text_after(decode(ids[context:start]) if context < start else "", decode(ids[context:end]))
        if (piece is None or not text.startswith(piece, num_read)) and _is_resync(end - start):
            piece = _text_after(text[:num_read], decode(ids[:end]))
        if piece is None or not text.startswith(piece, num_read):
            continue
        if piece:
            pieces.append(Piece(piece, end - start))
            starts.append(start)
        elif pieces:
            pieces[-1] = Piece(pieces[-1].text, pieces[-1].num_tokens + end - start)
        else:
            continue
        num_read += len(piece)
        start = end
    if start < len(ids) or num_read < len(text):
        _close(pieces, text[num_read:], len(ids) - start)
    return pieces


def visible_text(text: str) -> str:
    """The text with every character that would act or hide instead of being seen written out; newline and tab stay.

    ESC becomes ␛ (the control pictures at U+2400), a right-to-left override `<U+202E>`. Ordinary text is unchanged.
    """
    return _UNSEEN.sub(_written_out, text)


def _text_after(prefix: str, text: str) -> str | None:
    return text[len(prefix) :] if text.startswith(prefix) else None


def _is_resync(num_waiting: int) -> bool:
    """Whether to pay for decoding from the very beginning: after 8, 16, 32... tokens without a boundary."""
    return num_waiting >= 8 and num_waiting & (num_waiting - 1) == 0


def _close(pieces: list[Piece], text: str, num_tokens: int) -> None:
    """Give what is left over a piece of its own, or to the last piece if one of text and tokens is missing."""
    if pieces and not (text and num_tokens):
        last = pieces.pop()
        text, num_tokens = last.text + text, last.num_tokens + num_tokens
    pieces.append(Piece(text, num_tokens))


def _written_out(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)
    return "␡" if code == 0x7F else f"<U+{code:04X}>"
