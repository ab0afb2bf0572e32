"""Token ids as pieces of text that can be shown one by one and that together are exactly the decoded text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Decode = Callable[[list[int]], str]
"""Ids to text with nothing left out or tidied: for a Hugging Face tokenizer,
`partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)`."""

_NUM_CONTEXT_PIECES = 2
"""Pieces decoded in front of a token: SentencePiece strips the space of what comes first, so nothing may come first."""


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
