"""Templates are followed through what they do to text, or refused by line; the text is always transformers' own."""

import datetime
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

from sftron.data.chat.template import ChatTemplate, TemplateError
from sftron.data.chat.tracked_text import Origin, TrackedStr
from sftron.data.types import Role

MESSAGES = [
    {"role": "user", "content": " Hé 'you' \n line ", "items": "a key that is also the name of a method"},
    {"role": "assistant", "content": "<b>Yo</b>\n\n  there"},
]

FOLLOWED = {
    "plus": "{% for m in messages %}{{ '<' + m['content'] + '>' }}{% endfor %}",
    "tilde": "{% for m in messages %}{{ '<' ~ m.content ~ 1 ~ '>' }}{% endfor %}",
    "trim": "{% for m in messages %}<{{ m.content | trim }}>{% endfor %}",
    "join filter": "{{ messages | map(attribute='content') | join(' | ') }}",
    "join filter with attribute": "{{ messages | join(', ', attribute='content') }}",
    "join method": "{{ ' | '.join([messages[0].content, messages[1].content]) }}",
    "join of a generator": "{{ '-'.join(messages | map(attribute='content')) }}",
    "macro": "{% macro f(x) %}[{{ x | trim }}]{% endmacro %}{% for m in messages %}{{ f(m.content) }}{% endfor %}",
    "set block": "{% for m in messages %}{% set x %}<{{ m.content }}>{% endset %}{{ x }}{% endfor %}",
    "set and slices": "{% for m in messages %}{% set c = m.content %}{{ c[1:] }}{{ c[0] }}{% endfor %}",
    "split": "{% for m in messages %}{{ m.content.split('\n')[-1].lstrip() }}{% endfor %}",
    "replace method": "{% for m in messages %}{{ m.content.replace('o', '0') }}{% endfor %}",
    "replace filter": "{% for m in messages %}{{ m.content | replace('o', '0') }}{% endfor %}",
    "replace by content": "{{ 'hello X'.replace('X', messages[0].content) }}",
    "tojson": "{% for m in messages %}{{ m.content | tojson }}{% endfor %}",
    "indent": "{% for m in messages %}{{ m.content | indent(2) }}|{{ m.content | indent(3, true, true) }}{% endfor %}",
    "upper": "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
    "generation block": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "filter block": "{% for m in messages %}{% filter trim %} {{ m.content }} {% endfilter %}{% endfor %}",
    "loop controls": "{% for m in messages %}{% if loop.last %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
    "namespace": "{% set n = namespace() %}{% for m in messages %}{% set n.t = m.content %}{{n.t}}{% endfor %}",
    "default": "{% for m in messages %}{{ m.nothing | default(m.content) }}{% endfor %}",
    "splitlines": "{% for m in messages %}{% for l in m.content.splitlines() %}> {{ l }}\n{% endfor %}{% endfor %}",
    "items": "{% for m in messages %}{% for k, v in m.items() if k == 'content' %}{{ v }}{% endfor %}{% endfor %}",
    "safe": "{% for m in messages %}{{ '{\"' + m.content + '\": ' + (m.content | tojson | safe) + '}' }}{% endfor %}",
    "safe in a call": "{% for m in messages %}{{ '&'.join([m.content | safe, '<']) + '&' }}{% endfor %}",
    "safe in a filter": "{% for m in messages %}{{ [m.content | safe, 1] | join(m.content | safe) + '<' }}{% endfor %}",
    "a method in a loop": "{% for m in messages %}{% set x = m.content %}{{ '{}'.format(1) + x }}{% endfor %}",
    "safe that joins": "{% for m in messages %}{{ (m.content | safe).join(['<', m.content]) + '&' }}{% endfor %}",
    "safe and indent": "{% for m in messages %}{{ (m.content | safe | indent(2, true)) + '&' }}{% endfor %}",
    "safe object": "{% for m in messages %}{{ ({'<': m.content} | safe) + '&' }}{% endfor %}",
    "safe parts": "{% for m in messages %}{% set x = (m.content | safe).split() %}{{ '&' + x[-1] + x[0] }}{% endfor %}",
    "safe text of the template": "{% for m in messages %}{{ ('<' + ('1' | safe) + '>') ~ m.content }}{% endfor %}",
    "tests on content": "{% for m in messages if 'Yo' in m.content %}{{ m.content }}{% endfor %}",
}  # fmt: skip

REFUSED = {
    "{{ '%s' % messages[0].content }}": "loses the origin of text: the operator % formats",
    "{{ messages[0].content | wordwrap(4) }}": "loses the origin of text: the filter 'wordwrap' rewrites",
    "{{ messages[0].content | e }}": "loses the origin of text: the filter 'e' rewrites",
    "{{ '{}'.format(messages[0].content) }}": "loses the origin of text: the string method format",
    "{{ messages | tojson }}": "loses the origin of text: the filter 'tojson' mixes",
    "{{ ('<b>' | safe) + messages[0].content }}": "loses the origin of text: the filter 'safe' makes + escape",
    "{{ ('<b>' | safe).join([messages[0].content]) }}": "loses the origin of text: the filter 'safe' makes a method",
    "{{ messages[0].content + ('<b>' | safe) }}": "loses the origin of text: the filter 'safe' makes + escape",
    "{{ raise_exception('no system turn, please') }}": "refuses this conversation: no system turn, please",
    "{% if %}": "Expected an expression",
    **dict.fromkeys(("{{ tools | length }}", "{{ messages[0].content + 1 }}", "{{ 1 / 0 }}"), " this conversation: "),
    "{{ messages[9].content.x }}": "refuses this conversation: ",
}


def tracked(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    return [
        {**m, "content": TrackedStr.of(m["content"], Origin(i, "content", Role.USER))} for i, m in enumerate(messages)
    ]


@pytest.mark.parametrize("name", FOLLOWED)
def test_the_text_is_that_of_apply_chat_template_and_content_is_never_the_templates(
    name: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    text = ChatTemplate(FOLLOWED[name], tokenizer.special_tokens_map).render(tracked(MESSAGES))

    assert text == tokenizer.apply_chat_template(MESSAGES, chat_template=FOLLOWED[name], tokenize=False)
    owners = {origin.message for _, origin in text.spans if origin}
    assert owners == (
        {0} if name in ("loop controls", "replace by content") else {1} if name == "tests on content" else {0, 1}
    )
    start = 0
    for length, origin in text.spans:
        # Letters that only the messages hold may not have slipped into the template's part.
        if origin is None:
            assert not set("éyu'b") & set(text[start : start + length])
        start += length


ATOMS = st.sampled_from(["'<&'", "x", "(x | safe)", "(x | tojson | safe)", "(x | safe | string)", "x | trim"])
ON_TEXT = [
    "({}).strip()",
    "({} | upper)",
    "({})[1:]",
    "({} | safe)",
    "({} | replace('o', '<'))",
    "({}).replace('o', '<')",
]
ON_TEXT += ["({}).partition('o')[0]", "({}).split('\\n')[0]", "({} * 2)", "({}).splitlines()[0]", "({}).rsplit('Y')[0]"]


@given(
    st.recursive(
        ATOMS,
        lambda inner: st.one_of(
            st.tuples(inner, st.sampled_from([" + ", " ~ "]), inner).map("".join).map("({})".format),
            st.tuples(st.sampled_from(ON_TEXT), inner).map(lambda each: each[0].format(each[1])),
        ),
    )
)
def test_any_expression_with_safe_texts_escapes_what_transformers_escapes(expression: str) -> None:
    source = f"{{% for m in messages %}}{{% set x = m.content %}}{{{{ {expression} }}}};{{% endfor %}}"
    reference = _compile_jinja_template(source).render(messages=MESSAGES)
    try:
        text = ChatTemplate(source, {}).render(tracked(MESSAGES))
    except TemplateError as error:  # of the template's own text alone
        if "the filter 'safe' makes" in str(error) and "'<&'" in expression:
            return
        raise
    assert text == reference
    assert sum(length for length, _ in text.spans) == len(text)


@pytest.mark.parametrize("expression", REFUSED)
def test_what_loses_the_origin_or_fails_is_refused_by_line(expression: str) -> None:
    with pytest.raises(TemplateError, match=rf"^the chat template.*, line 2[,:] .*{re.escape(REFUSED[expression])}"):
        ChatTemplate("a\n" + expression, {}).render(tracked(MESSAGES))


def test_a_template_that_writes_the_date_writes_one_date_and_transformers_in_this_process_the_same(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    source = "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    template = ChatTemplate(source, {}, datetime.date(2024, 7, 26))

    assert template.render(tracked(MESSAGES)).startswith("26 Jul 2024")
    reference = tokenizer.apply_chat_template(MESSAGES, chat_template=source, tokenize=False)
    assert template.render(tracked(MESSAGES)) == reference
    assert template.date == datetime.date(2024, 7, 26)
    assert ChatTemplate("{{ messages[0].content }}", {}).date is None


def test_a_message_of_calls_alone_gets_an_empty_content_only_where_the_template_needs_one(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
    writes = "{% for m in messages %}{{ CONTENT }}" + calls + "{% endfor %}"
    contents = {"m.content.strip()": True, "m['content'] + ''": True, "m.content or ''": False, "m.content": False}
    templates = {each: ChatTemplate(writes.replace("CONTENT", each), tokenizer.special_tokens_map) for each in contents}
    assert {each: template.needs_content for each, template in templates.items()} == contents


def test_arguments_are_an_object_only_where_the_template_cannot_write_a_text(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    writes = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}WRITTEN{% endfor %}{% endfor %}"
    written = {
        "{{ c.function.arguments }}": False,
        "{{ c.function.arguments | tojson }}": False,
        "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}": True,
        "{% for k, v in c.function.arguments.pairs() %}{{ k }}={{ v }}{% endfor %}": False,  # it fails on both
    }
    templates = {each: ChatTemplate(writes.replace("WRITTEN", each), tokenizer.special_tokens_map) for each in written}
    assert {each: template.needs_arguments_as_object for each, template in templates.items()} == written


def test_what_is_written_after_a_call_is_the_templates_text_up_to_the_next_message(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
    after = {"<|im_end|>\n": "<|im_end|>\n", "": "", "{{ m.role }}.": "assistant."}
    templates = ["{% for m in messages %}{{ m.content }}" + calls + each + "{% endfor %}" for each in after]
    found = [ChatTemplate(each, tokenizer.special_tokens_map).after_call for each in templates]
    assert found == list(after.values())
