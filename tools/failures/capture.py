"""The trainer of a library that makes it itself: its own entry point runs, up to the call of `train`."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from transformers import Trainer

from tools.failures.materials import SCRATCH

QWEN3 = next(
    path.read_text(encoding="utf-8")
    for folder in sys.path
    if (path := Path(folder) / "trl" / "chat_templates" / "qwen3.jinja").exists()
)
"""Qwen 3's own template, which newer releases of TRL hold."""


class _ReadyError(Exception):
    """A trainer is about to train."""


def trainer_of(run: Callable[[], Any]) -> Any:
    """Returns the trainer whose `train` the entry point calls, before it trains."""
    found = list[Any]()

    def train(trainer: Any, *_: Any, **__: Any) -> None:
        found.append(trainer)
        raise _ReadyError

    with mock.patch.object(Trainer, "train", train):
        try:
            run()
        except Exception:
            if not found:
                raise
    return found[0]


def new_folder() -> Path:
    """Returns an empty folder: libraries keep what they have prepared of a file, by its path."""
    return Path(tempfile.mkdtemp(dir=SCRATCH))
