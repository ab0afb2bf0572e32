"""DataCollatorForLanguageModeling masks the stop token if it is the padding token too, as SmolLM2's is.

Exits with 1 if no stop token has a label; run it in the repository's root.
"""

import sys

from transformers import AutoTokenizer, DataCollatorForLanguageModeling

tokenizer = AutoTokenizer.from_pretrained("tests/assets/tokenizer")
tokenizer.pad_token = tokenizer.eos_token
messages = [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5."}]
row = {"input_ids": tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]}

labels = DataCollatorForLanguageModeling(tokenizer, mlm=False)([row])["labels"][0]
trained = tokenizer.decode(labels[labels != -100])
print("ids:    ", repr(tokenizer.decode(row["input_ids"])))
print("trained:", repr(trained))
sys.exit("<|im_end|>" not in trained)
