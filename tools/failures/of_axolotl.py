"""axolotl's trainer for supervised fine-tuning, with a configuration as its examples have it."""

from __future__ import annotations

import json
from typing import Any

import yaml
from axolotl.cli.args import TrainerCliArgs
from axolotl.cli.config import load_cfg
from axolotl.cli.train import do_train

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
NOT_RUN: dict[str, str] = {}
configuration = registrar(CONFIGURATIONS)
Rows = list[Conversation]


def run(rows: Rows, its_template: str = SMOLLM2, of_data: dict[str, Any] | None = None, **given: Any) -> None:
    """Runs the command `axolotl train` on the rows."""
    folder = new_folder()
    path, config = folder / "rows.jsonl", folder / "config.yaml"
    tools = {"tools": [TOOL]} if rows[0][0] in CALLED else {}
    path.write_text("".join(json.dumps({"messages": each, **tools}) + "\n" for each in rows), encoding="utf-8")
    data = {"path": str(path), "ds_type": "json", "type": "chat_template", "field_messages": "messages",
            "message_property_mappings": {"role": "role", "content": "content"}, **(of_data or {})}  # fmt: skip
    quiet = {"bf16": False, "fp16": False, "tf32": False, "gradient_checkpointing": False, "attn_implementation": "sdpa",
             "dataset_num_proc": 1, "dataloader_num_workers": 0, "use_tensorboard": False}  # fmt: skip
    options = {
        "base_model": str(saved_model(its_template)), "datasets": [data], "dataset_prepared_path": str(folder),
        "chat_template": "tokenizer_default", "sequence_len": 2048, "micro_batch_size": 4, "val_set_size": 0,
        "gradient_accumulation_steps": 1, "max_steps": 4, "optimizer": "adamw_torch", "learning_rate": 1e-3,
        "lr_scheduler": "constant", "output_dir": str(SCRATCH / "out"), "save_strategy": "no", **quiet, **given,
    }  # fmt: skip
    config.write_text(yaml.safe_dump(options), encoding="utf-8")
    do_train(load_cfg(str(config)), TrainerCliArgs())


def sft(rows: Rows, *given: Any, **options: Any) -> Any:
    return trainer_of(lambda: run(rows, *given, **options))


@configuration(given=True)
def default(rows: Rows) -> Any:
    """`type: chat_template`, `chat_template: tokenizer_default`"""
    return sft(rows)


@configuration(given=True)
def named_template(rows: Rows) -> Any:
    """`chat_template: chatml`"""
    return sft(rows, chat_template="chatml")


@configuration(given=True, roles="all")
def whole_texts(rows: Rows) -> Any:
    """`train_on_inputs: true`, `roles_to_train` of all roles"""
    return sft(rows, of_data={"roles_to_train": ["system", "user", "assistant"]}, train_on_inputs=True)


@configuration(given=True)
def packing(rows: Rows) -> Any:
    """`sample_packing: true`, `sequence_len: 1024`"""
    return sft(rows, sample_packing=True, sequence_len=1024, micro_batch_size=1)


@configuration(given=True, rows=tuple(with_thoughts(CHATS)))
def thoughts(rows: Rows) -> Any:
    """Qwen 3's template, a thought in each answer"""
    return sft(rows, QWEN3)


@configuration(given=True, rows=tuple(CALLS))
def tool_calls(rows: Rows) -> Any:
    """Qwen 3's template, a `tools` column"""
    return sft(rows, QWEN3)


@configuration(given=True, rows=(*CHATS, FORGED))
def control_text(rows: Rows) -> Any:
    """a user's text that spells control tokens"""
    return sft(rows)


@configuration(given=True)
def truncation(rows: Rows) -> Any:
    """`sequence_len: 256`, `excess_length_strategy: truncate`"""
    return sft(rows, sequence_len=256, excess_length_strategy="truncate")


@configuration(given=True)
def dropped(rows: Rows) -> Any:
    """`sequence_len: 256`, whose default drops longer conversations"""
    return sft(rows, sequence_len=256)


@configuration(given=True)
def accumulation(rows: Rows) -> Any:
    """`gradient_accumulation_steps: 4` of single rows"""
    return sft(rows, gradient_accumulation_steps=4, micro_batch_size=1)


@configuration(given=True)
def lora(rows: Rows) -> Any:
    """`adapter: lora`, `lora_target_linear: true`"""
    return sft(rows, adapter="lora", lora_r=8, lora_alpha=16, lora_target_linear=True)


@configuration(given=True)
def resume(rows: Rows) -> Any:
    """`resume_from_checkpoint` after two steps"""
    run(rows, max_steps=2, save_strategy="steps", save_steps=2)
    trainer = sft(rows, max_steps=3)
    trainer.train(resume_from_checkpoint=str(SCRATCH / "out" / "checkpoint-2"))
    return trainer


@configuration(given=True)
def evaluation(rows: Rows) -> Any:
    """`val_set_size: 0.2`"""
    return sft(rows, val_set_size=0.2)
