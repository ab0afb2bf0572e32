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
    saved_model,
    with_thoughts,
)

Rows = list[Conversation]
TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant",
        "system_tag": "system", "observation_tag": "tool", "function_tag": "function_call"}  # fmt: skip


def settings(rows: Rows, chat_template: str = SMOLLM2, **given: Any) -> dict[str, Any]:
    """Writes the model and the data; returns the configuration."""
    folder, number = new_folder(), len(rows)
    tools = {"tools": json.dumps([TOOL["function"]])} if rows[0][0] in CALLED else {}
    written = [{"messages": as_sharegpt(each), **tools} for each in rows]
    (folder / "rows.json").write_text(json.dumps(written), encoding="utf-8")
    columns = {"messages": "messages", **({"tools": "tools"} if tools else {})}
    known = {"rows": {"file_name": "rows.json", "formatting": "sharegpt", "columns": columns, "tags": TAGS}}
    (folder / "dataset_info.json").write_text(json.dumps(known), encoding="utf-8")
    options = arguments(gradient_checkpointing=False) | {"use_cpu": True, "overwrite_cache": True}
    return options | {
        "stage": "sft", "do_train": True, "finetuning_type": "full",
        "model_name_or_path": str(saved_model(chat_template)), "dataset": "rows",
        "dataset_dir": str(folder), "cutoff_len": 2048, "max_samples": number,
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


def resumed(rows: Rows) -> Any:
    """Returns a trainer that went on after two of three steps from a checkpoint."""
    run_exp(settings(rows, max_steps=2, save_strategy="steps", save_steps=2))
    trainer = sft(rows, max_steps=3)
    trainer.train(resume_from_checkpoint=str(SCRATCH / "out" / "checkpoint-2"))
    return trainer


def of(option: str, chat_template: str = SMOLLM2, rows: Rows = CHATS, roles: str = "assistant", **given: Any) -> Any:
    """Returns a configuration with these settings beside the common ones."""
    return Configuration(option, lambda own: sft(own, chat_template, **given), roles, given=True, rows=tuple(rows))


SINGLE: dict[str, Any] = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 1}

CONFIGURATIONS = {
    "default": of("`template:` left out, which takes the tokenizer's own"),
    "named_template": of("`template: smollm2`", template="smollm2"),
    "whole_texts": of("`train_on_prompt: true`", roles="all", train_on_prompt=True),
    "packing": of("`packing: true`, `cutoff_len: 1024`", packing=True, cutoff_len=1024),
    "packing_neat": of("`packing: true`, `neat_packing: true`", packing=True, neat_packing=True, cutoff_len=1024),
    "thoughts": of("`template: qwen3`, a thought in each answer", QWEN3, with_thoughts(CHATS), template="qwen3"),
    "tool_calls": of("`template: qwen3`, a `tools` column", QWEN3, CALLS, template="qwen3"),
    "control_text": of("a user's text that spells control tokens", rows=[*CHATS, FORGED]),
    "truncation": of("`cutoff_len: 64`", cutoff_len=64),
    "accumulation": of("`gradient_accumulation_steps: 4` of single rows", **SINGLE),
    "lora": of("`finetuning_type: lora`", finetuning_type="lora", lora_target="all"),
    "resume": Configuration("`resume_from_checkpoint` after two steps", resumed, given=True),
    "evaluation": of("`val_size: 0.2`", val_size=0.2),
}
