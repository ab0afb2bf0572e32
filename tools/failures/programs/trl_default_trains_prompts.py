"""TRL's defaults train the questions of `messages` rows. Exits with 1 if they do; run it in the repository's root."""

import sys

from datasets import Dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

tokenizer = AutoTokenizer.from_pretrained("tests/assets/tokenizer")
tokenizer.pad_token = tokenizer.eos_token
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))
rows = [{"messages": [{"role": "user", "content": "What is 2 plus 3?"}, {"role": "assistant", "content": "5."}]}] * 4
arguments = SFTConfig("/tmp/trl", use_cpu=True, bf16=False, report_to="none")
trainer = SFTTrainer(model, arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)

labels = next(iter(trainer.get_train_dataloader()))["labels"][0]
trained = tokenizer.decode(labels[labels != -100])
print("trained:", repr(trained))
sys.exit("What is 2 plus 3?" in trained)
