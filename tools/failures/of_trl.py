"""TRL's SFTTrainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import trl
from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

from tools.failures.materials import (
    CALLS,
    CHATS,
    FORGED,
    MARKED,
    SMOLLM2,
    TOOL,
    Configuration,
    Conversation,
    arguments,
    as_pair,
    model,
    resumed,
    tokenizer,
    with_thoughts,
)

Rows = list[Conversation]


def sft(rows: list[dict[str, Any]], template: str = SMOLLM2, **given: Any) -> SFTTrainer:
    own = tokenizer(template)
    others = {name: given.pop(name) for name in ("peft_config", "eval_dataset") if name in given}
    options = {"max_length": 2048, "gradient_checkpointing": False} | given
    return SFTTrainer(
        model(own), SFTConfig(**arguments(**options)), train_dataset=Dataset.from_list(rows), processing_class=own,
        **others,
    )  # fmt: skip


def of_messages(rows: Rows, template: str = MARKED, **given: Any) -> SFTTrainer:
    return sft([{"messages": each} for each in rows], template, **given)


def of_pairs(rows: Rows, **given: Any) -> SFTTrainer:
    return sft([as_pair(each) for each in rows], **given)


def of_answers(**given: Any) -> Callable[[Rows], SFTTrainer]:
    return lambda rows: of_messages(rows, assistant_only_loss=True, **given)


def of_texts(rows: Rows) -> SFTTrainer:
    own = tokenizer()
    return sft([{"text": own.apply_chat_template(each, tokenize=False)} for each in rows])


def of_tools(rows: Rows) -> SFTTrainer:
    return sft([{"messages": each, "tools": [TOOL]} for each in rows], known("qwen2_5"), assistant_only_loss=True)


def of_evaluation(rows: Rows) -> SFTTrainer:
    return of_pairs(rows[8:], eval_dataset=Dataset.from_list([as_pair(each) for each in rows[:8]]))


def known(name: str) -> str:
    """Returns a template that TRL knows."""
    return (Path(trl.__path__[0]) / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def packed(option: str, **given: Any) -> Configuration:
    return Configuration(option, of_answers(packing=True, **given), given=True)


LORA = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
SINGLE: dict[str, Any] = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 1}

CONFIGURATIONS = {
    "default": Configuration("a `messages` column, no option", lambda rows: of_messages(rows, SMOLLM2)),
    "answers": Configuration("`assistant_only_loss=True`, a template with marks", of_answers()),
    "prompt_completion": Configuration("`prompt` and `completion` of messages", of_pairs),
    "whole_texts": Configuration("a `text` column of rendered conversations", of_texts, roles="all"),
    "packing": packed("`packing=True` (`bfd`), `max_length=1024`", max_length=1024),
    "packing_split": packed(
        '`packing_strategy="bfd_split"`, `max_length=256`', packing_strategy="bfd_split", max_length=256
    ),
    "packing_wrapped": packed(
        '`packing_strategy="wrapped"`, `max_length=256`', packing_strategy="wrapped", max_length=256
    ),
    "padding_free": Configuration(
        "`padding_free=True`, `max_length=None`", of_answers(padding_free=True, max_length=None)
    ),
    "thoughts": Configuration(
        "`assistant_only_loss=True`, Qwen 3's template, a thought in each answer",
        lambda rows: of_messages(with_thoughts(rows), known("qwen3"), assistant_only_loss=True),
    ),
    "tool_calls": Configuration(
        "`assistant_only_loss=True`, Qwen 2.5's template, a `tools` column", of_tools, rows=tuple(CALLS)
    ),
    "control_text": Configuration("a user's text that spells control tokens", of_pairs, rows=(*CHATS, FORGED)),
    "truncation": Configuration("`max_length=256`", of_answers(max_length=256)),
    "accumulation": Configuration(
        "`gradient_accumulation_steps=4` of single rows", lambda rows: of_pairs(rows, **SINGLE)
    ),
    "lora": Configuration(
        '`peft_config=LoraConfig(target_modules="all-linear")`', lambda rows: of_pairs(rows, peft_config=LORA)
    ),
    "resume": Configuration(
        "`resume_from_checkpoint` after two steps", lambda rows: resumed(lambda steps: of_pairs(rows, **steps))
    ),
    "evaluation": Configuration("`eval_dataset` of the same form", of_evaluation),
}
