"""Run names that tell the runs of a sweep apart: `lr_{optimizer.learning_rate}` is `lr_0.0004`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from sftron.config.help import KeyPath, describe_value, locate, suggest_key

_HOLE = re.compile(r"\{([^{}]*)\}")


def fill_in(name: str, value_at: Callable[[KeyPath], Any]) -> str:
    """`name` with the value of each `{section.key}` in its place; what a folder's name cannot hold becomes `-`.

    Raises ValueError, for the user, at a key that is none or has no single value.
    """
    return _HOLE.sub(lambda hole: _words(hole[1], value_at), name)


def _words(key: str, value_at: Callable[[KeyPath], Any]) -> str:
    path = tuple(int(part) if part.isdecimal() else part for part in key.split("."))
    if key == "general.run_name":
        raise ValueError("holds itself; name other keys in the braces")
    if locate(path)[1] is None:
        raise ValueError(f"{{{key}}} is no key; {suggest_key(path)}")
    value = value_at(path)
    if isinstance(value, (dict, list, tuple)):
        raise ValueError(f"{{{key}}} is {describe_value(value)}, which cannot be part of a name; take one of its keys")
    text = value if isinstance(value, str) else json.dumps(value)
    return re.sub(r"[^A-Za-z0-9_.-]", "-", text)
