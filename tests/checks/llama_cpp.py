"""llama.cpp itself, for the tests: a small model in a GGUF file, and llama.cpp's server in a process of its own."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gguf
import numpy as np

WIDTH, BLOCKS = 8, 1
SERVER = """
import sys, time
import xllamacpp

params = xllamacpp.CommonParams()
params.model.path, params.port = sys.argv[1], 0
params.n_ctx, params.n_parallel, params.cpuparams.n_threads = 4096, 1, 1
params.use_jinja, params.warmup, params.verbosity = True, False, -1
if len(sys.argv) > 2:
    params.chat_template = open(sys.argv[2], encoding="utf-8").read()
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
sys.stdin.read()
"""


def write_gguf(folder: Path, file: Path, pre: str = "gpt-2") -> Path:
    """Writes the tokenizer and the template in `folder` to a GGUF file with the weights of a tiny Llama, which are 0.

    Args:
        pre: How llama.cpp divides text before it merges; "gpt-2" for a byte-level tokenizer without digits.
    """
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    added = {each["id"]: each for each in tokenizer["added_tokens"]}
    vocabulary = tokenizer["model"]["vocab"] | {each["content"]: number for number, each in added.items()}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    assert sorted(vocabulary.values()) == list(range(len(tokens)))
    kinds = [gguf.TokenType.NORMAL] * len(tokens)
    for number, each in added.items():
        kinds[number] = gguf.TokenType.CONTROL if each["special"] else gguf.TokenType.USER_DEFINED
    merges = [each if isinstance(each, str) else " ".join(each) for each in tokenizer["model"]["merges"]]

    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(4096)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(BLOCKS)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_add_bos_token(False)
    writer.add_eos_token_id(vocabulary[config["eos_token"]])
    if config.get("bos_token"):
        writer.add_bos_token_id(vocabulary[config["bos_token"]])
    writer.add_chat_template((folder / "chat_template.jinja").read_text(encoding="utf-8"))
    shapes = {"token_embd": (len(tokens), WIDTH), "output_norm": (WIDTH,)}
    for block in range(BLOCKS):
        names = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
        shapes |= {f"blk.{block}.{name}": (WIDTH, WIDTH) for name in names}
        shapes |= {f"blk.{block}.{name}": (WIDTH,) for name in ("attn_norm", "ffn_norm")}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@contextmanager
def llama_server(file: Path, template: Path | None = None) -> Iterator[str]:
    """Serves a GGUF file, with its own template or another one. Yields the URL."""
    arguments = [str(each) for each in (file, template) if each is not None]
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            assert url.startswith("http"), process.communicate()[1]
            yield url
        finally:
            process.kill()
