"""The start-up sample: a few hundred rows, prepared in full and checked before any weight is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np

from sftron.data.chat.check import require_reference_ids
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.labels import DEFAULT_TRAINED_ROLES, Targets
from sftron.data.prepare import Preparation
from sftron.data.types import (
    Conversation,
    ConversationKey,
    DataError,
    Dropped,
    Message,
    Role,
    TokenizedConversation,
)
from sftron.report.audit import Audit, AuditedRow
from sftron.train.progress import too_many_dropped

_NUM_SAMPLED_ROWS, _FEWEST_SAMPLED_ROWS = 400, 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The sampled rows and the statistics over them."""

    rows: tuple[AuditedRow, ...]
    audit: Audit
    num_pretokenized: int
    """The number of kept rows that are pretokenized."""
    num_equal: int
    """The number of kept conversations whose ids equal those of apply_chat_template; the others spell control tokens in
    their text."""
    stop_ids: tuple[int, ...]
    """The control tokens that end assistant turns or trained spans of pretokenized rows, most frequent first."""
    control_ids: frozenset[int]
    """The control tokens that occur in the rows; the template writes them."""
    other_prompt: tuple[str, str] | None
    """The end of the assistant header in training and the end of the generation prompt; None if they are equal."""


def check_sample(preparation: Preparation, max_dropped_share: float) -> Sample:
    """Prepares a few hundred evenly spaced rows, audits them, and compares their ids with apply_chat_template.

    Raises DataError for a bad row, for ids that differ, for a problem that the audit finds, and if more than
    `max_dropped_share` of the rows are dropped.
    """
    chat_tokenizer = preparation.chat_tokenizer
    rows: list[AuditedRow] = []
    audit = Audit(preparation.source_names, preparation.targets)
    stops: Counter[int] = Counter()
    control_ids: set[int] = set()
    num_pretokenized = num_equal = 0
    for key in sampled_keys(preparation):
        tokenized = preparation.tokenize(key)
        if isinstance(tokenized, Dropped):
            rows.append(tokenized)
        else:
            control_ids |= set(tokenized.input_ids.tolist()) & chat_tokenizer.control_ids
            parsed = preparation.parse(key)
            if isinstance(parsed, Conversation):
                if not tokenized.num_truncated_turns:
                    require_reference_ids(chat_tokenizer, parsed, tokenized)
                num_equal += not tokenized.holds_control_text
                stops.update(tokenized.stop_ids)
            else:
                num_pretokenized += 1
                stops.update(stops_of_pretokenized(tokenized, chat_tokenizer.control_ids))
            rows.append((tokenized, preparation.label(tokenized)))
        audit.add_row(rows[-1])
    if problems := [*audit.problems, *_problems_of_drops(preparation, audit, max_dropped_share)]:
        drops = [f"{count} {reason}; the first: {first}" for reason, count, first in audit.drops()]
        raise DataError("\n".join([f"{len(rows)} rows were sampled:", *problems, *drops]))
    return Sample(
        rows=tuple(rows),
        audit=audit,
        num_pretokenized=num_pretokenized,
        num_equal=num_equal,
        stop_ids=tuple(token_id for token_id, _ in stops.most_common()),
        control_ids=frozenset(control_ids),
        other_prompt=_other_prompt(chat_tokenizer),
    )


def sampled_keys(preparation: Preparation, num_rows: int = _NUM_SAMPLED_ROWS) -> Iterator[ConversationKey]:
    """Yields evenly spaced keys of each data set, in proportion to its rows, but at least 50.

    The keys of a stream are those of its first rows.
    """
    for index, dataset in enumerate(preparation.datasets):
        size = len(dataset.first_rows(num_rows))
        fewest = min(num_rows, _FEWEST_SAMPLED_ROWS)
        wanted = max(fewest, num_rows * size // max(size, preparation.num_rows or 0))
        for row in range(0, size, max(1, size // wanted)):
            yield ConversationKey(index, row)


def _problems_of_drops(preparation: Preparation, audit: Audit, max_dropped_share: float) -> Iterator[str]:
    """Yields a problem if too many rows of the run are dropped, or all rows of a data set that has a weight."""
    counts = [audit.sources[index] for index in range(len(preparation.datasets))]
    rates = [float(dataset.num_rows or 1) for dataset in preparation.datasets]
    if preparation.weights is not None:
        for dataset, count in zip(preparation.datasets, counts, strict=True):
            if not count.num_kept:
                yield f"None of {count.num_rows} rows of {dataset.name} was kept, so it cannot have its share."
                return
        rates = [
            weight * count.num_rows / count.num_tokens
            for weight, count in zip(preparation.weights, counts, strict=True)
        ]
    dropped = sum(rate * count.dropped.total() / count.num_rows for rate, count in zip(rates, counts, strict=True))
    share = dropped / sum(rates)
    if share > max_dropped_share:
        yield too_many_dropped(round(share * audit.num_rows), audit.num_rows, max_dropped_share)


def stops_of_pretokenized(tokenized: TokenizedConversation, control_ids: Collection[int]) -> list[int]:
    """Returns the control tokens that end model-generated spans of a pretokenized row."""
    is_generated = np.isin(tokenized.role_ids, list(DEFAULT_TRAINED_ROLES))
    last_ids = tokenized.input_ids[is_generated & ~np.append(is_generated[1:], False)].tolist()
    return [token_id for token_id in last_ids if token_id in control_ids]


def _other_prompt(chat_tokenizer: ChatTokenizer) -> tuple[str, str] | None:
    """Returns the ends of the assistant header in training and of the generation prompt; None if they are equal."""
    messages = (Message(Role.USER, "Hi"), Message(Role.ASSISTANT, "Yo"))
    try:
        trained = chat_tokenizer.encode(Conversation(messages, ConversationKey(0, 0), "a probe"))
        prompt = chat_tokenizer.encode_prompt(messages[:1])
    except ValueError:
        return None  # some templates refuse so plain a conversation
    header = trained.input_ids[: int(np.flatnonzero(Targets().of(trained))[0])].tolist()
    return None if prompt == header else (chat_tokenizer.decode(header[-8:]), chat_tokenizer.decode(prompt[-8:]))
