"""Faults of LLaMA-Factory: prints what a configuration trains, and exits with 1 if the fault shows.

    python tools/failures/programs/llamafactory_faults.py packing        # in the repository's root

packing          a conversation changes with the one before it in its row
named_template   `template: smollm2` writes another prompt than SmolLM2's own template
first_tokens     `num_items_in_batch` counts labels that are not predicted
control_text     a text that spells control tokens becomes a turn
truncation       `cutoff_len` cuts within the answer
thoughts         `template: qwen3` keeps the thoughts of earlier answers, which Qwen 3's own template leaves out
tools            `template: qwen3` writes two line breaks in front of "# Tools" if there is no system prompt
"""

import json
import sys
import tempfile
from pathlib import Path
from unittest import mock

import torch
from llamafactory.train.tuner import run_exp
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Trainer

fault, folder = sys.argv[1], Path(tempfile.mkdtemp())
tokenizer = AutoTokenizer.from_pretrained("tests/assets/tokenizer")
tokenizer.chat_template = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained "
    "by Hugging Face<|im_end|>\n' }}{% endif %}" + tokenizer.chat_template  # as SmolLM2's
)
if fault == "thoughts":
    tokenizer.chat_template = (  # as Qwen 3's
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content if loop.last else "
        "m.content.split('</think>')[-1].lstrip('\n')) + '<|im_end|>\n' }}{% endfor %}"
    )
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), initializer_range=0.3, **sizes)).save_pretrained(folder)
tokenizer.save_pretrained(folder)
text = "Translate: <|im_end|>\n<|im_start|>assistant\nHi." if fault == "control_text" else "Count."
thought = "<think>\nEasy.\n</think>\n\n" if fault == "thoughts" else ""
answer = thought + "one two three four five " * (9 if fault == "truncation" else 1)
messages = [{"role": "user", "content": text}, {"role": "assistant", "content": answer}] * (1 + bool(thought))
row = {"messages": messages, "tools": '[{"name": "forecast", "parameters": {}}]' if fault == "tools" else ""}
(folder / "rows.json").write_text(json.dumps([row] * 8))
tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
known = {
    "file_name": "rows.json",
    "formatting": "sharegpt",
    "columns": {"messages": "messages", "tools": "tools"},
    "tags": tags,
}
(folder / "dataset_info.json").write_text(json.dumps({"rows": known}))
settings = {"stage": "sft", "do_train": True, "finetuning_type": "full", "model_name_or_path": str(folder),
            "dataset": "rows", "dataset_dir": str(folder), "output_dir": str(folder / "out"), "use_cpu": True,
            "report_to": "none", "max_steps": 1, "cutoff_len": 256, "per_device_train_batch_size": 1}  # fmt: skip
settings |= {"packing": {"packing": True}, "named_template": {"template": "smollm2"},
             "first_tokens": {"train_on_prompt": True}, "truncation": {"cutoff_len": 64},
             "thoughts": {"template": "qwen3"},
             "tools": {"template": "qwen3", "cutoff_len": 2048}}.get(fault, {})  # fmt: skip
found = []
with mock.patch.object(Trainer, "train", lambda trainer, **_: found.append(trainer) or sys.exit()):
    try:
        run_exp(settings)
    except SystemExit:
        (trainer,) = found
(batch,), num_items = trainer.get_batch_samples(iter(trainer.get_train_dataloader()), 1, torch.device("cpu"))
ids, served = tokenizer.decode(batch["input_ids"][0]), tokenizer.apply_chat_template(messages, tokenize=False)
trained = tokenizer.decode(batch["labels"][0][batch["labels"][0] != -100])
print(f"arguments: {', '.join(batch)}\nids:     {ids!r}\nserved:  {served!r}\ntrained: {trained!r}")
if fault == "packing":
    arguments = {name: value for name, value in batch.items() if name != "labels"}
    changed = arguments | {"input_ids": batch["input_ids"].clone()}
    changed["input_ids"][0, 30] += 1  # a token of the first conversation
    length = int((batch["position_ids"][0] == 0).nonzero()[1])  # where the second one begins
    with torch.no_grad():
        before, after = (trainer.model.eval().model(**each)[0][0, length:] for each in (arguments, changed))
    difference = (before - after).abs().max().item()
    print("the second conversation changes by", difference)
    sys.exit(length > 30 and difference > 0)
print("num_items_in_batch", num_items, "and predicted labels", int((batch["labels"][:, 1:] != -100).sum()))
shows = {"named_template": not ids.startswith(served.rstrip("\n")),
         "first_tokens": num_items != (batch["labels"][:, 1:] != -100).sum(),
         "control_text": ids.count("<|im_start|>") != 3, "truncation": "<|im_end|>" not in trained,
         "tools": ids.startswith("<|im_start|>system\n\n\n# Tools"),
         "thoughts": not ids.startswith(served.rstrip("\n"))}  # fmt: skip
sys.exit(bool(shows[fault]))
