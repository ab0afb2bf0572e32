"""The types of the data pipeline, one per stage. Each docstring is the contract between two stages.

    row -> Conversation -> TokenizedConversation -> LabeledConversation -> Pack -> Batch

One conversation, "Hi" answered with "Yo", as every stage sees it (ChatML, completions only):

    tokens        <|im_start|> user \\n Hi <|im_end|> \\n <|im_start|> assistant \\n Yo <|im_end|> \\n
    role_ids      T            T    T  U  U          T  T            T         T  A  A          T
    labels        -            -    -  -  -          -  -            -         Yo <|im_end|> -  -
    loss_weights  0            0    0  0  0          0  0            0         1  1          0  0

(T template, U user, A assistant; "-" is IGNORE_INDEX.) Labels are already shifted: position i holds the id that the
model must generate after reading tokens 0..i.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

IGNORE_INDEX = -100
"""The label of a position without a target, as in torch and transformers."""

Row = Mapping[str, Any]
"""One row of a data set as read from its file, before its format is known."""

Documents = Literal["file", "line"]
"""What is one document of plain text in a `.txt` file: the file, or each line."""


class DataError(ValueError):
    """The user's data cannot be trained on. The message gives the location, the problem and the remedy."""

    def __init__(self, message: str, *, reason: str = "bad_data") -> None:
        super().__init__(message)
        self.reason = reason
        """The category, such as "broken_json", under which skipped rows are counted (`on_bad_row: skip`)."""


class Role(IntEnum):
    """The author of a token. The value is stored for each token, so an existing number never changes its meaning."""

    TEMPLATE = 0
    """Text of the chat template: headers, separators, and everything else that is not a message's content."""
    SYSTEM = 1
    """The system message, which instructs the assistant."""
    USER = 2
    """What the user asks."""
    ASSISTANT = 3
    """The assistant's answer, with the stop token that ends it."""
    TOOL = 4
    """The result of a tool call."""
    REASONING = 5
    """The assistant's reasoning, where the data marks it."""
    TOOL_CALL = 6
    """The assistant's tool call, where the data marks it."""
    PADDING = 7
    """The unused end of a pack, which belongs to no conversation."""
    TEXT = 8
    """A document of plain text, as in pretraining: no template writes it, and all of it is trained."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation. A control token's string in its text is plain text."""

    role: Role
    content: str | None = None
    """The text; None for a message without text, such as one of tool calls alone."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The other fields that the chat template may read (`reasoning_content`, `tool_calls`, `name`, ...), as JSON
    values. A field without a value is absent rather than None."""
    weight: float = 1.0
    """The loss weight of the message's trained tokens; with 0 they are not trained."""
    parts: tuple[str, ...] = ()
    """The texts of the content's parts, where the data gives a list of parts; `content` joins them with newlines."""
    thinking_parts: frozenset[int] = frozenset()
    """The indices of the parts of type `thinking`, in a system message. An assistant's are its `reasoning_content`."""
    role_name: str = ""
    """The role's name in the template where it differs from the usual one ("developer"); else empty."""


@dataclass(frozen=True, slots=True)
class ConversationKey:
    """One conversation of a run: the index of the data set in `data.datasets`, of the row in it, and its epoch."""

    source: int
    row: int
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Conversation:
    """One or more messages in order, whose roles, order and contents were checked when the row was parsed."""

    messages: tuple[Message, ...]
    key: ConversationKey
    location: str
    """The row's location for error messages (file:line)."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """JSON schemas of the tools that the assistant may call, in the form that the chat template receives."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """The row's values of variables of the chat template, such as `enable_thinking`."""


@dataclass(frozen=True, slots=True)
class Document:
    """A document of plain text, or a piece of one that is longer than a conversation may be (documents.py)."""

    text: str
    """A control token's string in it is plain text."""
    key: ConversationKey
    location: str
    """The row's location for error messages (file:line)."""
    is_last: bool = True
    """Whether the document ends here; else another row has its next piece."""


class Turn(NamedTuple):
    """The token range [start, end) of one message's content; it is empty where the template drops the message."""

    role: Role
    start: int
    end: int
    stop: int | None
    """Index of the stop token; None if the turn has no stop token."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenizedConversation:
    """The ids of a conversation and the role of every token."""

    input_ids: np.ndarray
    """int32 [n], the ids of `apply_chat_template`, but for control tokens in texts (law 3); or those of the row. For a
    document, the ids of `tokenizer(text)`."""
    role_ids: np.ndarray
    """uint8 [n], the `Role` of the token at the same index (not shifted). A stop token has the role of its turn."""
    turns: tuple[Turn, ...]
    """One turn for each message, in order; a pretokenized row and a document have none."""
    key: ConversationKey
    num_boundary_tokens: int = 0
    """Number of tokens that begin in the template's text and end in a message's. They have role TEMPLATE."""
    holds_control_text: bool = False
    """Whether a message's text spells a control token, which was then encoded as plain text."""
    num_truncated_turns: int = 0
    """Number of messages removed from the end because the conversation was too long."""
    token_weights: np.ndarray | None = None
    """float32 [n], the weight of the message that each token belongs to; None if all weights are 1."""
    left_out: tuple[str, ...] = ()
    """Fields whose texts the template does not write, as role and field ("assistant reasoning_content")."""
    template_kwargs: tuple[str, ...] = ()
    """The row's values of variables of the chat template, in words ("enable_thinking: false")."""
    has_second_thought: bool = False
    """Whether the template adds its own reasoning to an answer whose content has some; both are trained."""

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def stop_ids(self) -> list[int]:
        """The ids of the tokens that end the assistant's turns, in order; empty for a pretokenized row."""
        stops = [turn.stop for turn in self.turns if turn.role is Role.ASSISTANT]
        return [int(self.input_ids[stop]) for stop in stops if stop is not None]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} tokens, {len(self.turns)} turns, {self.key})"


@dataclass(frozen=True, slots=True, eq=False)
class LabeledConversation:
    """The token ids of a conversation with shifted labels and loss weights, ready to pack."""

    input_ids: np.ndarray
    """int32 [n]."""
    labels: np.ndarray
    """int32 [n], shifted: `labels[i]` is the id that the model must generate after `input_ids[: i + 1]`, or
    IGNORE_INDEX. The last label is always IGNORE_INDEX, so no label crosses into the next conversation of a pack."""
    loss_weights: np.ndarray
    """float32 [n], the loss weight of `labels[i]`; 0 exactly where the label is IGNORE_INDEX."""
    role_ids: np.ndarray
    """uint8 [n], the role of `input_ids[i]` (not shifted)."""
    key: ConversationKey
    num_truncated_turns: int = 0

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def num_trained_tokens(self) -> int:
        return int((self.labels != IGNORE_INDEX).sum())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} tokens, {self.num_trained_tokens} trained, {self.key})"


@dataclass(slots=True)
class MeasuredRow:
    """A row with a known length: a placeholder for its LabeledConversation until the row is read."""

    key: ConversationKey
    num_tokens: int

    def __len__(self) -> int:
        return self.num_tokens


@dataclass(frozen=True, slots=True)
class Dropped:
    """A row that is not trained on, with the reason to count it under and one line of detail for reports."""

    reason: str
    detail: str
    key: ConversationKey


@dataclass(frozen=True, slots=True, eq=False)
class Pack:
    """One flat row of `token_budget` tokens: whole conversations one after another, then padding.

    input_ids, labels and position_ids are int32, loss_weights float32 and role_ids uint8, all [token_budget]. Padding
    has the pad id, the label IGNORE_INDEX, weight 0 and Role.PADDING.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    loss_weights: np.ndarray
    role_ids: np.ndarray
    position_ids: np.ndarray
    """Counted from 0 in each document, and in the padding."""
    cu_seqlens: np.ndarray
    """int32 [documents + 1], the bounds of the documents within which tokens attend to each other: one document per
    conversation with remove_cross_attention, else a single document over all of them. Padding, if any, is one more
    document. The last bound is token_budget."""
    conversation_bounds: np.ndarray
    """int32 [conversations + 1], the bounds of the conversations, whatever the documents of attention are."""
    keys: tuple[ConversationKey, ...]
    index: int = 0
    """The number of this pack in the run, which is the same for any number of ranks and workers (law 5)."""
    lane: int = 0
    lane_state: str = ""
    """The state of the pack's lane after this pack is consumed (see lanes/lane.py)."""
    dropped_rows: tuple[Dropped, ...] = ()
    """The dropped rows that are consumed together with this pack's conversations."""
    num_truncated: int = 0
    """Number of its conversations that were cut at the end of a turn."""

    @property
    def dropped(self) -> Counter[tuple[int, str]]:
        """The number of dropped rows by (index of the data set, reason)."""
        return Counter((each.key.source, each.reason) for each in self.dropped_rows)

    @property
    def num_rows(self) -> int:
        """Number of rows that this pack consumes: its conversations and its dropped rows."""
        return len(self.keys) + len(self.dropped_rows)

    @property
    def num_tokens(self) -> int:
        """Number of tokens without the padding."""
        return int(self.conversation_bounds[-1])

    @property
    def num_trained_tokens(self) -> int:
        return int((self.labels != IGNORE_INDEX).sum())

    def __repr__(self) -> str:
        counts = f"{len(self.keys)} conversations, {self.num_tokens} tokens, {self.num_trained_tokens} trained"
        return f"{type(self).__name__}({self.index}: {counts}, budget {len(self.input_ids)})"


class ContextRank(NamedTuple):
    """A rank's place among the ranks that share each pack: its number, and their number."""

    rank: int = 0
    size: int = 1

    def part_of(self, num_tokens: int) -> ContextPart:
        """Returns this rank's part of a row. Raises ValueError if the row has fewer tokens than ranks."""
        if num_tokens < self.size:
            raise ValueError(f"{self.size} ranks (context) cannot share a row of {num_tokens} tokens")
        least, rest = divmod(num_tokens, self.size)
        return ContextPart(tuple(least + (rank < rest) for rank in range(self.size)), self.rank)


WHOLE_ROW = ContextRank()
"""A rank that does not share its packs."""


@dataclass(frozen=True, slots=True)
class ContextPart:
    """One rank's part of a row that several ranks share: consecutive tokens.

        0 1 2 | 3 4 5 | 6 7 8 | 9 10        a row of 11 tokens on 4 ranks: counts 3 3 3 2

    Rank 2 has begin 6 and end 9.
    """

    counts: tuple[int, ...]
    """The number of tokens of each rank; none is 0."""
    rank: int

    @property
    def begin(self) -> int:
        return sum(self.counts[: self.rank])

    @property
    def end(self) -> int:
        return self.begin + self.counts[self.rank]

    def select(self, positions: np.ndarray) -> np.ndarray:
        """Returns the given positions of the row that lie in the part."""
        return positions[(positions >= self.begin) & (positions < self.end)]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A pack as torch tensors, with everything that a step needs computed on the CPU, so none waits for the device
    (law 11). Several ranks may share a pack; each has a part of the row.

    S is the number of tokens of the row, T of those in the part; N of these have a label (0 or more), and M are
    untrained and measured. If no other rank shares the pack, T is S.
    """

    input_ids: torch.Tensor
    """int64 [T]."""
    position_ids: torch.Tensor
    """int32 [S], for the whole row, because rotations may depend on the length of a document."""
    role_ids: torch.Tensor
    """uint8 [T]."""
    cu_seqlens: torch.Tensor
    """int32 [documents + 1], the bounds in the whole row."""
    max_seqlen: int
    """The length of the longest document, as a Python int."""
    label_positions: torch.Tensor
    """int64 [N], the positions in the part that have a label, in ascending order."""
    labels: torch.Tensor
    """int64 [N]."""
    loss_weights: torch.Tensor
    """float32 [N]."""
    label_roles: torch.Tensor
    """uint8 [N], the role of each token in `labels`."""
    label_sources: torch.Tensor
    """int32 [N], the index of the data set that each label comes from."""
    untrained_rows: torch.Tensor
    """int64 [M], positions in the part without a label whose loss is only measured."""
    untrained_labels: torch.Tensor
    """int64 [M], the token after each of these positions."""
    untrained_roles: torch.Tensor
    """uint8 [M], the role of each token in `untrained_labels`."""
    weight_sum: float
    """The sum of the loss weights of the whole pack, even for a part, as a Python float; the step adds it to its one
    denominator (law 8)."""
    pack: Pack
    part: ContextPart

    @property
    def num_real(self) -> int:
        """The number of tokens in the part without the padding, which come first."""
        return min(max(self.pack.num_tokens - self.part.begin, 0), len(self.input_ids))

    def pin_memory(self) -> Batch:
        """Returns a copy in page-locked memory, from which copies to a GPU do not block."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        pinned = {name: value.pin_memory() for name, value in values.items() if isinstance(value, torch.Tensor)}
        return replace(self, **pinned)

    def __repr__(self) -> str:
        sizes = f"{len(self.input_ids)} positions, {len(self.cu_seqlens) - 1} documents, {len(self.labels)} labels"
        return f"{type(self).__name__}({sizes}, on {self.input_ids.device}, of {self.pack})"


@runtime_checkable
class SeekablePacks(Protocol):
    """An endless stream of packs, such as `PackedDataset`, that can report its position and return to it."""

    def __iter__(self) -> Iterator[Pack]: ...

    def seek(self, first_pack: int, lane_states: Mapping[int, str], first_epoch: int = 0) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
