"""A readable form of a pack for terminal and pages: conversations, blocks of one speaker, and spans of text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from sftron.data.types import ConversationKey, Pack, Role
from sftron.visible_text import visible_text

Decode = Callable[[list[int]], str]
"""A function that decodes ids into text without omitting anything. For a Hugging Face tokenizer:
`partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)`."""


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


def token_texts(decode: Decode, ids: Sequence[int]) -> list[tuple[str, int]]:
    """Splits decoded text into (text, number of tokens); texts join to `decode(ids)`, numbers add up to all ids.

        ids      5      6      7    8      9        bytes  "a"  E2     98     83   "b"
        texts    "a", 1 "☃", 3             "b", 1

    A boundary is set after a token if the text up to it is a prefix of the whole text. This excludes incomplete
    characters, which decode to U+FFFD. The work is linear in `ids`: for each token, only the previous two texts are
    decoded again, because SentencePiece strips the space of the first one. A decoder that changes text across tokens
    yields coarser texts, but they still join exactly.
    """
    ids, text = list(ids), decode(list(ids))
    texts: list[tuple[str, int]] = []
    starts: list[int] = []
    num_read = start = 0  # the characters of `text` and the tokens in `texts` so far
    for end in range(1, len(ids) + 1):
        context = starts[-2] if len(starts) >= 2 else 0
        before, after = decode(ids[context:start]), decode(ids[context:end])
        added = after[len(before) :]
        if not after.startswith(before) or not text.startswith(added, num_read) or not (added or texts):
            continue
        if added:
            texts.append((added, end - start))
            starts.append(start)
        else:
            texts[-1] = (texts[-1][0], texts[-1][1] + end - start)
        num_read += len(added)
        start = end
    rest, num_rest = text[num_read:], len(ids) - start
    if texts and bool(rest) != bool(num_rest):
        last_text, last_tokens = texts.pop()
        rest, num_rest = last_text + rest, last_tokens + num_rest
    return [*texts, (rest, num_rest)] if rest or num_rest else texts


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


def role_name(role: Role) -> str:
    return role.name.lower().replace("_", " ")


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


@dataclass(slots=True)
class RoleCount:
    """The number of tokens and of trained tokens, by role."""

    tokens: Counter[Role] = field(default_factory=Counter)
    trained: Counter[Role] = field(default_factory=Counter)

    def add(self, role_ids: np.ndarray, trained: np.ndarray) -> None:
        """Adds tokens; role_ids (uint8) and trained (bool) are [n]."""
        for counter, ids in ((self.tokens, role_ids), (self.trained, role_ids[trained])):
            values, counts = np.unique(ids, return_counts=True)
            counter.update({Role(int(value)): int(count) for value, count in zip(values, counts, strict=True)})

    @property
    def num_tokens(self) -> int:
        return self.tokens.total()

    @property
    def num_trained_tokens(self) -> int:
        return self.trained.total()

    def as_dict(self) -> dict[str, Any]:
        by_role = {
            role.name.lower(): {"num_tokens": self.tokens[role], "num_trained_tokens": self.trained[role]}
            for role in sorted(self.tokens)
        }
        return {"num_tokens": self.num_tokens, "num_trained_tokens": self.num_trained_tokens, "by_role": by_role}
