"""What is trained, compared with transformers' prompts on a user's rows: equal, different, or not comparable."""

import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer

from sftron.data.chat.check import CannotCompareError, MaskCount, generated_tokens
from sftron.data.chat.layout import MODEL_ROLES
from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.labels import Targets
from sftron.data.prepare import DataOptions, Preparation
from sftron.data.types import IGNORE_INDEX, Conversation, ConversationKey, DataError, Role, Row, TokenizedConversation
from tests.conftest import ASSETS, rest_nightly
from tests.data.family_conversations import SPELLED_CONVERSATIONS
from tests.data.streams import Rows, as_dataset, chat
from tests.data.test_families import conversation, shown

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
        labeled = change(preparation.label(tokenized))
        masks.add(preparation.chat_tokenizer, preparation.trained, parsed, tokenized, labeled, ends)
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


def test_a_token_that_begins_in_the_prompt_is_not_generated(chat_tokenizer: ChatTokenizer) -> None:
    """The prompt ends in " th", and an answer that begins in "e" makes one token " the" with it."""
    header = (
        "{{ m.role }}: th{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}assistant: th{% endif %}"
    )
    source = "{% for m in messages %}" + header
    joined = prepare(ChatTokenizer(chat_tokenizer.tokenizer, source), chat("Hi", "e cat"), chat("Hi " * 80, "e cat"),
                     sequence_length=400)  # fmt: skip
    masks = counted(joined)
    assert (masks.num_equal, masks.problems) == (2, [])


def test_a_template_that_writes_headers_and_no_prompts_cannot_be_compared(chat_tokenizer: ChatTokenizer) -> None:
    """What the model is trained after is not what transformers would prompt it with; the start warns of that."""
    source = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    masks = counted(prepare(ChatTokenizer(chat_tokenizer.tokenizer, source), ROWS[0]))
    assert (masks.wrong, masks.reasons) == ([], "1 as the template writes headers, but no generation prompts")


@pytest.mark.parametrize("begins", ["<|im_start|>", "<|im_start|>reply\n", "<think>\n\n</think>\n"])
@pytest.mark.parametrize("ends", ["<|im_end|>\nassistant\n", " [/INST]", "\nANSWER:"])
def test_what_follows_a_header_that_questions_end_in_is_compared(
    ends: str, begins: str, chat_tokenizer: ChatTokenizer
) -> None:
    """The model has to write what such a template writes before each answer."""
    source = f"{{% for m in messages %}}{{% if m.role == 'user' %}}{{{{ m.content }}}}{ends}{{% else %}}{begins}"
    source += "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    masks = counted(prepare(ChatTokenizer(chat_tokenizer.tokenizer, source), chat("Hi", "Yo", "Why?", "So it is.")))
    assert (masks.num_equal, masks.problems) == (1, [])


TRL_TEMPLATES = Path(*find_spec("trl").submodule_search_locations) / "chat_templates"  # type: ignore[union-attr]
TEXTLESS = ("idefics3", "smolvlm", "llava_next")  # they write no content that is a text
PUBLISHED = sorted(path.stem for path in TRL_TEMPLATES.glob("*.jinja") if not path.stem.startswith(TEXTLESS))
CONTROL = re.compile(
    r"<\|[^|<>\s{}]+\|>|<｜[^<>｜{}]+｜>|\[/?[A-Z_]+\]|</?s>|<(?:start|end)_of_turn>|</?think>|<\|?\w+\|?>(?<=\|>)|<\|\w+>"
)
STOPS = ["<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|END_OF_TURN_TOKEN|>", "<｜end▁of▁sentence｜>", "<turn|>"]


@pytest.mark.parametrize(
    "name",
    # A stop token after the last answer, marks that end within a character, line breaks that part, and turns in turns.
    rest_nightly(PUBLISHED, ["phi3", "diffusion_gemma_training", "qwen3_5_nothink", "gptoss"]),
)
def test_the_right_masks_of_published_templates_are_found_equal(name: str) -> None:
    """The templates that TRL holds; the eos token is one that ends answers, or the end of the whole text."""
    source = (TRL_TEMPLATES / f"{name}.jinja").read_text("utf-8")
    eos = next((stop for stop in STOPS if stop in source), "</s>")
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "tokenizer", bos_token="<s>", eos_token=eos)
    control = [
        AddedToken(each, normalized=False, special=True) for each in sorted({"<s>", eos, *CONTROL.findall(source)})
    ]
    tokenizer.backend_tokenizer.add_special_tokens(control)
    chat_tokenizer, num_equal, num_left = ChatTokenizer(tokenizer, source), 0, 0
    for each in SPELLED_CONVERSATIONS:
        given = conversation(each)
        (encoded,) = chat_tokenizer.encode_batch([given])
        if isinstance(encoded, DataError):
            num_left += 1
            continue
        ids, is_trained = encoded.input_ids.tolist(), np.isin(encoded.role_ids, list(MODEL_ROLES))
        try:
            expected = generated_tokens(chat_tokenizer, given, encoded, {tokenizer.eos_token_id, *encoded.stop_ids})
        except CannotCompareError:
            num_left += 1
            continue
        assert shown(tokenizer, ids, is_trained.tolist()) == shown(tokenizer, ids, expected.tolist()), each.name
        num_equal += 1
    assert num_equal >= 10 or name == "glm4moe"  # without a stop token
    assert num_equal + num_left == len(SPELLED_CONVERSATIONS)
