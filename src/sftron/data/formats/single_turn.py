"""Parsers of rows that hold a question and its answer in separate columns."""

from __future__ import annotations

from dataclasses import replace

from sftron.data.formats.messages import Numbered, parse_messages
from sftron.data.formats.values import NamedRow, checked_text, describe
from sftron.data.json_text import excerpt
from sftron.data.types import DataError, Message, Role

PROMPT_TEMPLATES = {
    "cot": "{query}\nPlease reason step by step, and put your final answer within \\boxed{}.",
    "alpaca": (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request."
        "\n\n### Instruction:\n{query}\n\n### Response:"
    ),
}
"""Prompt templates by name, from DART-Math (github.com/hkust-nlp/dart-math), without the names of the speakers, as the
chat template writes those."""


def prompt_template_text(template: str | None) -> str:
    """Returns the text of a prompt template, given by name or as a text that contains {query} once.

    None stands for the query alone. Raises DataError.
    """
    text = PROMPT_TEMPLATES.get(template or "", "{query}" if template is None else template)
    if (found := text.count("{query}")) != 1:
        problem = f"prompt_template: {excerpt(text)} is not the name of a template, and has {{query}} {found} times"
        raise DataError(f"{problem}; wanted {', '.join(PROMPT_TEMPLATES)}, or a text with {{query}} once")
    return text


def parse_question(row: NamedRow, question: str, answer: str, template: str) -> list[Numbered]:
    """Parses a question and its answer from the columns of these names. Raises DataError."""
    prompt = Message(Role.USER, template.replace("{query}", row.text(question)))
    return [(1, prompt), (2, Message(Role.ASSISTANT, row.text(answer)))]


def parse_alpaca(row: NamedRow, template: str) -> list[Numbered]:
    """Parses instruction, input and output, after the [user, assistant] pairs of `history`. Raises DataError."""
    messages = []
    column, history = row.column("history"), row.get("history") or []
    for pair in history if isinstance(history, list) else [history]:
        if not isinstance(pair, list) or len(pair) != 2:
            problem = f"`{column}` holds {describe(pair)}; wanted a list of pairs of texts, [user, assistant]"
            raise row.refusal("bad_history", problem)
        texts = [checked_text(text, column, row.location) for text in pair]
        messages += [Message(Role.USER, texts[0]), Message(Role.ASSISTANT, texts[1])]
    query, context = row.text("instruction"), row.optional_text("input")
    query = template.replace("{query}", f"{query}\n\n{context}" if context else query)
    messages += [Message(Role.USER, query), Message(Role.ASSISTANT, row.text("output"))]
    return list(enumerate(messages, start=1))


def parse_prompt_completion(row: NamedRow) -> list[Numbered]:
    """Parses two texts, or two lists of messages that are numbered as one list. Raises DataError.

    Only the completion is trained: a message in the prompt has weight 0, unless the data declares its weight.
    """
    prompt, completion = row.get("prompt"), row.get("completion")
    if isinstance(prompt, list) != isinstance(completion, list) and None not in (prompt, completion):
        found = f"`{row.column('prompt')}` is {describe(prompt)}, `{row.column('completion')}` {describe(completion)}"
        raise row.refusal("mixed_kinds", f"{found}; wanted two texts, or two lists of messages")
    if not isinstance(prompt, list):
        return parse_question(row, "prompt", "completion", "{query}")
    prompt, completion = row.filled_list("prompt"), row.filled_list("completion")
    given = [
        (number, replace(message, weight=0.0) if turn.get("weight") is None else message)
        for turn, (number, message) in zip(prompt, parse_messages(prompt, row.location), strict=True)
    ]
    return given + parse_messages(completion, row.location, first_number=len(prompt) + 1)
