from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from sftron.report.pieces import Piece, token_pieces
from sftron.visible_text import visible_text

from .bytes_tokenizer import CHATS, VOCABULARY_SIZE, decode, encode


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
