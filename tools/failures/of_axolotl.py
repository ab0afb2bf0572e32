"""axolotl's trainer for supervised fine-tuning, with a configuration as its examples have it."""

from __future__ import annotations

from typing import Any

import yaml
from axolotl.cli.args import TrainerCliArgs
from axolotl.cli.config import load_cfg
from axolotl.cli.train import do_train

from tools.failures.capture import QWEN3, Pipeline, Rows, written
from tools.failures.materials import CALLED, CALLS, CHATS, SCRATCH, TOOL, saved_model, with_thoughts


def run(rows: Rows, its_template: str, **given: Any) -> None:
    """Runs the command `axolotl train` on the rows."""
    tools = {"tools": [TOOL]} if rows[0][0] in CALLED else {}
    path = written({"messages": each, **tools} for each in rows)
    config = path.with_name("config.yaml")
    data = {"path": str(path), "ds_type": "json", "type": "chat_template", "field_messages": "messages",
            "message_property_mappings": {"role": "role", "content": "content"}}  # fmt: skip
    quiet = {"bf16": False, "fp16": False, "tf32": False, "gradient_checkpointing": False,
             "attn_implementation": "sdpa", "dataset_num_proc": 1, "dataloader_num_workers": 0,
             "use_tensorboard": False}  # fmt: skip
    options = {
        "base_model": str(saved_model(its_template)), "datasets": [data], "dataset_prepared_path": str(path.parent),
        "chat_template": "tokenizer_default", "sequence_len": 2048, "micro_batch_size": 4, "val_set_size": 0,
        "gradient_accumulation_steps": 1, "max_steps": 4, "optimizer": "adamw_torch", "learning_rate": 1e-3,
        "lr_scheduler": "constant", "output_dir": str(SCRATCH / "out"), "save_strategy": "no", **quiet, **given,
    }  # fmt: skip
    config.write_text(yaml.safe_dump(options), encoding="utf-8")
    do_train(load_cfg(str(config)), TrainerCliArgs())


LIBRARY = Pipeline(run)
of = LIBRARY.of
TRUNCATED = {"sequence_len": 256, "excess_length_strategy": "truncate"}
PACKED = {"sample_packing": True, "sequence_len": 1024, "micro_batch_size": 1}

CONFIGURATIONS = LIBRARY.common() | {
    "default": of("`type: chat_template`, `chat_template: tokenizer_default`"),
    "named_template": of("`chat_template: chatml`", chat_template="chatml"),
    "whole_texts": of("`train_on_inputs: true`", roles="all", train_on_inputs=True),
    "packing": of("`sample_packing: true`, `sequence_len: 1024`", **PACKED),
    "thoughts": of("Qwen 3's template, a thought in each answer", QWEN3, with_thoughts(CHATS)),
    "tool_calls": of("Qwen 3's template, a `tools` column", QWEN3, CALLS),
    "truncation": of("`sequence_len: 256`, `excess_length_strategy: truncate`", **TRUNCATED),
    "dropped": of("`sequence_len: 256`, whose default drops longer conversations", sequence_len=256),
    "accumulation": of(
        "`gradient_accumulation_steps: 4` of single rows", gradient_accumulation_steps=4, micro_batch_size=1
    ),
    "lora": of(
        "`adapter: lora`, `lora_target_linear: true`", adapter="lora", lora_r=8, lora_alpha=16, lora_target_linear=True
    ),
    "evaluation": of("`val_set_size: 0.2`", val_set_size=0.2),
}
