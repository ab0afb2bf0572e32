"""Makes tests/assets/tokenizer: a byte-level BPE of 768 ids with ChatML and Llama 3 control tokens; and beside it
tokenizer_sentencepiece: a BPE as SentencePiece has it, with ▁ for spaces and put in front of every text between
control tokens, and bytes for what its vocabulary lacks.

python tests/assets/make_tokenizer.py        (deterministic; run again only to change it)
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

ASSETS = Path(__file__).parent
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>",
]  # fmt: skip


def texts() -> list[str]:
    files = sorted((ASSETS.parents[1] / "examples" / "quickstart").glob("*.jsonl"))
    rows = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return [message["content"] for row in rows for message in row["messages"]]


def make_sentencepiece() -> None:
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.Metaspace()
    learned.train_from_iterator(texts(), trainers.BpeTrainer(vocab_size=700, show_progress=False))
    model = json.loads(learned.to_str())["model"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += sorted(model["vocab"], key=model["vocab"].__getitem__)
    backend = Tokenizer(
        models.BPE(
            {piece: number for number, piece in enumerate(pieces)},
            [(left, right) for left, right in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>"
    )
    tokenizer.save_pretrained(ASSETS / "tokenizer_sentencepiece")


def main() -> None:
    make_sentencepiece()
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=760, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts(), trainer)
    # Not special, as in Qwen and DeepSeek: `split_special_tokens` would leave it whole in a user's text.
    backend.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|begin_of_text|>", eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(ASSETS / "tokenizer")


if __name__ == "__main__":
    main()
