"""Both models with the same weights, from a folder or of a known shape with random ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from sftron.checkpoint.fusion import fuse_state_dict
from sftron.models.attention import resolve_attention
from sftron.models.llama import LlamaForSFT
from sftron.models.llama_config import LlamaConfig
from sftron.train.optimizer import make_adamw


def _shape(h: int, f: int, layers: int, heads: int, kv_heads: int, vocab: int, theta: float, tied: bool) -> dict:
    return {
        "hidden_size": h,
        "intermediate_size": f,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "rope_theta": theta,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 16_384,
        "rms_norm_eps": 1e-5,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _shape(48, 96, 2, 6, 2, 800, 1e4, True),
    "small": _shape(256, 768, 4, 4, 2, 8192, 1e4, True),
    "smollm2-135m": _shape(576, 1536, 30, 9, 3, 49_152, 1e5, True),
    "llama3.2-1b": _shape(2048, 8192, 16, 32, 8, 128_256, 5e5, True),
    "llama3-8b": _shape(4096, 14_336, 32, 32, 8, 128_256, 5e5, False),
}


def shape_of(text: str) -> dict[str, Any]:
    """NAME, or NAME:LAYERS for as many layers. Raises ValueError."""
    name, _, layers = text.partition(":")
    if name not in SHAPES or (layers and not layers.isdecimal()):
        raise ValueError(f"shape {text!r} is not one of {', '.join(SHAPES)}, or such a name and :LAYERS")
    return SHAPES[name] | ({"num_hidden_layers": int(layers)} if layers else {})


def make_theirs(model: Path | None, shape: dict[str, Any], device: torch.device, seed: int) -> Any:
    """LlamaForCausalLM with fp32 weights, of a folder or random ones."""
    import transformers

    options: dict[str, Any] = {"attn_implementation": "sdpa"}
    if model is not None:
        loaded: Any = transformers.LlamaForCausalLM.from_pretrained(model, dtype=torch.float32, **options)
        return loaded.to(device).train()
    torch.manual_seed(seed)
    with device:
        made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **options))
    return made.train()


def make_ours(theirs: Any, num_positions: int, activation_checkpointing: str = "none") -> LlamaForSFT:
    """LlamaForSFT with a copy of their weights, on their device, computing in bf16."""
    device = next(theirs.parameters()).device
    config = LlamaConfig.from_hf(theirs.config.to_dict())
    attention = resolve_attention("auto", device, torch.bfloat16, config.head_dim)
    with device:
        model = LlamaForSFT(
            config,
            attention,
            torch.bfloat16,
            max(num_positions, config.max_position_embeddings),
            activation_checkpointing,
        )
    weights = theirs.state_dict()
    with torch.no_grad():
        own = dict(model.named_parameters())
        for name, tensor in fuse_state_dict(own, weights.__getitem__):
            own[name].copy_(tensor)
    return model


def sharing_weights(model: LlamaForSFT, activation_checkpointing: str) -> LlamaForSFT:
    """Another one with the same parameters, gradients and so optimizer; to be compiled or checkpointed otherwise."""
    with torch.device("meta"):
        other = LlamaForSFT(
            model.config,
            model.attention,
            model.compute_dtype,
            model.rope_table.num_positions,
            activation_checkpointing,
        )
    for name, parameter in model.named_parameters():
        module, _, attribute = name.rpartition(".")
        setattr(other.get_submodule(module), attribute, parameter)
    return other


def make_optimizer(model: nn.Module, learning_rate: float) -> torch.optim.AdamW:
    """The same for both: fused AdamW, no decay, so that weights differ by gradients alone."""
    named = model.named_parameters()
    return make_adamw(named, learning_rate=learning_rate, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
