"""What is trained: content of the trained roles and their stop tokens, shifted once, under either setting (law 2)."""

import numpy as np
import pytest

from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.labels import Targets, label_conversations
from sftron.data.types import IGNORE_INDEX, Conversation, ConversationKey, Message, Role, TokenizedConversation


def tokenized(roles: str) -> TokenizedConversation:
    letters = {"T": Role.TEMPLATE, "U": Role.USER, "A": Role.ASSISTANT}
    role_ids = np.array([letters[letter] for letter in roles], dtype=np.uint8)
    return TokenizedConversation(np.arange(10, 10 + len(roles), dtype=np.int32), role_ids, (), ConversationKey(0, 0))


@pytest.mark.parametrize(
    ("completions_only", "roles", "labels"),
    [
        (True, "TUUTAAT", "...45.."),
        (True, "TUUT", "...."),
        (True, "AAU", "1.."),
        (True, "A", "."),
        (False, "TUUTAAT", "123456."),
        (False, "A", "."),
    ],
)
def test_labels_are_the_next_token_where_it_is_trained_and_nothing_else_depends_on_the_toggle(
    completions_only: bool, roles: str, labels: str
) -> None:
    conversation = tokenized(roles)
    (labeled,) = label_conversations([conversation], Targets(), train_on_completions_only=completions_only)
    expected = [IGNORE_INDEX if mark == "." else 10 + int(mark) for mark in labels]
    assert labeled.labels.tolist() == expected
    assert labeled.loss_weights.tolist() == [float(label != IGNORE_INDEX) for label in expected]
    assert np.array_equal(labeled.input_ids, conversation.input_ids)
    assert np.array_equal(labeled.role_ids, conversation.role_ids)


def test_without_turns_the_last_turn_is_the_last_span_of_targets() -> None:
    last = Targets(last_turn_only=True)
    assert last.mask_of(tokenized("TAUAAT")).tolist() == [False, False, False, True, True, False]
    assert last.mask_of(tokenized("AAU")).tolist() == [True, True, False]
    assert not last.mask_of(tokenized("TUT")).any()


def test_whether_a_row_is_kept_does_not_depend_on_the_toggle() -> None:
    assert Targets().has_any(tokenized("TUAT"))
    assert not Targets().has_any(tokenized("TUUT"))
    assert not Targets().has_any(tokenized("A"))  # the first token is nobody's next


def trained(
    chat_tokenizer: ChatTokenizer, messages: list[Message], targets: Targets | None = None
) -> tuple[str, list[float]]:
    """Returns the text that is trained, and the weights of its tokens."""
    conversation = Conversation(tuple(messages), ConversationKey(0, 0), "here")
    (labeled,) = label_conversations(
        [chat_tokenizer.encode(conversation)], targets or Targets(), train_on_completions_only=True
    )
    is_trained = labeled.labels != IGNORE_INDEX
    assert np.array_equal(is_trained, labeled.loss_weights > 0)
    return chat_tokenizer.decode(labeled.labels[is_trained]), labeled.loss_weights[is_trained].tolist()


def test_the_trained_text_of_a_chat_is_the_answers_and_their_stop_tokens(chat_tokenizer: ChatTokenizer) -> None:
    texts = [("SYSTEM", "S"), ("USER", "Q <|im_end|>"), ("ASSISTANT", "One."), ("USER", "R"), ("ASSISTANT", "")]
    text, _ = trained(chat_tokenizer, [Message(Role[role], text) for role, text in texts])
    assert text == "One.<|im_end|><|im_end|>"


ROUNDS = [
    Message(Role.SYSTEM, "S"),
    Message(Role.USER, "Q"),
    Message(Role.ASSISTANT, "One.", weight=0.5),
    Message(Role.USER, "R"),
    Message(Role.ASSISTANT, "<think>\nhm\n</think>\n\nTwo."),
]


@pytest.mark.parametrize(
    ("roles", "turns", "text"),
    [
        (["assistant"], "all", "One.<|im_end|><think>\nhm\n</think>\n\nTwo.<|im_end|>"),
        (["answer"], "all", "One.<|im_end|>Two.<|im_end|>"),
        (["reasoning"], "all", "<think>\nhm\n</think>\n\n"),
        (["assistant"], "last", "<think>\nhm\n</think>\n\nTwo.<|im_end|>"),
        (["user"], "all", "Q<|im_end|>R<|im_end|>"),
        (["user"], "last", "R<|im_end|>"),
        (["system", "user"], "all", "S<|im_end|>Q<|im_end|>R<|im_end|>"),
        (["tool"], "all", ""),
    ],
)
def test_the_trained_roles_and_turns_are_those_that_are_named(
    chat_tokenizer: ChatTokenizer, roles: list[str], turns: str, text: str
) -> None:
    assert trained(chat_tokenizer, ROUNDS, Targets.named(roles, turns))[0] == text


def test_a_messages_weight_is_that_of_its_tokens_and_its_stop_token_and_0_leaves_it_out(
    chat_tokenizer: ChatTokenizer,
) -> None:
    def weighted(weight: float) -> tuple[str, list[float]]:
        first = [Message(Role.USER, "Q"), Message(Role.ASSISTANT, "One.", weight=weight)]
        return trained(chat_tokenizer, [*first, Message(Role.USER, "R"), Message(Role.ASSISTANT, "Two.")])

    text, weights = weighted(0.5)
    num_first = len(chat_tokenizer.tokenizer("One.")["input_ids"]) + 1
    assert text == "One.<|im_end|>Two.<|im_end|>"
    assert weights == [0.5] * num_first + [1.0] * (len(weights) - num_first)
    assert weighted(0.0)[0] == "Two.<|im_end|>"
    # The template's own words, which are labels as well without train_on_completions_only, have the weight 1.
    both = (Message(Role.USER, "Q", weight=2), Message(Role.ASSISTANT, "A", weight=3))
    every = chat_tokenizer.encode(Conversation(both, ConversationKey(0, 0), "here"))
    (labeled,) = label_conversations([every], Targets(), train_on_completions_only=False)
    weight_of = {Role.USER: 2, Role.ASSISTANT: 3, Role.TEMPLATE: 1}
    assert labeled.loss_weights[:-1].tolist() == [weight_of[Role(role)] for role in every.role_ids[1:]]
    alone = (Message(Role.USER, "Q"), Message(Role.ASSISTANT, "A", weight=0))
    assert not Targets().has_any(chat_tokenizer.encode(Conversation(alone, ConversationKey(0, 0), "here")))
