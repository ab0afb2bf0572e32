"""Some rows of the data, taken all the way before any weight is read: what they are, and whether they can be used."""

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


@dataclass(frozen=True, slots=True)
class Sample:
    """Some rows of the data, taken all the way.

    rows: what became of each. num_ready_made: how many of the kept ones are rows of ids. num_equal: how many have
    exactly apply_chat_template's ids; the other kept ones, but for the former, spell a control token in their text.
    stop_ids: control tokens that end an assistant's turn, or a trained stretch of a row of ids, most frequent first.
    control_ids: the control tokens that occur, which are the template's.
    other_prompt: the end of an assistant's header as it is trained, and the end of the template's generation prompt,
    where these differ.
    """

    rows: tuple[AuditedRow, ...]
    audit: Audit
    num_ready_made: int
    num_equal: int
    stop_ids: tuple[int, ...]
    control_ids: frozenset[int]
    other_prompt: tuple[str, str] | None


def check_sample(preparation: Preparation, max_dropped_share: float) -> Sample:
    """Take some hundred rows, evenly spread, all the way, and hold them against apply_chat_template.

    Raises DataError for a bad row, for ids that differ, for whatever the audit finds wrong, and where a larger share of
    the rows is dropped than the run would go on with.
    """
    rows: list[AuditedRow] = []
    audit = Audit(preparation.source_names, preparation.targets)
    stops: Counter[int] = Counter()
    control_ids: set[int] = set()
    num_ready_made = num_equal = 0
    for key in sampled_keys(preparation):
        tokenized = preparation.tokenize(key)
        if isinstance(tokenized, Dropped):
            rows.append(tokenized)
        else:
            control_ids |= set(tokenized.input_ids.tolist()) & preparation.chat_tokenizer.control_ids
            parsed = preparation.parse(key)
            if isinstance(parsed, Conversation):
                if not tokenized.num_truncated_turns:
                    require_reference_ids(preparation.chat_tokenizer, parsed, tokenized)
                num_equal += not tokenized.holds_control_text
                stops.update(tokenized.stop_ids)
            else:
                num_ready_made += 1
                stops.update(stops_of_ready_made(tokenized, preparation.chat_tokenizer.control_ids))
            rows.append((tokenized, preparation.label(tokenized)))
        audit.add_row(rows[-1])
    if problems := [*audit.problems, *_problems_of_drops(preparation, audit, max_dropped_share)]:
        drops = [f"{count} {reason}; the first: {first}" for reason, count, first in audit.drops()]
        raise DataError("\n".join([f"{len(rows)} rows were sampled:", *problems, *drops]))
    stop_ids = tuple(token_id for token_id, _ in stops.most_common())
    return Sample(
        tuple(rows),
        audit,
        num_ready_made,
        num_equal,
        stop_ids,
        frozenset(control_ids),
        _other_prompt(preparation.chat_tokenizer),
    )


def sampled_keys(preparation: Preparation, num_rows: int = _NUM_SAMPLED_ROWS) -> Iterator[ConversationKey]:
    """Evenly spread over each data set, in proportion to its rows, and some dozens at least; or a stream's first."""
    for place, dataset in enumerate(preparation.datasets):
        size = len(dataset.first_rows(num_rows))
        fewest = min(num_rows, _FEWEST_SAMPLED_ROWS)
        wanted = max(fewest, num_rows * size // max(size, preparation.num_rows or 0))
        for row in range(0, size, max(1, size // wanted)):
            yield ConversationKey(place, row)


def _problems_of_drops(preparation: Preparation, audit: Audit, max_dropped_share: float) -> Iterator[str]:
    """Whether too many of the rows that the run would deal are dropped, or all of a data set that has a weight."""
    counts = [audit.sources[place] for place in range(len(preparation.datasets))]
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


def stops_of_ready_made(tokenized: TokenizedConversation, control_ids: Collection[int]) -> list[int]:
    """Control tokens that end what the model says in a row of ids; a word that does is no stop token."""
    is_said = np.isin(tokenized.role_ids, list(DEFAULT_TRAINED_ROLES))
    last_ids = tokenized.input_ids[is_said & ~np.append(is_said[1:], False)].tolist()
    return [token_id for token_id in last_ids if token_id in control_ids]


def _other_prompt(chat_tokenizer: ChatTokenizer) -> tuple[str, str] | None:
    """What the model is trained to answer after, and what it will be asked with, if that is something else."""
    messages = (Message(Role.USER, "Hi"), Message(Role.ASSISTANT, "Yo"))
    try:
        trained = chat_tokenizer.encode(Conversation(messages, ConversationKey(0, 0), "a probe"))
        asked = chat_tokenizer.encode_prompt(messages[:1])
    except ValueError:
        return None  # some templates take no conversation as plain as this
    header = trained.input_ids[: int(np.flatnonzero(Targets().of(trained))[0])].tolist()
    return None if asked == header else (chat_tokenizer.decode(header[-8:]), chat_tokenizer.decode(asked[-8:]))
