"""Tiny random Llamas of transformers, and ours with the same weights."""

from typing import Any

import torch
import transformers

from sftron.checkpoint.fusion import fuse_state_dict
from sftron.models.llama import LlamaForSFT
from sftron.models.llama_config import LlamaConfig

TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    # Large enough that logits, and with them every difference, are far from 0.
    "initializer_range": 0.3,
}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def make_theirs(seed: int = 0, **overrides: Any) -> transformers.LlamaForCausalLM:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**(TINY | overrides), attn_implementation="eager")
    model = transformers.LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            # transformers starts them at one and zero, where a norm or a bias left out would not show.
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    return model


def make_ours(theirs: transformers.LlamaForCausalLM, **options: Any) -> LlamaForSFT:
    options = {"compute_dtype": torch.float32} | options
    model = LlamaForSFT(LlamaConfig.from_hf(theirs.config.to_dict()), **options)
    names = [name for name, _ in model.named_parameters()]
    model.load_state_dict(dict(fuse_state_dict(names, theirs.state_dict().__getitem__)))
    return model


def pack(lengths: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """The arguments of `LlamaForSFT.forward` for random documents of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(0, TINY["vocab_size"], (sum(lengths),), generator=generator)
    position_ids = torch.cat([torch.arange(length) for length in lengths])
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    return input_ids, position_ids, cu_seqlens, max(lengths)
