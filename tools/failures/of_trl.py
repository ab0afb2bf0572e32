"""TRL's SFTTrainer."""

from __future__ import annotations

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
    registrar,
    resumed,
    tokenizer,
    with_thoughts,
)

CONFIGURATIONS: dict[str, Configuration] = {}
NOT_RUN: dict[str, str] = {}
configuration = registrar(CONFIGURATIONS)
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


@configuration()
def default(rows: Rows) -> SFTTrainer:
    """a `messages` column, no option"""
    return of_messages(rows, SMOLLM2)


@configuration()
def answers(rows: Rows) -> SFTTrainer:
    """`assistant_only_loss=True`, a template with marks"""
    return of_messages(rows, assistant_only_loss=True)


@configuration()
def prompt_completion(rows: Rows) -> SFTTrainer:
    """`prompt` and `completion` of messages"""
    return of_pairs(rows)


@configuration(roles="all")
def whole_texts(rows: Rows) -> SFTTrainer:
    """a `text` column of rendered conversations"""
    own = tokenizer()
    return sft([{"text": own.apply_chat_template(each, tokenize=False)} for each in rows])


@configuration(given=True)
def packing(rows: Rows) -> SFTTrainer:
    """`packing=True` (`bfd`), `max_length=1024`"""
    return of_messages(rows, assistant_only_loss=True, packing=True, max_length=1024)


@configuration(given=True)
def packing_split(rows: Rows) -> SFTTrainer:
    """`packing_strategy="bfd_split"`, `max_length=256`"""
    options = {"packing": True, "packing_strategy": "bfd_split", "max_length": 256}
    return of_messages(rows, assistant_only_loss=True, **options)


@configuration(given=True)
def packing_wrapped(rows: Rows) -> SFTTrainer:
    """`packing_strategy="wrapped"`, `max_length=256`"""
    options = {"packing": True, "packing_strategy": "wrapped", "max_length": 256}
    return of_messages(rows, assistant_only_loss=True, **options)


@configuration()
def padding_free(rows: Rows) -> SFTTrainer:
    """`padding_free=True`, `max_length=None`"""
    return of_messages(rows, assistant_only_loss=True, padding_free=True, max_length=None)


@configuration()
def thoughts(rows: Rows) -> SFTTrainer:
    """`assistant_only_loss=True`, Qwen 3's template, a thought in each answer"""
    template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text(encoding="utf-8")
    return of_messages(with_thoughts(rows), template, assistant_only_loss=True)


@configuration(rows=(*CHATS, FORGED))
def control_text(rows: Rows) -> SFTTrainer:
    """a user's text that spells control tokens"""
    return of_pairs(rows)


@configuration(rows=tuple(CALLS))
def tool_calls(rows: Rows) -> SFTTrainer:
    """`assistant_only_loss=True`, Qwen 2.5's template, a `tools` column"""
    template = (Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja").read_text(encoding="utf-8")
    return sft([{"messages": each, "tools": [TOOL]} for each in rows], template, assistant_only_loss=True)


@configuration()
def truncation(rows: Rows) -> SFTTrainer:
    """`max_length=256`"""
    return of_messages(rows, assistant_only_loss=True, max_length=256)


@configuration()
def accumulation(rows: Rows) -> SFTTrainer:
    """`gradient_accumulation_steps=4` of single rows"""
    return of_pairs(rows, gradient_accumulation_steps=4, per_device_train_batch_size=1)


@configuration()
def lora(rows: Rows) -> SFTTrainer:
    """`peft_config=LoraConfig(target_modules="all-linear")`"""
    return of_pairs(rows, peft_config=LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))


@configuration()
def resume(rows: Rows) -> SFTTrainer:
    """`resume_from_checkpoint` after two steps"""
    return resumed(lambda steps: of_pairs(rows, **steps))


@configuration()
def evaluation(rows: Rows) -> SFTTrainer:
    """`eval_dataset` of the same form"""
    return of_pairs(rows[8:], eval_dataset=Dataset.from_list([as_pair(each) for each in rows[:8]]))
