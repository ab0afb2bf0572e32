"""Formats whose rows are a question and its answer, each in a column of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sftron.data.formats.messages import Numbered, parse_messages
from sftron.data.formats.row_reader import RowReader, checked_text, describe
from sftron.data.sources.json_text import excerpt
from sftron.data.types import DataError, Message, Role

PROMPT_TEMPLATES = {
    "cot": "{query}\nPlease reason step by step, and put your final answer within \\boxed{}.",
    "alpaca": (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request."
        "\n\n### Instruction:\n{query}\n\n### Response:"
    ),
}
"""Known by name, as in DART-Math (github.com/hkust-nlp/dart-math), without the speakers' names, which are the chat
template's to write."""


def prompt_template_text(template: str | None) -> str:
    """The text with one {query} that `prompt_template` stands for. Raises DataError."""
    text = PROMPT_TEMPLATES.get(template or "", "{query}" if template is None else template)
    if (found := text.count("{query}")) != 1:
        names = ", ".join(PROMPT_TEMPLATES)
        problem = f"prompt_template: {excerpt(text)} is no name of a template, and has {{query}} {found} times"
        raise DataError(f"{problem}; wanted {names}, or a text with {{query}} once")
    return text


def parse_question(reader: RowReader, question: str, answer: str, template: str) -> list[Numbered]:
    """query_response, question_answer."""
    return _numbered([_asked(reader.text(question), template), Message(Role.ASSISTANT, reader.text(answer))])


def parse_alpaca(reader: RowReader, template: str) -> list[Numbered]:
    """instruction, input, output; `history` holds pairs of texts, [user, assistant], that went before."""
    instruction, context = reader.text("instruction"), reader.optional_text("input")
    query = f"{instruction}\n\n{context}" if context else instruction
    messages = [
        *_parse_history(reader, reader.get("history")),
        _asked(query, template),
        Message(Role.ASSISTANT, reader.text("output")),
    ]
    return _numbered(messages)


def parse_prompt_completion(reader: RowReader) -> list[Numbered]:
    """Two texts, or two lists of messages, numbered through. What an assistant says in the prompt has weight 0, unless
    the data gives it one: the prompt is given, the completion is trained."""
    prompt, completion = (reader.get(name) for name in ("prompt", "completion"))
    if isinstance(prompt, list) != isinstance(completion, list) and None not in (prompt, completion):
        found = (
            f"`{reader.column('prompt')}` is {describe(prompt)}, `{reader.column('completion')}` {describe(completion)}"
        )
        raise reader.refusal("mixed_kinds", f"{found}; wanted two texts, or two lists of messages")
    if not isinstance(prompt, list):
        return parse_question(reader, "prompt", "completion", "{query}")
    prompt, completion = reader.filled_list("prompt"), reader.filled_list("completion")
    given = [
        (number, replace(message, weight=0.0) if turn.get("weight") is None else message)
        for turn, (number, message) in zip(prompt, parse_messages(prompt, reader.location), strict=True)
    ]
    return given + parse_messages(completion, reader.location, first_number=len(prompt) + 1)


def _asked(query: str, template: str) -> Message:
    return Message(Role.USER, template.replace("{query}", query))


def _parse_history(reader: RowReader, history: Any) -> list[Message]:
    column = reader.column("history")
    if history is not None and not isinstance(history, list):
        raise reader.refusal(
            "not_a_list", f"`{column}` is {describe(history)}; wanted a list of [user, assistant] pairs"
        )
    messages = []
    for number, pair in enumerate(history or (), start=1):
        if not isinstance(pair, list) or len(pair) != 2:
            problem = f"pair {number} of `{column}` is {describe(pair)}; wanted a list of two texts, [user, assistant]"
            raise reader.refusal("bad_history", problem)
        for role, text in zip((Role.USER, Role.ASSISTANT), pair, strict=True):
            messages.append(Message(role, checked_text(text, column, reader.location)))
    return messages


def _numbered(messages: list[Message]) -> list[Numbered]:
    return list(enumerate(messages, start=1))
