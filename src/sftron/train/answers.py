"""Questions that a run is asked whenever it is evaluated."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from sftron.data.chat.tokenizer import ChatTokenizer
from sftron.data.formats.detect import RowFormat, parse_conversation
from sftron.data.sources import open_source
from sftron.data.types import Conversation, ConversationKey, DataError, Message, Role
from sftron.models.generation import generate, most_likely
from sftron.models.llama import LlamaForSFT


@dataclass(frozen=True, slots=True)
class Question:
    """Messages that end in a user turn."""

    messages: tuple[Message, ...]

    @property
    def text(self) -> str:
        return self.messages[-1].content or ""


def read_questions(path: str | None) -> list[Question]:
    """JSONL of `messages`. Raises DataError with file:line."""
    if path is None:
        return []
    if not Path(path).is_file():
        raise DataError(f"evaluation.prompts: {path} is not a file")
    source = open_source(path, "train")
    questions = []
    for index in range(len(source)):
        location = source.locate(index)
        conversation = parse_conversation(
            source[index], RowFormat("messages"), key=ConversationKey(0, index), location=location
        )
        assert isinstance(conversation, Conversation), "format messages holds no ids"
        if conversation.tools:
            raise DataError(f"{location}: prompts with tools are not supported yet; remove the column")
        if conversation.messages[-1].role is not Role.USER:
            role = conversation.messages[-1].role.name.lower()
            raise DataError(f"{location}: a prompt ends in a user turn, this one in {role}")
        questions.append(Question(conversation.messages))
    return questions


@dataclass(frozen=True, slots=True)
class Answer:
    """tokens: new ones, the stop token included. stopped: whether it ended by itself, before the limit."""

    prompt: str
    answer: str
    tokens: int
    stopped: bool


def answer(
    model: LlamaForSFT,
    chat_tokenizer: ChatTokenizer,
    question: Question,
    *,
    max_new_tokens: int,
    stop_ids: Collection[int],
    should_stop: Callable[[], bool] = lambda: False,
) -> Answer | None:
    """The model's greedy answer, computed in the type of its parameters; None where should_stop, which is asked before
    every token and has to say the same on all ranks, said so."""
    prompt_ids = chat_tokenizer.encode_prompt(question.messages)
    token_ids: list[int] = []
    dtype = model.head_weight.dtype
    for token_id in generate(model, prompt_ids, max_new_tokens, stop_ids, choose=most_likely, dtype=dtype):
        token_ids.append(token_id)
        if should_stop():
            return None
    text = str(chat_tokenizer.tokenizer.decode(token_ids, skip_special_tokens=True)).strip()
    return Answer(question.text, text, len(token_ids), token_ids[-1] in stop_ids)


def stop_rate(answers: Sequence[Answer]) -> float | None:
    """Share of the answers that ended by themselves; None of none."""
    return sum(each.stopped for each in answers) / len(answers) if answers else None
