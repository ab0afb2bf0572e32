"""TRL's packing strategies `bfd_split` and `wrapped` begin packed documents in the middle of a conversation.

Takes the strategy. Exits with 1 if a document begins elsewhere than its conversation; run it in the repository's root.
"""

import sys

from datasets import Dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

tokenizer = AutoTokenizer.from_pretrained("tests/assets/tokenizer")
tokenizer.pad_token = tokenizer.eos_token
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))
messages = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "one two three four five " * 9}]
rows = [{"messages": messages}] * 6
arguments = SFTConfig(
    "/tmp/trl", packing=True, packing_strategy=sys.argv[1], max_length=64, use_cpu=True, bf16=False, report_to="none"
)
trainer = SFTTrainer(model, arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)

begins = [row["input_ids"][0] for row in trainer.train_dataset]
cut = [first for first in begins if first != tokenizer.convert_tokens_to_ids("<|im_start|>")]
print(f"{len(cut)} of {len(begins)} rows begin in the middle of a conversation:", tokenizer.decode(cut))
sys.exit(bool(cut))
