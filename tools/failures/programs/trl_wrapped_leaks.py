"""With TRL's packing strategy `wrapped`, a conversation sees the one before it in its row.

Exits with 1 if hidden states change with tokens of another conversation; run it in the repository's root.
"""

import sys

import torch
from datasets import Dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

tokenizer = AutoTokenizer.from_pretrained("tests/assets/tokenizer")
tokenizer.pad_token = tokenizer.eos_token
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, initializer_range=0.3)).eval()
rows = [
    {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "Yes."}]} for n in range(9)
]
arguments = SFTConfig(
    "/tmp/trl", packing=True, packing_strategy="wrapped", max_length=64, per_device_train_batch_size=1,
    use_cpu=True, bf16=False, report_to="none",
)  # fmt: skip
trainer = SFTTrainer(model, arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)

batch = {name: value for name, value in next(iter(trainer.get_train_dataloader())).items() if name != "labels"}
changed = {**batch, "input_ids": batch["input_ids"].clone()}
changed["input_ids"][0, 4] += 1  # a token of the first conversation
with torch.no_grad():
    difference = (model.model(**batch)[0] - model.model(**changed)[0])[0, -10:].abs().max().item()
print("arguments:", ", ".join(batch), "| the last ten tokens change by", difference)
sys.exit(difference > 0)
