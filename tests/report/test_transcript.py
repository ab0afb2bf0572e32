import numpy as np

from sftron.data.types import IGNORE_INDEX, ConversationKey, LabeledConversation, Role
from sftron.report.transcript import key_text, pack_trained_tokens, shown_conversations

from .bytes_tokenizer import CHATS, awkward_pack, conversation, decode, pack, trained_by_brute_force


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
