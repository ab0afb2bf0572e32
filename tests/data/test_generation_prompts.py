"""Where the model begins an answer, whatever its generation prompt depends on.

The reference renders the messages before each answer with apply_chat_template (mask_oracle.py).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftron.data.chat.generation_prompt import GenerationPrompts
from sftron.data.chat.layout import MODEL_ROLES
from sftron.data.chat.template import ChatTemplate
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.types import Conversation, ConversationKey, DataError, Message, Role, TokenizedConversation
from tests.conftest import rest_nightly
from tests.data.family_conversations import answer, call, calling, result, user
from tests.data.mask_oracle import CannotCompareError, Oracle
from tests.data.test_families import FOLLOWED, Family, load, shown

THOUGHT = "<hm>\n\n</hm>\n"
READS = {
    "nothing": "''",
    "the flag's own text": "' Well,'",
    "the number of messages": "before | length",
    "many messages": f"'{THOUGHT}' if before | length > 4 else ''",
    "the number of questions": "before | selectattr('role', 'equalto', 'user') | list | length",
    "results in a row": f"'{THOUGHT}' if before[-3:] | selectattr('role', 'equalto', 'tool') | list | length > 2",
    "the first text": f"'{THOUGHT}' if '/no_think' in before[0].content else ''",
    "the last text": f"'{THOUGHT}' if before[-1].content.endswith('/no_think') else ''",
    "any text": f"'{THOUGHT}' if '/no_think' in before | map(attribute='content') | join(' ') else ''",
    "equality": f"'{THOUGHT}' if before[-1].content == 'Who?' else ''",
    "a length": "before[-1].content | length",
    "all lengths": "before | map(attribute='content') | map('length') | sum",
    "an answer": f"'{THOUGHT}' if before[-2:][0].content.startswith('Pip') else ''",
}
"""What stands in a header after the name of the assistant, by what it reads of the messages before."""


@cache
def template(in_history: str, in_prompt: str, *, skips_empty: bool) -> str:
    """A ChatML template, whose header is one function of the messages before in the history, and one in the prompt."""
    content = "{% if m.content %}{{ m.content }}{% endif %}" if skips_empty else "{{ m.content }}"
    return (
        f"{{% macro written(before) %}}{{{{ {READS[in_history]} }}}}{{% endmacro %}}"
        f"{{% macro prompted(before) %}}{{{{ {READS[in_prompt]} }}}}{{% endmacro %}}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' %}{{ written(messages[:loop.index0]) }}{% endif %}" + content + "{% for each in "
        "m.tool_calls or [] %}<tool_call>{{ each.function.name }}{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{{ prompted(messages) }}{% endif %}"
    )


TOKENS = Family("qwen3_like")


@cache
def tokenizer_and_oracle(family: Family, source: str) -> tuple[ChatTokenizer, Oracle]:
    tokenizer = load(family, "tokenizer")
    return ChatTokenizer(tokenizer, source), Oracle(tokenizer, source, family.words("stop"))


TEXTS = st.sampled_from(
    ["Who?", "Why?", "Pip.", "Hi /no_think", " /no_think Hi\n", THOUGHT + "Yo", "Well, yes", "é 你"]
)
RESULTS = st.lists(st.sampled_from(["25", "", "/no_think"]), min_size=1, max_size=4)


@st.composite
def conversations(draw: st.DrawFn, *, has_system: bool = True, has_tools: bool = True) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": draw(TEXTS)}] if has_system and draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 4))):
        messages.append(user(draw(TEXTS)))
        for results in draw(st.lists(RESULTS, max_size=2)) if has_tools else ():
            messages += [calling(call(city="Rome")), *map(result, results)]
        messages.append(answer(draw(TEXTS)))
    return messages


def encoded_by(chat_tokenizer: ChatTokenizer, messages: Sequence[dict[str, Any]]) -> TokenizedConversation | DataError:
    parsed = tuple(
        Message(Role[m["role"].upper()], m["content"], {k: v for k, v in m.items() if k not in ("role", "content")})
        for m in messages
    )
    (encoded,) = chat_tokenizer.encode_batch([Conversation(parsed, ConversationKey(0, 0), "test.jsonl:1")])
    return encoded


def outcome(chat_tokenizer: ChatTokenizer, oracle: Oracle, messages: list[dict[str, Any]]) -> str:
    """Whether a mask was compared, or why it was not."""
    encoded = encoded_by(chat_tokenizer, messages)
    if isinstance(encoded, DataError):
        # A header that the prompt alone writes, and a conversation that the template refuses.
        assert re.search(
            r"the header of message \d+ \(assistant\) differs from|refuses this conversation", str(encoded)
        )
        return "refused"
    if encoded.holds_control_text:
        return "control text"
    ids = encoded.input_ids.tolist()
    assert ids == oracle.ids(messages)
    is_trained = np.isin(encoded.role_ids, [int(role) for role in MODEL_ROLES]).tolist()
    try:
        mask = oracle.mask(messages)
    except CannotCompareError:
        return "history moved"
    assert shown(oracle.tokenizer, ids, is_trained) == shown(oracle.tokenizer, ids, mask)
    return "compared"


# One that reads the number of messages, one the tools' results, one a text, and one a length.
@pytest.mark.parametrize(
    "in_history", rest_nightly(READS, ["many messages", "results in a row", "the last text", "a length"])
)
def test_a_header_is_never_trained_whatever_it_reads(in_history: str) -> None:
    """Also where the history and the prompt read different things: the model begins where the two part."""
    outcomes = Counter[str]()

    @given(conversations(), st.just(in_history) | st.sampled_from(list(READS)), st.booleans())
    def check(messages: list[dict[str, Any]], in_prompt: str, skips_empty: bool) -> None:
        source = template(in_history, in_prompt, skips_empty=skips_empty)
        found = outcome(*tokenizer_and_oracle(TOKENS, source), messages)
        outcomes[f"{found}, {'one' if in_prompt == in_history else 'two'}"] += 1

    check()
    assert outcomes.keys() == {"compared, one", "compared, two"}


MORE_PROMPT = {
    "reads a text": "messages[-1].content is string and '/no_think' in messages[-1].content",
    "counts": "messages | length > 4",
}


@pytest.mark.parametrize("reads", MORE_PROMPT)
@pytest.mark.parametrize("name", rest_nightly(FOLLOWED, ["qwen3_like", "mistral_like", "phi_like", "smollm3_like"]))
def test_a_prompt_that_says_more_than_its_template_is_not_trained_in_any_family(name: str, reads: str) -> None:
    """The history does not write it, but an answer may begin with it."""
    family, outcomes = Family(name), Counter[str]()
    more = f"{{%- if add_generation_prompt and {MORE_PROMPT[reads]} %}}{{{{- '{THOUGHT}' }}}}{{% endif %}}"
    pair, takes = tokenizer_and_oracle(family, family.source + more), family.words("takes")

    @given(conversations(has_system="system" in takes, has_tools="tools" in takes))
    def check(messages: list[dict[str, Any]]) -> None:
        outcomes[outcome(*pair, messages)] += 1

    for question in ("Who?", "Hi /no_think", "Who?"):  # the text around an answer is the same, and its prompt is not
        outcomes[outcome(*pair, [user(question), answer(THOUGHT + "Yo")])] += 1
    check()
    assert outcomes["compared"]


@pytest.mark.parametrize("name", ["", "Pip"])
@pytest.mark.parametrize("is_constant", [True, False])
def test_another_field_of_an_answer_after_its_prompt_is_generated_as_the_templates_text_is(
    name: str, is_constant: bool
) -> None:
    header = "<|im_start|>{{ m.role }}{% if m.name is defined %}={{ m.name }}:{% endif %}"
    source = (
        f"{{% for m in messages %}}{header}\n{{{{ m.content }}}}<|im_end|>\n{{% endfor %}}"
        f"{{% if add_generation_prompt{'' if is_constant else ' and messages'} %}}<|im_start|>assistant{{% endif %}}"
    )
    messages = [user("Who?"), answer("Yo", name=name), user("So?"), answer("No", name=name)]
    assert ChatTemplate(source, {}).has_constant_header is is_constant
    assert outcome(*tokenizer_and_oracle(TOKENS, source), messages) == "compared"


def test_a_constant_header_is_that_of_every_prompt() -> None:
    """Most templates have one, so that their prompts are known from short conversations alone."""
    constant = [name for name in FOLLOWED if ChatTemplate(Family(name).source, {}).has_constant_header]
    assert sorted(set(FOLLOWED) - set(constant)) == [
        *("command_a_like", "deepseek_like", "gemma4_like", "hunyuan_like", "llama2_like", "mistral_like", "phi_like"),
        "smollm3_like",
    ]


FLAG = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}BODY{% endif %}"


@pytest.mark.parametrize(
    ("source", "is_constant"),
    [
        (FLAG, True),
        (FLAG.replace("BODY", "{{ bos_token }}{% if enable_thinking is defined %}x{% endif %}"), True),
        (FLAG.replace("{% endif %}", "{% else %}{{ messages[0].content }}{% endif %}"), True),
        (FLAG.replace("{% endif %}", "{% elif messages %}x{% endif %}"), False),
        (FLAG + "x", False),
        (FLAG.replace("BODY", "{{ messages | length }}"), False),
        (FLAG.replace("BODY", "{{ raise_exception('no') }}"), False),
        (FLAG.replace("BODY", "{{ strftime_now('%Y') }}"), False),
        ("{% set x = 1 %}" + FLAG.replace("BODY", "{{ x }}"), False),
        ("{% set x = namespace() %}" + FLAG.replace("BODY", "{% if x.y %}x{% endif %}"), False),
        ("{% macro f() %}{{ messages | length }}{% endmacro %}" + FLAG.replace("BODY", "{{ f() }}"), False),
        ("{% set add_generation_prompt = messages | length > 1 %}" + FLAG, False),
        (FLAG.replace("{% if add_generation_prompt %}", "{% if add_generation_prompt and messages %}"), False),
        ("", False),
    ],
)
def test_a_header_is_constant_only_if_nothing_of_the_conversation_is_read_for_it(
    source: str, is_constant: bool
) -> None:
    assert ChatTemplate(source, {}).has_constant_header == is_constant


@pytest.mark.parametrize(
    ("written", "position"), [("a BODY", 2), ("BODY BODY", -1), ("a BOD", -1), ("a BODYWORK", 2), ("a", -1), ("", -1)]
)
def test_a_header_is_found_where_it_is_written_whole_and_once(written: str, position: int) -> None:
    chat_tokenizer, _ = tokenizer_and_oracle(TOKENS, FLAG)
    prompts = GenerationPrompts(ChatTemplate(FLAG, {}), chat_tokenizer._control)
    assert prompts.position_of_header(written, has_tools=False) == position


@pytest.mark.parametrize(("in_prompt", "num_for_each"), [("nothing", 0), ("the last text", 1)])
def test_only_a_header_that_may_vary_costs_a_rendering_for_each_answer(
    in_prompt: str, num_for_each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = template("nothing", in_prompt, skips_empty=False)
    source = body if num_for_each else body.replace("{{ prompted(messages) }}", "")
    chat_tokenizer, _ = tokenizer_and_oracle(TOKENS, source)
    rounds = [user("Who?"), answer("Pip.")]
    encoded_by(chat_tokenizer, rounds * 2)  # renders the prompts of the shapes
    calls, run = [], ChatTemplate._run
    monkeypatch.setattr(ChatTemplate, "_run", lambda *arguments, **given: calls.append(1) or run(*arguments, **given))
    for num_rounds in (3, 30):
        calls.clear()
        encoded = encoded_by(chat_tokenizer, rounds * num_rounds)
        assert isinstance(encoded, TokenizedConversation)
        assert len(calls) == 1 + num_for_each * num_rounds


QUESTION_WITH_HEADER = (
    "{% for m in messages %}{% if m.role == 'user' %}QUESTION{% else %}<|im_start|>{{ m.content }}<|im_end|>\n"
    "{% endif %}{% endfor %}"
)
HEADER_OF_ANSWER = (
    "{% for m in messages %}{% if m.role == 'user' %}QUESTION{% else %}ANSWER{{ m.content }}<|im_end|>\n"
    "{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "generated"),
    [
        (
            QUESTION_WITH_HEADER.replace("QUESTION", "{{ m.content }}<|im_end|>\nassistant\n"),
            "<|im_start|>Yo<|im_end|>",
        ),
        (QUESTION_WITH_HEADER.replace("QUESTION", "[INST] {{ m.content }} [/INST]"), "<|im_start|>Yo<|im_end|>"),
        (QUESTION_WITH_HEADER.replace("QUESTION", "{{ m.content }}\nANSWER:"), "<|im_start|>Yo<|im_end|>"),
        (HEADER_OF_ANSWER.replace("QUESTION", "{{ m.content }}\n").replace("ANSWER", "ASSISTANT: "), "Yo<|im_end|>"),
        (
            HEADER_OF_ANSWER.replace("QUESTION", "{{ m.content }}<|im_end|>\n").replace("ANSWER", "<|im_start|>it\n"),
            "Yo<|im_end|>",
        ),
        (HEADER_OF_ANSWER.replace("QUESTION", "{{ m.content }}[/INST]").replace("ANSWER", " "), " Yo<|im_end|>"),
    ],
)
def test_a_template_without_prompts_has_its_header_where_its_questions_or_its_answers_write_it(
    source: str, generated: str
) -> None:
    chat_tokenizer, _ = tokenizer_and_oracle(TOKENS, source)
    encoded = encoded_by(chat_tokenizer, [user("Who?"), answer("Yo"), user("Why?"), answer("Yo")])
    assert isinstance(encoded, TokenizedConversation)
    is_trained = np.isin(encoded.role_ids, [int(role) for role in MODEL_ROLES])
    assert chat_tokenizer.decode(encoded.input_ids[is_trained]) == generated * 2
