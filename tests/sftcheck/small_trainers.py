"""Small trainers of TRL and transformers, of which the tests of verify_trainer change one thing each."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from transformers import (
    DataCollatorForSeq2Seq,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer

from sftron.checks.report import Report


def messages(number: int, num_turns: int = 1) -> list[dict[str, str]]:
    turns = []
    for turn in range(num_turns):
        answer = f"{number} is " + "one more than " * ((number + turn) % 5) + f"{number}."
        turns += [
            {"role": "user", "content": f"What is {number} plus {turn}?"},
            {"role": "assistant", "content": answer},
        ]
    return turns


ROWS = [{"messages": messages(number, 1 + number % 2)} for number in range(24)]
ANSWERS = [{"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in ROWS]
QUIET: dict[str, Any] = {
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
    "save_strategy": "no",
}

ALWAYS_FAILED = [] if "[..., 1:]" in inspect.getsource(transformers.trainer) else ["loss"]
"""The rows that fail for every trainer whose first tokens are labeled. To 5.10.0, transformers' Trainer counts them
in num_items_in_batch, although no label is predicted for them."""


def tiny(tokenizer: PreTrainedTokenizerBase, **settings: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    config = LlamaConfig(
        vocab_size=len(tokenizer), num_key_value_heads=2, initializer_range=0.3, **sizes, **ids, **settings
    )
    return LlamaForCausalLM(config)


def sft(tokenizer: Any, folder: Path, rows: list[dict[str, Any]], model: Any = None, **options: Any) -> SFTTrainer:
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, **QUIET, **options}
    return SFTTrainer(
        model or tiny(tokenizer),
        SFTConfig(str(folder / "out"), **options),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )


def encoded(tokenizer: Any, rows: list[dict[str, Any]]) -> list[dict[str, list[int]]]:
    """Single answers with labels, found by rendering the prompt alone."""
    features = []
    for row in rows:
        ids = tokenizer.apply_chat_template(row["messages"], return_dict=True)["input_ids"]
        prompt = tokenizer.apply_chat_template(row["messages"][:-1], add_generation_prompt=True, return_dict=True)
        start = len(prompt["input_ids"])
        features.append({"input_ids": ids, "labels": [-100] * start + ids[start:]})
    return features


def plain(tokenizer: Any, folder: Path, kind: type[Trainer] = Trainer, collator: Any = None, **options: Any) -> Trainer:
    features = encoded(tokenizer, [{"messages": messages(number)} for number in range(24)])
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, **QUIET, **options}
    return kind(
        tiny(tokenizer),
        TrainingArguments(str(folder / "out"), **options),
        train_dataset=Dataset.from_list(features),
        processing_class=tokenizer,
        data_collator=collator or DataCollatorForSeq2Seq(tokenizer),
    )


def failed(report: Report) -> list[str]:
    return [row.name for row in report.checks if row.status == "FAIL"]


def row_of(report: Report, name: str) -> Any:
    return next(row for row in report.checks if row.name == name)


class Collator(DataCollatorForSeq2Seq):
    """Pads labels by position, and then changes the batch."""

    change: Callable[[Any], None]

    def __call__(self, features: Any, return_tensors: Any = None) -> Any:
        batch = super().__call__(features)
        type(self).change(batch)
        return batch


def collated(own: Any, folder: Path, change: Callable[[Any], None], kind: type[Trainer] = Trainer) -> Trainer:
    return plain(own, folder, kind, type("Changing", (Collator,), {"change": staticmethod(change)})(own))


def of_features(own: Any, folder: Path, features: list[dict[str, Any]], model: Any = None, collator: Any = None) -> Any:
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, **QUIET}
    return Trainer(
        model or tiny(own),
        TrainingArguments(str(folder / "out"), **options),
        train_dataset=features,  # pyright: ignore[reportArgumentType]
        processing_class=own,
        data_collator=collator or DataCollatorForSeq2Seq(own),
    )


def features_of(own: Any) -> list[dict[str, Any]]:
    return encoded(own, [{"messages": messages(number)} for number in range(24)])


class Means(Trainer):
    loss_is_scaled_for_ga = False

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        return model(**inputs).loss


def cache(own: Any, folder: Path) -> Trainer:
    return plain(own, folder, collator=transformers.DataCollatorWithFlattening(), use_cache=True)
