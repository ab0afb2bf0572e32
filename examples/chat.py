"""Chat in the terminal with an exported model, by transformers alone: python examples/chat.py FOLDER"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer
from transformers.utils.logging import disable_progress_bar


def main(folder: str) -> None:
    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    messages: list[dict[str, str]] = []
    print("Ask something; an empty line ends the chat.")
    while question := input("\n> ").strip():
        messages.append({"role": "user", "content": question})
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
        output = model.generate(**prompt, max_new_tokens=200, do_sample=False, streamer=streamer)
        answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
