"""Questions that a run is asked before and after training."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from sftron.data.chat_tokenizer import ChatTokenizer
from sftron.data.conversations import RowFormat, parse_conversation
from sftron.data.sources import open_source
from sftron.data.types import Conversation, ConversationKey, DataError, Message, Role
from sftron.models.generation import greedy_generate
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


def answer(
    model: LlamaForSFT,
    chat_tokenizer: ChatTokenizer,
    question: Question,
    *,
    max_new_tokens: int,
    stop_ids: Collection[int],
) -> str:
    """The model's greedy answer, computed in the type of its parameters."""
    prompt_ids = chat_tokenizer.encode_prompt(question.messages)
    generation = greedy_generate(model, prompt_ids, max_new_tokens, stop_ids, dtype=model.head_weight.dtype)
    return str(chat_tokenizer.tokenizer.decode(list(generation.token_ids), skip_special_tokens=True)).strip()
