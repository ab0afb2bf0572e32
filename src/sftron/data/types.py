"""The nouns of the data side, one frozen type a stage. Each docstring is the contract between two stages.

    row -> Conversation -> TokenizedConversation -> LabeledConversation -> Pack -> Batch

One conversation, "Hi" answered with "Yo", as every stage sees it (ChatML, completions only):

    tokens        <|im_start|> user \\n Hi <|im_end|> \\n <|im_start|> assistant \\n Yo <|im_end|> \\n
    role_ids      T            T    T  U  U          T  T            T         T  A  A          T
    labels        -            -    -  -  -          -  -            -         Yo <|im_end|> -  -
    loss_weights  0            0    0  0  0          0  0            0         1  1          0  0

(T template, U user, A assistant; "-" is IGNORE_INDEX.) Labels are shifted already: position i holds the id that the
model must say after reading tokens 0..i.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
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
    """The user's data cannot be trained on as it is; the message says where, what was found and the remedy.

    reason: a slug, such as "broken_json", under which rows are counted that are skipped (`on_bad_row: skip`).
    """

    def __init__(self, message: str, *, reason: str = "bad_data") -> None:
        super().__init__(message)
        self.reason = reason


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
    """The unused tail of a pack; belongs to no conversation."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation, as the data has it. Control strings in its texts mean nothing.

    content: the text; None where there is none, as beside tool calls.
    fields: what else the chat template may read (`reasoning_content`, `tool_calls`, `tool_call_id`, `name`, ...), as
        JSON values; absent rather than None.
    weight: of the message's tokens in the loss, where they are trained; 0 leaves them out.
    parts: the texts that `content` is made of, where the data gives a list of them.
    role_name: how the template is to spell the role, where that is not the usual name ("developer").
    """

    role: Role
    content: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    weight: float = 1.0
    parts: tuple[str, ...] = ()
    role_name: str = ""


@dataclass(frozen=True, slots=True)
class ConversationKey:
    """Names one conversation of a run for ledgers and error messages; unique within an epoch."""

    source: int
    """Index of the data set in `data.datasets`."""
    row: int
    """Index of the row in that data set."""
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in order, checked: at least one, known roles, text contents. `location` is for people (file:line).

    tools: JSON schemas of the tools the assistant may call, as the chat template gets them.
    """

    messages: tuple[Message, ...]
    key: ConversationKey
    location: str
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Turn:
    """Where one message stands in the tokens: content is [start, end), `stop` the index of its stop token or None.

    A message whose content the template drops has start == end.
    """

    role: Role
    start: int
    end: int
    stop: int | None


@dataclass(frozen=True, slots=True, eq=False)
class TokenizedConversation:
    """The ids of a conversation and the role of every token.

    input_ids: int32 [n], exactly those of the tokenizer's own `apply_chat_template` unless a text holds control
        strings; or those that the row holds.
    role_ids: uint8 [n], `Role` of the token at the same index (not shifted). A stop token has the role of the turn
        it ends.
    turns: one for each message, in order; none where the row held ids.
    num_boundary_tokens: tokens that begin in the template and end in content; their role is TEMPLATE, not trained.
    holds_control_text: some content spells a control token; it was encoded as plain text.
    num_truncated_turns: messages left out at the end because the conversation was too long.
    token_weights: float32 [n], the weight of each token's message; None if all are 1.
    left_out: texts that the template does not write, by role and field ("assistant reasoning_content").
    """

    input_ids: np.ndarray
    role_ids: np.ndarray
    turns: tuple[Turn, ...]
    key: ConversationKey
    num_boundary_tokens: int = 0
    holds_control_text: bool = False
    num_truncated_turns: int = 0
    token_weights: np.ndarray | None = None
    left_out: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def stop_ids(self) -> list[int]:
        """Of the tokens that end the assistant's turns, in order; none where the row held ids."""
        return [
            int(self.input_ids[turn.stop])
            for turn in self.turns
            if turn.role is Role.ASSISTANT and turn.stop is not None
        ]


@dataclass(frozen=True, slots=True, eq=False)
class LabeledConversation:
    """A conversation ready to pack.

    input_ids: int32 [n].
    labels: int32 [n], shifted: `labels[i]` is the id the model must say after `input_ids[: i + 1]`, or IGNORE_INDEX.
        The last one is always IGNORE_INDEX, so nothing crosses into a neighbour.
    loss_weights: float32 [n], the weight of `labels[i]` in the loss; 0 exactly where the label is IGNORE_INDEX.
    role_ids: uint8 [n], role of `input_ids[i]` (not shifted).
    num_truncated_turns: see TokenizedConversation.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    loss_weights: np.ndarray
    role_ids: np.ndarray
    key: ConversationKey
    num_truncated_turns: int = 0

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(slots=True)
class MeasuredRow:
    """A row of which only the length is known; it stands for its LabeledConversation until it is read."""

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


def count_dropped(dropped: Iterable[Dropped]) -> Counter[tuple[int, str]]:
    """Rows by (index of the data set, reason)."""
    return Counter((each.key.source, each.reason) for each in dropped)


@dataclass(frozen=True, slots=True, eq=False)
class Pack:
    """One flat row of `token_budget` tokens: whole conversations one after another, then the unused tail.

    input_ids, labels (int32), loss_weights (float32), role_ids (uint8), position_ids (int32): [token_budget].
        In the tail: the pad id, IGNORE_INDEX, 0, Role.PADDING, positions counting from 0.
    cu_seqlens: int32 [documents + 1], what attention may see: one document per conversation with
        remove_cross_attention, else a single one over all of them; the tail, if any, is one more. Ends at token_budget.
    conversation_bounds: int32 [conversations + 1], where the conversations lie, whatever attention sees.
    keys: the conversations, in order.
    index: n, the number of this pack in the run; it is the same for any number of ranks and workers.
    lane, lane_state: the lane it came from, and that lane's state once this pack is consumed (see lanes.py).
    dropped_rows: rows dropped on the way to it.
    num_truncated: conversations in it that lost turns at their end.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    loss_weights: np.ndarray
    role_ids: np.ndarray
    position_ids: np.ndarray
    cu_seqlens: np.ndarray
    conversation_bounds: np.ndarray
    keys: tuple[ConversationKey, ...]
    index: int = 0
    lane: int = 0
    lane_state: str = ""
    dropped_rows: tuple[Dropped, ...] = ()
    num_truncated: int = 0

    @property
    def dropped(self) -> Counter[tuple[int, str]]:
        """Rows dropped on the way to it, counted by (index of the data set, reason)."""
        return count_dropped(self.dropped_rows)

    @property
    def num_rows(self) -> int:
        """Rows of the data that this pack used up: its conversations and those dropped on the way to it."""
        return len(self.keys) + len(self.dropped_rows)

    @property
    def num_tokens(self) -> int:
        """Real tokens, the tail not counted."""
        return int(self.conversation_bounds[-1])

    @property
    def num_trained_tokens(self) -> int:
        return int((self.labels != IGNORE_INDEX).sum())


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A pack as the model takes it: torch tensors made on the CPU, so that a step never waits for a device.

    input_ids, position_ids: int64 and int32 [T]; role_ids: uint8 [T].
    cu_seqlens: int32 [documents + 1]; max_seqlen: a Python int, the longest document's length.
    labeled_rows: int64 [N], the positions that have a label, ascending; labels int64 [N] and loss_weights float32 [N]
        belong to them, and so do label_roles uint8 [N], the roles of the tokens that the labels name, and label_sources
        int32 [N], the data sets they come from, by index. N may be 0.
    untrained_rows, untrained_labels: int64 [M], positions without a label, and the tokens that follow there, whose
        losses are measured now and then; untrained_roles: uint8 [M], of those tokens. M is 0 where none are wanted.
    weight_sum: the sum of loss_weights as a Python float; it enters the step's one denominator.
    pack: the pack it was made of.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    role_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    labeled_rows: torch.Tensor
    labels: torch.Tensor
    loss_weights: torch.Tensor
    label_roles: torch.Tensor
    label_sources: torch.Tensor
    untrained_rows: torch.Tensor
    untrained_labels: torch.Tensor
    untrained_roles: torch.Tensor
    weight_sum: float
    pack: Pack

    def pin_memory(self) -> Batch:
        """In page-locked memory, from where copies to a GPU need not be waited for; torch's loaders call this."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return replace(
            self, **{name: value.pin_memory() for name, value in values.items() if isinstance(value, torch.Tensor)}
        )
