"""Passwords and tokens in text that is shown or written; what is found becomes ***."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

_IN_URL = re.compile(r"(?<=://)[^/\s@]+(?=@)")
"""user:password of https://user:password@host."""
_HUB_TOKEN = re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{20,}")
_SECRET_NAME = re.compile(r"(?:^|_)(?:TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$", re.IGNORECASE)
"""Of environment variables: HF_TOKEN, WANDB_API_KEY, AWS_SECRET_ACCESS_KEY, ..."""
_SHORTEST = 8


def redacted(text: str) -> str:
    """The text without what a URL tells a server to know its user by, Hub tokens, and secrets of the environment."""
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST and _SECRET_NAME.search(name) and value in text:
            text = text.replace(value, "***")
    return _HUB_TOKEN.sub("***", _IN_URL.sub("***", text))


def without_secrets(facts: Any) -> Any:
    """The same JSON, each text of it redacted."""
    if isinstance(facts, Mapping):
        return {redacted(str(name)): without_secrets(value) for name, value in facts.items()}
    if isinstance(facts, (list, tuple)):
        return [without_secrets(value) for value in facts]
    return redacted(facts) if isinstance(facts, str) else facts
