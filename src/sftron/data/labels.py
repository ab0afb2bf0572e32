"""Labels, their shift by one position, and their loss weights. Only this module decides which tokens are trained."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import numpy as np

from sftron.data.types import IGNORE_INDEX, LabeledConversation, Pack, Role, TokenizedConversation

PARTS_OF_ROLES = {
    "system": frozenset({Role.SYSTEM}),
    "user": frozenset({Role.USER}),
    "assistant": frozenset({Role.ASSISTANT, Role.REASONING, Role.TOOL_CALL}),
    "answer": frozenset({Role.ASSISTANT}),
    "reasoning": frozenset({Role.REASONING}),
    "tool_call": frozenset({Role.TOOL_CALL}),
    "tool": frozenset({Role.TOOL}),
}
"""The roles that each name of `data.train_on_roles` stands for; "assistant" is answers, reasoning and tool calls."""

DEFAULT_TRAINED_ROLES = PARTS_OF_ROLES["assistant"]
_ALWAYS_TRAINED = frozenset({Role.TEXT})
"""Documents have no completions, so no option selects tokens of them."""


@dataclass(frozen=True, slots=True)
class Targets:
    """Selects the tokens of conversations that are trained with train_on_completions_only.

    Of documents, all tokens but the first are.
    """

    roles: frozenset[Role] = DEFAULT_TRAINED_ROLES
    last_turn_only: bool = False
    """Whether only the last turn that has such a role is trained."""

    @classmethod
    def named(cls, roles: Collection[str], turns: str) -> Targets:
        """Returns the targets for `data.train_on_roles` and `data.train_on_turns`."""
        return cls(frozenset().union(*(PARTS_OF_ROLES[name] for name in roles)), turns == "last")

    def __str__(self) -> str:
        roles = ", ".join(sorted(role.name.lower() for role in self.roles))
        return f"{roles} of the last turn" if self.last_turn_only else roles

    def mask_of(self, conversation: TokenizedConversation) -> np.ndarray:
        """Returns, as bool [n], whether each token is trained. A token of weight 0 is not."""
        is_target = _is_of(self.roles | _ALWAYS_TRAINED)[conversation.role_ids]
        if conversation.token_weights is not None:
            is_target &= conversation.token_weights > 0
        if self.last_turn_only:
            is_target[: _start_of_last_turn(conversation, is_target)] = False
        return is_target

    def may_be_in(self, speaker: Role) -> bool:
        """Returns whether a message of this role may contain a target."""
        return speaker in self.roles or (speaker is Role.ASSISTANT and bool(self.roles & PARTS_OF_ROLES["assistant"]))

    def has_any(self, conversation: TokenizedConversation) -> bool:
        """Returns whether the conversation has a target.

        A conversation without one is dropped, whatever train_on_completions_only is, so that packs do not depend on the
        toggle (law 5).
        """
        return bool(self.mask_of(conversation)[1:].any())


def label_conversations(
    conversations: Sequence[TokenizedConversation], targets: Targets, *, train_on_completions_only: bool
) -> list[LabeledConversation]:
    """Returns the conversations with their labels, shifted by one position, and the labels' weights.

    With train_on_completions_only, only the targets become labels: by default the assistant's text and the stop token
    that ends each of its turns. Without it, and in documents, every token but the first becomes a label. The last
    position never has a label. The weight of a label is that of its message, by default 1.

        input_ids   <s>  user  Hi  </s>  assistant  Yo  </s>
        role_ids     T    T    U    U        T       A    A
        labels       -    -    -    -       Yo     </s>   -        completions only
        labels     user  Hi  </s> assistant  Yo    </s>   -        everything
    """
    if not conversations:
        return []
    # All conversations at once, as they are short: the same operations on each of them take five times as long.
    ends = list(accumulate(map(len, conversations)))
    input_ids = np.concatenate([each.input_ids for each in conversations])
    if not train_on_completions_only:
        is_target = np.ones(len(input_ids), dtype=bool)
    elif targets.last_turn_only:
        is_target = np.concatenate([targets.mask_of(each) for each in conversations])
    else:
        is_of = _is_of(targets.roles | _ALWAYS_TRAINED)
        is_target = is_of[np.concatenate([each.role_ids for each in conversations])]
    weights = is_target.astype(np.float32)
    for each, end in zip(conversations, ends, strict=True):
        if each.token_weights is not None:
            weights[end - len(each) : end] *= each.token_weights
    weights[[0, *ends[:-1]]] = 0  # no token precedes the first of a conversation
    loss_weights = np.append(weights[1:], np.float32(0))
    labels = np.append(input_ids[1:], np.int32(0))
    labels[loss_weights == 0] = IGNORE_INDEX
    return [
        LabeledConversation(
            input_ids=each.input_ids,
            labels=labels[end - len(each) : end],
            loss_weights=loss_weights[end - len(each) : end],
            role_ids=each.role_ids,
            key=each.key,
            num_truncated_turns=each.num_truncated_turns,
        )
        for each, end in zip(conversations, ends, strict=True)
    ]


def label_roles(pack: Pack) -> np.ndarray:
    """Returns, as uint8 [token_budget], the role of the next token in the same conversation, which is the token that a
    label at this position holds, or Role.PADDING where there is none.

        input_ids   <s>  user  Hi  </s>  |  <s>  assistant  Yo  </s>  |  pad
        roles        T    U    U    -       T       A       A    -       -
    """
    roles = np.full(len(pack.role_ids), Role.PADDING, dtype=np.uint8)
    roles[:-1] = pack.role_ids[1:]
    roles[pack.conversation_bounds[1:] - 1] = Role.PADDING
    return roles


def untrained_rows(pack: Pack, roles: frozenset[Role]) -> np.ndarray:
    """Returns, as int64 [N], the positions without a label whose next token in the same conversation has one of
    `roles`. That token is `input_ids[positions + 1]`."""
    if not roles:
        return np.empty(0, dtype=np.int64)
    return np.flatnonzero((pack.labels == IGNORE_INDEX) & _is_of(roles)[label_roles(pack)])


@cache
def _is_of(roles: frozenset[Role]) -> np.ndarray:
    """Returns a bool table indexed by role id. A look-up takes a tenth of the time of np.isin."""
    return np.array([role in roles for role in Role])


def _start_of_last_turn(conversation: TokenizedConversation, is_target: np.ndarray) -> int:
    """Returns the start of the last turn that has a target; without turns, the start of the last span of targets."""
    turns = conversation.turns
    starts = [0, *(turn.end if turn.stop is None else turn.stop + 1 for turn in turns[:-1])]
    for start in reversed(starts if turns else []):
        if is_target[start:].any():
            return start
    before = np.flatnonzero(~is_target[: np.flatnonzero(is_target).max(initial=0)])
    return int(before[-1]) + 1 if len(before) else 0
