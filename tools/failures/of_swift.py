"""ms-swift's supervised pipeline."""

from __future__ import annotations

import json
from typing import Any

from swift.pipelines import SwiftSft

from tools.failures.capture import QWEN3, Pipeline, Rows, written
from tools.failures.materials import (
    CALLED,
    CALLS,
    CHATS,
    SCRATCH,
    SMOLLM2,
    TOOL,
    Conversation,
    saved_model,
    with_thoughts,
)

CHATML = SMOLLM2.replace("loop.first and messages[0]['role'] != 'system'", "false")
"""A template without a default system prompt, as ms-swift's own `chatml`."""


def run(rows: Rows, chat_template: str, **given: Any) -> None:
    """Runs the pipeline on the rows."""
    path = written(map(as_row, rows))
    few = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "max_steps": 4, "save_strategy": "no"}
    quiet = {"report_to": "none", "use_cpu": True, "bf16": False, "fp16": False, "torch_dtype": "float32",
             "dataset_num_proc": 1, "dataloader_num_workers": 0, "gradient_checkpointing": False}  # fmt: skip
    options = {
        "model": str(saved_model(chat_template)), "model_type": "llama", "template": "chatml", "tuner_type": "full",
        "dataset": str(path), "max_length": 2048, "split_dataset_ratio": 0, "output_dir": str(SCRATCH / "out"),
        "add_version": False, **few, **quiet, **given,
    }  # fmt: skip
    texts = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in options.items()}
    SwiftSft([text for name, value in texts.items() for text in (f"--{name}", value)]).main()


def as_row(messages: Conversation) -> dict[str, Any]:
    """Returns the row with calls as ms-swift reads them."""
    if messages[0] not in CALLED:
        return {"messages": messages}
    call = json.dumps(messages[1]["tool_calls"][0]["function"])
    result = {"role": "tool_response", "content": messages[2]["content"]}
    turns = [messages[0], {"role": "tool_call", "content": call}, result]
    return {"tools": json.dumps([TOOL]), "messages": [*turns, messages[3]]}


LIBRARY = Pipeline(run, CHATML)
of = LIBRARY.of
SINGLE: dict[str, Any] = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 1}
TOOLS = {"template": "qwen3", "agent_template": "hermes"}

CONFIGURATIONS = LIBRARY.common() | {
    "default": of("`template: chatml`, and on the tokenizer a template of the same form"),
    "named_template": of("`template: chatml`, and SmolLM2's template on the tokenizer", SMOLLM2),
    "jinja": of("`template_backend: jinja`", template_backend="jinja"),
    "whole_texts": of("`loss_scale: all`", roles="all", loss_scale="all"),
    "packing": of("`packing: true`", packing=True),
    "padding_free": of("`padding_free: true`", padding_free=True),
    "thoughts": of("`template: qwen3`, a thought in each answer", QWEN3, with_thoughts(CHATS), template="qwen3"),
    "tool_calls": of("`template: qwen3`, `agent_template: hermes`, a `tools` column", QWEN3, CALLS, **TOOLS),
    "truncation": of("`max_length: 256`, `truncation_strategy: right`", max_length=256, truncation_strategy="right"),
    "accumulation": of("`gradient_accumulation_steps: 4` of single rows", **SINGLE),
    "lora": of("`tuner_type: lora`", tuner_type="lora", target_modules="all-linear"),
    "evaluation": of("`split_dataset_ratio: 0.2`", split_dataset_ratio=0.2),
}
