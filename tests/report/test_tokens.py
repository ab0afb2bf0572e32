from itertools import accumulate

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sftron.data.types import IGNORE_INDEX, ConversationKey, LabeledConversation, Role
from sftron.report.tokens import Piece, key_text, pack_trained_tokens, shown_conversations, token_pieces
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


def test_the_picture_in_the_docstring_holds():
    assert token_pieces(decode, [0x61, 0xE2, 0x98, 0x83, 0x62]) == [
        Piece("a", 1),
        Piece("☃", 3),
        Piece("b", 1),
    ]


def decode_backwards(ids: list[int]) -> str:
    """No text of some first tokens is the beginning of the whole text."""
    return f" {decode(ids)[::-1]}\n" if ids else ""


def decode_with_ending(ids: list[int]) -> str:
    """The end of the text is no token's."""
    return decode(ids) + " \n" * (len(ids) > 4)


DECODERS = (decode, decode_like_sentencepiece, decode_with_clean_up, decode_backwards, decode_with_ending)


@given(st.lists(st.integers(0, VOCABULARY_SIZE - 1), max_size=60))
def test_pieces_are_exact_for_any_ids_even_those_that_are_no_utf8(ids):
    for decoder in DECODERS:
        pieces = token_pieces(decoder, ids)
        assert "".join(piece.text for piece in pieces) == decoder(ids)
        assert sum(piece.num_tokens for piece in pieces) == len(ids)
        assert all(piece.num_tokens > 0 for piece in pieces)


@given(st.text())
def test_pieces_of_text_are_as_fine_as_whole_characters_allow(text):
    ids = encode(text)
    # A boundary is possible after each token up to which the bytes are valid UTF-8; pieces must end at all of these.
    possible = [end for end in range(1, len(ids) + 1) if _is_whole(ids[:end])]
    ends = list(accumulate(piece.num_tokens for piece in token_pieces(decode, ids)))
    assert ends == possible


def _is_whole(ids: list[int]) -> bool:
    text = decode(ids)
    return encode(text) == ids if "\ufffd" in text else True


def test_tokens_split_and_join_characters_in_the_fixture():
    ids = [id_ for chat in CHATS for _, content in chat for id_ in encode(content)]
    num_tokens = [piece.num_tokens for piece in token_pieces(decode, ids)]
    assert max(num_tokens) > 1, "no character is spread over tokens, so the fixture proves nothing"
    assert any(id_ >= 256 for id_ in ids), "no token holds several bytes"


def test_a_token_without_text_belongs_to_the_piece_before_it():
    def decode_without_controls(ids: list[int]) -> str:
        return decode([id_ for id_ in ids if id_ < VOCABULARY_SIZE - 2])

    silent = VOCABULARY_SIZE - 1
    assert token_pieces(decode_without_controls, [silent, 97, silent, 98]) == [Piece("a", 3), Piece("b", 1)]
    assert token_pieces(decode_without_controls, [silent, silent]) == [Piece("", 2)]
    assert token_pieces(decode_without_controls, []) == []


def test_decoding_stays_linear_when_no_boundary_is_found_nearby():
    num_decoded = 0

    def counting(ids: list[int]) -> str:
        nonlocal num_decoded
        num_decoded += len(ids)
        return decode(ids)

    ids = encode("Ein ☃ und noch ein 😀. " * 100)
    token_pieces(counting, ids)
    assert num_decoded < 20 * len(ids)


def test_what_acts_on_a_terminal_is_written_out():
    assert visible_text("a\x1b[0m\x00\x7f\x9b\r") == "a␛[0m␀␡<U+009B>␍"
    assert visible_text("\u202e\u200b\u2066\ud800\U000e0041") == "<U+202E><U+200B><U+2066><U+D800><U+E0041>"


@given(st.text(st.characters(exclude_categories=["Cc", "Cf", "Cn", "Cs", "Zl", "Zp"])))
def test_ordinary_text_is_left_as_it_is(text):
    text += "\n\t👩‍👧"  # newline and tab are for the views; the joiner inside an emoji family is no trick
    kept = "".join(c for c in text if not 0xE0100 <= ord(c) <= 0xE01EF)
    assert visible_text(kept) == kept


def test_trained_tokens_are_the_labels_of_the_position_before():
    shown = awkward_pack()
    trained = pack_trained_tokens(shown).tolist()
    assert trained[: shown.num_tokens] == trained_by_brute_force(shown)
    assert not any(trained[shown.num_tokens :])
    assert 0 < sum(trained) == shown.num_trained_tokens < shown.num_tokens


def test_a_label_on_the_border_trains_no_neighbour():
    shown = awkward_pack()
    for border in shown.conversation_bounds[1:-1].tolist():
        shown.labels[border - 1] = shown.input_ids[border]
        shown.loss_weights[border - 1] = 1
        assert not pack_trained_tokens(shown)[border]


def test_a_label_without_weight_trains_nothing():
    shown = awkward_pack()
    shown.loss_weights[:] = 0
    assert not pack_trained_tokens(shown).any()


def test_pieces_cover_every_token_once_and_show_the_decoded_text():
    shown = awkward_pack()
    trained = trained_by_brute_force(shown)
    at = 0
    num_partly_possible = 0
    for conversation_ in shown_conversations(shown, decode):
        pieces = [piece for block in conversation_.blocks for piece in block.pieces]
        ids = shown.input_ids[conversation_.start : conversation_.end].tolist()
        assert "".join(piece.text for piece in pieces) == decode(ids)
        for piece in pieces:
            assert piece.start == at
            assert piece.num_trained == sum(trained[piece.start : piece.end])
            num_partly_possible += piece.end - piece.start > 1 and piece.is_trained
            at = piece.end
        assert conversation_.num_trained == sum(piece.num_trained for piece in pieces)
    assert at == shown.num_tokens
    assert num_partly_possible, "no trained character is spread over tokens"


def test_a_character_of_which_one_byte_is_trained_is_partly_trained():
    shown = pack([conversation([(Role.USER, "a"), (Role.ASSISTANT, "☃")])[1]])
    first_byte = trained_by_brute_force(shown).index(True)
    shown.labels[first_byte] = -100  # the label of the second byte
    (snowman,) = [p for c in shown_conversations(shown, decode) for b in c.blocks for p in b.pieces if p.text == "☃"]
    assert snowman.is_trained
    assert snowman.is_partly_trained


def test_a_block_holds_one_speaker_between_its_header_and_its_white_space():
    shown = pack([conversation(CHATS[0])[1]])
    (conversation_,) = shown_conversations(shown, decode)
    assert [(block.role, "".join(piece.text for piece in block.pieces)) for block in conversation_.blocks] == [
        (role, f"<|im_start|>{role.name.lower()}\n{content}<|im_end|>\n") for role, content in CHATS[0]
    ]


def test_speakers_without_headers_between_them_are_told_apart():
    tokenized, labeled = conversation([(Role.ASSISTANT, "thought, word")])
    start = tokenized.turns[0].start
    labeled.role_ids[start : start + len("thought")] = Role.REASONING
    (conversation_,) = shown_conversations(pack([labeled]), decode)
    assert [block.role for block in conversation_.blocks] == [Role.REASONING, Role.ASSISTANT]


def test_keys_are_named_for_people():
    assert key_text(ConversationKey(1, 1234, 2), ["a", "b\nc"]) == "row 1,234 of b c, epoch 2"
    assert key_text(ConversationKey(1, 7), ["a"]) == "row 7 of data set 1"


def test_a_turn_of_the_templates_own_is_a_block_of_its_own():
    """A default system prompt is nobody's message, least of all the user's that follows it."""
    names = ["", "<|im_start|>", "sys", "Be kind.", "<|im_end|>", "user", "Hi"]
    ids, roles = [1, 2, 3, 4, 1, 5, 6, 4], "TTTTTTUU"
    role_ids = np.array([Role.USER if role == "U" else Role.TEMPLATE for role in roles], dtype=np.uint8)
    labels = np.full(len(ids), IGNORE_INDEX, dtype=np.int32)
    weights = np.zeros(len(ids), dtype=np.float32)
    labeled = LabeledConversation(np.array(ids, dtype=np.int32), labels, weights, role_ids, ConversationKey(0, 0))

    (shown,) = shown_conversations(pack([labeled]), lambda ids: "".join(names[number] for number in ids))

    assert [(block.role, "".join(piece.text for piece in block.pieces)) for block in shown.blocks] == [
        (Role.TEMPLATE, "<|im_start|>sysBe kind.<|im_end|>"),
        (Role.USER, "<|im_start|>userHi<|im_end|>"),
    ]
