"""Turns each row into a LabeledConversation, or into a Dropped with a reason (law 4)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from itertools import accumulate, count
from math import gcd, lcm
from typing import Literal, get_args

from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.formats.messages import ReasoningPolicy, apply_reasoning_policy
from sftron.data.formats.table import Parsed, RowFormat, parse_conversation
from sftron.data.labels import Targets, label_conversations
from sftron.data.pieces import Pieces, streamed_pieces
from sftron.data.sources import EndOfStream, RowSource, StreamedSource
from sftron.data.types import (
    Conversation,
    ConversationKey,
    DataError,
    Document,
    Dropped,
    LabeledConversation,
    TokenizedConversation,
)
from sftron.visible_text import counted

Overlong = Literal["drop", "truncate_turns", "error"]
PackingStrategy = Literal["pool", "minibatch", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions:
    """Options of the conversion of rows to conversations and of conversations to packs.

    The defaults equal the configuration's. Raises DataError for an invalid value.
    """

    sequence_length: int
    """The largest number of tokens of a conversation."""
    overlong: Overlong = "drop"
    """The treatment of a longer conversation."""
    on_bad_row: Literal["error", "skip"] = "error"
    """"error" raises DataError; "skip" drops the row and counts it under its reason."""
    reasoning: ReasoningPolicy = "keep"
    """The part of the assistant's reasoning that the chat template receives; pretokenized rows are unaffected."""
    train_on_completions_only: bool = True
    targets: Targets = field(default_factory=Targets)
    """The tokens that are trained with train_on_completions_only; by default all of the assistant's."""
    remove_cross_attention: bool = True
    packing: PackingStrategy = "pool"
    pool_size: int = 256
    micro_batch_size: int = 1
    """The number of conversations in a pack with `packing="minibatch"`; it also scales the default token_budget."""
    token_budget: int = 0
    """The number of tokens in a pack; 0 stands for sequence_length x micro_batch_size."""
    num_lanes: int | Literal["auto"] = "auto"
    """The number of lanes, which ranks x workers must divide. With "auto", the packing of a small data set is planned,
    which allows any number of ranks and workers, and a large data set has 48 lanes."""
    num_epochs: int | None = None
    """The number of epochs; None repeats the data without end."""
    seed: int = 42

    def __post_init__(self) -> None:
        for option, known in (("overlong", get_args(Overlong)), ("packing", get_args(PackingStrategy))):
            if (value := getattr(self, option)) not in known:
                raise DataError(f"{option} is {value!r}; choose from {', '.join(known)}")
        if self.sequence_length < 2:
            raise DataError(
                f"sequence_length is {self.sequence_length}; set it to at least 2, the shortest conversation"
            )
        smallest = self.sequence_length * (self.micro_batch_size if self.packing == "minibatch" else 1)
        if self.token_budget and self.token_budget < smallest:
            raise DataError(f"token_budget is {self.token_budget}, but a pack may need {smallest} tokens; raise it")
        if not self.token_budget:
            object.__setattr__(self, "token_budget", self.sequence_length * self.micro_batch_size)


@dataclass(frozen=True, slots=True)
class DataSet:
    """One data set of the run: its name in reports, its rows, and the format of the rows."""

    name: str
    source: RowSource | StreamedSource
    row_format: RowFormat
    held_out: RowSource | None = None
    """The rows that are excluded from `source` for evaluation."""
    weight: float | None = None
    """The data set's share of the tokens, relative to the other data sets. Either all data sets have a weight, or
    none."""

    @property
    def num_rows(self) -> int | None:
        """The number of rows, or None for a stream that does not declare it.

        Reading does not count a stream's rows, because reports must not depend on how far it was read.
        """
        return self.source.declared_num_rows if isinstance(self.source, StreamedSource) else len(self.source)

    def with_pieces(self, chat_tokenizer: ChatTokenizer, num_tokens: int) -> DataSet:
        """Returns the data set with documents of plain text cut into pieces of at most `num_tokens` tokens."""
        if self.row_format.name != "text" or isinstance(self.source, Pieces):
            return self
        column, cut = self.row_format.column("text"), partial(chat_tokenizer.documents.pieces, num_tokens=num_tokens)
        if isinstance(self.source, StreamedSource):
            return replace(self, source=streamed_pieces(self.source, column, cut))
        return replace(self, source=Pieces(self.source, column, cut))

    @property
    def documents(self) -> dict[str, int]:
        """The numbers of documents of plain text, of those that are cut, and of their pieces, by name.

        Empty if the rows are no documents, or are streamed, so that the numbers are not known.
        """
        if not isinstance(self.source, Pieces):
            return {}
        return {name: getattr(self.source, name) for name in ("num_documents", "num_cut", "num_pieces")}

    @property
    def pieces_in_words(self) -> str:
        """How many documents of plain text are cut into pieces; "" if the rows are no documents."""
        if self.row_format.name == "text" and isinstance(self.source, StreamedSource):
            return "documents that are too long are cut into pieces as they are read"
        if not isinstance(self.source, Pieces):
            return ""
        documents, num_cut = counted(self.source.num_documents, "documents"), self.source.num_cut
        if not num_cut:
            return f"{documents}, none of them cut"
        return f"{documents}, {num_cut:,} of them cut into {self.source.num_pieces:,} pieces"

    def first_rows(self, num_rows: int) -> RowSource:
        """Returns the first `num_rows` rows of a stream, without consuming them, or all rows of an indexed source."""
        return self.source.head(num_rows) if isinstance(self.source, StreamedSource) else self.source


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Returns the smallest integers in proportion to the weights as written in decimal: 0.1 and 0.25 give 2 and 5."""
    exact = [Fraction(str(weight)) for weight in weights]
    whole = [int(weight * lcm(*(each.denominator for each in exact))) for weight in exact]
    return tuple(weight // gcd(*whole) for weight in whole)


class Preparation:
    """Reads, parses, tokenizes and labels rows; the result is a pure function of the row and the options.

    Without weights, the rows of all data sets are numbered consecutively and consumed as one data set, or there is a
    single data set and it is streamed.
    """

    def __init__(self, datasets: Sequence[DataSet], chat_tokenizer: ChatTokenizer, options: DataOptions) -> None:
        self.chat_tokenizer, self.options = chat_tokenizer, options
        if options.overlong != "error":
            datasets = [each.with_pieces(chat_tokenizer, options.sequence_length) for each in datasets]
        self.datasets = tuple(datasets)
        self.targets, self.train_on_completions_only = options.targets, options.train_on_completions_only
        *self._first_rows, self._end = accumulate((dataset.num_rows or 0 for dataset in datasets), initial=0)
        weights = [dataset.weight for dataset in datasets if dataset.weight is not None]
        assert len(weights) in (0, len(datasets))
        # Integers in proportion to the shares of the tokens; None consumes every row once an epoch.
        self.weights = whole_weights(weights) if weights else None
        self.is_streamed = any(isinstance(dataset.source, StreamedSource) for dataset in datasets)
        assert not self.is_streamed or self.weights or len(datasets) == 1
        if self.num_rows == 0:
            raise DataError(f"the data has no rows: {', '.join(self.source_names)}")

    @property
    def num_rows(self) -> int | None:
        """The number of rows of all data sets, or None if one is a stream that does not declare it."""
        return None if any(dataset.num_rows is None for dataset in self.datasets) else self._end

    @property
    def source_names(self) -> tuple[str, ...]:
        return tuple(dataset.name for dataset in self.datasets)

    @property
    def fingerprint(self) -> dict[str, str]:
        """Everything that determines which conversation a row becomes, by name.

        The two toggles, train_on_completions_only and remove_cross_attention, are not part of it (law 5).
        """
        return {
            # By index, not by name: a file may move, but the order of the data sets determines the row numbers.
            **{f"data.datasets.{n}": f"{d.source.fingerprint} {d.row_format}" for n, d in enumerate(self.datasets)},
            "number of data sets": str(len(self.datasets)),
            **({"data.datasets.*.weight": " : ".join(map(str, self.weights))} if self.weights else {}),
            **self.chat_tokenizer.fingerprint,
            "tokens.sequence_length": str(self.options.sequence_length),
            "data.overlong": self.options.overlong,
            "data.on_bad_row": self.options.on_bad_row,
            "data.reasoning": self.options.reasoning,
            "trained roles": str(self.targets),
        }

    @property
    def trained(self) -> Targets | None:
        """The tokens that are trained; None for all of them, without train_on_completions_only."""
        return self.targets if self.train_on_completions_only else None

    def location(self, key: ConversationKey) -> str:
        """Returns the location of a conversation for error messages (file:line)."""
        return self.datasets[key.source].source.locate(key.row)

    def key(self, number: int, epoch: int = 0) -> ConversationKey:
        """Returns the key of row `number` of all data sets, numbered consecutively; none may be streamed."""
        source = bisect_right(self._first_rows, number) - 1
        return ConversationKey(source, number - self._first_rows[source], epoch)

    def row_number(self, key: ConversationKey) -> int:
        """Returns the number of a row of all data sets; the inverse of `key`."""
        return self._first_rows[key.source] + key.row

    def all_keys(self) -> Iterator[ConversationKey]:
        """Yields the key of every row, in the order of the data sets and their files."""
        for source, dataset in enumerate(self.datasets):
            with suppress(EndOfStream):
                for row in count() if dataset.num_rows is None else range(dataset.num_rows):
                    if isinstance(dataset.source, StreamedSource):
                        dataset.source.raw(row)
                    yield ConversationKey(source, row)

    def read_many(self, keys: Sequence[ConversationKey]) -> list[LabeledConversation | Dropped]:
        """Returns each row's LabeledConversation or Dropped, in the order of the keys.

        Raises DataError for a bad row, unless `on_bad_row` is "skip".
        """
        rows = self.tokenize_many(keys)
        labeled = iter(self._label_many([each for each in rows if not isinstance(each, Dropped)]))
        return [each if isinstance(each, Dropped) else next(labeled) for each in rows]

    def read(self, key: ConversationKey) -> LabeledConversation | Dropped:
        return self.read_many([key])[0]

    def tokenize_many(self, keys: Sequence[ConversationKey]) -> list[TokenizedConversation | Dropped]:
        """Returns the same as `read_many`, without labels."""
        parsed = [self._parse_or_error(key) for key in keys]
        encoded = iter(self.chat_tokenizer.encode_batch([each for each in parsed if isinstance(each, Conversation)]))
        documents = [each for each in parsed if isinstance(each, Document)]
        encoded_documents = iter(self.chat_tokenizer.documents.encode(documents))

        def tokenized(each: Parsed | DataError) -> TokenizedConversation | DataError:
            if isinstance(each, Conversation):
                return next(encoded)
            return next(encoded_documents) if isinstance(each, Document) else each

        return [self._accept(key, each, tokenized(each)) for key, each in zip(keys, parsed, strict=True)]

    def tokenize(self, key: ConversationKey) -> TokenizedConversation | Dropped:
        return self.tokenize_many([key])[0]

    def label(self, tokenized: TokenizedConversation) -> LabeledConversation:
        return self._label_many([tokenized])[0]

    def _label_many(self, tokenized: Sequence[TokenizedConversation]) -> list[LabeledConversation]:
        return label_conversations(tokenized, self.targets, train_on_completions_only=self.train_on_completions_only)

    def parse(self, key: ConversationKey) -> Parsed:
        """Reads and parses one row. Raises DataError for a bad row, even if `on_bad_row` is "skip"."""
        source, row_format = self.datasets[key.source].source, self.datasets[key.source].row_format
        parsed = parse_conversation(source[key.row], row_format, key=key, location=source.locate(key.row))
        if isinstance(parsed, Conversation):
            return apply_reasoning_policy(parsed, self.options.reasoning)
        if isinstance(parsed, Document):
            return parsed
        if (highest := int(parsed.input_ids.max())) >= (size := len(self.chat_tokenizer.tokenizer)):
            problem = (
                f"has the id {highest}, but the tokenizer's ids are below {size}; use the tokenizer that made the ids"
            )
            raise DataError(f"{source.locate(key.row)}: {problem}", reason="unknown_id")
        return parsed

    def _parse_or_error(self, key: ConversationKey) -> Parsed | DataError:
        try:
            return self.parse(key)
        except DataError as error:
            return error

    def _accept(
        self,
        key: ConversationKey,
        parsed: Parsed | DataError,
        tokenized: TokenizedConversation | DataError,
    ) -> TokenizedConversation | Dropped:
        try:
            if isinstance(tokenized, DataError):
                raise tokenized
            assert not isinstance(parsed, DataError)
            if len(tokenized) > self.options.sequence_length:
                return self._shorten(parsed, tokenized)
        except DataError as error:
            if self.options.on_bad_row == "error":
                raise
            return Dropped(error.reason, str(error), key)
        if not self.targets.has_any(tokenized):
            is_text = isinstance(parsed, Document)
            problem = "is one token, with none before it" if is_text else f"no text to train on (role {self.targets})"
            return Dropped("no_trained_token", f"{self.location(key)}: {problem}", key)
        return tokenized

    def _shorten(self, conversation: Parsed, tokenized: TokenizedConversation) -> TokenizedConversation | Dropped:
        """Drops an overlong conversation, or removes turns from its end until it fits and ends in a trained turn.

        A pretokenized row has no turns, so it is dropped. Documents are cut before, unless `overlong` is "error".

        Raises:
            DataError: `overlong` is "error".
        """
        length = self.options.sequence_length
        too_long = f"{self.location(tokenized.key)}: {len(tokenized)} tokens, but tokens.sequence_length is {length}"
        if self.options.overlong == "error":
            is_text = isinstance(conversation, Document)
            remedy = "drop, which cuts documents into pieces" if is_text else "drop or truncate_turns"
            raise DataError(f"{too_long}; raise it, or set data.overlong to {remedy}", reason="overlong")
        if self.options.overlong == "truncate_turns" and isinstance(conversation, Conversation):
            for num_messages in range(len(conversation.messages) - 1, 0, -1):
                last = tokenized.turns[num_messages - 1]
                if not self.targets.may_be_in(last.role) or last.end >= length:
                    continue
                # Rendered again, as a template may write text after the last turn only.
                kept = replace(conversation, messages=conversation.messages[:num_messages])
                shortened = self.chat_tokenizer.encode(kept)
                if len(shortened) <= length and self.targets.has_any(shortened):
                    return replace(shortened, num_truncated_turns=len(conversation.messages) - num_messages)
        return Dropped("overlong", too_long, tokenized.key)
