"""apply_chat_template(truncation=True) cuts answers: they end without a stop token.

Exits with 1 if it does; run it in the repository's root.
"""

import sys

from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("tests/assets/tokenizer")
messages = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "one two three four five " * 9}]
ids = tokenizer.apply_chat_template(messages, truncation=True, max_length=64, return_dict=True)["input_ids"]
print(len(ids), "tokens:", repr(tokenizer.decode(ids)))
sys.exit("<|im_end|>" not in tokenizer.decode(ids[-10:]))
