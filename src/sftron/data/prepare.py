"""One row, all the way to a LabeledConversation, or to the reason why it is dropped (law 4)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate, count
from typing import Literal

from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.formats.detect import RowFormat, parse_conversation
from sftron.data.formats.messages import ReasoningPolicy, apply_reasoning_policy
from sftron.data.labels import Targets, label_conversation
from sftron.data.lanes.mixture import whole_weights
from sftron.data.sources import EndOfStream, RowSource, StreamedSource
from sftron.data.types import (
    Conversation,
    ConversationKey,
    DataError,
    Dropped,
    LabeledConversation,
    TokenizedConversation,
)


@dataclass(frozen=True, slots=True)
class DataSet:
    """One of the run's data sets: its name for people, its rows, and how they hold conversations.

    held_out: rows of it that are kept out of `source`, to evaluate on.
    weight: its share of the tokens, relative to the other data sets'; all have one, or none.
    """

    name: str
    source: RowSource | StreamedSource
    row_format: RowFormat
    held_out: RowSource | None = None
    weight: float | None = None

    @property
    def num_rows(self) -> int | None:
        """None of a stream that does not tell; what is reported must not depend on how far it was read."""
        return self.source.told_num_rows if isinstance(self.source, StreamedSource) else len(self.source)

    def first_rows(self, num_rows: int) -> RowSource:
        """To look at, before anything is dealt; of a source that is not streamed it gives all."""
        return self.source.head(num_rows) if isinstance(self.source, StreamedSource) else self.source


class Preparation:
    """Reads, parses, tokenizes and labels rows; a pure function of the row and these settings.

    datasets: without weights, the rows of all are numbered through, and dealt as one; or there is one alone, streamed.
    sequence_length: bounds a conversation, in tokens. overlong: what happens to a longer one.
    targets: what is trained with train_on_completions_only; by default all that the assistant says.
    on_bad_row: "error" raises, "skip" drops the row and counts it under its reason.
    reasoning: which of the assistant's reasoning the chat template gets; rows of ids stay as they are.
    """

    def __init__(
        self,
        datasets: Sequence[DataSet],
        chat_tokenizer: ChatTokenizer,
        *,
        sequence_length: int,
        overlong: Literal["drop", "truncate_turns", "error"] = "drop",
        on_bad_row: Literal["error", "skip"] = "error",
        reasoning: ReasoningPolicy = "keep",
        train_on_completions_only: bool = True,
        targets: Targets | None = None,
    ) -> None:
        self.chat_tokenizer = chat_tokenizer
        self.sequence_length = sequence_length
        self.datasets = tuple(datasets)
        self._ends = list(accumulate(dataset.num_rows or 0 for dataset in datasets))
        given = [dataset.weight for dataset in datasets if dataset.weight is not None]
        assert len(given) in (0, len(datasets))
        # In proportion to the shares of the tokens; None deals every row once an epoch.
        self.weights = whole_weights(given) if given else None
        self._overlong, self._on_bad_row = overlong, on_bad_row
        self._reasoning: ReasoningPolicy = reasoning
        self.train_on_completions_only, self.targets = train_on_completions_only, targets or Targets()
        self.is_streamed = any(isinstance(dataset.source, StreamedSource) for dataset in datasets)
        assert not self.is_streamed or self.weights or len(datasets) == 1
        if self.num_rows == 0:
            raise DataError(f"the data holds no rows: {', '.join(dataset.name for dataset in datasets)}")

    @property
    def num_rows(self) -> int | None:
        """Of all data sets; None with a stream that does not tell."""
        return None if any(dataset.num_rows is None for dataset in self.datasets) else self._ends[-1]

    @property
    def source_names(self) -> tuple[str, ...]:
        return tuple(dataset.name for dataset in self.datasets)

    @property
    def fingerprint(self) -> dict[str, str]:
        """All that decides which conversation a row becomes, by name; the toggles are not among it (law 5)."""
        return {
            # By place, not by name: a file may move, but the order of data sets numbers the rows.
            **{f"data.datasets.{n}": f"{d.source.fingerprint} {d.row_format}" for n, d in enumerate(self.datasets)},
            "number of data sets": str(len(self.datasets)),
            **({"data.datasets.*.weight": " : ".join(map(str, self.weights))} if self.weights else {}),
            **self.chat_tokenizer.fingerprint,
            "tokens.sequence_length": str(self.sequence_length),
            "data.overlong": self._overlong,
            "data.on_bad_row": self._on_bad_row,
            "data.reasoning": self._reasoning,
            "trained roles": str(self.targets),
        }

    def location(self, key: ConversationKey) -> str:
        """Where a conversation stands, for people (file:line)."""
        return self.datasets[key.source].source.locate(key.row)

    def key(self, row: int, epoch: int = 0) -> ConversationKey:
        """Of the row numbered `row`, of data sets that are not streamed."""
        number = bisect_right(self._ends, row)
        return ConversationKey(number, row - (self._ends[number - 1] if number else 0), epoch)

    def all_keys(self) -> Iterator[ConversationKey]:
        """Of every row, in the order of the files."""
        for place, dataset in enumerate(self.datasets):
            with suppress(EndOfStream):
                for row in count() if dataset.num_rows is None else range(dataset.num_rows):
                    if isinstance(dataset.source, StreamedSource):
                        dataset.source.raw(row)
                    yield ConversationKey(place, row)

    def read_many(self, keys: Sequence[ConversationKey]) -> list[LabeledConversation | Dropped]:
        """What becomes of each row. Raises DataError for a bad one, unless those are skipped."""
        return [each if isinstance(each, Dropped) else self.label(each) for each in self.tokenize_many(keys)]

    def read(self, key: ConversationKey) -> LabeledConversation | Dropped:
        """As `read_many`, of one row."""
        return self.read_many([key])[0]

    def parse(self, key: ConversationKey) -> Conversation | TokenizedConversation:
        """The conversation as the chat template gets it, or the ids that the row holds. Raises DataError with
        file:line."""
        source, row_format = self.datasets[key.source].source, self.datasets[key.source].row_format
        parsed = parse_conversation(source[key.row], row_format, key=key, location=source.locate(key.row))
        if isinstance(parsed, Conversation):
            return apply_reasoning_policy(parsed, self._reasoning)
        if (highest := int(parsed.input_ids.max())) >= (size := len(self.chat_tokenizer.tokenizer)):
            problem = f"has the id {highest}, and the tokenizer's are below {size}; they were made with another one"
            raise DataError(f"{source.locate(key.row)}: {problem}", reason="unknown_id")
        return parsed

    def tokenize(self, key: ConversationKey) -> TokenizedConversation | Dropped:
        """As `read`, one stage earlier."""
        return self.tokenize_many([key])[0]

    def tokenize_many(self, keys: Sequence[ConversationKey]) -> list[TokenizedConversation | Dropped]:
        """As `read_many`, one stage earlier."""
        parsed = [self._parse_or_error(key) for key in keys]
        conversations = [each for each in parsed if isinstance(each, Conversation)]
        encoded = iter(self.chat_tokenizer.encode_batch(conversations))
        return [
            self._accept(key, each, next(encoded) if isinstance(each, Conversation) else each)
            for key, each in zip(keys, parsed, strict=True)
        ]

    def _parse_or_error(self, key: ConversationKey) -> Conversation | TokenizedConversation | DataError:
        try:
            return self.parse(key)
        except DataError as error:
            return error

    def _accept(
        self,
        key: ConversationKey,
        parsed: Conversation | TokenizedConversation | DataError,
        tokenized: TokenizedConversation | DataError,
    ) -> TokenizedConversation | Dropped:
        try:
            if isinstance(tokenized, DataError):
                raise tokenized
            assert not isinstance(parsed, DataError)
            if len(tokenized) > self.sequence_length:
                return self._shorten(parsed, tokenized)
        except DataError as error:
            if self._on_bad_row == "error":
                raise
            return Dropped(error.reason, str(error), key)
        if not self.targets.has_any(tokenized):
            detail = f"{self.location(tokenized.key)}: no text to train on, of role {self.targets}"
            return Dropped("no_trained_token", detail, tokenized.key)
        return tokenized

    def label(self, tokenized: TokenizedConversation) -> LabeledConversation:
        return label_conversation(tokenized, self.targets, train_on_completions_only=self.train_on_completions_only)

    def _shorten(
        self, conversation: Conversation | TokenizedConversation, tokenized: TokenizedConversation
    ) -> TokenizedConversation | Dropped:
        """Drop an over-long conversation, or leave out turns at its end until what is left ends in a trained one; rows
        of ids know no turns."""
        location = self.location(tokenized.key)
        too_long = f"{location}: {len(tokenized)} tokens, tokens.sequence_length is {self.sequence_length}"
        if self._overlong == "error":
            raise DataError(f"{too_long}; raise it, or set data.overlong to drop or truncate_turns", reason="overlong")
        if self._overlong == "truncate_turns" and isinstance(conversation, Conversation):
            for num_messages in range(len(conversation.messages) - 1, 0, -1):
                last = tokenized.turns[num_messages - 1]
                if self.targets.may_be_in(last.role) and last.end < self.sequence_length:
                    # Rendered again: a template may write something after the last turn only.
                    kept = replace(conversation, messages=conversation.messages[:num_messages])
                    shortened = self.chat_tokenizer.encode(kept)
                    if len(shortened) <= self.sequence_length and self.targets.has_any(shortened):
                        return replace(shortened, num_truncated_turns=len(conversation.messages) - num_messages)
        return Dropped("overlong", too_long, tokenized.key)
