"""What the four loops train on: conversations as ids, with a flag for each token that the model has to write."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROWS = Path(__file__).parents[1] / "quickstart" / "support.jsonl"


def conversations(count: int = 16) -> list[list[dict[str, str]]]:
    lines = ROWS.read_text(encoding="utf-8").splitlines()[: 3 * count : 3]
    return [json.loads(line)["messages"] for line in lines]


def encoded(tokenizer: Any, messages: list[dict[str, str]]) -> tuple[list[int], list[bool]]:
    """Returns the ids of a conversation, and which of them are an answer or its stop token."""
    ids = tokenizer.apply_chat_template(messages, return_dict=False)
    is_answer = [False] * len(ids)
    for n in (n for n, message in enumerate(messages) if message["role"] == "assistant"):
        begin = len(tokenizer.apply_chat_template(messages[:n], add_generation_prompt=True, return_dict=False))
        end = begin + ids[begin:].index(tokenizer.eos_token_id) + 1
        is_answer[begin:end] = [True] * (end - begin)
    return ids, is_answer


def in_groups(rows: list[Any], size: int) -> Iterator[list[Any]]:
    for at in range(0, len(rows) - size + 1, size):
        yield rows[at : at + size]
