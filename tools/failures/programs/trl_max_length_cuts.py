"""TRL cuts what is longer than `max_length`: answers end without a stop token.

Exits with 1 if a row has no stop token at its end; run it in the repository's root.
"""

import sys

from datasets import Dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

tokenizer = AutoTokenizer.from_pretrained("tests/assets/tokenizer")
tokenizer.pad_token = tokenizer.eos_token
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))
prompt, answer = {"role": "user", "content": "Count."}, {"role": "assistant", "content": "one two three four five " * 9}
arguments = SFTConfig("/tmp/trl", max_length=64, use_cpu=True, bf16=False, report_to="none")
data = Dataset.from_list([{"prompt": [prompt], "completion": [answer]}] * 4)
trainer = SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer)

labels = next(iter(trainer.get_train_dataloader()))["labels"][0]
trained = tokenizer.decode(labels[labels != -100])
print("trained:", repr(trained))
sys.exit(bool(trained) and "<|im_end|>" not in trained)
