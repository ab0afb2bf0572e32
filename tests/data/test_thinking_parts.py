"""Content parts of type thinking, as Mistral's reasoning models have them: reasoning, written as the template wants."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from sftron.data.chat.check import MaskCount, require_reference_ids
from sftron.data.chat.template import ChatTemplate
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.formats.table import RowFormat
from sftron.data.labels import Targets
from sftron.data.prepare import DataOptions, DataSet, Preparation
from sftron.data.types import Conversation, DataError, Message, Role
from tests.conftest import ASSETS
from tests.data.rows import assistant, parse, system, user
from tests.data.streams import Rows

BLOCKS = (
    "{%- macro blocks(content) %}{% if content is string %}{{ content }}{% else %}{% for block in content %}"
    "{% if block['type'] == 'text' %}{{ block['text'] }}"
    "{% elif block['type'] == 'thinking' %}{{ '[THINK]' + block['thinking'] + '[/THINK]' }}"
    "{% else %}{{ raise_exception('Only text and thinking chunks are supported.') }}{% endif %}"
    "{% endfor %}{% endif %}{% endmacro %}"
)
MAGISTRAL = (
    BLOCKS + "{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ '[SYSTEM_PROMPT]' + blocks(m['content']) + '[/SYSTEM_PROMPT]' }}"
    "{% elif m['role'] == 'user' %}{{ '[INST]' + blocks(m['content']) + '[/INST]' }}"
    "{% else %}{{ blocks(m['content']) + eos_token }}{% endif %}{% endfor %}"
)
"""In the manner of Magistral Small 1.2 and Ministral 3 Reasoning."""
IN_FIELD = (
    "{% for m in messages %}{{ '[INST]' if m['role'] == 'user' else '' }}"
    "{% if m['reasoning_content'] is defined %}{{ '[THINK]' + m['reasoning_content'] + '[/THINK]' }}{% endif %}"
    "{{ m['content'] }}{{ '[/INST]' if m['role'] == 'user' else eos_token }}{% endfor %}"
)
TOKENS = ["[THINK]", "[/THINK]", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    loaded = AutoTokenizer.from_pretrained(ASSETS / "tokenizer")
    loaded.add_special_tokens({"additional_special_tokens": TOKENS})
    return loaded


def thinking(text: Any, **extra: Any) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, **extra}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


ANSWER = [thinking("Hm."), text("Yes.")]
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "answer": [user("Why?"), assistant(ANSWER)],
    "system": [
        system([text("Think:"), thinking("thus"), text("then answer.")]),
        user([text("Why?")]),
        assistant(ANSWER),
    ],
    "two": [user("Why?"), assistant(ANSWER), user("And?"), assistant([thinking("So."), text("No,"), text(" never.")])],
    "thought": [user("Why?"), assistant("Plainly."), user("And?"), assistant([thinking("Only a thought.")])],
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_parts_have_the_ids_of_transformers_and_are_trained_as_reasoning(tokenizer: Any, name: str) -> None:
    chat_tokenizer, messages = ChatTokenizer(tokenizer, MAGISTRAL), CONVERSATIONS[name]
    source = DataSet("rows", Rows([{"messages": messages}]), RowFormat("messages"))
    preparation = Preparation([source], chat_tokenizer, DataOptions(sequence_length=200))
    (key,) = preparation.all_keys()
    parsed, tokenized, labeled = preparation.parse(key), preparation.tokenize(key), preparation.read(key)
    expected = tokenizer.apply_chat_template(messages, chat_template=MAGISTRAL)["input_ids"]
    assert tokenized.input_ids.tolist() == expected
    assert isinstance(parsed, Conversation)
    require_reference_ids(chat_tokenizer, parsed, tokenized)
    assert tokenized.left_out == ()
    thought = chat_tokenizer.decode(tokenized.input_ids[tokenized.role_ids == Role.REASONING])
    thoughts = {"answer": "Hm.", "system": "Hm.", "two": "Hm.[/THINK][THINK]So.", "thought": "Only a thought."}
    # The template's text behind a thought that no text follows is part of the answer.
    assert thought.removesuffix("[/THINK]") == f"[THINK]{thoughts[name]}"
    masks = MaskCount()
    masks.add(chat_tokenizer, Targets(), parsed, tokenized, labeled, set(tokenized.stop_ids))
    assert (masks.num_equal, masks.wrong) == (1, [])


def test_thoughts_of_fields_are_parts_where_only_those_are_written_and_the_other_way_round(tokenizer: Any) -> None:
    in_parts = [user("Why?"), assistant(ANSWER)]
    in_field = [user("Why?"), assistant("Yes.", reasoning_content="Hm.")]
    assert parse({"messages": in_parts}).messages[1] == Message(
        Role.ASSISTANT, "Yes.", {"reasoning_content": "Hm."}, parts=("Yes.",)
    )
    for template, messages in (MAGISTRAL, in_parts), (IN_FIELD, in_field):
        chat_tokenizer = ChatTokenizer(tokenizer, template)
        expected = tokenizer.apply_chat_template(messages, chat_template=template)["input_ids"]
        for given in (in_parts, in_field):
            encoded = chat_tokenizer.encode_messages(given)
            assert encoded.input_ids.tolist() == expected
            assert encoded.left_out == ()
    assert ChatTokenizer(tokenizer).encode_messages(in_parts).left_out == ("assistant reasoning",)
    assert ChatTemplate(MAGISTRAL, {"eos_token": "</s>"}).takes_thoughts_as_parts
    assert not ChatTemplate(IN_FIELD, {"eos_token": "</s>"}).takes_thoughts_as_parts


def test_marked_text_of_any_length_is_no_part_that_a_template_writes() -> None:
    """SmolLM3's marks enclose 33 characters of its own, as many as the thought of a probe, and leave lists out."""
    for length in range(1, 60):
        template = ChatTemplate(
            "{% for m in messages %}{% set text = m.content if m.content is string else '' %}"
            f"{{% generation %}}{{{{ '{'x' * length}' + text }}}}{{% endgeneration %}}{{% endfor %}}",
            {},
        )
        assert not template.takes_thoughts_as_parts, length
        assert not template.reads_parts, length


def test_the_policy_of_reasoning_holds_for_parts(tokenizer: Any) -> None:
    source = DataSet("rows", Rows([{"messages": CONVERSATIONS["two"]}]), RowFormat("messages"))
    for policy, left in ("keep", ["Hm.", "So."]), ("last", ["So."]), ("strip", []):
        options = DataOptions(sequence_length=200, reasoning=policy)
        preparation = Preparation([source], ChatTokenizer(tokenizer, MAGISTRAL), options)
        decoded = preparation.chat_tokenizer.decode(preparation.tokenize(next(preparation.all_keys())).input_ids)
        assert [each.partition("[/THINK]")[0] for each in decoded.split("[THINK]")[1:]] == left


def test_a_thought_may_be_a_list_of_texts_that_is_closed() -> None:
    part = thinking([text("H"), text("m.")], closed=True, id=None)
    assert parse({"messages": [user(), assistant([part, text("a")])]}).messages[1].fields == {
        "reasoning_content": "Hm."
    }


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([user(), assistant([text("a"), thinking("t")])], "message 2: has a part of type thinking after another part"),
        ([user(), assistant([thinking("t"), thinking("t"), text("a")])], "join thoughts into one, before the text"),
        ([user(), assistant([thinking("t"), text("a")], reasoning="r")], "has `reasoning` and a part of type thinking"),
        ([user(), assistant([thinking("t", closed=False)])], "part 1 of `content`: is a thought that is not closed"),
        ([user(), assistant([thinking("t", mood="calm")])], "has mood in addition to its text; remove that"),
        ([user(), assistant([thinking(7)])], "`thinking` is the number 7; wanted text"),
        ([user(), assistant([{"type": "thinking"}])], "part 1 of `content`: `thinking` is null; wanted text"),
        ([user(), assistant([{"type": "thinking", "text": "t"}])], "has text but no thinking; rename it to thinking"),
        ([user([thinking("t")]), assistant()], 'is of type "thinking"; only parts {type: text, text: ...} are read'),
    ],
)
def test_parts_that_cannot_be_written_in_order_are_refused(messages: list[Any], message: str) -> None:
    with pytest.raises(DataError) as caught:
        parse({"messages": messages})
    assert message in str(caught.value)


def test_a_thought_in_a_system_message_is_refused_where_the_template_reads_none(tokenizer: Any) -> None:
    with pytest.raises(DataError, match="reads no part of type thinking in a system message; write it as text"):
        ChatTokenizer(tokenizer, IN_FIELD).encode_messages(CONVERSATIONS["system"])
