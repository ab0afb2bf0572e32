"""llama.cpp itself, for the tests: a small model in a GGUF file, and llama.cpp's server in a process of its own."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

TINY = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
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
    """Writes the tokenizer, the template and the weights of a Llama in `folder` to a GGUF file, in fp32.

    If it holds no weights, the file gets those of a tiny model, which are 0.

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

    has_weights = (folder / "model.safetensors").exists()
    sizes: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8")) if has_weights else TINY
    heads = sizes["num_attention_heads"]
    unused = range(len(tokens), sizes.get("vocab_size", len(tokens)))  # the model embeds more ids than there are tokens
    tokens += [f"[unused {number}]" for number in unused]
    kinds += [gguf.TokenType.UNUSED] * len(unused)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(4096)
    writer.add_embedding_length(sizes["hidden_size"])
    writer.add_block_count(sizes["num_hidden_layers"])
    writer.add_feed_forward_length(sizes["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(sizes.get("num_key_value_heads", heads))
    writer.add_layer_norm_rms_eps(sizes.get("rms_norm_eps", 1e-5))
    writer.add_rope_freq_base(sizes.get("rope_parameters", {}).get("rope_theta", 1e4))
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
    for name, values in (_weights(folder, sizes) if has_weights else _zeros(len(tokens))).items():
        writer.add_tensor(f"{name}.weight", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _zeros(num_tokens: int) -> dict[str, np.ndarray]:
    width = TINY["hidden_size"]
    parts = [each for each in NAMES.values() if each.startswith(("attn", "ffn"))]
    shapes = {f"blk.0.{each}": (width,) if each.endswith("norm") else (width, width) for each in parts}
    shapes |= {"token_embd": (num_tokens, width), "output_norm": (width,)}
    return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}


def _weights(folder: Path, sizes: dict[str, Any]) -> dict[str, np.ndarray]:
    """Returns the weights under llama.cpp's names. Its Llama rotates neighbors, not halves, so q and k change rows."""
    heads = {"attn_q": sizes["num_attention_heads"], "attn_k": sizes["num_key_value_heads"]}
    weights = dict[str, np.ndarray]()
    for name, values in load_file(folder / "model.safetensors").items():
        part = name.removesuffix(".weight")
        block, own = "", part
        if part.startswith("model.layers."):
            number, own = part.removeprefix("model.layers.").split(".", 1)
            block = f"blk.{number}."
        if number_of_heads := heads.get(NAMES[own]):
            rows = values.reshape(number_of_heads, 2, -1, values.shape[1]).swapaxes(1, 2)
            values = rows.reshape(values.shape)
        weights[block + NAMES[own]] = values.astype(np.float32)
    return weights


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
