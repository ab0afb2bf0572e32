"""With `assistant_only_loss=True` TRL renders its own copy of Qwen 3's template, which keeps earlier thoughts.

Exits with 1 if the ids differ from those of the tokenizer's own template; run it in the repository's root.
"""

import sys
from pathlib import Path

import trl
from datasets import Dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

tokenizer = AutoTokenizer.from_pretrained("tests/assets/tokenizer")
tokenizer.pad_token = tokenizer.eos_token
tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))
turn = [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "<think>\nEasy.\n</think>\n\n5."}]
arguments = SFTConfig("/tmp/trl", assistant_only_loss=True, use_cpu=True, bf16=False, report_to="none")
data = Dataset.from_list([{"messages": turn + turn}] * 4)
trainer = SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer)

trained = tokenizer.decode(trainer.train_dataset[0]["input_ids"])
served = tokenizer.apply_chat_template(turn + turn, tokenize=False)
print(f"trained: {trained!r}\nserved:  {served!r}")
sys.exit(trained != served)
