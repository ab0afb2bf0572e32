"""The peak memory of a training step as it is predicted from the architecture, in bytes of tensors.

docs/lora.md has the formula, and measured_memory.py measures the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sftron.checkpoint.adapter import model_projections
from sftron.kernels.cross_entropy import ELEMENTS_AT_ONCE
from sftron.models.adapters import LoraSpec, add_adapters
from sftron.models.architecture import LlamaConfig
from sftron.models.delta import bytes_for_backward
from sftron.models.experts import Experts
from sftron.models.layers import LayerNorm, Linear
from sftron.models.llama import LlamaBlock, LlamaForSFT
from sftron.models.loss import rows_per_chunk
from sftron.models.quantization import NF4, store_frozen_in
from sftron.train.optimizer import state_bytes
from sftron.train.run import Setup
from sftron.train.start.lora import frozen_dtype
from sftron.train.start.run_data import longest_document

DEFAULT_RANK = 16
MEMORY_PARTS = ("weights", "gradients", "optimizer", "activations")
GROWTH_OF_TENSORS = 1.13
"""The growth of a process on a CPU for each byte of tensors; the C library keeps freed memory (SmolLM2)."""
RESERVE_OF = {"cpu": 1.5, "cuda": 1.15}
"""The memory that a device should have for each byte of tensors, for its allocator and, on a CPU, the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """The bytes of tensors in a training step of one rank."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    """What the blocks keep for the backward pass of one micro-batch."""
    peak: int


def make_unloaded(
    config: LlamaConfig, spec: LoraSpec | None, frozen_dtype: torch.dtype, compute_dtype: torch.dtype
) -> LlamaForSFT:
    """Returns a model on the meta device, with adapters and the types of a run.

    Raises:
        ValueError: The matrices cannot be stored in frozen_dtype.
    """
    with torch.device("meta"):
        model = LlamaForSFT(config, compute_dtype=compute_dtype)
    if spec is not None:
        add_adapters(model, config, spec)
        store_frozen_in(model, frozen_dtype, compute_dtype)
    return model


def default_spec(config: LlamaConfig) -> LoraSpec:
    """Returns adapters of rank 16 on all linear layers of the blocks."""
    names = model_projections(config)
    return LoraSpec(ranks=dict.fromkeys(names, DEFAULT_RANK), alphas=dict.fromkeys(names, 2.0 * DEFAULT_RANK))


def predictions_of(setup: Setup) -> tuple[str, dict[str, StepMemory | str]]:
    """Returns the run's own way to train, and for each way the prediction or the reason why it is impossible."""
    config, model, ranks = setup.config, setup.model, setup.ranks
    spec = default_spec(model.architecture) if model.adapters is None else model.adapters.start.spec
    frozen = frozen_dtype(config)
    dense = model.compute_dtype if frozen == NF4 else frozen
    found: dict[str, StepMemory | str] = {}
    own = "full" if model.adapters is None else "QLoRA (nf4)" if frozen == NF4 else "LoRA"
    for name, adapters, dtype in (("full", None, dense), ("LoRA", spec, dense), ("QLoRA (nf4)", spec, NF4)):
        try:
            unloaded = make_unloaded(model.architecture, adapters, dtype, model.compute_dtype)
        except ValueError as error:
            found[name] = str(error)
            continue
        found[name] = predict(
            unloaded,
            num_tokens=setup.data.dataset.token_budget,
            longest_document=longest_document(config),
            activation_checkpointing=config.model.activation_checkpointing,
            optimizer_state=config.optimizer.state,
            accumulates=config.tokens.batch_accumulation_per_replica > 1,
            num_shards=1 if ranks.mesh is None else ranks.mesh.shape[-1],
            on_gpu=ranks.device.type == "cuda",
        )
    return own, found


def predict(
    model: LlamaForSFT,
    *,
    num_tokens: int,
    longest_document: int,
    activation_checkpointing: str,
    optimizer_state: str,
    accumulates: bool,
    num_shards: int = 1,
    on_gpu: bool = False,
) -> StepMemory:
    """Returns the memory of a training step, other than the first, on a micro-batch without padding.

    Args:
        model: A model from `make_unloaded`.
        num_tokens: The tokens of a micro-batch, each with a label.
        accumulates: Whether a step has several micro-batches, so that gradients remain while the next one runs.
        num_shards: The number of ranks that share a copy of the model.
    """
    config, size = model.config, model.compute_dtype.itemsize
    mode, trained = activation_checkpointing, [each for each in model.parameters() if each.requires_grad]
    table = 4 * max(num_tokens * config.head_dim, model.rope_tables.num_elements)
    weights = sum(each.nbytes for each in model.parameters()) // num_shards
    gradients = sum(4 * each.numel() for each in trained) // num_shards
    optimizer = sum(state_bytes(each, optimizer_state) for each in trained) // num_shards
    held = weights + optimizer + table + (_gathered_at_once(model) if num_shards > 1 else 0)

    blocks: Sequence[LlamaBlock] = list(model.model.layers)  # pyright: ignore[reportAssignmentType]
    layers = [_Block(block, config, num_tokens, longest_document, size, on_gpu) for block in blocks]
    hidden = num_tokens * config.hidden_size * size
    kept_by = [hidden if mode == "full" else each.kept(mode) for each in layers]
    kept = sum(kept_by)
    # The recomputed block of "full" is kept in addition.
    working = [each.backward(mode) + (each.kept("none") if mode == "full" else 0) for each in layers]
    # Gradients of earlier micro-batches; to them, those of this one are added.
    earlier = gradients if accumulates else 0
    in_blocks, still_kept, made = 0, kept, 0
    for block, kept_here, used in reversed([*zip(layers, kept_by, working, strict=True)]):
        in_blocks = max(in_blocks, still_kept + made + used + block.expert_gradients)
        still_kept -= kept_here
        made += 0 if accumulates else block.gradients // num_shards

    head_gradient = 4 * model.head_weight.numel() if model.head_weight.requires_grad else 0
    # The input and output of the final norm.
    ends = 2 * hidden
    in_loss = held + earlier + kept + ends + hidden + head_gradient + _of_loss(model, num_tokens, on_gpu)
    # The gradient of the loss is scaled in fp32.
    scaled = hidden + 4 * num_tokens * config.hidden_size
    after_loss = held + earlier + ends + head_gradient + max(scaled + kept, in_blocks)
    # The gradients of tied weights by head and embeddings are both there before they are added.
    embeddings = model.model.embed_tokens.weight
    added = 4 * embeddings.numel() if embeddings.requires_grad else 0
    is_added = config.tie_word_embeddings or accumulates
    at_end = held + gradients + hidden + (added if is_added else 0)
    first_block = held + gradients - (0 if config.tie_word_embeddings else added) + hidden + working[0]
    update = held + gradients
    if optimizer_state == "8bit" and not on_gpu:
        update += max((12 * each.numel() for each in trained), default=0) // num_shards
    peak = max(in_loss, after_loss, at_end, first_block, update)
    return StepMemory(weights=weights, gradients=gradients, optimizer=optimizer, activations=kept, peak=peak)


def _gathered_at_once(model: LlamaForSFT) -> int:
    """Returns the bytes of the weights that FSDP gathers: two blocks, and all that is outside of blocks."""

    def gathered(module: nn.Module) -> int:
        size = model.compute_dtype.itemsize
        return sum(each.nbytes if each.dtype == NF4 else each.numel() * size for each in module.parameters())

    blocks = [gathered(block) for block in model.model.layers]
    return gathered(model) - sum(blocks) + 2 * max(blocks)


def _of_loss(model: LlamaForSFT, num_tokens: int, on_gpu: bool) -> int:
    """Returns the bytes of a chunk of logits, of what is computed from it, and of the cast head."""
    head, size = model.head_weight, model.compute_dtype.itemsize
    chunk = min(rows_per_chunk(len(head), size), num_tokens) * len(head) * size
    # A bounded head keeps the derivatives of a chunk, too.
    bounds = chunk if model.config.logit_softcap is not None else 0
    cast = 0 if head.dtype == model.compute_dtype else head.numel() * size
    in_fp32 = 0 if on_gpu else 4 * min(ELEMENTS_AT_ONCE, chunk // size) * (1 if size == 4 else 2)
    return chunk + bounds + in_fp32 + cast


class _Block:
    """The activations of one block. See the table in models/linear.py for what its layers save."""

    def __init__(
        self, block: LlamaBlock, config: LlamaConfig, num_tokens: int, longest: int, size: int, on_gpu: bool
    ) -> None:
        self._size, self._num_tokens, self._config = size, num_tokens, config
        self._linears: dict[str, Linear] = {
            name.rpartition(".")[2]: module for name, module in block.named_modules() if isinstance(module, Linear)
        }
        self._up = "gate_up_proj" if "gate_up_proj" in self._linears else "up_proj"
        self._norms_before, self._norms_after = block.num_norms
        self._has_layer_norms = any(isinstance(module, LayerNorm) for module in block.children())
        self._is_delta = "in_proj" in self._linears
        self._rule_bytes = 0
        if self._is_delta and config.delta is not None:
            dtype = torch.float32 if size == 4 else torch.bfloat16
            self._rule_bytes = bytes_for_backward(config.delta, num_tokens, longest, dtype)
        self.gradients = sum(4 * each.numel() for each in block.parameters() if each.requires_grad)
        self._experts = next((module for module in block.modules() if isinstance(module, Experts)), None)
        self._has_normed_heads = any(name.endswith("q_norm") for name, _ in block.named_modules())
        # On a CPU, attention computes short documents in fp32, and keeps its output before the documents are joined.
        self._attention_size = 4 if not on_gpu and longest <= 256 else size
        self._is_joined = not on_gpu

    def _needs_input(self, name: str) -> bool:
        linear = self._linears[name]
        return linear.weight.requires_grad or len(linear.adapters) > 0

    def kept(self, mode: str) -> int:
        """Returns the bytes that the block keeps for its backward pass, with "none" or "selective"."""
        total = self._num_tokens * self._per_token(mode) + (self._rule_bytes if mode == "none" else 0)
        for linear in self._linears.values():
            adapters: list[Any] = list(linear.adapters.values())
            total += self._num_tokens * self._size * sum(len(each.lora_A) for each in adapters)
            if any(each.lora_magnitude_vector is not None for each in adapters):
                total += self._num_tokens * self._size * linear.out_features
            if mode == "none" and linear.weight.requires_grad and linear.weight.dtype.itemsize != self._size:
                total += self._size * linear.weight.numel()
        return total

    def _per_token(self, mode: str) -> int:
        config, size = self._config, self._size
        hidden, inner = config.hidden_size, config.intermediate_size
        num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        width_o, width_qkv = num_heads * config.head_dim, (num_heads + 2 * num_kv_heads) * config.head_dim
        before, after = self._norms_before, self._norms_after
        # Of experts, what the shared one keeps is that of a network without experts.
        mixture = config.mixture if self._experts is not None else None
        inner = inner if mixture is None else mixture.shared_size or 0
        up = self._linears[self._up].out_features if inner else 0
        # What norms read, or linear layers without one before them; LayerNorm reads an fp32 copy.
        read = (2 - before + after) * size + before * (4 if self._has_layer_norms else size)
        per_token = read * hidden + size * up + self._attention_size * (width_qkv + width_o)
        # The statistics of the norms, and the log-sum-exp of each head.
        per_token += 4 * ((before + after) * (2 if self._has_layer_norms else 1) + num_heads)
        if mixture is not None:
            # Gate and up of the experts, their normalized input, and the output of the shared expert; of the router,
            # the probabilities, and the scores, indices and order of the slots, with what they are divided by.
            slots = mixture.num_selected
            per_token += size * (2 * slots * mixture.intermediate_size + hidden * (2 if inner else 1))
            per_token += 4 * mixture.num_experts + (4 + 4 + 8 + 8 + 8) * slots
        if config.output_gate and not self._is_delta:
            per_token += self._attention_size * width_o
        if self._has_normed_heads:
            per_token += size * width_qkv + 4 * (num_heads + num_kv_heads)
        if config.output_gate:
            # The gate's product.
            per_token += size * 2 * width_o
        if self._is_delta:
            assert config.delta is not None
            width_o = config.delta.widths[2]
            # The projections, the outputs of the convolution and of the rule, and the halves of the gated product.
            widths = sum(config.delta.rows) + sum(config.delta.widths) + 3 * width_o
            per_token = size * (2 * hidden + 2 * inner + widths)
        elif self._needs_input("o_proj") and self._is_joined:
            per_token += size * width_o
        if mode == "none":
            per_token += size * inner * (inner > 0 and self._needs_input("down_proj"))
            if self._is_delta:
                per_token += size * width_o * self._needs_input("out_proj")
        if before and mode == "none":
            first = "in_proj" if self._is_delta else "qkv_proj"
            per_token += size * hidden * (self._needs_input(first) + (inner > 0 and self._needs_input(self._up)))
        return per_token

    def backward(self, mode: str) -> int:
        """Returns the largest bytes at a time in the backward pass of the block, besides what it keeps.

        They are those in the backward pass of the second half, for which the gradients of gate and up, of their product
        and of the output are there, and the gradient of a matrix; or in that of gate_up_proj, when the former are
        gone.
        """
        hidden, inner, mixture = self._config.hidden_size, self._config.intermediate_size, self._config.mixture
        if self._experts is not None and mixture is not None:
            # By slot: when SwiGLU has its gradient, and when the outputs' gradient of a token is summed.
            width = max(hidden + 5 * mixture.intermediate_size, 2 * (hidden + mixture.intermediate_size))
            return self._num_tokens * self._size * (mixture.num_selected * width + 2 * hidden)
        up = self._linears[self._up].out_features
        again = inner if mode == "selective" and self._needs_input("down_proj") else 0
        down = self._num_tokens * self._size * (hidden + up + inner + again) + self._matrix("down_proj")
        freed = up + (mode != "selective" and self._needs_input("down_proj")) * inner
        gate_up = self._num_tokens * (self._size * (3 * hidden + up - freed) + 8 * hidden)
        # The gradients of the delta rule are there with what it keeps, which "selective" computes again.
        rule = self._rule_bytes // 2 + (self._rule_bytes if mode == "selective" else 0)
        return max(down, gate_up + self._matrix(self._up), rule)

    @property
    def expert_gradients(self) -> int:
        """The bytes of the gradients of the experts, which are made at once."""
        experts = self._experts
        return 0 if experts is None else sum(4 * each.numel() for each in experts.parameters() if each.requires_grad)

    def _matrix(self, name: str) -> int:
        """Returns the bytes of a matrix that exist in its backward pass alone: its gradient and its cast copy."""
        linear, size = self._linears[name], self._size
        num_values = linear.in_features * linear.out_features
        cast = 0 if linear.weight.dtype.itemsize == size else num_values * size
        return cast + (4 * num_values if linear.weight.requires_grad else 0)
