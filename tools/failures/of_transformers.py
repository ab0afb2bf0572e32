"""transformers' own Trainer and collators, with rows that a script has tokenized."""

from __future__ import annotations

import inspect
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
    registrar,
    resumed,
    tokenizer,
)

CONFIGURATIONS: dict[str, Configuration] = {}
NOT_RUN: dict[str, str] = {}
configuration = registrar(CONFIGURATIONS)
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


@configuration(given=True, roles="all")
def default(rows: Rows) -> Trainer:
    """`DataCollatorForLanguageModeling(mlm=False)`, the padding token is the stop token"""
    own = tokenizer()
    features = [{"input_ids": own.apply_chat_template(each, return_dict=True)["input_ids"]} for each in rows]
    return trained(features, DataCollatorForLanguageModeling(own, mlm=False))


@configuration(given=True)
def answers(rows: Rows) -> Trainer:
    """labels of `return_assistant_tokens_mask`, `DataCollatorForSeq2Seq`"""
    return trained(of_marks(rows))


@configuration(given=True, roles="all")
def whole_texts(rows: Rows) -> Trainer:
    """labels that equal the ids, `DataCollatorForSeq2Seq`"""
    return trained([{**each, "labels": each["input_ids"]} for each in of_marks(rows)])


@configuration(given=True)
def padding_free(rows: Rows) -> Trainer:
    """`DataCollatorWithFlattening()`"""
    return trained(of_marks(rows), DataCollatorWithFlattening())


@configuration(given=True, rows=tuple(CALLS))
def tool_calls(rows: Rows) -> Trainer:
    """`apply_chat_template(tools=...)`, labels by prefixes"""
    return trained(of_prefixes(rows, WITH_TOOLS, tools=[TOOL]), template=WITH_TOOLS)


@configuration(given=True, rows=(*CHATS, FORGED))
def control_text(rows: Rows) -> Trainer:
    """`apply_chat_template`, its defaults"""
    return trained(of_marks(rows))


if "sanitize_control_tokens" in inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters:

    @configuration(given=True, rows=(*CHATS, FORGED))
    def sanitized(rows: Rows) -> Trainer:
        """`apply_chat_template(sanitize_control_tokens=True)`, labels by prefixes"""
        return trained(of_prefixes(rows, SMOLLM2, sanitize_control_tokens=True))


@configuration(given=True)
def truncation(rows: Rows) -> Trainer:
    """`truncation=True, max_length=256`"""
    return trained(of_marks(rows, truncation=True, max_length=256))


@configuration(given=True)
def accumulation(rows: Rows) -> Trainer:
    """`gradient_accumulation_steps=4` of single rows"""
    return trained(of_marks(rows), gradient_accumulation_steps=4, per_device_train_batch_size=1)


@configuration(given=True)
def lora(rows: Rows) -> Trainer:
    """peft's `LoraConfig(target_modules="all-linear")`"""
    settings = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    return trained(of_marks(rows), model=get_peft_model(model(tokenizer()), settings))


@configuration(given=True)
def resume(rows: Rows) -> Trainer:
    """`resume_from_checkpoint` after two steps"""
    return resumed(lambda steps: trained(of_marks(rows), **steps))


@configuration(given=True)
def evaluation(rows: Rows) -> Trainer:
    """`eval_dataset` of the same form"""
    return trained(of_marks(rows[8:]), eval_dataset=Dataset.from_list(of_marks(rows[:8])))
