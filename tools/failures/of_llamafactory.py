"""LLaMA-Factory's supervised stage, with a configuration as its examples have it."""

from __future__ import annotations

import json
from typing import Any

from llamafactory.train.tuner import run_exp

from tools.failures.capture import QWEN3, Pipeline, Rows, written
from tools.failures.materials import CALLED, CALLS, CHATS, TOOL, Conversation, arguments, saved_model, with_thoughts

TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant",
        "system_tag": "system", "observation_tag": "tool", "function_tag": "function_call"}  # fmt: skip


def run(rows: Rows, chat_template: str, **given: Any) -> None:
    """Runs the stage on the rows."""
    tools = {"tools": json.dumps([TOOL["function"]])} if rows[0][0] in CALLED else {}
    path = written({"messages": as_sharegpt(each), **tools} for each in rows)
    columns = {"messages": "messages", **({"tools": "tools"} if tools else {})}
    known = {"rows": {"file_name": path.name, "formatting": "sharegpt", "columns": columns, "tags": TAGS}}
    path.with_name("dataset_info.json").write_text(json.dumps(known), encoding="utf-8")
    options = arguments(gradient_checkpointing=False) | {"use_cpu": True, "overwrite_cache": True}
    options |= {
        "stage": "sft", "do_train": True, "finetuning_type": "full",
        "model_name_or_path": str(saved_model(chat_template)), "dataset": "rows",
        "dataset_dir": str(path.parent), "cutoff_len": 2048, "max_samples": len(rows),
        "disable_gradient_checkpointing": True, **given,
    }  # fmt: skip
    run_exp(options)


def as_sharegpt(messages: Conversation) -> Conversation:
    """Returns the messages with calls as LLaMA-Factory reads them."""
    return [
        {"role": "function_call", "content": json.dumps([each["tool_calls"][0]["function"]])}
        if each.get("tool_calls")
        else {"role": each["role"], "content": each["content"]}
        for each in messages
    ]


LIBRARY = Pipeline(run)
of = LIBRARY.of
SINGLE: dict[str, Any] = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 1}

CONFIGURATIONS = LIBRARY.common() | {
    "default": of("`template:` left out, which takes the tokenizer's own"),
    "named_template": of("`template: smollm2`", template="smollm2"),
    "whole_texts": of("`train_on_prompt: true`", roles="all", train_on_prompt=True),
    "packing": of("`packing: true`, `cutoff_len: 1024`", packing=True, cutoff_len=1024),
    "packing_neat": of("`packing: true`, `neat_packing: true`", packing=True, neat_packing=True, cutoff_len=1024),
    "thoughts": of("`template: qwen3`, a thought in each answer", QWEN3, with_thoughts(CHATS), template="qwen3"),
    "tool_calls": of("`template: qwen3`, a `tools` column", QWEN3, CALLS, template="qwen3"),
    "truncation": of("`cutoff_len: 64`", cutoff_len=64),
    "accumulation": of("`gradient_accumulation_steps: 4` of single rows", **SINGLE),
    "lora": of("`finetuning_type: lora`", finetuning_type="lora", lora_target="all"),
    "evaluation": of("`val_size: 0.2`", val_size=0.2),
}
