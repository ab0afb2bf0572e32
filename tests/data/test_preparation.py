"""A row becomes a whole conversation or a drop with its reason, by rules that no toggle changes (law 4)."""

import datetime
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.formats.table import RowFormat
from sftron.data.labels import Targets
from sftron.data.prepare import DataOptions, DataSet, Preparation
from sftron.data.types import ConversationKey, DataError, Dropped, LabeledConversation, Role, Row, TokenizedConversation
from tests.data.streams import NOTHING_TRAINED, OVERLONG, Rows, as_dataset, chat


def prepared(datasets: Sequence[DataSet], chat_tokenizer: ChatTokenizer, **options: Any) -> Preparation:
    return Preparation(datasets, chat_tokenizer, DataOptions(**{"sequence_length": 48} | options))


def prepare(chat_tokenizer: ChatTokenizer, *rows: Row | str, **options: Any) -> Preparation:
    return prepared([as_dataset(Rows(rows))], chat_tokenizer, **options)


def at(row: int, source: int = 0) -> ConversationKey:
    return ConversationKey(source, row)


def kept(item: TokenizedConversation | LabeledConversation | Dropped) -> Any:
    assert not isinstance(item, Dropped), item
    return item


@pytest.mark.parametrize("completions_only", [True, False])
def test_overlong_and_untrained_rows_are_dropped_with_a_reason_under_either_setting(
    chat_tokenizer: ChatTokenizer, completions_only: bool
) -> None:
    preparation = prepare(
        chat_tokenizer, OVERLONG, NOTHING_TRAINED, chat("Hi", "Yo"), train_on_completions_only=completions_only
    )
    overlong, untrained, fine = (preparation.read(at(row)) for row in range(3))

    assert isinstance(overlong, Dropped)
    assert isinstance(untrained, Dropped)
    assert (overlong.reason, untrained.reason) == ("overlong", "no_trained_token")
    assert re.match(r"rows\.jsonl:1: \d+ tokens, but tokens\.sequence_length is 48", overlong.detail)
    assert untrained.detail == "rows.jsonl:2: no text to train on (role assistant, reasoning, tool_call)"
    assert isinstance(fine, LabeledConversation)


def test_the_length_itself_fits_and_one_token_more_is_dropped_or_an_error(chat_tokenizer: ChatTokenizer) -> None:
    row = chat("Hi", "Yo")
    length = len(kept(prepare(chat_tokenizer, row).read(at(0))))
    assert len(kept(prepare(chat_tokenizer, row, sequence_length=length).read(at(0)))) == length
    assert isinstance(prepare(chat_tokenizer, row, sequence_length=length - 1).read(at(0)), Dropped)
    strict = prepare(chat_tokenizer, row, OVERLONG, overlong="error")
    kept(strict.read(at(0)))
    with pytest.raises(
        DataError, match=r"rows\.jsonl:2: \d+ tokens, but tokens\.sequence_length is 48; raise"
    ) as caught:
        strict.read(at(1))
    assert caught.value.reason == "overlong"


turns = st.lists(st.integers(0, 12), min_size=1, max_size=8)


@given(words=turns, sequence_length=st.integers(2, 60))
@example(words=[0] * 6, sequence_length=26)  # three turns of 8 tokens would fit, and the third is a question
def test_truncation_leaves_whole_turns_that_end_in_an_answer_and_as_many_as_fit(
    chat_tokenizer: ChatTokenizer, words: list[int], sequence_length: int
) -> None:
    row = chat(*("word " * count + "." for count in words))

    def encode(num_turns: int) -> Any:
        return kept(prepare(chat_tokenizer, chat(*(m["content"] for m in row["messages"][:num_turns])), NOTHING_TRAINED,
                            sequence_length=10_000).tokenize(at(0)))  # fmt: skip

    fitting = [n for n in range(2, len(words) + 1, 2) if len(encode(n)) <= sequence_length]
    if len(words) > 1 and len(encode(len(words))) <= sequence_length:
        fitting.append(len(words))
    item = prepare(chat_tokenizer, row, sequence_length=sequence_length, overlong="truncate_turns").tokenize(at(0))
    if not fitting:
        assert isinstance(item, Dropped)
        assert item.reason == ("no_trained_token" if len(words) == 1 and "overlong" not in item.reason else "overlong")
        return
    expected = encode(max(fitting))
    assert isinstance(item, TokenizedConversation)
    assert np.array_equal(item.input_ids, expected.input_ids)
    assert np.array_equal(item.role_ids, expected.role_ids)
    assert item.num_truncated_turns == len(words) - max(fitting)


@pytest.mark.parametrize("num_missing", range(4))
def test_what_truncation_leaves_is_never_longer_than_the_sequence(
    chat_tokenizer: ChatTokenizer, num_missing: int
) -> None:
    """Also where the turn and its stop token fit, and the text of the template behind them does not."""
    row = chat("Hi", "Yo", "And", "then")
    length = len(kept(prepare(chat_tokenizer, chat("Hi", "Yo")).tokenize(at(0)))) - num_missing
    item = prepare(chat_tokenizer, row, sequence_length=length, overlong="truncate_turns").tokenize(at(0))
    assert isinstance(item, Dropped) == (num_missing > 0)
    assert isinstance(item, Dropped) or len(item) == length


def test_truncation_may_leave_the_first_message_alone(chat_tokenizer: ChatTokenizer) -> None:
    row, question = chat("question", "word " * 60), chat("question")
    targets = Targets.named(["user"], "all")
    item = kept(prepare(chat_tokenizer, row, overlong="truncate_turns", targets=targets).tokenize(at(0)))
    alone = kept(prepare(chat_tokenizer, question, targets=targets).tokenize(at(0)))
    assert (item.input_ids.tolist(), item.num_truncated_turns) == (alone.input_ids.tolist(), 1)


def test_a_bad_row_names_its_file_and_line_or_is_skipped_under_its_own_key(chat_tokenizer: ChatTokenizer) -> None:
    """The bad row is in the second data set: its key must not be mistaken for one of the first."""
    files = [Rows([chat("a", "b")] * 3, "one.jsonl"), Rows([chat("c", "d"), "broken_json"], "two.jsonl")]
    sets = [as_dataset(rows) for rows in files]
    strict, lenient = (prepared(sets, chat_tokenizer, on_bad_row=setting) for setting in ("error", "skip"))

    with pytest.raises(DataError, match=r"two\.jsonl:2: broken_json"):
        strict.read(at(1, source=1))
    dropped = lenient.read(ConversationKey(1, 1, 2))
    assert isinstance(dropped, Dropped)
    assert (dropped.reason, dropped.key) == ("broken_json", ConversationKey(1, 1, 2))
    assert lenient.location(dropped.key) == "two.jsonl:2"
    assert kept(lenient.read(at(0, source=1))).key == ConversationKey(1, 0)
    assert (strict.num_rows, strict.source_names) == (5, ("one.jsonl", "two.jsonl"))


def test_rows_are_numbered_through_all_data_sets_and_data_without_rows_is_refused(
    chat_tokenizer: ChatTokenizer,
) -> None:
    sizes = (3, 1, 2)
    preparation = prepared([as_dataset(Rows([chat("a", "b")] * size)) for size in sizes], chat_tokenizer)
    expected = [ConversationKey(source, row, 4) for source, size in enumerate(sizes) for row in range(size)]
    assert [preparation.key(row, epoch=4) for row in range(6)] == expected
    assert [preparation.row_number(key) for key in expected] == list(range(6))
    with pytest.raises(DataError, match=r"the data has no rows: rows\.jsonl"):
        prepare(chat_tokenizer)


def test_the_fingerprint_follows_all_that_makes_a_conversation_and_no_toggle(chat_tokenizer: ChatTokenizer) -> None:
    row = chat("Hi", "Yo")
    base = prepare(chat_tokenizer, row).fingerprint
    template = "{% for m in messages %}{{ '<|im_start|>' + m.role + m.content + '<|im_end|>' }}{% endfor %}"
    others = {
        "data.datasets.0": prepare(chat_tokenizer, row, row),
        "chat_template": prepare(ChatTokenizer(chat_tokenizer.tokenizer, template), row),
        "tokens.sequence_length": prepare(chat_tokenizer, row, sequence_length=47),
        "data.overlong": prepare(chat_tokenizer, row, overlong="truncate_turns"),
        "data.on_bad_row": prepare(chat_tokenizer, row, on_bad_row="skip"),
        "data.reasoning": prepare(chat_tokenizer, row, reasoning="strip"),
        "trained roles": prepare(chat_tokenizer, row, targets=Targets(frozenset({Role.USER}))),
    }

    assert prepare(chat_tokenizer, row, train_on_completions_only=False).fingerprint == base
    for name, other in others.items():
        assert {key for key in base if other.fingerprint[key] != base[key]} == {name}


def test_the_fingerprint_follows_the_date_where_the_template_writes_it(chat_tokenizer: ChatTokenizer) -> None:
    """So a run does not resume under another date than its own."""

    def of(template: str | None, day: int) -> dict[str, str]:
        tokenizer = ChatTokenizer(chat_tokenizer.tokenizer, template, datetime.date(2024, 7, day))
        return prepare(tokenizer, chat("Hi", "Yo")).fingerprint

    dated = "{{ strftime_now('%d %b') }}{% for m in messages %}{{ m.role + m.content + '<|im_end|>' }}{% endfor %}"
    one, other = of(dated, 26), of(dated, 27)
    assert [name for name in one if one[name] != other[name]] == ["tokenizer.date"]
    assert of(None, 26) == of(None, 27)


def test_the_fingerprint_follows_weights_order_and_formats_of_data_sets_and_not_their_names(
    chat_tokenizer: ChatTokenizer,
) -> None:
    """Rows are numbered through all data sets: in another order, a resume would give other conversations."""

    def of(*datasets: DataSet) -> str:
        return str(prepared(datasets, chat_tokenizer).fingerprint)

    one, two = (Rows([chat("a", text)], f"{text}.jsonl") for text in ("b", "c"))
    weights = [(0.1, 0.3), (1, 3), (2.5, 7.5), (None, None), (1, 1), (3, 1)]
    prints = [of(*(as_dataset(one, weight=weight) for weight in each)) for each in weights]
    assert prints[0] == prints[1] == prints[2]
    assert len(set(prints)) == 4
    sets = [as_dataset(rows) for rows in (one, two)]
    assert len({of(*sets), of(*reversed(sets)), of(sets[0]), of(sets[0], sets[0])}) == 4
    assert of(*sets) == of(as_dataset(Rows(one.rows, "moved.jsonl")), sets[1])
    formats = [
        RowFormat("query_response"),
        RowFormat("query_response", prompt_template="cot"),
        RowFormat("query_response", {"system": "s"}),
        RowFormat("question_answer", {"question": "query", "answer": "response"}),
    ]
    assert len({of(DataSet("a", one, row_format)) for row_format in formats}) == 4


# --- Pretokenized rows, and reasoning ---


def of_ids(chat_tokenizer: ChatTokenizer, *rows: Row, **options: Any) -> Preparation:
    dataset = DataSet("ids.jsonl", Rows(rows, "ids.jsonl"), RowFormat("input_ids"))
    return prepared([dataset], chat_tokenizer, **options)


def test_a_row_of_ids_that_a_chat_was_tokenized_to_is_labelled_as_the_chat(chat_tokenizer: ChatTokenizer) -> None:
    written = kept(prepare(chat_tokenizer, chat("Hi", "Yo", "And?", "So.")).tokenize(at(0)))
    is_trained = written.role_ids == Role.ASSISTANT
    row = {"input_ids": written.input_ids.tolist(), "labels": np.where(is_trained, written.input_ids, -100).tolist()}
    for each in (row, {"input_ids": row["input_ids"], "role_ids": written.role_ids.tolist()}):
        for completions_only in (True, False):
            options: dict[str, Any] = {"train_on_completions_only": completions_only}
            expected = kept(prepare(chat_tokenizer, chat("Hi", "Yo", "And?", "So."), **options).read(at(0)))
            found = kept(of_ids(chat_tokenizer, each, **options).read(at(0)))
            assert found.input_ids.tolist() == expected.input_ids.tolist()
            assert found.labels.tolist() == expected.labels.tolist()
            assert found.loss_weights.tolist() == expected.loss_weights.tolist()


def test_rows_of_ids_keep_the_rules_of_length_targets_and_vocabulary(chat_tokenizer: ChatTokenizer) -> None:
    size = len(chat_tokenizer.tokenizer)
    fine, long = ({"input_ids": [5] * n, "roles": ["assistant"] * n} for n in (48, 49))
    untrained = {"input_ids": [5, 6], "labels": [5, -100]}
    foreign = {"input_ids": [5, size], "labels": [-100, size]}
    rows = (fine, long, untrained, foreign)
    for overlong in ("drop", "truncate_turns"):
        preparation = of_ids(chat_tokenizer, *rows, overlong=overlong, on_bad_row="skip")
        assert len(kept(preparation.read(at(0)))) == 48
        reasons = ["overlong", "no_trained_token", "unknown_id"]
        for row, dropped in enumerate(preparation.read_many([at(1), at(2), at(3)]), start=2):
            assert isinstance(dropped, Dropped)
            assert dropped.reason == reasons[row - 2]
            assert dropped.detail.startswith(f"ids.jsonl:{row}: ")
    strict = of_ids(chat_tokenizer, *rows, overlong="error")
    for row, message in ((1, "ids.jsonl:2: 49 tokens"), (3, f"ids.jsonl:4: .* {size}")):
        with pytest.raises(DataError, match=message):
            strict.read(at(row))


def test_the_template_gets_the_reasoning_that_the_policy_leaves(chat_tokenizer: ChatTokenizer) -> None:
    thinking = chat("Hi", "<think>a</think>Yo", "And?", "<think>b</think>So.")
    policies = {
        "keep": thinking,
        "last": chat("Hi", "Yo", "And?", "<think>b</think>So."),
        "strip": chat("Hi", "Yo", "And?", "So."),
    }
    for policy, row in policies.items():
        found = kept(prepare(chat_tokenizer, thinking, reasoning=policy, sequence_length=99).tokenize(at(0)))
        expected = kept(prepare(chat_tokenizer, row, sequence_length=99).tokenize(at(0)))
        assert found.input_ids.tolist() == expected.input_ids.tolist()
