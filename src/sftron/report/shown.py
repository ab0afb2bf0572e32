"""A readable form of a pack for terminal and pages: conversations, blocks of one speaker, and spans of text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from sftron.data.types import ConversationKey, Pack, Role
from sftron.report.tokens import Decode, token_texts
from sftron.visible_text import visible_text


@dataclass(frozen=True, slots=True)
class Span:
    """The shortest printable text for tokens [start, end) of a pack: one token, or several that share a character."""

    text: str
    start: int
    end: int
    role: Role
    """The role of the first token."""
    num_trained: int
    """The number of trained tokens in the span; each is the label of the preceding token."""

    @property
    def is_trained(self) -> bool:
        return self.num_trained > 0

    @property
    def is_partly_trained(self) -> bool:
        return 0 < self.num_trained < self.end - self.start


@dataclass(frozen=True, slots=True)
class Block:
    """The text of one speaker, including the template's header before it and the template's white space after it."""

    role: Role
    """The role of the speaker; TEMPLATE if the block has no text from a message."""
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class ShownConversation:
    """Conversation `number` of its pack, counted from 0, with tokens [start, end) and num_trained trained tokens."""

    number: int
    key: ConversationKey
    start: int
    end: int
    num_trained: int
    blocks: tuple[Block, ...]

    @property
    def spans(self) -> Iterator[Span]:
        return (span for block in self.blocks for span in block.spans)


def trained_tokens(input_ids: np.ndarray, labels: np.ndarray, loss_weights: np.ndarray) -> np.ndarray:
    """Returns, for each token of a conversation, whether the model is trained to generate it.

    input_ids     <s>  Hi   Yo   </s>
    labels        -    Yo   </s> -
    loss_weights  0    1    1    0
    trained       no   no   yes  yes

    All arguments and the result (bool) are [n]. The first token is never trained, because there is no token before it.
    """
    trained = np.zeros(len(input_ids), dtype=bool)
    trained[1:] = (labels[:-1] == input_ids[1:]) & (loss_weights[:-1] > 0)
    return trained


def pack_trained_tokens(pack: Pack) -> np.ndarray:
    """Returns `trained_tokens` for all conversations of the pack, bool [token_budget]; False in the padding."""
    trained = np.zeros(len(pack.input_ids), dtype=bool)
    for start, end in conversation_ranges(pack):
        part = slice(start, end)
        trained[part] = trained_tokens(pack.input_ids[part], pack.labels[part], pack.loss_weights[part])
    return trained


def conversation_ranges(pack: Pack) -> Iterator[tuple[int, int]]:
    """Returns the (start, end) of each conversation in the pack."""
    return pairwise(pack.conversation_bounds.tolist())


def num_attention_documents(pack: Pack) -> int:
    """Returns the number of documents that attention isolates from each other, without the padding."""
    return len(pack.cu_seqlens) - 1 - (pack.num_tokens < len(pack.input_ids))


def shown_conversations(pack: Pack, decode: Decode) -> Iterator[ShownConversation]:
    """Yields the conversations of a pack in order; each is decoded separately and lazily."""
    trained = pack_trained_tokens(pack)
    for number, (start, end) in enumerate(conversation_ranges(pack)):
        spans: list[Span] = []
        at = start
        for text, num_tokens in token_texts(decode, pack.input_ids[start:end].tolist()):
            after = at + num_tokens
            spans.append(Span(text, at, after, Role(pack.role_ids[at]), int(trained[at:after].sum())))
            at = after
        num_trained = int(trained[start:end].sum())
        yield ShownConversation(number, pack.keys[number], start, end, num_trained, tuple(_blocks(spans)))


Locate = Callable[[ConversationKey], str]
"""Returns the location of a row for people, such as `gsm8k.jsonl:18`; `Preparation.location` is one."""


def numbered_row(key: ConversationKey) -> str:
    """Returns the location of a row whose data is not at hand."""
    return f"row {key.row:,} of data set {key.source}"


def key_text(key: ConversationKey, locate: Locate) -> str:
    """Returns the location of a conversation in one line, with its epoch if that is not the first."""
    return on_one_line(locate(key)) + (f", epoch {key.epoch}" if key.epoch else "")


def on_one_line(text: str) -> str:
    return " ".join(visible_text(text).split())


def _blocks(spans: list[Span]) -> Iterator[Block]:
    speaker = Role.TEMPLATE
    block: list[Span] = []
    for span in spans:
        is_template = span.role is Role.TEMPLATE
        begins_turn = is_template and bool(span.text.strip()) and speaker is not Role.TEMPLATE
        changes_speaker = not is_template and speaker not in (Role.TEMPLATE, span.role)
        if begins_turn or changes_speaker:
            yield Block(speaker, tuple(block))
            speaker, block = Role.TEMPLATE, []
        if not is_template and speaker is Role.TEMPLATE and (header := _last_header(block)):
            # The template wrote a turn of its own before this one, such as a default system prompt.
            yield Block(Role.TEMPLATE, tuple(block[:header]))
            block = block[header:]
        if not is_template:
            speaker = span.role
        block.append(span)
    if block:
        yield Block(speaker, tuple(block))


def _last_header(block: list[Span]) -> int:
    """Returns the start of the last header in the template's text: the last occurrence of its first control token."""
    texts = [span.text for span in block]
    is_control = [text.startswith(("<", "[")) and text.endswith((">", "]")) and len(text) > 2 for text in texts]
    first = next((n for n, text in enumerate(texts) if is_control[n] and text in texts[n + 1 :]), None)
    return 0 if first is None else len(texts) - 1 - texts[::-1].index(texts[first])
