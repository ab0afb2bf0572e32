"""A pack as people read it: conversations, blocks of one speaker, pieces of text. Terminal and page both show this."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from sftron.data.types import ConversationKey, Pack, Role
from sftron.report.pieces import Decode, token_pieces
from sftron.visible_text import visible_text


@dataclass(frozen=True, slots=True)
class ShownPiece:
    """Some text and the tokens [start, end) of the pack that it stands for.

    role: of the first of them.
    num_trained: how many of them are trained, that is, are the label of the token before.
    """

    text: str
    start: int
    end: int
    role: Role
    num_trained: int

    @property
    def is_trained(self) -> bool:
        """At least one of its tokens is; they are several only where they share a character."""
        return self.num_trained > 0

    @property
    def is_partly_trained(self) -> bool:
        return 0 < self.num_trained < self.end - self.start


@dataclass(frozen=True, slots=True)
class Block:
    """What one speaker says, with the template's header before it and the template's white space after it.

    role: the speaker's; TEMPLATE if the block holds nobody's words.
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


def trained_tokens(input_ids: np.ndarray, labels: np.ndarray, loss_weights: np.ndarray) -> np.ndarray:
    """For each token of one conversation, whether the model learns to say it.

    input_ids     <s>  Hi   Yo   </s>
    labels        -    Yo   </s> -
    loss_weights  0    1    1    0
    trained       no   no   yes  yes

    All arguments and the result (bool) are [n]. The first token never is: nothing stands before it.
    """
    trained = np.zeros(len(input_ids), dtype=bool)
    trained[1:] = (labels[:-1] == input_ids[1:]) & (loss_weights[:-1] > 0)
    return trained


def pack_trained_tokens(pack: Pack) -> np.ndarray:
    """`trained_tokens` of every conversation of the pack in its place; bool [token_budget], False in the tail."""
    trained = np.zeros(len(pack.input_ids), dtype=bool)
    for start, end in conversation_ranges(pack):
        part = slice(start, end)
        trained[part] = trained_tokens(pack.input_ids[part], pack.labels[part], pack.loss_weights[part])
    return trained


def conversation_ranges(pack: Pack) -> Iterator[tuple[int, int]]:
    """Where each conversation lies in the pack, as (start, end)."""
    bounds = pack.conversation_bounds.tolist()
    return pairwise(bounds)


def num_attention_documents(pack: Pack) -> int:
    """How many documents attention keeps apart, the unused tail not counted."""
    return len(pack.cu_seqlens) - 1 - (pack.num_tokens < len(pack.input_ids))


def shown_conversations(pack: Pack, decode: Decode) -> Iterator[ShownConversation]:
    """The conversations of a pack in order, each decoded by itself when it is asked for."""
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
    """Where a conversation comes from, for people: "row 17 of gsm8k.jsonl", or "row 17 of data set 0"."""
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
        if not is_template and speaker is Role.TEMPLATE and (header := _own_header(block)):
            # What comes before is a turn of the template's own, a default system prompt for instance.
            yield Block(Role.TEMPLATE, tuple(block[:header]))
            block = block[header:]
        if not is_template:
            speaker = piece.role
        block.append(piece)
    if block:
        yield Block(speaker, tuple(block))


def _own_header(block: list[ShownPiece]) -> int:
    """Where the last header of a stretch of template begins: at the last copy of the control token of the first one."""
    texts = [piece.text for piece in block]
    is_control = [text.startswith(("<", "[")) and text.endswith((">", "]")) and len(text) > 2 for text in texts]
    first = next((n for n, text in enumerate(texts) if is_control[n] and text in texts[n + 1 :]), None)
    return 0 if first is None else len(texts) - 1 - texts[::-1].index(texts[first])
