"""Libraries that read their rows from a file and make their trainer themselves.

The library's own entry point runs, up to the call of `train`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from transformers import Trainer

from tools.failures.materials import CHATS, FORGED, SCRATCH, SMOLLM2, Configuration, Conversation

Rows = list[Conversation]

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


def written(rows: Iterable[dict[str, Any]]) -> Path:
    """Returns a file with the rows in a folder of its own, as libraries keep what they have prepared by its path."""
    path = Path(tempfile.mkdtemp(dir=SCRATCH)) / "rows.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")
    return path


@dataclass(frozen=True)
class Pipeline:
    """A library's entry point, and configurations of it.

    Attributes:
        run: Runs it on the rows, with a chat template on the tokenizer and the library's own settings.
        template: The chat template of a configuration that gives no other one.
    """

    run: Callable[..., None]
    template: str = SMOLLM2

    def sft(self, rows: Rows, its_template: str, **given: Any) -> Any:
        return trainer_of(lambda: self.run(rows, its_template, **given))

    def resumed(self, rows: Rows) -> Any:
        """Returns a trainer that went on after two of three steps from a checkpoint."""
        self.run(rows, self.template, max_steps=2, save_strategy="steps", save_steps=2)
        trainer = self.sft(rows, self.template, max_steps=3)
        trainer.train(resume_from_checkpoint=str(SCRATCH / "out" / "checkpoint-2"))
        return trainer

    def of(
        self, option: str, its_template: str = "", rows: Rows = CHATS, roles: str = "assistant", **given: Any
    ) -> Configuration:
        """Returns a configuration with these settings beside the common ones."""
        make = partial(self.sft, its_template=its_template or self.template, **given)
        return Configuration(option, make, roles, given=True, rows=tuple(rows))

    def common(self) -> dict[str, Configuration]:
        """Returns the configurations that every library has in the same words."""
        return {
            "control_text": self.of("a user's text that spells control tokens", rows=[*CHATS, FORGED]),
            "resume": Configuration("`resume_from_checkpoint` after two steps", self.resumed, given=True),
        }
