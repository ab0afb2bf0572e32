"""Faults of axolotl: prints what a configuration trains, and exits with 1 if the fault shows.

    python tools/failures/programs/axolotl_faults.py accumulation        # in the repository's root

accumulation     each micro-batch is averaged by itself, whatever its number of labels
control_text     a text that spells control tokens becomes a turn
truncation       `excess_length_strategy: truncate` cuts within the answer
dropped          conversations longer than `sequence_len` are dropped
thoughts         `<think>`, with which the last answer begins in Qwen 3's format, has no label
whole_texts      `train_on_inputs: true` trains no token that the template writes, but for the stop tokens
empty_thought    the empty thought that Qwen 3's template writes in front of the last answer has no label
"""

import json
import sys
import tempfile
from pathlib import Path
from unittest import mock

import torch
import yaml
from axolotl.cli.args import TrainerCliArgs
from axolotl.cli.config import load_cfg
from axolotl.cli.train import do_train
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Trainer

QWEN3 = (  # as Qwen 3's: a thought in the last answer alone, and an empty one if it has none
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% set said = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') if '</think>' in m.content %}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>\n' + (thought or '') + '\n</think>\n\n' }}{% endif %}"
    "{{ said + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def main() -> bool:
    fault, folder = sys.argv[1], Path(tempfile.mkdtemp())
    tokenizer = AutoTokenizer.from_pretrained("tests/assets/tokenizer")
    if "thought" in fault:
        tokenizer.chat_template = QWEN3
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), initializer_range=0.3, **sizes))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    text = "Translate: <|im_end|>\n<|im_start|>assistant\nHi." if fault == "control_text" else "Count."
    thought = "<think>\nEasy.\n</think>\n\n" if fault == "thoughts" else ""
    lengths = {"accumulation": (1, 9), "truncation": (9,), "dropped": (1, 9)}.get(fault, (1,))
    rows = [
        {
            "messages": [
                {"role": "user", "content": text},
                {"role": "assistant", "content": thought + "one two three four five " * n},
            ]
        }
        for n in lengths * 4
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"path": str(folder / "rows.jsonl"), "ds_type": "json", "type": "chat_template",
            "field_messages": "messages",
            "message_property_mappings": {"role": "role", "content": "content"}}  # fmt: skip
    settings = {"base_model": str(folder), "datasets": [data], "dataset_prepared_path": str(folder / "data"),
                "chat_template": "tokenizer_default", "sequence_len": 256, "micro_batch_size": 1, "max_steps": 1,
                "gradient_accumulation_steps": 4, "optimizer": "adamw_torch", "learning_rate": 1e-3, "bf16": False,
                "fp16": False, "dataset_num_proc": 1, "attn_implementation": "sdpa",
                "output_dir": str(folder / "out"), "val_set_size": 0}  # fmt: skip
    settings |= {"truncation": {"sequence_len": 64, "excess_length_strategy": "truncate"},
                 "dropped": {"sequence_len": 64}, "whole_texts": {"train_on_inputs": True}}.get(fault, {})  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    found = []
    with mock.patch.object(Trainer, "train", lambda trainer, *_, **__: found.append(trainer) or sys.exit()):
        try:
            do_train(load_cfg(str(folder / "config.yaml")), TrainerCliArgs())
        except SystemExit:
            (trainer,) = found
    batches, num_items = trainer.get_batch_samples(iter(trainer.get_train_dataloader()), 4, torch.device("cpu"))
    counts = [int((each["labels"][:, 1:] != -100).sum()) for each in batches]
    trainer.current_gradient_accumulation_steps = 4
    step = sum(trainer.training_step(trainer.model, dict(each), num_items).item() for each in batches)
    sums = [trainer.model(**each).loss.item() * count for each, count in zip(batches, counts, strict=True)]
    print(f"labels of the micro-batches: {counts}; the step's loss {step:.5f}, the mean {sum(sums) / sum(counts):.5f}")
    ids, labels = batches[0]["input_ids"][0], batches[0]["labels"][0]
    trained = tokenizer.decode(labels[labels != -100])
    print(f"{len(trainer.train_dataset)} of {len(rows)} rows; ids: {tokenizer.decode(ids)!r}\ntrained: {trained!r}")
    shows = {"accumulation": abs(step / (sum(sums) / sum(counts)) - 1) > 1e-3,
             "truncation": "<|im_end|>" not in trained,
             "control_text": tokenizer.decode(ids).count("<|im_start|>") != 2,
             "thoughts": "Easy." in trained and "<think>" not in trained,
             "whole_texts": "Count." in trained and "<|im_start|>" not in trained,
             "empty_thought": "one two" in trained and "<think>" not in trained,
             "dropped": len(trainer.train_dataset) < len(rows)}  # fmt: skip
    return bool(shows[fault])


if __name__ == "__main__":  # axolotl starts processes that import this file
    sys.exit(main())
