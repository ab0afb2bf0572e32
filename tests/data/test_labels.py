"""What is trained: content of the trained roles and their stop tokens, shifted once, under either setting."""

import numpy as np
import pytest

from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.labels import Targets, label_conversation
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
def test_labels_are_the_next_token_where_the_model_must_say_it(completions_only: bool, roles: str, labels: str) -> None:
    labeled = label_conversation(tokenized(roles), train_on_completions_only=completions_only)
    expected = [IGNORE_INDEX if mark == "." else 10 + int(mark) for mark in labels]

    assert labeled.labels.tolist() == expected
    assert labeled.loss_weights.tolist() == [float(label != IGNORE_INDEX) for label in expected]


def test_the_toggle_changes_labels_and_weights_and_nothing_else() -> None:
    on, off = (label_conversation(tokenized("TUUTAAT"), train_on_completions_only=setting) for setting in (True, False))

    assert np.array_equal(on.input_ids, off.input_ids)
    assert np.array_equal(on.role_ids, off.role_ids)
    assert not np.array_equal(on.labels, off.labels)


def test_whether_a_row_is_kept_does_not_depend_on_the_toggle() -> None:
    assert Targets().has_any(tokenized("TUAT"))
    assert not Targets().has_any(tokenized("TUUT"))
    assert not Targets().has_any(tokenized("A"))  # the first token is nobody's next


def test_the_trained_text_of_a_chat_is_the_answers_and_their_stop_tokens(chat_tokenizer: ChatTokenizer) -> None:
    messages = [
        (Role.SYSTEM, "S"),
        (Role.USER, "Q <|im_end|>"),
        (Role.ASSISTANT, "One."),
        (Role.USER, "R"),
        (Role.ASSISTANT, ""),
    ]
    conversation = Conversation(tuple(Message(*message) for message in messages), ConversationKey(0, 0), "here")
    labeled = label_conversation(chat_tokenizer.encode(conversation), train_on_completions_only=True)

    trained = labeled.labels[labeled.labels != IGNORE_INDEX]
    assert chat_tokenizer.decode(trained) == "One.<|im_end|><|im_end|>"


def spoken(chat_tokenizer: ChatTokenizer, messages: list[Message], targets: Targets) -> tuple[str, list[float]]:
    """The text that is trained, and the weights of its tokens."""
    conversation = Conversation(tuple(messages), ConversationKey(0, 0), "here")
    labeled = label_conversation(chat_tokenizer.encode(conversation), targets, train_on_completions_only=True)
    is_trained = labeled.labels != IGNORE_INDEX
    assert np.array_equal(is_trained, labeled.loss_weights > 0)
    return chat_tokenizer.decode(labeled.labels[is_trained]), labeled.loss_weights[is_trained].tolist()


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
    assert spoken(chat_tokenizer, ROUNDS, Targets.named(roles, turns))[0] == text


def test_a_message_weighs_what_its_row_says_with_its_stop_token_and_0_leaves_it_out(
    chat_tokenizer: ChatTokenizer,
) -> None:
    def weighed(weight: float) -> tuple[str, list[float]]:
        messages = [Message(Role.USER, "Q"), Message(Role.ASSISTANT, "One.", weight=weight), *ROUNDS[3:4]]
        return spoken(chat_tokenizer, [*messages, Message(Role.ASSISTANT, "Two.")], Targets())

    text, weights = weighed(0.5)
    num_first = len(chat_tokenizer.tokenizer("One.")["input_ids"]) + 1
    assert text == "One.<|im_end|>Two.<|im_end|>"
    assert weights == [0.5] * num_first + [1.0] * (len(weights) - num_first)
    assert weighed(0.0)[0] == "Two.<|im_end|>"
    assert not Targets().has_any(
        chat_tokenizer.encode(
            Conversation(
                (Message(Role.USER, "Q"), Message(Role.ASSISTANT, "A", weight=0)), ConversationKey(0, 0), "here"
            )
        )
    )
