"""transformers' own Trainer and collators, with rows that a script has tokenized."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
)

from tools.failures.materials import (
    CALLS,
    CHATS,
    FORGED,
    MARKED,
    SMOLLM2,
    TOOL,
    WITH_TOOLS,
    Configuration,
    Conversation,
    arguments,
    model,
    resumed,
    tokenizer,
)

Rows = list[Conversation]


def of_marks(rows: Rows, **options: Any) -> list[dict[str, Any]]:
    """Returns ids, and labels where the template marks an answer."""
    own, features = tokenizer(MARKED), []
    for each in rows:
        found = own.apply_chat_template(each, return_dict=True, return_assistant_tokens_mask=True, **options)
        ids, marks = found["input_ids"], found["assistant_masks"]
        features.append({"input_ids": ids, "labels": [n if mark else -100 for n, mark in zip(ids, marks, strict=True)]})
    return features


def of_prefixes(rows: Rows, template: str, **options: Any) -> list[dict[str, Any]]:
    """Returns ids, and labels behind what add_generation_prompt=True gives for each answer, up to its stop token."""
    own, features = tokenizer(template), []
    for messages in rows:
        ids = own.apply_chat_template(messages, return_dict=True, **options)["input_ids"]
        labels = [-100] * len(ids)
        for n in (n for n, message in enumerate(messages) if message["role"] == "assistant"):
            prompt = own.apply_chat_template(messages[:n], add_generation_prompt=True, return_dict=True, **options)
            begin = len(prompt["input_ids"])
            end = ids.index(own.eos_token_id, begin) + 1
            labels[begin:end] = ids[begin:end]
        features.append({"input_ids": ids, "labels": labels})
    return features


def trained(features: list[dict[str, Any]], collator: Any = None, template: str = SMOLLM2, **given: Any) -> Trainer:
    own = tokenizer(template)
    others = {name: given.pop(name) for name in ("model", "eval_dataset") if name in given}
    return Trainer(
        **{"model": model(own), **others}, args=TrainingArguments(**arguments(**given)),
        train_dataset=Dataset.from_list(features), processing_class=own,
        data_collator=collator or DataCollatorForSeq2Seq(own),
    )  # fmt: skip


def of_collator(rows: Rows) -> Trainer:
    own = tokenizer()
    features = [{"input_ids": own.apply_chat_template(each, return_dict=True)["input_ids"]} for each in rows]
    return trained(features, DataCollatorForLanguageModeling(own, mlm=False))


def of_whole_texts(rows: Rows) -> Trainer:
    return trained([{**each, "labels": each["input_ids"]} for each in of_marks(rows)])


def with_adapters(rows: Rows) -> Trainer:
    settings = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    return trained(of_marks(rows), model=get_peft_model(model(tokenizer()), settings))


def of(option: str, make: Callable[[Rows], Trainer], **described: Any) -> Configuration:
    return Configuration(option, make, given=True, **described)


SINGLE: dict[str, Any] = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 1}
FORGERY: dict[str, Any] = {"rows": (*CHATS, FORGED)}

CONFIGURATIONS = {
    "default": of(
        "`DataCollatorForLanguageModeling(mlm=False)`, the padding token is the stop token", of_collator, roles="all"
    ),
    "answers": of(
        "labels of `return_assistant_tokens_mask`, `DataCollatorForSeq2Seq`", lambda rows: trained(of_marks(rows))
    ),
    "whole_texts": of("labels that equal the ids, `DataCollatorForSeq2Seq`", of_whole_texts, roles="all"),
    "padding_free": of(
        "`DataCollatorWithFlattening()`", lambda rows: trained(of_marks(rows), DataCollatorWithFlattening())
    ),
    "tool_calls": of(
        "`apply_chat_template(tools=...)`, labels by prefixes",
        lambda rows: trained(of_prefixes(rows, WITH_TOOLS, tools=[TOOL]), template=WITH_TOOLS),
        rows=tuple(CALLS),
    ),
    "control_text": of("`apply_chat_template`, its defaults", lambda rows: trained(of_marks(rows)), **FORGERY),
    "truncation": of(
        "`truncation=True, max_length=256`", lambda rows: trained(of_marks(rows, truncation=True, max_length=256))
    ),
    "accumulation": of(
        "`gradient_accumulation_steps=4` of single rows", lambda rows: trained(of_marks(rows), **SINGLE)
    ),
    "lora": of('peft\'s `LoraConfig(target_modules="all-linear")`', with_adapters),
    "resume": of(
        "`resume_from_checkpoint` after two steps", lambda rows: resumed(lambda steps: trained(of_marks(rows), **steps))
    ),
    "evaluation": of(
        "`eval_dataset` of the same form",
        lambda rows: trained(of_marks(rows[8:]), eval_dataset=Dataset.from_list(of_marks(rows[:8]))),
    ),
}
if "sanitize_control_tokens" in inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters:
    CONFIGURATIONS["sanitized"] = of(
        "`apply_chat_template(sanitize_control_tokens=True)`, labels by prefixes",
        lambda rows: trained(of_prefixes(rows, SMOLLM2, sanitize_control_tokens=True)),
        **FORGERY,
    )
