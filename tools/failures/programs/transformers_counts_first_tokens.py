"""The Trainer counts the first token of each row, for which no label is predicted, in `num_items_in_batch`.

Exits with 1 if the loss of a step is not the mean over its predicted labels; run it in the repository's root.
"""

import sys

import torch
from transformers import (
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

tokenizer = AutoTokenizer.from_pretrained("tests/assets/tokenizer")
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))
ids = tokenizer("one two three four five")["input_ids"]
rows = [{"input_ids": ids, "labels": ids}] * 8
arguments = TrainingArguments("/tmp/out", per_device_train_batch_size=4, use_cpu=True, report_to="none")
trainer = Trainer(model, arguments, DataCollatorForSeq2Seq(tokenizer), rows)

(batch,), num_items = trainer.get_batch_samples(iter(trainer.get_train_dataloader()), 1, torch.device("cpu"))
loss = trainer.training_step(model, batch, num_items).item()
logits, labels = model(input_ids=batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
mean = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()
print(f"num_items_in_batch {num_items}, {labels.numel()} predicted labels; loss {loss:.5f}, their mean {mean:.5f}")
sys.exit(abs(loss / mean - 1) > 1e-4)
