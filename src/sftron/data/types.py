"""The nouns of the data side, one frozen type a stage. Each docstring is the contract between two stages.

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
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from typing import Any

import numpy as np
import torch

IGNORE_INDEX = -100
"""The label of a position without a target; torch's and transformers' value."""

Row = Mapping[str, Any]
"""One row of a data set as its file holds it, before any format is known."""


class DataError(ValueError):
    """The user's data cannot be trained on as it is; the message gives the location, what was found and the remedy."""

    def __init__(self, message: str, *, reason: str = "bad_data") -> None:
        super().__init__(message)
        self.reason = reason
        """A slug, such as "broken_json", under which skipped rows are counted (`on_bad_row: skip`)."""


class Role(IntEnum):
    """Who a token belongs to. The value is stored per token, so an existing number never changes its meaning."""

    TEMPLATE = 0
    """Written by the chat template: headers, separators, anything that is no message's content."""
    SYSTEM = 1
    USER = 2
    ASSISTANT = 3
    TOOL = 4
    """A tool's result, given to the model."""
    REASONING = 5
    """The assistant's thinking, where the data marks it."""
    TOOL_CALL = 6
    """The assistant's call of a tool, where the data marks it."""
    PADDING = 7
    """The unused end of a pack; belongs to no conversation."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation, as the data has it. Control strings in its texts mean nothing."""

    role: Role
    content: str | None = None
    """None where there is no text, as next to tool calls."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """What else the chat template may read (`reasoning_content`, `tool_calls`, `name`, ...), as JSON values; a field
    without a value is absent rather than None."""
    weight: float = 1.0
    """The factor of the message's tokens in the loss, where they are trained; 0 leaves them out."""
    parts: tuple[str, ...] = ()
    """The texts that `content` is made of, where the data gives a list of them."""
    role_name: str = ""
    """How the template spells the role, where that is not the usual name ("developer")."""


@dataclass(frozen=True, slots=True)
class ConversationKey:
    """Identifies one conversation of a run in ledgers and error messages; unique within an epoch."""

    source: int
    """Index of the data set in `data.datasets`."""
    row: int
    """Index of the row in that data set."""
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in order, checked: at least one, known roles, text contents."""

    messages: tuple[Message, ...]
    key: ConversationKey
    location: str
    """Where the row stands, for people (file:line)."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """JSON schemas of the tools that the assistant may call, as the chat template gets them."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Where one message stands in the tokens: its content is [start, end), empty where the template drops it."""

    role: Role
    start: int
    end: int
    stop: int | None
    """Index of the stop token."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenizedConversation:
    """The ids of a conversation and the role of every token."""

    input_ids: np.ndarray
    """int32 [n], exactly those of the tokenizer's own `apply_chat_template` unless a text holds control strings; or
    those that a pretokenized row holds."""
    role_ids: np.ndarray
    """uint8 [n], the `Role` of the token at the same index (not shifted). A stop token has the role of its turn."""
    turns: tuple[Turn, ...]
    """One for each message, in order; none of a pretokenized row."""
    key: ConversationKey
    num_boundary_tokens: int = 0
    """Tokens that begin in the template and end in content; they have role TEMPLATE and are not trained."""
    holds_control_text: bool = False
    """Whether some content spells a control token; it was encoded as plain text."""
    num_truncated_turns: int = 0
    """Messages left out at the end because the conversation was too long."""
    token_weights: np.ndarray | None = None
    """float32 [n], the weight of each token's message; None if all are 1."""
    left_out: tuple[str, ...] = ()
    """Texts that the template does not write, by role and field ("assistant reasoning_content")."""

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def stop_ids(self) -> list[int]:
        """The tokens that end the assistant's turns, in order; none of a pretokenized row."""
        stops = [turn.stop for turn in self.turns if turn.role is Role.ASSISTANT]
        return [int(self.input_ids[stop]) for stop in stops if stop is not None]


@dataclass(frozen=True, slots=True, eq=False)
class LabeledConversation:
    """A conversation ready to pack."""

    input_ids: np.ndarray
    """int32 [n]."""
    labels: np.ndarray
    """int32 [n], shifted: `labels[i]` is the id that the model must generate after `input_ids[: i + 1]`, or
    IGNORE_INDEX. The last one is always IGNORE_INDEX, so nothing crosses into a neighbor."""
    loss_weights: np.ndarray
    """float32 [n], the weight of `labels[i]` in the loss; 0 exactly where the label is IGNORE_INDEX."""
    role_ids: np.ndarray
    """uint8 [n], the role of `input_ids[i]` (not shifted)."""
    key: ConversationKey
    num_truncated_turns: int = 0

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(slots=True)
class MeasuredRow:
    """A row of which only the length is known; it stands for its LabeledConversation until that is read."""

    key: ConversationKey
    num_tokens: int

    def __len__(self) -> int:
        return self.num_tokens


@dataclass(frozen=True, slots=True)
class Dropped:
    """A row that is not trained on, with the reason it is counted under and one line for people."""

    reason: str
    detail: str
    key: ConversationKey


@dataclass(frozen=True, slots=True, eq=False)
class Pack:
    """One flat row of `token_budget` tokens: whole conversations one after another, then padding.

    The padding has the pad id, IGNORE_INDEX, weight 0, Role.PADDING, and positions that count from 0.
    """

    input_ids: np.ndarray
    """int32 [token_budget]."""
    labels: np.ndarray
    """int32 [token_budget]."""
    loss_weights: np.ndarray
    """float32 [token_budget]."""
    role_ids: np.ndarray
    """uint8 [token_budget]."""
    position_ids: np.ndarray
    """int32 [token_budget]."""
    cu_seqlens: np.ndarray
    """int32 [documents + 1], what attention may see: one document per conversation with remove_cross_attention, else a
    single one over all of them; the padding, if any, is one more. It ends at token_budget."""
    conversation_bounds: np.ndarray
    """int32 [conversations + 1], where the conversations lie, whatever attention sees."""
    keys: tuple[ConversationKey, ...]
    """The conversations, in order."""
    index: int = 0
    """n, the number of this pack in the run; it is the same for any number of ranks and workers."""
    lane: int = 0
    lane_state: str = ""
    """The state of the lane it came from, once this pack is consumed (see lanes/sampler.py)."""
    dropped_rows: tuple[Dropped, ...] = ()
    """Rows that were dropped on the way to this pack."""
    num_truncated: int = 0
    """Conversations in it that lost turns at their end."""

    @property
    def dropped(self) -> Counter[tuple[int, str]]:
        """Rows dropped on the way to it, counted by (index of the data set, reason)."""
        return Counter((each.key.source, each.reason) for each in self.dropped_rows)

    @property
    def num_rows(self) -> int:
        """Rows of the data that this pack used up: its conversations and those dropped on the way to it."""
        return len(self.keys) + len(self.dropped_rows)

    @property
    def num_tokens(self) -> int:
        """Real tokens, without the padding."""
        return int(self.conversation_bounds[-1])

    @property
    def num_trained_tokens(self) -> int:
        return int((self.labels != IGNORE_INDEX).sum())


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A pack as the model takes it: torch tensors made on the CPU, so that a step never waits for a device."""

    input_ids: torch.Tensor
    """int64 [T]."""
    position_ids: torch.Tensor
    """int32 [T]."""
    role_ids: torch.Tensor
    """uint8 [T]."""
    cu_seqlens: torch.Tensor
    """int32 [documents + 1]."""
    max_seqlen: int
    """The longest document's length, a Python int."""
    label_positions: torch.Tensor
    """int64 [N], the positions that have a label, ascending; N may be 0."""
    labels: torch.Tensor
    """int64 [N]."""
    loss_weights: torch.Tensor
    """float32 [N]."""
    label_roles: torch.Tensor
    """uint8 [N], the roles of the tokens that the labels name."""
    label_sources: torch.Tensor
    """int32 [N], the data sets that the labels come from, by index."""
    untrained_rows: torch.Tensor
    """int64 [M], positions without a label whose loss is measured now and then; M is 0 where none are wanted."""
    untrained_labels: torch.Tensor
    """int64 [M], the tokens that follow there."""
    untrained_roles: torch.Tensor
    """uint8 [M], the roles of these tokens."""
    weight_sum: float
    """The sum of loss_weights, a Python float; it enters the step's one denominator."""
    pack: Pack
    """What the batch was made of."""

    def pin_memory(self) -> Batch:
        """Returns a copy in page-locked memory, so that copies to a GPU do not block; torch's loaders call this."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        pinned = {name: value.pin_memory() for name, value in values.items() if isinstance(value, torch.Tensor)}
        return replace(self, **pinned)
