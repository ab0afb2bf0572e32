"""Folders of gpt-oss as they are published: experts in MXFP4, everything else in bf16."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors


def pack_experts(reference: Any, root: Path) -> dict[str, Path]:
    """Writes the model with random experts in MXFP4, and the same one in bf16. Their sizes are multiples of 32."""
    folders = {kind: root / kind for kind in ("mxfp4", "bf16")}
    for folder in folders.values():
        reference.bfloat16().save_pretrained(folder)
    dense = load_file(folders["bf16"] / "model.safetensors")
    packed, generator = dict(dense), torch.Generator().manual_seed(0)
    for name in [name for name in dense if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        num_experts, num_inputs, num_outputs = packed.pop(name).shape
        shape = (num_experts, num_outputs, num_inputs // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator).to(torch.uint8)
        scales = torch.randint(123, 126, shape, generator=generator).to(torch.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        dense[name] = convert_moe_packed_tensors(blocks, scales)
    for folder, tensors in zip(folders.values(), (packed, dense), strict=True):
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path = folders["mxfp4"] / "config.json"
    unquantized = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    stated = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": unquantized}}
    path.write_text(json.dumps(json.loads(path.read_text()) | stated))
    return folders
