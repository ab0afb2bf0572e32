"""Prompts to verify a model with: conversations that end where the model answers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sftron.regular_file import read_regular

Prompt = Sequence[dict[str, str]]
"""Messages ({"role", "content"}) as `tokenizer.apply_chat_template` takes them; the last one is a user's."""

EXAMPLE_PROMPTS: tuple[Prompt, ...] = (
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "user", "content": "Write one sentence about the sea."}],
    [{"role": "user", "content": "What is 17 + 25? Think step by step."}],
    [{"role": "user", "content": "Translate to German: good morning, my friend."}],
    [
        {"role": "user", "content": "Which planet is the largest?"},
        {"role": "assistant", "content": "Jupiter"},
        {"role": "user", "content": "And the smallest?"},
    ],
)


_MAX_FILE_BYTES = 64 * 2**20


def read_prompts(path: Path) -> list[Prompt]:
    """Reads prompts from a JSONL file of objects with `messages`, of which the last is a user's.

    Raises ValueError, naming file:line, for a line that is anything else, and OSError if the file cannot be read.
    """
    prompts = []
    try:
        text = read_regular(path, _MAX_FILE_BYTES).decode("utf-8")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: not valid JSON: {error}") from error
        problem = _problem(row)
        if problem:
            raise ValueError(f"{path}:{number}: {problem}")
        prompts.append(row["messages"])
    if not prompts:
        raise ValueError(f'{path}: holds no prompt. Expected lines such as {{"messages": [{{"role": "user", ...}}]}}.')
    return prompts


def _problem(row: Any) -> str | None:
    if not isinstance(row, dict) or not isinstance(row.get("messages"), list) or not row["messages"]:
        return "expected an object with a non-empty list `messages`."
    for index, message in enumerate(row["messages"]):
        is_message = isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        if not is_message:
            return f"messages[{index}] is {message!r}, expected an object with texts `role` and `content`."
    last = row["messages"][-1]["role"]
    if last != "user":
        return (
            f"the last message has role {last!r}, expected 'user': the model is to answer it. Remove what follows it."
        )
    return None
