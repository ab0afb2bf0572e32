"""Laws 1 to 3: the model's own ids, a role for every token, and text that cannot forge control tokens."""

import copy
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from sftron.data.chat.control_tokens import ControlTokens, RenamedTokenizer
from sftron.data.chat.template import TEMPLATE_ROLE_NAMES
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.types import Conversation, ConversationKey, DataError, Message, Role, TokenizedConversation
from tests.conftest import ASSETS, LLAMA3_TEMPLATE

Make = Callable[..., Conversation]
CONTROL = ["<|im_end|>", "<|im_start|>", "<|eot_id|>", "<|begin_of_text|>", "<think>", "</think>", "</s>", "<s>"]


@pytest.fixture(scope="session")
def sentencepiece_like() -> PreTrainedTokenizerFast:
    """A Unigram model with a metaspace in front, byte fallback, and control tokens in its own vocabulary."""
    words = ["▁", "▁the", "▁a", "he", "lo", "▁he", "s", "e", "l", "o", "t", "h", "a", "/", "<", ">", "\n", "▁user"]
    vocabulary = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    vocabulary += [(f"<0x{byte:02X}>", 0.0) for byte in range(256)] + [(word, -1.0 - len(word)) for word in words]
    backend = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


METASPACE_TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role + '\n' + m.content + '</s>' }}{% endfor %}"


@pytest.fixture(scope="session", params=["chatml", "llama3", "metaspace"])
def any_chat_tokenizer(
    request: pytest.FixtureRequest,
    tokenizer: PreTrainedTokenizerBase,
    sentencepiece_like: PreTrainedTokenizerBase,
) -> ChatTokenizer:
    if request.param == "metaspace":
        return ChatTokenizer(sentencepiece_like, METASPACE_TEMPLATE)
    return ChatTokenizer(tokenizer, LLAMA3_TEMPLATE if request.param == "llama3" else None)


# Plane 16 is left out: a text with the name of a control token is refused, which has a test of its own.
characters = st.characters(exclude_categories=["Cs"], max_codepoint=0xFFFFD)
WORDS = ["he", "lo", " ", "\n", "the", "<", "|", "im_end", "|>", "é", "🌱", "\u200d", "\U000f0001"]
plain_texts = st.text(characters, max_size=30) | st.lists(st.sampled_from(WORDS), max_size=8).map("".join)
texts = plain_texts | st.lists(st.sampled_from([*CONTROL, *WORDS]), max_size=8).map("".join)
turns = st.lists(st.tuples(texts, texts), min_size=1, max_size=3)
plain_turns = st.lists(st.tuples(plain_texts, plain_texts), min_size=1, max_size=3)


def make_conversation(pairs: list[tuple[str, str]], system: str | None = None) -> Conversation:
    messages = [] if system is None else [Message(Role.SYSTEM, system)]
    for user, assistant in pairs:
        messages += [Message(Role.USER, user), Message(Role.ASSISTANT, assistant)]
    return Conversation(tuple(messages), ConversationKey(0, 0), "test.jsonl:1")


def reference_ids(chat_tokenizer: ChatTokenizer, conversation: Conversation) -> list[int]:
    messages = [{"role": TEMPLATE_ROLE_NAMES[m.role], "content": m.content} for m in conversation.messages]
    return chat_tokenizer.tokenizer.apply_chat_template(
        messages, chat_template=chat_tokenizer.template.source, return_dict=False
    )


def encode_or_none(chat_tokenizer: ChatTokenizer, conversation: Conversation) -> TokenizedConversation | None:
    try:
        return chat_tokenizer.encode(conversation)
    except DataError:
        return None


@example(pairs=[(" he\n", "\n lo ")], system=" the ")
@example(pairs=[("", "<|end_header_id|>")], system=None)  # Hypothesis also draws texts that the code holds
@given(pairs=plain_turns, system=st.none() | plain_texts)
def test_ids_are_exactly_those_of_apply_chat_template(
    any_chat_tokenizer: ChatTokenizer, pairs: list[tuple[str, str]], system: str | None
) -> None:
    conversation = make_conversation(pairs, system)
    encoded = encode_or_none(any_chat_tokenizer, conversation)
    spells_control = any(token in m.content for m in conversation.messages for token in any_chat_tokenizer._control.ids)
    if encoded is None or spells_control:
        return
    assert not encoded.holds_control_text
    assert encoded.input_ids.tolist() == reference_ids(any_chat_tokenizer, conversation)


@given(pairs=turns)
def test_text_cannot_make_a_control_token(any_chat_tokenizer: ChatTokenizer, pairs: list[tuple[str, str]]) -> None:
    """However a message is spelled, the control tokens are those of the same conversation with harmless texts."""
    added = any_chat_tokenizer.tokenizer.added_tokens_decoder
    encoded = encode_or_none(any_chat_tokenizer, make_conversation(pairs))
    if encoded is None:
        return
    harmless = any_chat_tokenizer.encode(make_conversation([("he", "lo")] * len(pairs)))
    controls, expected = ([n for n in each.input_ids.tolist() if n in added] for each in (encoded, harmless))
    assert controls == expected != []


@pytest.mark.parametrize("place", ["{{ m.note }}", "{{ 'note: ' ~ m.note }}", "{{ m.note | string }}"])
def test_the_texts_in_a_field_that_is_written_as_a_whole_cannot_make_a_control_token(
    tokenizer: PreTrainedTokenizerBase, place: str
) -> None:
    header = "<|im_start|>{{ m.role }}\n"
    written = f"{{% if m.note is defined %}}{place}{{% endif %}}{{{{ m.content }}}}<|im_end|>"
    prompt = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    template = f"{{% for m in messages %}}{header}{written}{{% endfor %}}{prompt}"
    question = Message(Role.USER, "Q", fields={"note": {"of": ["a<|im_end|>b"]}})
    conversation = Conversation((question, Message(Role.ASSISTANT, "A")), ConversationKey(0, 0), "rows.jsonl:1")
    encoded = ChatTokenizer(tokenizer, template).encode(conversation)
    assert encoded.holds_control_text
    assert tokenizer.decode(encoded.input_ids).count("<|im_end|>") == 3
    assert encoded.input_ids.tolist().count(tokenizer.eos_token_id) == 2


def test_private_use_characters_in_a_text_cannot_name_a_control_token(chat_tokenizer: ChatTokenizer) -> None:
    text = "".join(chr(first + number) for first in (0xF0000, 0x100000) for number in range(20))
    encoded = chat_tokenizer.encode(make_conversation([(text, "Yo")]))

    assert chat_tokenizer.decode(encoded.input_ids[encoded.turns[0].start : encoded.turns[0].end]) == text
    with pytest.raises(
        DataError, match=r"test\.jsonl:1: the text contains .*, a private-use character that stands for"
    ):
        chat_tokenizer.encode(make_conversation([(chr(0x10FFFC), "Yo")]))


@given(pairs=turns)
def test_turns_decode_to_their_contents_and_end_in_their_stop_token(
    chat_tokenizer: ChatTokenizer, pairs: list[tuple[str, str]]
) -> None:
    conversation = make_conversation(pairs)
    encoded = chat_tokenizer.encode(conversation)

    for turn, message in zip(encoded.turns, conversation.messages, strict=True):
        assert chat_tokenizer.decode(encoded.input_ids[turn.start : turn.end]) == message.content
        assert turn.stop == turn.end
        assert chat_tokenizer.decode([encoded.input_ids[turn.stop]]) == "<|im_end|>"
        assert set(encoded.role_ids[turn.start : turn.stop + 1]) <= {message.role, Role.REASONING}
        assert encoded.role_ids[turn.stop] == message.role


@pytest.mark.parametrize(
    ("template", "reason"),
    {
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}": "no stop token follows the content",
        "{% for m in messages %}{{ m.content }} END <|im_start|>{% endfor %}": "no stop token follows the content",
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}"
        "<|im_start|>assistant\n{% endif %}": "no stop token follows the content of message 2",
        "{% for m in messages * 2 %}{{ m.content }}<|im_end|>{% endfor %}": "mixes message 2",
        "{{ messages[0].content | wordwrap }}<|im_end|>": "'wordwrap' rewrites",
    }.items(),
)
def test_a_template_whose_roles_are_unknown_is_refused_with_the_reason(
    tokenizer: PreTrainedTokenizerBase, conversation: Make, template: str, reason: str
) -> None:
    with pytest.raises(DataError, match=rf"test\.jsonl:1: .*{reason}"):
        ChatTokenizer(tokenizer, template).encode(
            conversation("user: n", "assistant: an answer", "user: n", "assistant: b")
        )


def test_a_prompt_has_the_reference_ids_and_ends_in_the_assistants_header(
    any_chat_tokenizer: ChatTokenizer, conversation: Make
) -> None:
    messages = conversation("user: he lo").messages
    reference = any_chat_tokenizer.tokenizer.apply_chat_template(
        [{"role": "user", "content": "he lo"}],
        chat_template=any_chat_tokenizer.template.source,
        add_generation_prompt=True,
        return_dict=False,
    )

    assert any_chat_tokenizer.encode_prompt(messages) == reference


def test_a_tokenizer_without_a_template_or_that_is_slow_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(ValueError, match="is a slow tokenizer"):
        ChatTokenizer(SimpleNamespace(chat_template="x"))  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"but has none; set tokenizer\.chat_template to one of chatml, hermes, llama3, "
    ):
        ChatTokenizer(bare)


def test_the_users_tokenizer_is_left_as_it_was(tokenizer: PreTrainedTokenizerBase, conversation: Make) -> None:
    before = tokenizer.backend_tokenizer.to_str()
    ChatTokenizer(tokenizer).encode(conversation("user: <|im_end|>", "assistant: x"))

    assert tokenizer.backend_tokenizer.to_str() == before


def test_a_control_token_that_the_copy_of_the_tokenizer_misses_is_an_error(conversation: Make) -> None:
    """`single_word` tokens are found between words only, and a private-use character is no word."""
    backend = Tokenizer(models.BPE({letter: n for n, letter in enumerate("abcdefghijklmnopqrstuvwxyz ")}, []))
    backend.add_tokens([AddedToken("stop", single_word=True, normalized=False)])
    chat_tokenizer = ChatTokenizer(
        PreTrainedTokenizerFast(tokenizer_object=backend), "{% for m in messages %}{{ m.content }}stop{% endfor %}"
    )

    with pytest.raises(DataError, match="the template writes 2 control tokens here, but the tokenizer finds"):
        chat_tokenizer.encode(conversation("user: hi", "assistant: yo"))


ORDINARY = [
    AddedToken("mulch", normalized=True),
    AddedToken("thrips", normalized=False),
    AddedToken("garden hose", normalized=True),
    AddedToken("50mg", single_word=True),
    AddedToken(" spider mite", lstrip=True),
    AddedToken("[C@@H]", normalized=True),
    AddedToken("caf\u00e9", normalized=True),
    AddedToken("|||PHONE|||", normalized=False),
    AddedToken("kind", normalized=True),  # in a default system message
    AddedToken("ant", normalized=True),  # within "assistant"
]
CONTROLLING = [
    AddedToken("FINIS", normalized=False),  # a stop token that the template writes
    AddedToken("ASKED:", normalized=True),
    AddedToken("[TOOL]", normalized=False),
    AddedToken("<note>", normalized=False),
    AddedToken("aphid", normalized=False, special=True),
]
DOMAIN_TEMPLATE = (
    "{% if messages[0].role != 'system' %}You are kind.<|im_end|>{% endif %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}<|im_start|>assistant\n{% else %}ASKED: {% endif %}{{ m.content }}FINIS\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("folder", ["tokenizer", "tokenizer_sentencepiece"])
def test_an_ordinary_added_word_keeps_its_id_and_is_trained(folder: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.add_tokens([*ORDINARY, *CONTROLLING])
    chat_tokenizer = ChatTokenizer(tokenizer, DOMAIN_TEMPLATE)
    for words in (ORDINARY, CONTROLLING):
        for word in map(str, words):
            text = f"The {word} and mulch, {word}{word}."
            encoded = chat_tokenizer.encode(make_conversation([(text, text)]))
            word_id = tokenizer.convert_tokens_to_ids(word)
            is_word = (encoded.input_ids == word_id) & (encoded.role_ids == Role.ASSISTANT)
            if words is ORDINARY:
                reference = reference_ids(chat_tokenizer, make_conversation([(text, text)]))
                assert encoded.input_ids.tolist() == reference
                # The normalizer of SentencePiece joins words, between which a single word is then not found.
                assert is_word.any() or (word_id not in reference and word == "50mg"), word
                assert not encoded.holds_control_text
                assert word_id not in chat_tokenizer.control_ids
            else:
                assert is_word.sum() == (word == "FINIS"), word
                assert encoded.holds_control_text
                assert word_id in chat_tokenizer.control_ids
            assert encoded.turns[1].stop is not None


def test_a_role_may_be_allowed_a_control_token_that_others_still_cannot_write(
    tokenizer: PreTrainedTokenizerBase, conversation: Make
) -> None:
    think, end = tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    allowing = ChatTokenizer(tokenizer, allow_control_tokens={"assistant": ["<think>", "</think>"]})
    encoded = allowing.encode(conversation("user: <think>", "assistant: <think>hm</think>Yo<|im_end|>"))

    assert encoded.input_ids.tolist().count(think) == encoded.input_ids.tolist().count(end) == 1
    assert encoded.input_ids.tolist().count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 2
    assert encoded.holds_control_text
    only_allowed = conversation("user: Hi", "assistant: <think>hm</think>Yo")
    assert allowing.encode(only_allowed).input_ids.tolist() == reference_ids(allowing, only_allowed)
    with pytest.raises(ValueError, match="is not a control token of the tokenizer"):
        ChatTokenizer(tokenizer, allow_control_tokens={"assistant": ["<thinking>"]})
    with pytest.raises(ValueError, match="unknown role 'assistent'; choose from system, user, assistant"):
        ChatTokenizer(tokenizer, allow_control_tokens={"assistent": ["<think>"]})


def test_a_conversation_with_tools_has_the_tokenizers_template_for_them(
    tokenizer: PreTrainedTokenizerBase, conversation: Make
) -> None:
    several = copy.deepcopy(tokenizer)
    end = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    several.chat_template = {"default": end, "tool_use": "{{ tools | tojson }}" + end, "rag": "{{ x }}"}
    chat_tokenizer = ChatTokenizer(several)
    plain = conversation("user: Hi", "assistant: Yo")
    with_tools = replace(plain, tools=({"name": "f<|im_end|>"},))

    assert chat_tokenizer.decode(chat_tokenizer.encode(plain).input_ids) == "Hi<|im_end|>Yo<|im_end|>"
    encoded = chat_tokenizer.encode(with_tools)
    assert chat_tokenizer.decode(encoded.input_ids) == '[{"name": "f<|im_end|>"}]Hi<|im_end|>Yo<|im_end|>'
    assert encoded.input_ids.tolist().count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 2


def test_the_work_is_linear_in_the_number_of_turns(chat_tokenizer: ChatTokenizer, monkeypatch: Any) -> None:
    """Counted in renderings and in characters tokenized, not in seconds."""
    calls: list[int] = []
    render = chat_tokenizer.template.render
    monkeypatch.setattr(chat_tokenizer.template, "render", lambda *a, **k: calls.append(1) or render(*a, **k))
    chat_tokenizer.encode(make_conversation([("a", "b")] * 2))  # renders the prompt before a first, and a later answer
    calls.clear()

    for num_turns in (2, 20, 200):
        encoded = chat_tokenizer.encode(make_conversation([("question", "answer")] * num_turns))
        assert len(encoded.turns) == 2 * num_turns
    assert len(calls) == 3


def trained(chat_tokenizer: ChatTokenizer, *messages: Message) -> tuple[str, tuple[str, ...]]:
    """Returns what the model generates, and what the template leaves out."""
    encoded = chat_tokenizer.encode(Conversation(messages, ConversationKey(0, 0), "test.jsonl:1"))
    is_generated = np.isin(encoded.role_ids, [Role.ASSISTANT, Role.REASONING, Role.TOOL_CALL])
    return chat_tokenizer.decode(encoded.input_ids[is_generated]), encoded.left_out


FIELDS = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
ENDS = "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def test_a_field_that_an_answer_has_of_another_message_is_not_trained(tokenizer: PreTrainedTokenizerBase) -> None:
    quoted = "{% if loop.index0 == 1 and messages | length > 3 %}{{ messages[3].name }}: {% endif %}"
    named = ChatTokenizer(tokenizer, FIELDS + quoted + "{{ m.content }}" + ENDS)
    messages = [Message(role, text) for role, text in zip((Role.USER, Role.ASSISTANT), "QA", strict=True)]
    later = [Message(Role.USER, "R"), Message(Role.ASSISTANT, "B", fields={"name": "Ann"})]
    assert trained(named, *messages, *later)[0] == ": A<|im_end|>B<|im_end|>"


def test_a_field_between_generation_marks_is_trained_as_the_mask_of_transformers_has_it(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    marks = "{% if m.role == 'assistant' %}{% generation %}[{{ m.name }}] {{ m.content }}<|im_end|>{% endgeneration %}"
    template = FIELDS + marks + "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    rows = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A", "name": "Ann"}] * 2
    options = {"chat_template": template, "return_assistant_tokens_mask": True, "return_dict": True}
    found: Any = tokenizer.apply_chat_template(rows, **options)
    masked = [token for token, mask in zip(found["input_ids"], found["assistant_masks"], strict=True) if mask]
    messages = [Message(Role.USER, "Q"), Message(Role.ASSISTANT, "A", fields={"name": "Ann"})] * 2
    assert trained(ChatTokenizer(tokenizer, template), *messages)[0] == tokenizer.decode(masked)
    assert tokenizer.decode(masked) == "[Ann] A<|im_end|>" * 2


def test_an_empty_name_is_as_none_where_an_answer_is_empty_too(tokenizer: PreTrainedTokenizerBase) -> None:
    written = "{% if m.name is defined %}{{ m.name }}{% endif %}{% if m.content %}{{ m.content }}{% endif %}"
    named = ChatTokenizer(tokenizer, FIELDS + written + ENDS)
    question, last = Message(Role.USER, "Q"), Message(Role.ASSISTANT, "B")
    for fields in ({}, {"name": ""}):
        messages = (question, Message(Role.ASSISTANT, "", fields=fields), question, last)
        assert trained(named, *messages)[0] == "<|im_end|>B<|im_end|>", fields


@pytest.mark.parametrize("key", ["tool_calls", "reasoning_content", "function_call", "name"])
def test_an_empty_key_is_not_written_by_a_template_that_asks_whether_there_is_one(
    tokenizer: PreTrainedTokenizerBase, key: str
) -> None:
    asks = ChatTokenizer(
        tokenizer, FIELDS + f"{{% if m.{key} is defined %}}[{key}]{{% endif %}}{{{{ m.content }}}}" + ENDS
    )
    question, answer = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
    bare = asks.encode_messages([question, answer] * 2)
    for empty in (None, "", [], {}):
        given = [question | {key: empty}, answer | {key: empty}] * 2
        assert asks.encode_messages(given).input_ids.tolist() == bare.input_ids.tolist()


@pytest.mark.parametrize(
    ("end", "stops"),
    [
        ("<|eot_id|><|im_end|>", "<|eot_id|><|im_end|>"),
        ("<|eot_id|>\n<|im_end|>\n", "<|eot_id|>\n<|im_end|>"),
        ("<|begin_of_text|><|eot_id|><|im_end|>", "<|begin_of_text|><|eot_id|><|im_end|>"),
        ("<|eot_id|> then <|im_end|>", "<|eot_id|>"),
        ("<|eot_id|>{% if loop.last %}<|im_end|>{% endif %}", "<|eot_id|>"),
        ("<|eot_id|><|end_header_id|><|im_end|>", "<|eot_id|><|end_header_id|>"),
    ],
)
def test_all_tokens_that_end_every_answer_are_trained_up_to_the_eos_token_or_the_last(
    tokenizer: PreTrainedTokenizerBase, end: str, stops: str
) -> None:
    base = copy.deepcopy(tokenizer)
    base.eos_token = "<|end_header_id|>"
    encoded_text = trained(
        ChatTokenizer(base, FIELDS + "{{ m.content }}" + ENDS.replace("<|im_end|>", end, 1)),
        *(Message(role, "Q") for role in (Role.USER, Role.ASSISTANT) * 2),
    )[0]
    assert encoded_text == f"Q{stops}" * 2


OLMO_TEMPLATE = FIELDS + (
    "{{ m.content or '' }}{% if m.functions is defined %} <functions>{{ m.functions }}</functions>{% endif %}"
    "{% if m.function_calls is defined %}<function_calls>{{ m.function_calls }}</function_calls>{% endif %}" + ENDS
)


@pytest.mark.parametrize("calls", ["water(bed='B2')", "a()\nb()", "water(bed='<|im_end|>')"])
def test_rows_of_olmo_3_with_calls_as_text_and_results_of_the_environment_are_read(
    tokenizer: PreTrainedTokenizerBase, calls: str
) -> None:
    null = {"functions": None, "function_calls": None}
    row = [
        {"role": "system", "content": "You garden.", "functions": "[]", "function_calls": None},
        {"role": "user", "content": "Water B2", **null},
        {"role": "assistant", "content": None, "functions": None, "function_calls": calls},
        {"role": "environment", "content": "done", **null},
        {"role": "assistant", "content": "I watered it.", **null},
    ]
    chat_tokenizer = ChatTokenizer(tokenizer, OLMO_TEMPLATE)
    encoded = chat_tokenizer.encode_messages(row)
    by_role = {
        role: chat_tokenizer.decode(encoded.input_ids[encoded.role_ids == role]) for role in (Role.TOOL_CALL, Role.TOOL)
    }
    assert by_role[Role.TOOL_CALL] == f"<function_calls>{calls}</function_calls><|im_end|>"
    assert by_role[Role.TOOL] == "done<|im_end|>"
    assert "<|im_start|>environment\n" in chat_tokenizer.decode(encoded.input_ids)
    if "<|im_end|>" not in calls:
        bare = [{key: value for key, value in message.items() if value is not None} for message in row]
        options = {"chat_template": OLMO_TEMPLATE, "return_dict": False}
        assert encoded.input_ids.tolist() == tokenizer.apply_chat_template(bare, **options)
    with pytest.raises(DataError, match=r"does not write the tool calls of message 3"):
        ChatTokenizer(tokenizer, FIELDS + "{{ m.content or '' }}" + ENDS).encode_messages(row)


def test_a_conversation_of_which_a_template_writes_nothing_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    chat_tokenizer = ChatTokenizer(
        tokenizer, "{% for m in messages if m.content %}{{ m.content }}<|im_end|>{% endfor %}"
    )
    empty, full = make_conversation([("", "")]), make_conversation([("Q", "A")])
    for batch in ([empty], [full, empty], [empty, full]):
        for each, encoded in zip(batch, chat_tokenizer.encode_batch(batch), strict=True):
            assert isinstance(encoded, DataError) == (each is empty)
            assert each is full or "the template writes no text of this conversation" in str(encoded)


SAYS = "{% for m in messages %}{{ m.role }} says: {{ m.content }}<|im_end|>{% endfor %}"
WELL = SAYS + "{% if add_generation_prompt %}assistant says: Well,{% endif %}"
NEWLINE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}\n<|im_end|>{% endfor %}"


def marked(before: str, inside: str) -> str:
    generation = "{% generation %}" + inside + "{{ m.content }}<|im_end|>{% endgeneration %}"
    answer = "{% else %}" + before + generation + "{% endif %}{% endfor %}"
    return "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}\n" + answer


END = "{% for m in messages if m.role != 'system' %}{{ m.content.split('###')[0] | trim }}<|im_end|>{% endfor %}"


@pytest.mark.parametrize("before", ["", "Be kind."])
def test_what_a_template_leaves_out_writes_in_part_or_cannot_read_is_counted(
    tokenizer: PreTrainedTokenizerBase, before: str
) -> None:
    """The words may stand in the template as well: leaving them out is no loss of origin."""
    messages = (Message(Role.SYSTEM, "Be kind."), Message(Role.USER, " Hi \n", fields={"id": "1", "mood": "sad"}))
    text, left_out = trained(ChatTokenizer(tokenizer, before + END), *messages, Message(Role.ASSISTANT, "Yo### lost"))
    assert text == "Yo<|im_end|>"
    assert left_out == ("system content", "assistant content in part", "user key mood")


def test_a_template_that_cannot_write_another_content_where_it_left_one_out_is_refused(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    checked = "{% for m in messages if m.content not in ('Be kind.', 'Hi', 'Yo') %}{{ raise_exception(m.content) }}"
    template = checked + "{% endfor %}" + END
    messages = (Message(Role.SYSTEM, "Be kind."), Message(Role.USER, "Hi"), Message(Role.ASSISTANT, "Yo"))
    with pytest.raises(DataError, match="rewrites the system content of message 1, so sftron cannot trace its text"):
        trained(ChatTokenizer(tokenizer, template), *messages)


@pytest.mark.parametrize(
    ("template", "answer", "generated"),
    [
        # As in Llama 2's template: a model that never learnt the white space would not come to the stop token.
        (NEWLINE, "Yo", "Yo\n<|im_end|>"),
        # The prompt goes on with " Well", which is one token, as is " Pip": the space belongs to the answer's word.
        (WELL, "Pip.", " Pip.<|im_end|>"),
        (WELL, "Well, no.", " no.<|im_end|>"),
        (WELL, "", " <|im_end|>"),
        # An answer that quotes the prompt is trained whole.
        (WELL, "You wrote assistant says: Well, yes.", " You wrote assistant says: Well, yes.<|im_end|>"),
        # Marks decide, wherever they are in a turn.
        (marked("<think>{{ m.t }}</think>", ""), "Yo", "Yo<|im_end|>"),
        (marked("", "{{ m.t }}"), "Yo", "Yo<|im_end|>"),
        (marked("{{ m.thinking }}", "|"), "Yo", "|Yo<|im_end|>"),
    ],
)
def test_the_model_generates_all_that_follows_the_prompt(
    tokenizer: PreTrainedTokenizerBase, template: str, answer: str, generated: str
) -> None:
    reply = Message(Role.ASSISTANT, answer, fields={"thinking": "secret"} if "thinking" in template else {})
    assert trained(ChatTokenizer(tokenizer, template), Message(Role.USER, "Q"), reply)[0] == generated


@pytest.mark.parametrize("condition", ["", " and messages"])
def test_a_header_that_is_not_the_generation_prompts_is_refused_unless_it_is_whole_after_other_words(
    tokenizer: PreTrainedTokenizerBase, condition: str
) -> None:
    messages = [Message(role, text) for role, text in zip([Role.USER, Role.ASSISTANT] * 2, "QARB", strict=True)]
    body = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% if m.role == 'user' and loop.last %} Think.{% endif %}<|im_end|>{% endfor %}"
        f"{{% if add_generation_prompt{condition} %}}"
    )
    known = ChatTokenizer(tokenizer, body + "<|im_start|>assistant\n{% endif %}")
    assert trained(known, *messages)[0] == "A<|im_end|>B<|im_end|>"
    with pytest.raises(DataError, match=r"the header of message 2 \(assistant\) differs from the template's gen"):
        trained(ChatTokenizer(tokenizer, body + "<think>{% endif %}"), *messages)


RESULT = {"role": "tool", "content": "12:00 <|im_end|>", "tool_call_id": "abcdefghi", "name": "now"}
WITH_FIELDS = {
    "the id": ("{{ {'content': m.content, 'call_id': m.tool_call_id} | tojson }}", ()),
    "the id first": ("{{ {'call_id': m.tool_call_id, 'content': m.content} | tojson }}", ()),
    "in brackets": ("{{ '[' + ({'name': m.name, 'content': m.content | string} | tojson) + ']' }}", ()),
    "all fields": ("{{ [m.name, m.tool_call_id, m.content] | tojson }}", ()),
    "a dict": ("{{ {'content': m.content, 'name': m.name} }}", ()),
    "other fields alone": ("{{ {'id': m.tool_call_id, 'name': m.name} | tojson }}{{ m.content }}", ()),
    "no content": ("{{ {'id': m.tool_call_id, 'name': m.name} | tojson }}", ("tool content",)),
}


@pytest.mark.parametrize(("written", "left_out"), WITH_FIELDS.values(), ids=WITH_FIELDS.keys())
def test_fields_of_one_message_that_are_written_as_one_value_are_followed(
    tokenizer: PreTrainedTokenizerBase, written: str, left_out: tuple[str, ...]
) -> None:
    """As mistral-common's templates write results. Fields of several roles are not one value of one role."""
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
    body = f"{{% if m.role == 'tool' %}}{written}{{% else %}}{{{{ m.content }}}}{calls}{{% endif %}}"
    chat_tokenizer = ChatTokenizer(tokenizer, FIELDS + body + ENDS)
    call = {"type": "function", "id": "abcdefghi", "function": {"name": "now", "arguments": {}}}
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    encoded = chat_tokenizer.encode_messages([*messages, RESULT, {"role": "assistant", "content": "It is noon."}])
    assert encoded.left_out == left_out
    assert encoded.holds_control_text == (not left_out)
    roles = encoded.role_ids[encoded.turns[2].start : encoded.turns[2].end]
    assert set(roles.tolist()) == {Role.TOOL}
    mixed = FIELDS + "{{ {'content': m.content, 'calls': m.tool_calls or ''} | tojson }}" + ENDS
    with pytest.raises(DataError, match="'tojson' mixes several texts"):
        ChatTokenizer(tokenizer, mixed).encode_messages([*messages, RESULT])


@pytest.mark.parametrize("content", ["", "Hm"])
def test_a_content_that_is_written_again_for_each_call_is_refused_though_it_is_empty(
    tokenizer: PreTrainedTokenizerBase, content: str
) -> None:
    """The turn ends at the stop token of the first call, so the second call would not be trained."""
    each_call = "{{ m.content }}{{ call.function.name }}<|im_end|>"
    template = "{% for m in messages %}{% for call in m.tool_calls %}" + each_call + "{% else %}{{ m.content }}"
    calls = [{"type": "function", "function": {"name": name, "arguments": {}}} for name in ("weather", "time")]
    one, two = (Message(Role.ASSISTANT, content, fields={"tool_calls": calls[:number]}) for number in (1, 2))
    chat_tokenizer = ChatTokenizer(tokenizer, template + "<|im_end|>{% endfor %}{% endfor %}")
    assert trained(chat_tokenizer, Message(Role.USER, "Q"), one)[0] == content + "weather<|im_end|>"
    with pytest.raises(DataError, match=r"mixes message 2 \(assistant\) with other messages"):
        trained(chat_tokenizer, Message(Role.USER, "Q"), two)


@pytest.mark.parametrize("before", [(), (Message(Role.SYSTEM, "S"),)])
def test_a_token_that_begins_an_answer_does_not_end_the_question_before_it(
    tokenizer: PreTrainedTokenizerBase, before: tuple[Message, ...]
) -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{{ '<|im_start|>' if m.role == 'user' else '<|im_end|>' }}{% endfor %}"
    )
    messages = (*before, Message(Role.USER, "Q"), Message(Role.ASSISTANT, "Yo"), Message(Role.USER, "R"))
    chat_tokenizer = ChatTokenizer(tokenizer, template)
    encoded = chat_tokenizer.encode(Conversation(messages, ConversationKey(0, 0), "here"))
    ids = encoded.input_ids.tolist()
    begins, ends = (tokenizer.convert_tokens_to_ids(token) for token in ("<|im_start|>", "<|im_end|>"))
    stops = [None if turn.stop is None else ids[turn.stop] for turn in encoded.turns]
    assert stops == [*(ends for _ in before), None, ends, begins]
    assert encoded.role_ids[ids.index(begins)] == Role.TEMPLATE


def test_reasoning_is_only_what_is_between_brackets_at_the_beginning(
    chat_tokenizer: ChatTokenizer, conversation: Make
) -> None:
    for answer in ("use </think> to close", "a <think>b</think> c"):
        encoded = chat_tokenizer.encode(conversation("user: Q", f"assistant: {answer}"))
        assert Role.REASONING not in encoded.role_ids


CLOSED = "Hm.\n</think>\n\nSo."
THINKS = "{% if m.role == 'assistant' %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
SPLITS = "{% if '</think>' in m.content %}<think>{{ m.content.split('</think>')[0].split('<think>')[-1] }}</think>"
SPLITS += "{% endif %}{{ m.content.split('</think>')[-1].lstrip() }}"
OPENS = ENDS.replace("assistant\n", "assistant\n<think>\n")


@pytest.mark.parametrize(
    ("written", "ends", "answer", "is_second"),
    [
        ("{{ m.content }}", ENDS, CLOSED, False),
        ("{{ m.content }}", ENDS, f"<think>{CLOSED}", False),
        ("{{ m.content }}", ENDS, f"<think>A</think> B <think>{CLOSED}", False),
        ("{{ m.content | tojson }}", ENDS, f"<think>{CLOSED}", False),
        (SPLITS, ENDS, f"<think>{CLOSED}", False),
        (SPLITS, ENDS, CLOSED, False),
        ("{% if m.role == 'assistant' %}<think>\n{% endif %}{{ m.content }}", OPENS, CLOSED, False),
        ("{% if m.role == 'assistant' %}<think>\n{% endif %}{{ m.content }}", OPENS, f"<think>{CLOSED}", True),
        (THINKS, ENDS, f"<think>{CLOSED}", True),
        (THINKS, ENDS, CLOSED, True),
        (THINKS, ENDS, "So.", False),
        ("<think>{{ m.content.split('</think>')[-1] }}", ENDS, f"<think>{CLOSED}", False),
    ],
)
def test_a_thought_that_is_written_is_not_left_out_and_a_second_one_is_named(
    tokenizer: PreTrainedTokenizerBase, written: str, ends: str, answer: str, is_second: bool
) -> None:
    chat_tokenizer = ChatTokenizer(tokenizer, FIELDS + written + ends)
    encoded = chat_tokenizer.encode(make_conversation([("Q", answer)] * 2))
    is_lost = "[-1] }}" in written and "[0]" not in written
    assert encoded.left_out == (("assistant reasoning",) * 2 if is_lost else ())
    assert encoded.has_second_thought == is_second
    if "</think>" in answer and "tojson" not in written and not is_lost:
        assert Role.REASONING in encoded.role_ids


# --- Failures of the tokenizers library ---


class PanicException(BaseException):
    """As the tokenizers library raises it: under this name, and no Exception."""


def test_a_text_at_which_the_tokenizers_library_panics_is_an_error_of_its_own_row(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = RenamedTokenizer.encode

    def panic(self: RenamedTokenizer, texts: Any) -> Any:
        if any("poison" in text for text in texts):
            raise PanicException("index out of bounds")
        return encode(self, texts)

    conversations = [make_conversation([(f"Hello {text}", "Hi")]) for text in ("a", "poison", "b")]
    chat_tokenizer = ChatTokenizer(tokenizer)
    expected = [chat_tokenizer.encode(conversations[n]).input_ids.tolist() for n in (0, 2)]
    monkeypatch.setattr(RenamedTokenizer, "encode", panic)
    first, failed, last = chat_tokenizer.encode_batch(conversations)

    assert isinstance(failed, DataError)
    assert str(failed).startswith("test.jsonl:1: the tokenizers library failed on this text (index out of bounds)")
    assert failed.reason == "tokenizer_failed"
    assert [each.input_ids.tolist() for each in (first, last) if isinstance(each, TokenizedConversation)] == expected


@pytest.mark.parametrize("question", ["Why?", " Why? ", "Why <|im_end|>?", "\U000f0001 Why?", "你好"])
@pytest.mark.parametrize("answer", ["So.", "\nSo. ", "", " \n", "So <|im_start|>.", "<think>\nHm.\n</think>\n\nSo."])
def test_a_layout_is_the_same_whether_or_not_its_frame_is_known(
    chat_tokenizer: ChatTokenizer, question: str, answer: str
) -> None:
    found = []
    for is_known in (True, False):
        chat_tokenizer._layouts.clear()
        if is_known:
            chat_tokenizer.encode(make_conversation([("A", "B")]))
        each = chat_tokenizer.encode(make_conversation([(question, answer)]))
        facts = each.turns, each.left_out, each.num_boundary_tokens, each.holds_control_text
        found.append((each.input_ids.tolist(), each.role_ids.tolist(), *facts))
    assert found[0] == found[1]


def test_answers_that_share_different_words_with_the_prompt_have_no_frame(tokenizer: PreTrainedTokenizerBase) -> None:
    chat_tokenizer, question = ChatTokenizer(tokenizer, WELL), Message(Role.USER, "Q")
    generated = {"Pip.": " Pip.<|im_end|>", "Well, no.": " no.<|im_end|>", "Yes.": " Yes.<|im_end|>"}
    for text, expected in generated.items():
        assert trained(chat_tokenizer, question, Message(Role.ASSISTANT, text))[0] == expected


def test_a_message_with_keys_has_no_frame_of_one_without(chat_tokenizer: ChatTokenizer) -> None:
    plain = (Message(Role.USER, "Hi"), Message(Role.ASSISTANT, "Yo"))
    moody = (replace(plain[0], fields={"mood": "sad"}), plain[1])
    found = [trained(chat_tokenizer, *each)[1] for each in (plain, moody, plain)]
    assert found == [(), ("user key mood",), ()]


# --- Parts of turns and tokens ---


def test_a_turn_of_reasoning_and_an_answer_is_all_of_its_text(chat_tokenizer: ChatTokenizer) -> None:
    content = "<think>\nHm.\n</think>\n\nSo."
    encoded = chat_tokenizer.encode(make_conversation([("Why?", content)]))
    turn = encoded.turns[1]
    assert set(encoded.role_ids[turn.start : turn.end]) == {Role.REASONING, Role.ASSISTANT}
    assert chat_tokenizer.decode(encoded.input_ids[turn.start : turn.end]) == content


def test_a_token_of_the_template_and_an_answer_is_counted(tokenizer: PreTrainedTokenizerBase) -> None:
    """The header ends in " th", so that an answer "e" makes one token " the" with it."""
    header = (
        "{{ m.role }}: th{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}assistant: th{% endif %}"
    )
    chat_tokenizer = ChatTokenizer(tokenizer, "{% for m in messages %}" + header)
    conversations = [make_conversation([("Q", answer)]) for answer in ("e", "!")]
    assert [chat_tokenizer.encode(each).num_boundary_tokens for each in conversations] == [1, 0]


def test_a_control_token_within_a_longer_one_is_not_found(tokenizer: PreTrainedTokenizerBase) -> None:
    backend = copy.deepcopy(tokenizer.backend_tokenizer)
    backend.add_special_tokens(["<a>", "<a>b", "<a>bc"])
    control, text = ControlTokens(backend), "<a><a>b<a>bc <a>bd"
    found = [content for _, content in control.find(text)]
    assert found == [token for token in backend.encode(text, add_special_tokens=False).tokens if token in control.ids]
    assert found == ["<a>", "<a>b", "<a>bc", "<a>b"]


def test_positions_of_tokens_are_bytes_of_characters_of_any_size(sentencepiece_like: PreTrainedTokenizerFast) -> None:
    renamed = ControlTokens(sentencepiece_like.backend_tokenizer).renamed_tokenizer
    assert renamed.byte_pairs is None
    edges = ["\x7f", "\x80", "\u07ff", "\u0800", "\uffff", "\U00010000"]
    sizes = [renamed.encode([f"he{character}lo"])[0].ends[-1] - len("helo") for character in edges]
    assert sizes == [len(character.encode()) for character in edges]


def test_a_template_that_needs_a_system_message_and_writes_no_generation_prompt_is_followed(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    requires = "{% if messages[0].role != 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    messages = (Message(Role.SYSTEM, "S"), Message(Role.USER, "Q"), Message(Role.ASSISTANT, "Yo"))
    assert trained(ChatTokenizer(tokenizer, requires + NEWLINE), *messages)[0] == "Yo\n<|im_end|>"


def test_a_control_token_that_begins_marked_text_does_not_end_the_message_before_it(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    answer = "{% generation %}<|im_start|>{{ m.content }}<|im_end|>{% endgeneration %}"
    body = "{% if m.role == 'assistant' %}" + answer + "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    chat_tokenizer = ChatTokenizer(tokenizer, "{% for m in messages %}" + body)
    messages = (Message(Role.SYSTEM, "S"), Message(Role.ASSISTANT, "Yo"))
    assert trained(chat_tokenizer, *messages)[0] == "<|im_start|>Yo<|im_end|>"
    encoded = chat_tokenizer.encode(Conversation(messages, ConversationKey(0, 0), "here"))
    assert encoded.turns[0].stop is None


def test_a_long_text_without_its_white_space_is_not_written_in_part(tokenizer: PreTrainedTokenizerBase) -> None:
    template = SAYS.replace("m.content", "(m.content.split() | join(' '))")
    messages = (Message(Role.USER, "why  \n" * 100), Message(Role.ASSISTANT, "so"))
    assert trained(ChatTokenizer(tokenizer, template), *messages)[1] == ()


def test_an_empty_answer_of_which_only_header_and_stop_token_are_written_is_trained_in_its_place(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    body = "{% if m.content %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
    prompt = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n" + body + prompt
    roles = (Role.USER, Role.ASSISTANT) * 3
    messages = tuple(Message(role, text) for role, text in zip(roles, ("Q", "A", "R", "", "S", "B"), strict=True))
    chat_tokenizer = ChatTokenizer(tokenizer, template)
    encoded = chat_tokenizer.encode(Conversation(messages, ConversationKey(0, 0), "here"))
    assert trained(chat_tokenizer, *messages)[0] == "A<|im_end|><|im_end|>B<|im_end|>"
    assert [turn.start for turn in encoded.turns] == sorted(turn.start for turn in encoded.turns)
    assert None not in [turn.stop for turn in encoded.turns]
