"""A pack as people read it, in the terminal and on pages: conversations, blocks of one speaker, pieces of text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from sftron.data.types import ConversationKey, Pack, Role
from sftron.visible_text import visible_text

Decode = Callable[[list[int]], str]
"""Turns ids into text and leaves nothing out: for a Hugging Face tokenizer,
`partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)`."""

_NUM_CONTEXT_PIECES = 2
"""Pieces decoded in front of a token: SentencePiece strips the space of the first one, so no piece may be the first."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The shortest text that can be shown for some tokens: one token, or those that share a character.

    Attributes:
        text: Not empty, unless all the ids together decode to nothing.
        num_tokens: At least 1; more where a character's bytes are spread over tokens, or where a token has no text.
    """

    text: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class ShownPiece:
    """Some text and the tokens [start, end) of the pack that it stands for.

    Attributes:
        role: The role of the first of them.
        num_trained: How many of them are trained: each is the label of the token before it.
    """

    text: str
    start: int
    end: int
    role: Role
    num_trained: int

    @property
    def is_trained(self) -> bool:
        """Whether at least one of its tokens is; it has several only where they share a character."""
        return self.num_trained > 0

    @property
    def is_partly_trained(self) -> bool:
        return 0 < self.num_trained < self.end - self.start


@dataclass(frozen=True, slots=True)
class Block:
    """The text of one speaker, with the template's header before it and the template's white space after it.

    Attributes:
        role: The speaker's role; TEMPLATE if the block holds nobody's words.
    """

    role: Role
    pieces: tuple[ShownPiece, ...]


@dataclass(frozen=True, slots=True)
class ShownConversation:
    """Conversation `number` of its pack (from 0): tokens [start, end), of which num_trained are trained."""

    number: int
    key: ConversationKey
    start: int
    end: int
    num_trained: int
    blocks: tuple[Block, ...]


def token_pieces(decode: Decode, ids: Sequence[int]) -> list[Piece]:
    """Splits the decoded text into pieces: their texts joined are `decode(ids)`, their num_tokens sum to `len(ids)`.

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
    rest, num_rest = text[num_read:], len(ids) - start
    if rest or num_rest:
        if pieces and not (rest and num_rest):
            last = pieces.pop()
            rest, num_rest = last.text + rest, last.num_tokens + num_rest
        pieces.append(Piece(rest, num_rest))
    return pieces


def _text_after(prefix: str, text: str) -> str | None:
    return text[len(prefix) :] if text.startswith(prefix) else None


def _is_resync(num_waiting: int) -> bool:
    """Returns whether to decode from the very beginning: after 8, 16, 32... tokens without a boundary."""
    return num_waiting >= 8 and num_waiting & (num_waiting - 1) == 0


def trained_tokens(input_ids: np.ndarray, labels: np.ndarray, loss_weights: np.ndarray) -> np.ndarray:
    """Returns for each token of one conversation whether the model is trained to write it.

    input_ids     <s>  Hi   Yo   </s>
    labels        -    Yo   </s> -
    loss_weights  0    1    1    0
    trained       no   no   yes  yes

    All arguments and the result (bool) are [n]. The first token is never trained: no token stands before it.
    """
    trained = np.zeros(len(input_ids), dtype=bool)
    trained[1:] = (labels[:-1] == input_ids[1:]) & (loss_weights[:-1] > 0)
    return trained


def pack_trained_tokens(pack: Pack) -> np.ndarray:
    """Returns `trained_tokens` of every conversation in its place; bool [token_budget], False in the padding."""
    trained = np.zeros(len(pack.input_ids), dtype=bool)
    for start, end in conversation_ranges(pack):
        part = slice(start, end)
        trained[part] = trained_tokens(pack.input_ids[part], pack.labels[part], pack.loss_weights[part])
    return trained


def conversation_ranges(pack: Pack) -> Iterator[tuple[int, int]]:
    """Returns where each conversation lies in the pack, as (start, end)."""
    return pairwise(pack.conversation_bounds.tolist())


def num_attention_documents(pack: Pack) -> int:
    """Returns how many documents attention keeps apart, the padding not counted."""
    return len(pack.cu_seqlens) - 1 - (pack.num_tokens < len(pack.input_ids))


def shown_conversations(pack: Pack, decode: Decode) -> Iterator[ShownConversation]:
    """Yields the conversations of a pack in order, each decoded by itself when it is asked for."""
    trained = pack_trained_tokens(pack)
    for number, (start, end) in enumerate(conversation_ranges(pack)):
        pieces: list[ShownPiece] = []
        at = start
        for piece in token_pieces(decode, pack.input_ids[start:end].tolist()):
            after = at + piece.num_tokens
            role = Role(int(pack.role_ids[at]))
            pieces.append(ShownPiece(piece.text, at, after, role, int(trained[at:after].sum())))
            at = after
        num_trained = int(trained[start:end].sum())
        yield ShownConversation(number, pack.keys[number], start, end, num_trained, tuple(_blocks(pieces)))


def key_text(key: ConversationKey, source_names: Sequence[str]) -> str:
    """Returns where a conversation comes from: "row 17 of gsm8k.jsonl", or "row 17 of data set 0"."""
    known = key.source < len(source_names)
    source = " ".join(visible_text(source_names[key.source]).split()) if known else f"data set {key.source}"
    return f"row {key.row:,} of {source}" + (f", epoch {key.epoch}" if key.epoch else "")


def role_name(role: Role) -> str:
    return role.name.lower().replace("_", " ")


def _blocks(pieces: list[ShownPiece]) -> Iterator[Block]:
    speaker = Role.TEMPLATE
    block: list[ShownPiece] = []
    for piece in pieces:
        is_template = piece.role is Role.TEMPLATE
        begins_turn = is_template and bool(piece.text.strip()) and speaker is not Role.TEMPLATE
        changes_speaker = not is_template and speaker not in (Role.TEMPLATE, piece.role)
        if begins_turn or changes_speaker:
            yield Block(speaker, tuple(block))
            speaker, block = Role.TEMPLATE, []
        if not is_template and speaker is Role.TEMPLATE and (header := _last_header(block)):
            # A turn that the template itself wrote comes before: a default system prompt, for instance.
            yield Block(Role.TEMPLATE, tuple(block[:header]))
            block = block[header:]
        if not is_template:
            speaker = piece.role
        block.append(piece)
    if block:
        yield Block(speaker, tuple(block))


def _last_header(block: list[ShownPiece]) -> int:
    """Returns where the last header of a span of template begins: at the last copy of its first control token."""
    texts = [piece.text for piece in block]
    is_control = [text.startswith(("<", "[")) and text.endswith((">", "]")) and len(text) > 2 for text in texts]
    first = next((n for n, text in enumerate(texts) if is_control[n] and text in texts[n + 1 :]), None)
    return 0 if first is None else len(texts) - 1 - texts[::-1].index(texts[first])
