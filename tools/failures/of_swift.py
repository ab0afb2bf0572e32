"""ms-swift's supervised pipeline."""

from __future__ import annotations

import json
from typing import Any

from swift.pipelines import SwiftSft

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
    registrar,
    saved_model,
    with_thoughts,
)

CONFIGURATIONS: dict[str, Configuration] = {}
NOT_RUN = {
    "packing": "needs flash attention",
    "padding_free": "needs flash attention",
}
configuration = registrar(CONFIGURATIONS)
Rows = list[Conversation]
CHATML = SMOLLM2.replace("loop.first and messages[0]['role'] != 'system'", "false")
"""A template without a default system prompt, as ms-swift's own `chatml`."""


def run(rows: Rows, chat_template: str = CHATML, **given: Any) -> None:
    """Runs the pipeline on the rows."""
    path = new_folder() / "rows.jsonl"
    path.write_text("".join(json.dumps(as_row(each)) + "\n" for each in rows), encoding="utf-8")
    few = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "max_steps": 4, "save_strategy": "no"}
    quiet = {"report_to": "none", "use_cpu": True, "bf16": False, "fp16": False, "torch_dtype": "float32",
             "dataset_num_proc": 1, "dataloader_num_workers": 0, "gradient_checkpointing": False}  # fmt: skip
    options = {
        "model": str(saved_model(chat_template)), "model_type": "llama", "template": "chatml", "tuner_type": "full",
        "dataset": str(path), "max_length": 2048, "split_dataset_ratio": 0, "output_dir": str(SCRATCH / "out"),
        "add_version": False, **few, **quiet, **given,
    }  # fmt: skip
    SwiftSft([text for name, value in options.items() for text in (f"--{name}", str(value).lower() if isinstance(value, bool) else str(value))]).main()


def as_row(messages: Conversation) -> dict[str, Any]:
    """Returns the row with calls as ms-swift reads them."""
    if messages[0] not in CALLED:
        return {"messages": messages}
    call = json.dumps(messages[1]["tool_calls"][0]["function"])
    turns = [messages[0], {"role": "tool_call", "content": call}, {"role": "tool_response", **{"content": messages[2]["content"]}}]
    return {"tools": json.dumps([TOOL]), "messages": [*turns, messages[3]]}


def sft(rows: Rows, *given: Any, **options: Any) -> Any:
    return trainer_of(lambda: run(rows, *given, **options))


@configuration(given=True)
def default(rows: Rows) -> Any:
    """`template: chatml`, and on the tokenizer a template of the same form"""
    return sft(rows)


@configuration(given=True)
def named_template(rows: Rows) -> Any:
    """`template: chatml`, and SmolLM2's template on the tokenizer"""
    return sft(rows, SMOLLM2)


@configuration(given=True)
def jinja(rows: Rows) -> Any:
    """`template_backend: jinja`"""
    return sft(rows, template_backend="jinja")


@configuration(given=True, roles="all")
def whole_texts(rows: Rows) -> Any:
    """`loss_scale: all`"""
    return sft(rows, loss_scale="all")


@configuration(given=True)
def packing(rows: Rows) -> Any:
    """`packing: true`"""
    return sft(rows, packing=True)


@configuration(given=True)
def padding_free(rows: Rows) -> Any:
    """`padding_free: true`"""
    return sft(rows, padding_free=True)


@configuration(given=True, rows=tuple(with_thoughts(CHATS)))
def thoughts(rows: Rows) -> Any:
    """`template: qwen3`, a thought in each answer"""
    return sft(rows, QWEN3, template="qwen3")


@configuration(given=True, rows=tuple(CALLS))
def tool_calls(rows: Rows) -> Any:
    """`template: qwen3`, `agent_template: hermes`, a `tools` column"""
    return sft(rows, QWEN3, template="qwen3", agent_template="hermes")


@configuration(given=True, rows=(*CHATS, FORGED))
def control_text(rows: Rows) -> Any:
    """a user's text that spells control tokens"""
    return sft(rows)


@configuration(given=True)
def truncation(rows: Rows) -> Any:
    """`max_length: 256`, `truncation_strategy: right`"""
    return sft(rows, max_length=256, truncation_strategy="right")


@configuration(given=True)
def accumulation(rows: Rows) -> Any:
    """`gradient_accumulation_steps: 4` of single rows"""
    return sft(rows, gradient_accumulation_steps=4, per_device_train_batch_size=1)


@configuration(given=True)
def lora(rows: Rows) -> Any:
    """`tuner_type: lora`"""
    return sft(rows, tuner_type="lora", target_modules="all-linear")


@configuration(given=True)
def resume(rows: Rows) -> Any:
    """`resume_from_checkpoint` after two steps"""
    run(rows, max_steps=2, save_strategy="steps", save_steps=2)
    trainer = sft(rows, max_steps=3)
    trainer.train(resume_from_checkpoint=str(SCRATCH / "out" / "checkpoint-2"))
    return trainer


@configuration(given=True)
def evaluation(rows: Rows) -> Any:
    """`split_dataset_ratio: 0.2`"""
    return sft(rows, split_dataset_ratio=0.2)
