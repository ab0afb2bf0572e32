"""FLOPs of a training step: model FLOPs (for MFU), hardware FLOPs (for HFU), and the peak of the device."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sftron.data.types import Batch
from sftron.kernels.device import device_name, is_gpu
from sftron.models.architecture import LlamaConfig
from sftron.models.llama import blocks_without_weights


@dataclass(frozen=True, slots=True)
class StepFlops:
    """FLOPs of the micro-batches of one step."""

    model: int
    """The FLOPs that the model requires for the real tokens, without padding."""
    hardware: int
    """The FLOPs that are computed, including recomputation and padding."""


@dataclass(frozen=True, slots=True)
class TrainedMatrices:
    """The matrices that are trained, as far as FLOPs depend on it. The default is full fine-tuning."""

    blocks: bool = True
    """Whether the matrices of the blocks are trained; with adapters, they are frozen."""
    head: bool = True
    adapter_parameters: int = 0
    """The number of weights of the low-rank matrices of all blocks."""


def model_flops(
    config: LlamaConfig,
    *,
    num_labeled: int,
    document_lengths: Sequence[int],
    trained: TrainedMatrices = TrainedMatrices(),
) -> int:
    """Returns the FLOPs that forward and backward require: the numerator of MFU.

        6 * P_blocks * T  +  6 * H * V * T_labeled  +  3 * mixing

    A product with a weight of P numbers takes P multiply-adds per token, which are 2 P FLOPs. The backward pass takes
    two products of the same size (the gradients of the input and of the weight), so the total is 6 P. A frozen matrix
    needs no gradient of its weight, which makes 4 P, and adapters of A numbers in all add 6 A per token. The head is
    counted for labeled positions only, and the embedding lookup is not counted.

    What a block takes, for its weights and for mixing tokens within documents, its own `flops` tells. Norms, RoPE,
    softmax, activations and the optimizer are not counted. The formula follows PaLM (arXiv 2204.02311, appendix B), but
    with causal attention within documents.

    Args:
        config: The architecture.
        num_labeled: The number of tokens that have a label.
        document_lengths: The lengths of the documents within which tokens are mixed: one conversation each, or the
            whole pack without remove_cross_attention.
    """
    blocks, adapters, mixing = _forward_flops(config, document_lengths, trained)
    head = 2 * config.hidden_size * config.vocab_size * num_labeled
    return (3 if trained.blocks else 2) * blocks + 3 * (adapters + mixing) + (3 if trained.head else 2) * head


def _forward_flops(config: LlamaConfig, lengths: Sequence[int], trained: TrainedMatrices) -> tuple[int, int, int]:
    """Returns the FLOPs of the forward pass of all blocks: of their weights, of the adapters, and of mixing tokens."""
    weights = mixing = 0
    for block, count in Counter(blocks_without_weights(config)).items():
        flops = block.flops(lengths)
        weights, mixing = weights + count * flops.weights, mixing + count * flops.mixing
    return weights, 2 * trained.adapter_parameters * sum(lengths), mixing


def step_flops(
    config: LlamaConfig,
    batches: Sequence[Batch],
    activation_checkpointing: str,
    trained: TrainedMatrices = TrainedMatrices(),
) -> StepFlops:
    """Returns the FLOPs of the micro-batches of one step on this rank, or on all ranks that share them.

    For the hardware FLOPs, `full` activation checkpointing repeats the forward pass of the blocks, and `selective`
    repeats no matrix product. The scores that fused attention recomputes in its backward pass are not counted.
    """
    model = hardware = 0
    for batch in batches:
        num_labeled = batch.pack.num_trained_tokens
        real = np.diff(batch.pack.cu_seqlens.clip(max=batch.pack.num_tokens)).tolist()
        model += model_flops(config, num_labeled=num_labeled, document_lengths=real, trained=trained)
        computed = np.diff(batch.cu_seqlens.numpy()).tolist()
        hardware += model_flops(config, num_labeled=num_labeled, document_lengths=computed, trained=trained)
        if activation_checkpointing == "full":
            hardware += sum(_forward_flops(config, computed, trained))
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
    r"A10G": 70.0,
    r"A10": 125.0,
    r"RTX A6000": 154.8,
    r"L40S": 362.05,
    r"L40": 181.05,
    r"L4": 121.0,
    r"RTX 6000 Ada": 364.2,
    r"RTX PRO 6000 Blackwell Workstation": 503.8,
    r"RTX 3090$": 71.0,
    r"RTX 3090 Ti$": 80.0,
    r"RTX 4090$": 165.2,
    r"RTX 4090 D$": 147.1,
    r"RTX 5090$": 209.5,
    r"MI300X": 1307.4,
    r"MI325X": 1307.4,
}
"""Dense bf16 TFLOP/s with fp32 accumulation, by a pattern of the device name. The first pattern that matches counts.

Data sheets often state twice as much, with sparsity, which training does not use: 1,979 for an H100 means 989.4 dense.
An H100 or H200 that is neither NVL nor PCIe is an SXM. The `$` patterns exclude laptop GPUs, which have other chips.
"""


@dataclass(frozen=True, slots=True)
class Peak:
    """The peak TFLOP/s of one GPU, the denominator of MFU, and a description of where the number comes from."""

    tflops: float | None
    """The peak; None if it is not known."""
    source: str

    def __str__(self) -> str:
        if self.tflops is None:
            return f"peak unknown ({self.source}): no mfu; set logging.peak_tflops to the device's dense bf16 TFLOP/s"
        return f"peak {self.tflops:g} TFLOP/s ({self.source}); mfu = FLOPs the model needs / seconds / peak"


def find_peak(device: torch.device, peak_tflops: float | None) -> Peak:
    """Returns `peak_tflops` (the value of logging.peak_tflops) if it is given, else the known peak of the device."""
    if peak_tflops is not None:
        return Peak(peak_tflops, "logging.peak_tflops")
    if not is_gpu(device):
        return Peak(None, device.type)
    return peak_of(device_name(device))


def peak_of(device_name: str) -> Peak:
    """Returns the peak of a device by its name from torch.cuda.get_device_name."""
    for pattern, tflops in _DENSE_BF16_TFLOPS.items():
        # A MIG slice has only a part of the peak of its GPU.
        if " MIG " not in device_name and re.search(rf"\b{pattern}\b", device_name):
            return Peak(tflops, f"{device_name}, bf16 dense")
    return Peak(None, device_name)
