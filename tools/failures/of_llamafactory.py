"""LLaMA-Factory's supervised stage, with a configuration as its examples have it."""

from __future__ import annotations

import json
from typing import Any

from llamafactory.train.tuner import run_exp

from tools.failures.capture import QWEN3, new_folder, trainer_of
from tools.failures.materials import (
    CALLED,
    CALLS,
    CHATS,
    FORGED,
    SCRATCH,
    SMOLLM2,
    TOOL,
    Configuration,
    Conversation,
    arguments,
    registrar,
    saved_model,
    with_thoughts,
)

CONFIGURATIONS: dict[str, Configuration] = {}
NOT_RUN: dict[str, str] = {}
configuration = registrar(CONFIGURATIONS)
Rows = list[Conversation]
TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant",
        "system_tag": "system", "observation_tag": "tool", "function_tag": "function_call"}  # fmt: skip


def settings(rows: Rows, chat_template: str = SMOLLM2, **given: Any) -> dict[str, Any]:
    """Writes the model and the data; returns the configuration."""
    folder, number = new_folder(), len(rows)
    tools = {"tools": json.dumps([TOOL["function"]])} if rows[0][0] in CALLED else {}
    rows_of_it = [{"messages": as_sharegpt(each), **tools} for each in rows]
    (folder / "rows.json").write_text(json.dumps(rows_of_it), encoding="utf-8")
    columns = {"messages": "messages", **({"tools": "tools"} if tools else {})}
    known = {"rows": {"file_name": "rows.json", "formatting": "sharegpt", "columns": columns, "tags": TAGS}}
    (folder / "dataset_info.json").write_text(json.dumps(known), encoding="utf-8")
    options = arguments(gradient_checkpointing=False) | {"use_cpu": True, "overwrite_cache": True}
    return options | {
        "stage": "sft", "do_train": True, "finetuning_type": "full", "model_name_or_path": str(saved_model(chat_template)),
        "dataset": "rows", "dataset_dir": str(folder), "cutoff_len": 2048, "max_samples": number,
        "disable_gradient_checkpointing": True, **given,
    }  # fmt: skip


def as_sharegpt(messages: Conversation) -> Conversation:
    """Returns the messages with calls as LLaMA-Factory reads them."""
    return [
        {"role": "function_call", "content": json.dumps([each["tool_calls"][0]["function"]])}
        if each.get("tool_calls")
        else {"role": each["role"], "content": each["content"]}
        for each in messages
    ]


def sft(rows: Rows, chat_template: str = SMOLLM2, **given: Any) -> Any:
    return trainer_of(lambda: run_exp(settings(rows, chat_template, **given)))


@configuration(given=True)
def default(rows: Rows) -> Any:
    """`template:` left out, which takes the tokenizer's own"""
    return sft(rows)


@configuration(given=True)
def named_template(rows: Rows) -> Any:
    """`template: smollm2`"""
    return sft(rows, template="smollm2")


@configuration(given=True, roles="all")
def whole_texts(rows: Rows) -> Any:
    """`train_on_prompt: true`"""
    return sft(rows, train_on_prompt=True)


@configuration(given=True)
def packing(rows: Rows) -> Any:
    """`packing: true`, `cutoff_len: 1024`"""
    return sft(rows, packing=True, cutoff_len=1024)


@configuration(given=True)
def packing_neat(rows: Rows) -> Any:
    """`packing: true`, `neat_packing: true`"""
    return sft(rows, packing=True, neat_packing=True, cutoff_len=1024)


@configuration(given=True, rows=tuple(with_thoughts(CHATS)))
def thoughts(rows: Rows) -> Any:
    """`template: qwen3`, a thought in each answer"""
    return sft(rows, QWEN3, template="qwen3")


@configuration(given=True, rows=tuple(CALLS))
def tool_calls(rows: Rows) -> Any:
    """`template: qwen3`, a `tools` column"""
    return sft(rows, QWEN3, template="qwen3")


@configuration(given=True, rows=(*CHATS, FORGED))
def control_text(rows: Rows) -> Any:
    """a user's text that spells control tokens"""
    return sft(rows)


@configuration(given=True)
def truncation(rows: Rows) -> Any:
    """`cutoff_len: 64`"""
    return sft(rows, cutoff_len=64)


@configuration(given=True)
def accumulation(rows: Rows) -> Any:
    """`gradient_accumulation_steps: 4` of single rows"""
    return sft(rows, gradient_accumulation_steps=4, per_device_train_batch_size=1)


@configuration(given=True)
def lora(rows: Rows) -> Any:
    """`finetuning_type: lora`"""
    return sft(rows, finetuning_type="lora", lora_target="all")


@configuration(given=True)
def resume(rows: Rows) -> Any:
    """`resume_from_checkpoint` after two steps"""
    run_exp(settings(rows, max_steps=2, save_strategy="steps", save_steps=2))
    trainer = sft(rows, max_steps=3)
    trainer.train(resume_from_checkpoint=str(SCRATCH / "out" / "checkpoint-2"))
    return trainer


@configuration(given=True)
def evaluation(rows: Rows) -> Any:
    """`val_size: 0.2`"""
    return sft(rows, val_size=0.2)
