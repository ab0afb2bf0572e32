"""Rows of chat data sets in short, and what they parse to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sftron.data.formats.table import Format, RowFormat, parse_conversation
from sftron.data.types import Conversation, ConversationKey

KEY = ConversationKey(source=0, row=7)
LOCATION = "chats.jsonl:8"
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def system(content: Any = "s", **extra: Any) -> dict:
    return {"role": "system", "content": content, **extra}


def user(content: Any = "q", **extra: Any) -> dict:
    return {"role": "user", "content": content, **extra}


def assistant(content: Any = "a", **extra: Any) -> dict:
    return {"role": "assistant", "content": content, **extra}


def tool(content: Any = "t", **extra: Any) -> dict:
    return {"role": "tool", "content": content, **extra}


def turns(*pairs: tuple[Any, Any], **columns: Any) -> dict:
    """A ShareGPT row."""
    return {"conversations": [{"from": speaker, "value": value} for speaker, value in pairs], **columns}


def parse(row: Any, format: Format = "messages", **options: Any) -> Conversation:
    parsed = parse_conversation(row, RowFormat(format, **options), KEY, LOCATION)
    assert isinstance(parsed, Conversation)
    return parsed


def write_jsonl(path: Path, *rows: Any) -> Path:
    """A row given as text is written as it is."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path
