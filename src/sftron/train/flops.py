"""FLOPs of a training step: what the model needs (for MFU), what the hardware computes (for HFU), and its peak."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sftron.data.types import Batch
from sftron.models.architecture import LlamaConfig


@dataclass(frozen=True, slots=True)
class StepFlops:
    """FLOPs of the micro-batches of one step."""

    model: int
    """What the model needs for the real tokens."""
    hardware: int
    """What is computed, recomputation and padding included."""


def block_parameters(config: LlamaConfig) -> int:
    """Returns the number of weights in one block's matrix products: q, k, v, o and gate, up, down; no norms, no
    biases."""
    width_q, width_kv = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    return config.hidden_size * (2 * width_q + 2 * width_kv + 3 * config.intermediate_size)


def model_flops(config: LlamaConfig, *, num_tokens: int, num_labeled: int, document_lengths: Iterable[int]) -> int:
    """Returns the FLOPs of forward and backward that the model needs: the numerator of MFU.

        6 * P_blocks * T  +  6 * H * V * T_labeled  +  6 * L * Hq * D * sum(l * (l + 1))

    A product with a weight of P numbers takes P multiply-adds a token, 2 P FLOPs; the backward pass takes two of the
    size (gradients of the input and of the weight): 6 P. The head counts for labeled rows alone, the embeddings'
    lookup for nothing. Query i of a document sees i keys, l (l + 1) / 2 pairs in a document of l tokens; a pair takes
    2 D FLOPs for its score and 2 D for its value in each of Hq heads: 2 Hq D l (l + 1) forward, three times that with
    the backward pass. Norms, RoPE, softmax, activations and the optimizer are not counted (PaLM, arXiv 2204.02311,
    appendix B, but causal and by document).

    Args:
        config: The architecture.
        num_tokens: The number of real tokens.
        num_labeled: The number of them with a label.
        document_lengths: The documents as attention sees them: one conversation each, or, without
            remove_cross_attention, all of a pack together. The pack's length for documents of 512 tokens in 16 k would
            give 1.6 times the FLOPs (8B), and a run would look that much better than it is.
    """
    pairs_twice = sum(length * (length + 1) for length in document_lengths)
    blocks = config.num_hidden_layers * block_parameters(config) * num_tokens
    head = config.hidden_size * config.vocab_size * num_labeled
    attention = config.num_hidden_layers * config.num_attention_heads * config.head_dim * pairs_twice
    return 6 * (blocks + head + attention)


def step_flops(config: LlamaConfig, batches: Sequence[Batch], activation_checkpointing: str) -> StepFlops:
    """Returns the FLOPs of the micro-batches of one step on this rank.

    Of the hardware's, `full` computes the blocks' forward pass once more; `selective` computes no matrix product again.
    The scores that fused attention makes again in its backward pass are not counted.
    """
    model = hardware = 0
    for batch in batches:
        num_labeled = len(batch.label_positions)
        real = np.diff(batch.pack.cu_seqlens.clip(max=batch.pack.num_tokens)).tolist()
        model += model_flops(config, num_tokens=batch.pack.num_tokens, num_labeled=num_labeled, document_lengths=real)
        computed = np.diff(batch.cu_seqlens.numpy()).tolist()
        num_tokens = len(batch.input_ids)
        hardware += model_flops(config, num_tokens=num_tokens, num_labeled=num_labeled, document_lengths=computed)
        if activation_checkpointing == "full":
            blocks = model_flops(config, num_tokens=num_tokens, num_labeled=0, document_lengths=computed)
            hardware += blocks // 3
    return StepFlops(model=model, hardware=hardware)


_DENSE_BF16_TFLOPS: dict[str, float] = {
    r"GB[23]00": 2500.0,
    r"B[23]00": 2250.0,
    r"H[12]00 NVL": 835.5,
    r"H[18]00 PCIe": 756.0,
    r"(H100|H200|H800|GH200)": 989.4,
    r"H20": 148.0,
    r"A[18]00": 312.0,
    r"A30": 165.0,
    r"A40": 149.7,
    r"A10": 125.0,
    r"RTX A6000": 154.8,
    r"L40S": 362.05,
    r"L40": 181.05,
    r"L4": 121.0,
    r"RTX 6000 Ada": 364.2,
    r"RTX PRO 6000 Blackwell Workstation": 503.8,
    r"RTX 3090$": 71.0,
    r"RTX 4090$": 165.2,
    r"RTX 5090$": 209.5,
    r"MI300X": 1307.4,
    r"MI325X": 1307.4,
}
"""TFLOP/s with fp32 accumulation, by a pattern in the device's name; the first pattern that is found counts.

The sheets' larger numbers are with sparsity, twice as high, and no training reaches them: 1,979 for an H100 is 989.4.
Of an H100 or H200, what is neither NVL nor PCIe is SXM. A laptop's RTX 4090 is another chip, hence the ends of lines.
"""


@dataclass(frozen=True, slots=True)
class Peak:
    """The TFLOP/s of one GPU that mfu is measured against, and their origin in words."""

    tflops: float | None
    """None where it is not known."""
    source: str

    def __str__(self) -> str:
        if self.tflops is None:
            return f"peak unknown ({self.source}): no mfu; set logging.peak_tflops to the device's dense bf16 TFLOP/s"
        return f"peak {self.tflops:g} TFLOP/s ({self.source}); mfu = FLOPs the model needs / seconds / peak"


def find_peak(device: torch.device, peak_tflops: float | None) -> Peak:
    """Returns the peak of the device, or `peak_tflops`, which is logging.peak_tflops, where that is given."""
    if peak_tflops is not None:
        return Peak(peak_tflops, "logging.peak_tflops")
    if device.type != "cuda":
        return Peak(None, device.type)
    return peak_of(torch.cuda.get_device_name(device))


def peak_of(device_name: str) -> Peak:
    """Returns the peak of a device by its name, as torch.cuda.get_device_name gives it."""
    for pattern, tflops in _DENSE_BF16_TFLOPS.items():
        # A slice of a GPU (MIG) has a slice of its peak.
        if " MIG " not in device_name and re.search(rf"\b{pattern}\b", device_name):
            return Peak(tflops, f"{device_name}, bf16 dense")
    return Peak(None, device_name)
