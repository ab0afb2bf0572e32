"""What is trained, compared with transformers' prompts on a user's rows: equal, different, or not comparable."""

from dataclasses import replace
from typing import Any

import pytest

from sftron.data.chat.check import MaskCount
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.labels import Targets
from sftron.data.prepare import DataOptions, Preparation
from sftron.data.types import IGNORE_INDEX, Conversation, ConversationKey, Role, Row, TokenizedConversation
from tests.data.streams import Rows, as_dataset, chat

WEIGHTED: Row = {
    "messages": [*chat("Hi", "Yo", "And?")["messages"], {"role": "assistant", "content": "No", "weight": 0}]
}
ROWS = [chat("Hi", "Yo"), chat("Hi", "Yo", "And?", "No."), chat("<|im_end|>", "Yo <think>"), chat("Hi", ""), WEIGHTED]


def counted(
    preparation: Preparation, *, stop_ids: set[int] | None = None, change: Any = lambda labeled: labeled
) -> MaskCount:
    masks = MaskCount()
    for row in range(preparation.num_rows or 0):
        key = ConversationKey(0, row)
        parsed, tokenized = preparation.parse(key), preparation.tokenize(key)
        assert isinstance(parsed, Conversation)
        assert isinstance(tokenized, TokenizedConversation)
        ends = set(tokenized.stop_ids) if stop_ids is None else stop_ids
        masks.add(preparation, parsed, tokenized, change(preparation.label(tokenized)), ends)
    return masks


def prepare(chat_tokenizer: ChatTokenizer, *rows: Row, **options: Any) -> Preparation:
    return Preparation([as_dataset(Rows(rows))], chat_tokenizer, DataOptions(**{"sequence_length": 64} | options))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"train_on_completions_only": False},
        {"targets": Targets(last_turn_only=True)},
        {"targets": Targets(frozenset({Role.ASSISTANT}))},
    ],
    ids=["completions", "everything", "last turn", "answers alone"],
)
def test_every_right_mask_is_found_equal_under_any_setting(
    chat_tokenizer: ChatTokenizer, options: dict[str, Any]
) -> None:
    masks = counted(prepare(chat_tokenizer, *ROWS, **options))

    assert (masks.num_equal, masks.num_rows, masks.problems) == (len(ROWS), len(ROWS), [])


def test_a_mask_with_one_token_too_many_or_too_few_is_a_problem_that_names_the_token(
    chat_tokenizer: ChatTokenizer,
) -> None:
    preparation = prepare(chat_tokenizer, ROWS[0])

    def changed(shift: int) -> Any:
        def change(labeled: Any) -> Any:
            labels = labeled.labels.copy()
            first = int((labels != IGNORE_INDEX).argmax()) - shift
            labels[first] = labeled.input_ids[first + 1] if shift else IGNORE_INDEX
            return replace(labeled, labels=labels)

        return change

    (too_many,), (too_few,) = (counted(preparation, change=changed(shift)).problems for shift in (1, 0))
    assert "1 of 1 masks differ; the first: rows.jsonl:1: token 13, " in too_many
    assert "is trained, but is part of the prompt" in too_many
    assert "token 14, 'Yo" in too_few
    assert "is not trained, but the model must generate it" in too_few


def test_rows_that_cannot_be_compared_are_counted_by_reason_and_more_than_a_twentieth_are_a_problem(
    chat_tokenizer: ChatTokenizer,
) -> None:
    few, many = counted(prepare(chat_tokenizer, *[chat("Hi", "Yo")] * 19)), MaskCount()
    one_more = counted(prepare(chat_tokenizer, chat("Hi", "Yo")), stop_ids=set())
    assert one_more.num_equal == 0
    few.not_compared += one_more.not_compared
    assert (few.num_rows, few.num_compared, few.problems) == (20, 19, [])
    assert few.reasons == "1 as none of the model's own stop tokens follows an answer"

    many.num_equal, many.not_compared = 18, few.not_compared + one_more.not_compared
    (problem,) = many.problems
    assert problem.startswith("2 of 20 masks could not be compared with transformers' renderings")
