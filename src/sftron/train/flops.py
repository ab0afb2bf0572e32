"""FLOPs of a training step: what the model needs (for MFU), and what the hardware computes (for HFU)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from sftron.data.types import Batch
from sftron.models.llama_config import LlamaConfig


@dataclass(frozen=True, slots=True)
class StepFlops:
    """model: needed for the step's real tokens. hardware: computed, recomputation and unused tail included."""

    model: int
    hardware: int


def block_parameters(config: LlamaConfig) -> int:
    """Weights of one block's matrix products: q, k, v, o and the MLP's gate, up, down; no norms, no biases."""
    width_q, width_kv = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    return config.hidden_size * (2 * width_q + 2 * width_kv + 3 * config.intermediate_size)


def model_flops(config: LlamaConfig, *, num_tokens: int, num_labelled: int, document_lengths: Iterable[int]) -> int:
    """FLOPs of forward and backward that the model needs: the numerator of MFU.

        6 * P_blocks * T  +  6 * H * V * T_labelled  +  6 * L * Hq * D * sum(l * (l + 1))

    A product with a weight of P numbers takes P multiply-adds a token, 2 P FLOPs; the backward pass takes two of the
    size (gradients of the input and of the weight): 6 P. The head counts for labelled rows alone, the embeddings'
    lookup for nothing. Query i of a document sees i keys, l (l + 1) / 2 pairs in a document of l tokens; a pair takes
    2 D FLOPs for its score and 2 D for its value in each of Hq heads: 2 Hq D l (l + 1) forward, three times that with
    the backward pass. Norms, RoPE, softmax, activations and the optimizer are not counted (PaLM, arXiv 2204.02311,
    appendix B, but causal and by document).

    num_tokens: real ones. document_lengths: as attention sees them: one conversation each, or, without
        remove_cross_attention, all of a pack together. Taking the pack's length for documents of 512 tokens in 16 k
        would give 1.6 times the FLOPs (8B), and a run looks that much better than it is.
    """
    pairs_twice = sum(length * (length + 1) for length in document_lengths)
    blocks = config.num_hidden_layers * block_parameters(config) * num_tokens
    head = config.hidden_size * config.vocab_size * num_labelled
    attention = config.num_hidden_layers * config.num_attention_heads * config.head_dim * pairs_twice
    return 6 * (blocks + head + attention)


def hardware_flops(
    config: LlamaConfig,
    *,
    num_tokens: int,
    num_labelled: int,
    document_lengths: Sequence[int],
    activation_checkpointing: str,
) -> int:
    """FLOPs computed for these tokens, the unused tail among them: the numerator of HFU.

    `full` computes the blocks' forward pass once more; `selective` computes no matrix product again. The scores that
    fused attention makes again in its backward pass are the kernel's own affair and not counted.
    """
    flops = model_flops(config, num_tokens=num_tokens, num_labelled=num_labelled, document_lengths=document_lengths)
    if activation_checkpointing != "full":
        return flops
    blocks = model_flops(config, num_tokens=num_tokens, num_labelled=0, document_lengths=document_lengths)
    return flops + blocks // 3


def step_flops(config: LlamaConfig, batches: Sequence[Batch], activation_checkpointing: str) -> StepFlops:
    """Of the micro-batches of one step, on this rank."""
    return StepFlops(
        model=sum(
            model_flops(
                config,
                num_tokens=batch.pack.num_tokens,
                num_labelled=len(batch.labeled_rows),
                document_lengths=_lengths(batch.pack.cu_seqlens.clip(max=batch.pack.num_tokens)),
            )
            for batch in batches
        ),
        hardware=sum(
            hardware_flops(
                config,
                num_tokens=len(batch.input_ids),
                num_labelled=len(batch.labeled_rows),
                document_lengths=_lengths(batch.cu_seqlens.numpy()),
                activation_checkpointing=activation_checkpointing,
            )
            for batch in batches
        ),
    )


def _lengths(bounds: np.ndarray) -> list[int]:
    return np.diff(bounds).tolist()
