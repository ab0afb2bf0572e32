"""Conversations to train on, each of one answer, and how either side turns them into ids and labels."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, Protocol

import numpy as np

from sftron.data.labels import label_conversation
from sftron.data.types import (
    IGNORE_INDEX,
    ConversationKey,
    LabeledConversation,
    Message,
    Role,
    TokenizedConversation,
)

FLAN_MEDIAN, FLAN_SIGMA, LONGEST = 100, 1.2, 2048
"""Log-normal lengths in tokens, cut at the longest: a mean of twice the median, as FLAN's, and a long tail."""

SHARE_ANSWERED = (0.1, 0.5)
"""Of a synthesised conversation, how much is its answer: uniform between these."""

_KEY = ConversationKey(0, 0)


@dataclass(frozen=True, slots=True)
class Row:
    """One conversation: `messages` that end in the answer; or `input_ids`, the first `num_prompt` of them asked."""

    messages: tuple[tuple[str, str], ...] = ()
    input_ids: tuple[int, ...] = ()
    num_prompt: int = 0


class Encoder(Protocol):
    """ours: up to labels, as sftron does it. theirs: `input_ids` and `labels`, not shifted, as for a collator of
    transformers. Both train the answers alone, with the token that ends them."""

    def ours(self, rows: Sequence[Row]) -> list[LabeledConversation]: ...

    def theirs(self, rows: Sequence[Row]) -> list[dict[str, list[int]]]: ...


class IdEncoder:
    """Of rows that are ids already."""

    def ours(self, rows: Sequence[Row]) -> list[LabeledConversation]:
        return [label_conversation(self._tokenized(row), train_on_completions_only=True) for row in rows]

    def _tokenized(self, row: Row) -> TokenizedConversation:
        roles = np.full(len(row.input_ids), Role.ASSISTANT, np.uint8)
        roles[: row.num_prompt] = Role.USER
        return TokenizedConversation(np.array(row.input_ids, np.int32), roles, (), _KEY)

    def theirs(self, rows: Sequence[Row]) -> list[dict[str, list[int]]]:
        return [
            {
                "input_ids": list(row.input_ids),
                "labels": [IGNORE_INDEX] * row.num_prompt + list(row.input_ids[row.num_prompt :]),
            }
            for row in rows
        ]


class TextEncoder:
    """Of rows of messages: ours with ChatTokenizer, theirs with apply_chat_template of the prompt and of the whole."""

    def __init__(self, tokenizer: Any) -> None:
        from sftron.data.chat_tokenizer import ChatTokenizer

        self._tokenizer, self._chat_tokenizer = tokenizer, ChatTokenizer(tokenizer)
        self.vocab_size = len(tokenizer)

    def ours(self, rows: Sequence[Row]) -> list[LabeledConversation]:
        from sftron.data.types import Conversation

        conversations = [
            Conversation(tuple(Message(Role[role.upper()], text) for role, text in row.messages), _KEY, f"row {number}")
            for number, row in enumerate(rows)
        ]
        labeled = []
        for tokenized in self._chat_tokenizer.encode_batch(conversations):
            if isinstance(tokenized, Exception):
                raise tokenized
            labeled.append(label_conversation(tokenized, train_on_completions_only=True))
        return labeled

    def theirs(self, rows: Sequence[Row]) -> list[dict[str, list[int]]]:
        return [self._theirs([{"role": role, "content": text} for role, text in row.messages]) for row in rows]

    def _theirs(self, messages: list[dict[str, str]]) -> dict[str, list[int]]:
        apply = self._tokenizer.apply_chat_template
        ids: list[int] = apply(messages, return_dict=True)["input_ids"]
        num_prompt = len(apply(messages[:-1], add_generation_prompt=True, return_dict=True)["input_ids"])
        # What the template writes behind the token that ends the turn is not the model's to say.
        end, stop = len(ids), self._tokenizer.eos_token_id
        while end > num_prompt and stop in ids[num_prompt:] and ids[end - 1] != stop:
            end -= 1
        ignored = [IGNORE_INDEX]
        labels = ignored * num_prompt + ids[num_prompt:end] + ignored * (len(ids) - end)
        return {"input_ids": ids, "labels": labels}


def flan_lengths(num_rows: int, draw: random.Random, longest: int = LONGEST) -> list[int]:
    """Log-normal, cut at `longest`."""
    lengths = (round(draw.lognormvariate(math.log(FLAN_MEDIAN), FLAN_SIGMA)) for _ in range(num_rows))
    return [min(longest, max(8, length)) for length in lengths]


def id_rows(lengths: Sequence[int], vocab_size: int, draw: random.Random, share: float | None = None) -> list[Row]:
    """Random ids, small ones more often (as 1 / rank), so that there is something to learn. share: answered."""
    ranks = np.random.default_rng(draw.getrandbits(32)).random(sum(lengths))
    ids = np.minimum(vocab_size**ranks - 1, vocab_size - 1).astype(np.int64).tolist()
    rows, start = [], 0
    for length in lengths:
        answered = share if share is not None else draw.uniform(*SHARE_ANSWERED)
        num_prompt = min(length - 1, max(1, round(length * (1 - answered))))
        rows.append(Row(input_ids=tuple(ids[start : start + length]), num_prompt=num_prompt))
        start += length
    return rows


def file_rows(path: Path) -> list[Row]:
    """The conversations of a file that end in an answer. Raises DataError where it cannot be read."""
    from sftron.data.conversations import parse_conversation, settle_format
    from sftron.data.sources import open_source
    from sftron.data.types import Conversation

    source = open_source(str(path))
    row_format = settle_format(source, "auto", {}, None)
    rows = []
    for number in range(len(source)):
        parsed = parse_conversation(source[number], row_format, key=_KEY, location=source.locate(number))
        if isinstance(parsed, Conversation) and parsed.messages[-1].role is Role.ASSISTANT:
            rows.append(Row(tuple((each.role.name.lower(), each.content or "") for each in parsed.messages)))
    if not rows:
        raise ValueError(f"{path}: holds no conversation that ends in an answer; give a file of such")
    return rows


def flan_like_rows(
    rows: Sequence[Row], num_rows: int, tokenizer: Any, draw: random.Random, longest: int = LONGEST
) -> list[Row]:
    """Conversations of one question and one answer with FLAN's lengths, cut out of the text of `rows`, in order."""
    text = "\n".join(content for row in rows for _, content in row.messages)
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    bare = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
    overhead = len(tokenizer.apply_chat_template(list(bare), return_dict=True)["input_ids"]) - 2
    made, place = [], 0

    def cut(num_tokens: int) -> str:
        nonlocal place
        if place + num_tokens >= len(offsets):
            place = draw.randrange(max(1, len(offsets) - num_tokens))
        begin, place = place, place + num_tokens
        return text[offsets[begin][0] : offsets[min(place, len(offsets)) - 1][1]].strip() or "."

    for length in flan_lengths(num_rows, draw, longest):
        answer = max(2, round((length - overhead) * draw.uniform(*SHARE_ANSWERED)))
        made.append(Row((("user", cut(max(2, length - overhead - answer))), ("assistant", cut(answer)))))
    return made


def within_budget(rows: Sequence[Row], encoder: Encoder, per_step: int) -> tuple[list[Row], int]:
    """Rows that fit a pack of as many tokens as `per_step` of them have on average, and that number of tokens.

    The few that do not, at the end of a long tail, go to no way, so that all have the same conversations.
    """
    kept = [(row, len(each)) for row, each in zip(rows, encoder.ours(rows), strict=True)]
    while True:
        budget = round(fmean(length for _, length in kept) * per_step)
        fitting = [(row, length) for row, length in kept if length <= budget]
        if len(fitting) == len(kept):
            return [row for row, _ in kept], budget
        kept = fitting


def described(rows: Sequence[Row], encoder: Encoder) -> dict[str, float]:
    """Lengths in tokens, and how many of them are trained."""
    labeled = encoder.ours(rows)
    lengths = [len(each) for each in labeled]
    return {
        "conversations": len(lengths),
        "median": median(lengths),
        "mean": round(fmean(lengths), 1),
        "longest": max(lengths),
        "trained share": round(sum(int((each.labels != IGNORE_INDEX).sum()) for each in labeled) / sum(lengths), 3),
    }
