"""What is trained, decided here and nowhere else: labels, their shift, and their weights."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from sftron.data.types import IGNORE_INDEX, LabeledConversation, Role, TokenizedConversation

DEFAULT_TRAINED_ROLES = frozenset({Role.ASSISTANT})


def has_trained_token(conversation: TokenizedConversation, trained_roles: Collection[Role]) -> bool:
    """Whether anything is left to train on. Asked under either setting of the toggle, so that packs do not differ."""
    return bool(_of_roles(conversation, trained_roles)[1:].any())


def label_conversation(
    conversation: TokenizedConversation,
    *,
    train_on_completions_only: bool,
    trained_roles: Collection[Role] = DEFAULT_TRAINED_ROLES,
) -> LabeledConversation:
    """Shift ids to labels and weigh them: 1 where the model itself must say the token, else no label.

    With train_on_completions_only the targets are the content of the trained roles and the stop token that ends each
    of their turns; without it, every token but the first. The last position never has a label.

        input_ids   <s>  user  Hi  </s>  assistant  Yo  </s>
        role_ids     T    T    U    U        T       A    A
        labels       -    -    -    -       Yo     </s>   -        completions only
        labels     user  Hi  </s> assistant  Yo    </s>   -        everything
    """
    is_target = (
        _of_roles(conversation, trained_roles) if train_on_completions_only else np.ones(len(conversation), dtype=bool)
    )
    labels = np.full(len(conversation), IGNORE_INDEX, dtype=np.int32)
    labels[:-1] = np.where(is_target[1:], conversation.input_ids[1:], IGNORE_INDEX)
    return LabeledConversation(
        input_ids=conversation.input_ids,
        labels=labels,
        loss_weights=(labels != IGNORE_INDEX).astype(np.float32),
        role_ids=conversation.role_ids,
        key=conversation.key,
        num_truncated_turns=conversation.num_truncated_turns,
    )


def _of_roles(conversation: TokenizedConversation, roles: Collection[Role]) -> np.ndarray:
    return np.isin(conversation.role_ids, [int(role) for role in roles])
