"""Texts of tokens are exact for any tokenizer, and what is trained is the label of the position before."""

from itertools import accumulate

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sftron.data.types import IGNORE_INDEX, ConversationKey, LabeledConversation, Role
from sftron.report.shown import key_text, numbered_row, pack_trained_tokens, shown_conversations
from sftron.report.tokens import token_texts
from sftron.visible_text import visible_text

from .bytes_tokenizer import (
    CHATS,
    VOCABULARY_SIZE,
    awkward_pack,
    conversation,
    decode,
    encode,
    pack,
    trained_by_brute_force,
)


def decode_like_sentencepiece(ids: list[int]) -> str:
    """Every token brings a space before it, and the first space of the text is stripped."""
    return decode([byte for id_ in ids for byte in (0x20, id_)]).removeprefix(" ")


def decode_with_clean_up(ids: list[int]) -> str:
    """Rewrites text across tokens, as `clean_up_tokenization_spaces` does."""
    return decode(ids).replace(" .", ".").replace("a b", "ab")


def decode_backwards(ids: list[int]) -> str:
    """No text of some first tokens is the beginning of the whole text."""
    return f" {decode(ids)[::-1]}\n" if ids else ""


DECODERS = (decode, decode_like_sentencepiece, decode_with_clean_up, decode_backwards)


@given(st.lists(st.integers(0, VOCABULARY_SIZE - 1), max_size=60))
def test_texts_are_exact_for_any_ids_even_those_that_are_no_utf8(ids: list[int]) -> None:
    for decoder in DECODERS:
        texts = token_texts(decoder, ids)
        assert "".join(text for text, _ in texts) == decoder(ids)
        assert sum(num_tokens for _, num_tokens in texts) == len(ids)
        assert all(num_tokens > 0 for _, num_tokens in texts)


@given(st.text())
def test_texts_are_as_fine_as_whole_characters_allow(text: str) -> None:
    def is_whole(ids: list[int]) -> bool:
        return "\ufffd" not in decode(ids) or encode(decode(ids)) == ids

    ids = encode(text)
    # A boundary is possible after each token up to which the bytes are valid UTF-8; texts must end at all of these.
    possible = [end for end in range(1, len(ids) + 1) if is_whole(ids[:end])]
    assert list(accumulate(num_tokens for _, num_tokens in token_texts(decode, ids))) == possible


def test_characters_and_tokens_without_text_join_tokens() -> None:
    assert token_texts(decode, [0x61, 0xE2, 0x98, 0x83, 0x62]) == [("a", 1), ("☃", 3), ("b", 1)]

    def decode_without_controls(ids: list[int]) -> str:
        return decode([id_ for id_ in ids if id_ < VOCABULARY_SIZE - 2])

    silent = VOCABULARY_SIZE - 1
    assert token_texts(decode_without_controls, [silent, 97, silent, 98]) == [("a", 3), ("b", 1)]
    assert token_texts(decode_without_controls, [silent, silent]) == [("", 2)]
    assert token_texts(decode_without_controls, []) == []


def test_decoding_stays_linear() -> None:
    num_decoded = 0

    def counting(ids: list[int]) -> str:
        nonlocal num_decoded
        num_decoded += len(ids)
        return decode(ids)

    ids = encode("Ein ☃ und noch ein 😀. " * 100)
    token_texts(counting, ids)
    assert num_decoded < 20 * len(ids)


def test_what_acts_on_a_terminal_is_written_out() -> None:
    assert visible_text("a\x1b[0m\x00\x7f\x9b\r") == "a␛[0m␀␡<U+009B>␍"
    for (
        unseen
    ) in "\u3164\u2800\u115f\u1160\uffa0\u034f\u17b4\u180b\u180f\ufe00\ufe0d\ufe0e\ufe0f\U0001d159\U0001d173\U000e0fff":
        assert visible_text(f"a{unseen}b") == f"a<U+{ord(unseen):04X}>b"
    hearts = "\u2764\ufe0f and \U0001f3f3\ufe0f\u200d\U0001f308, 1\ufe0f\u20e3, \xa9\ufe0e"
    assert visible_text(hearts) == hearts
    assert visible_text("\u2764\ufe0f\ufe0f 1\ufe0f") == "\u2764\ufe0f<U+FE0F> 1<U+FE0F>", "each would be a hidden bit"
    assert visible_text("\u202e\u200b\u2066\ud800\U000e0041") == "<U+202E><U+200B><U+2066><U+D800><U+E0041>"


@given(st.text(st.characters(exclude_categories=["Cc", "Cf", "Cn", "Cs", "Zl", "Zp"])))
def test_ordinary_text_is_left_as_it_is(text: str) -> None:
    text += "\n\t👩‍👧"  # newline and tab are for the views; the joiner inside an emoji family is no trick
    ignorable = "\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2800\u3164\uffa0\U0001d159"
    kept = "".join(c for c in text if c not in ignorable and not 0xE0100 <= ord(c) <= 0xE01EF)
    kept = "".join(c for c in kept if not 0xFE00 <= ord(c) <= 0xFE0F)
    assert visible_text(kept) == kept


def test_trained_tokens_are_the_labels_of_the_position_before() -> None:
    shown = awkward_pack()
    trained = pack_trained_tokens(shown).tolist()
    assert trained[: shown.num_tokens] == trained_by_brute_force(shown)
    assert not any(trained[shown.num_tokens :])
    assert 0 < sum(trained) == shown.num_trained_tokens < shown.num_tokens
    for border in shown.conversation_bounds[1:-1].tolist():
        shown.labels[border - 1] = shown.input_ids[border]
        shown.loss_weights[border - 1] = 1
        assert not pack_trained_tokens(shown)[border], "a label on the border trains the neighbor"
    shown.loss_weights[:] = 0
    assert not pack_trained_tokens(shown).any()


def test_a_character_of_which_one_byte_is_trained_is_partly_trained() -> None:
    shown = pack([conversation([(Role.USER, "a"), (Role.ASSISTANT, "☃")])[1]])
    shown.labels[trained_by_brute_force(shown).index(True)] = IGNORE_INDEX  # the label of its second byte
    (snowman,) = [span for each in shown_conversations(shown, decode) for span in each.spans if span.text == "☃"]
    assert snowman.is_partly_trained


def block_texts(labeled: LabeledConversation, decoder=decode) -> list[tuple[Role, str]]:
    (shown,) = shown_conversations(pack([labeled]), decoder)
    return [(block.role, "".join(span.text for span in block.spans)) for block in shown.blocks]


def test_a_block_holds_one_speaker_between_its_header_and_its_white_space() -> None:
    assert block_texts(conversation(CHATS[0])[1]) == [
        (role, f"<|im_start|>{role.name.lower()}\n{content}<|im_end|>\n") for role, content in CHATS[0]
    ]
    tokenized, labeled = conversation([(Role.ASSISTANT, "thought, word")])
    start = tokenized.turns[0].start
    labeled.role_ids[start : start + len("thought")] = Role.REASONING
    assert [role for role, _ in block_texts(labeled)] == [Role.REASONING, Role.ASSISTANT]


def test_a_turn_of_the_templates_own_is_a_block_of_its_own() -> None:
    """A default system prompt is nobody's message, least of all the user's that follows it."""
    names = ["", "<|im_start|>", "sys", "Be kind.", "<|im_end|>", "user", "Hi"]
    ids = np.array([1, 2, 3, 4, 1, 5, 6, 4], np.int32)
    roles = np.array([Role.TEMPLATE] * 6 + [Role.USER] * 2, np.uint8)
    labels, weights = np.full(len(ids), IGNORE_INDEX, np.int32), np.zeros(len(ids), np.float32)
    labeled = LabeledConversation(ids, labels, weights, roles, ConversationKey(0, 0))
    assert block_texts(labeled, lambda ids: "".join(names[number] for number in ids)) == [
        (Role.TEMPLATE, "<|im_start|>sysBe kind.<|im_end|>"),
        (Role.USER, "<|im_start|>userHi<|im_end|>"),
    ]


def test_keys_are_named_for_people() -> None:
    assert key_text(ConversationKey(1, 1234, 2), lambda key: f"b\nc:{key.row}") == "b c:1234, epoch 2"
    assert key_text(ConversationKey(2, 7), numbered_row) == "row 7 of data set 2"
