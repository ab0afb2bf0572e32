"""The ways to train that `tools/bench_step.py` times: transformers' and sftron's, each with and without adapters."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from sftron.data.loader import collate
from sftron.data.packing import PoolPacking, lay_out
from sftron.data.types import IGNORE_INDEX, ConversationKey, LabeledConversation
from sftron.models.adapters import ALL_LINEAR, LoraSpec, add_adapters, initial_value, match_targets, projections_of
from sftron.models.architecture import LlamaConfig
from sftron.models.fusion import fuse_state_dict
from sftron.models.llama import LlamaForSFT, attention_of_layers
from sftron.train.flops import TrainedMatrices
from sftron.train.optimizer import make_adamw
from sftron.train.step import train_step

POOL_SIZE = 256
RANK, ALPHA = 16, 32
PEFT, FULL = "peft, flattened", "sftron, minibatch"
"""The ways that the others are compared with."""
LIGER, FA2_LIGER = "transformers, padded, compiled, Liger", "transformers, flattened, FA2, Liger"
FA2, PEFT_FA2 = "transformers, flattened, FA2", "peft, flattened, FA2"
FLASH_ATTENTION = next((name for name in ("flash_attn", "kernels") if find_spec(name)), "flash_attn")
"""Where transformers has flash-attention 2 from: the package, or else the Hub's kernel, which `kernels` downloads."""
NEEDS = {
    PEFT: ("peft",),
    LIGER: ("liger_kernel",),
    FA2: (FLASH_ATTENTION,),
    PEFT_FA2: ("peft", FLASH_ATTENTION),
    FA2_LIGER: ("liger_kernel", FLASH_ATTENTION),
}
"""The modules that ways need besides transformers. Without flash-attention, flattened rows take a T x T mask."""


def rows_of_file(path: Path, tokenizer_folder: Path) -> list[LabeledConversation]:
    from sftron import ChatTokenizer, PackedDataset

    tokenizer = ChatTokenizer.from_pretrained(str(tokenizer_folder))
    preparation = PackedDataset.from_path(path, tokenizer, sequence_length=4096).preparation
    rows = preparation.read_many(list(preparation.all_keys()))
    return [row for row in rows if isinstance(row, LabeledConversation)]


def random_rows(lengths: Sequence[int], vocab_size: int, *, trained_share: float = 0.5) -> list[LabeledConversation]:
    """Returns conversations of random ids, of which the last `trained_share` is trained."""
    chance, rows = np.random.default_rng(0), []
    for length in lengths:
        ids = chance.integers(vocab_size, size=length).astype(np.int32)
        labels = np.append(ids[1:], np.int32(IGNORE_INDEX))
        labels[: max(0, int(length * (1 - trained_share)) - 1)] = IGNORE_INDEX
        weights = (labels != IGNORE_INDEX).astype(np.float32)
        rows.append(LabeledConversation(ids, labels, weights, np.zeros(length, np.uint8), ConversationKey(0, 0)))
    return rows


@dataclass(frozen=True, slots=True)
class StepBatch:
    inputs: Any
    rows: list[LabeledConversation]
    num_positions: int


@dataclass(frozen=True, slots=True)
class Way:
    """One implementation of training.

    `batches` turns rows into the batches for `step`. `token_losses` returns fp32 losses in the order of the rows.
    """

    name: str
    batches: Callable[[Iterator[LabeledConversation]], Iterator[StepBatch]]
    step: Callable[[StepBatch], object]
    token_losses: Callable[[list[LabeledConversation]], Tensor]
    trained: TrainedMatrices


def make_reference_model(options: argparse.Namespace, attention: str = "sdpa") -> Any:
    """Returns transformers' LlamaForCausalLM with fp32 weights: those of a folder, or random ones."""
    import transformers

    with torch.device(options.device):
        if options.model:
            load = transformers.LlamaForCausalLM.from_pretrained
            return load(options.model, dtype=torch.float32, attn_implementation=attention).train()
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(**options.hf_config, attn_implementation=attention)
        return transformers.AutoModelForCausalLM.from_config(config).train()


def make_native_model(options: argparse.Namespace, *, lora: bool) -> LlamaForSFT:
    """Returns LlamaForSFT with the weights of the reference model."""
    reference = make_reference_model(options)
    config = LlamaConfig.from_hf(reference.config.to_dict())
    attention = attention_of_layers("auto", config, options.device, options.dtype)
    with options.device:
        max_positions = max(options.budget, config.max_position_embeddings)
        model = LlamaForSFT(config, attention, options.dtype, max_positions, options.checkpointing)
    own, weights = dict(model.named_parameters()), reference.state_dict()
    with torch.no_grad():
        for name, tensor in fuse_state_dict(own, config, weights.__getitem__):
            own[name].copy_(tensor)
    return with_native_adapters(model, options.dtype) if lora else model


@torch.no_grad()
def with_native_adapters(model: LlamaForSFT, dtype: torch.dtype) -> LlamaForSFT:
    names = match_targets(ALL_LINEAR, list(projections_of(model, model.config)))
    add_adapters(model, model.config, LoraSpec(ranks=dict.fromkeys(names, RANK), alphas=dict.fromkeys(names, ALPHA)))
    for name, each in model.named_parameters():
        if each.requires_grad:
            each.copy_(initial_value(name, each.shape, seed=0, init="default", row_norms=lambda _: Tensor()))
        elif each.ndim >= 2:
            each.data = each.data.to(dtype)
    return model


def trained_matrices(model: nn.Module, *, lora: bool) -> TrainedMatrices:
    if not lora:
        return TrainedMatrices()
    num_trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    return TrainedMatrices(blocks=False, head=False, adapter_parameters=num_trained)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    parameters = ((name, each) for name, each in model.named_parameters() if each.requires_grad)
    return make_adamw(parameters, learning_rate=1e-5, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)


def collated(rows: list[LabeledConversation], *, flat: bool) -> dict[str, Tensor]:
    """Returns the inputs of transformers' model: one row without padding if `flat`, else padded rows."""
    from transformers import DataCollatorWithFlattening

    # Labels are shifted back, because transformers shifts them itself.
    features = [
        {"input_ids": row.input_ids.tolist(), "labels": [IGNORE_INDEX, *row.labels[:-1].tolist()]} for row in rows
    ]
    if flat:
        return DataCollatorWithFlattening()(features)  # pyright: ignore[reportReturnType]
    inputs = {
        key: pad_sequence([torch.tensor(each[key]) for each in features], batch_first=True, padding_value=filler)
        for key, filler in (("input_ids", 0), ("labels", IGNORE_INDEX))
    }
    lengths, longest = torch.tensor([len(row) for row in rows]), max(map(len, rows))
    if int(lengths.min()) < longest:
        inputs["attention_mask"] = (torch.arange(longest) < lengths[:, None]).long()
    return inputs


def transformers_way(
    name: str,
    options: argparse.Namespace,
    *,
    flat: bool,
    lora: bool = False,
    compiled: bool = False,
    liger: bool = False,
    attention: str = "sdpa",
) -> Way:
    model = make_reference_model(options, attention)
    if lora:
        import peft

        adapters = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=ALL_LINEAR)
        model: Any = peft.get_peft_model(model.to(options.dtype), adapters)
    if liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama  # pyright: ignore[reportMissingImports]

        apply_liger_kernel_to_llama(model=model)
    optimizer = make_optimizer(model)
    forward = torch.compile(model, dynamic=False) if compiled else model

    def call(function: Callable[..., Any], inputs: dict[str, Tensor]) -> Any:
        moved = {key: tensor.to(options.device) for key, tensor in inputs.items()}
        with torch.autocast(options.device.type, torch.bfloat16, enabled=options.dtype != torch.float32):
            # With the default use_cache=True, flattened documents are not isolated.
            return function(**moved, use_cache=False)

    def batches(rows: Iterator[LabeledConversation]) -> Iterator[StepBatch]:
        while chunk := list(itertools.islice(rows, options.per_step)):
            inputs = collated(chunk, flat=flat)
            yield StepBatch(inputs, chunk, inputs["input_ids"].numel())

    def step(batch: StepBatch) -> None:
        call(forward, batch.inputs).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def token_losses(rows: list[LabeledConversation]) -> Tensor:
        inputs = collated(rows, flat=flat)
        labels = inputs.pop("labels")[:, 1:].to(options.device)
        logits, is_labeled = call(model, inputs).logits[:, :-1], labels != IGNORE_INDEX
        return F.cross_entropy(logits[is_labeled].float(), labels[is_labeled], reduction="none")

    return Way(name, batches, step, token_losses, trained_matrices(model, lora=lora))


def native_way(
    name: str, options: argparse.Namespace, *, pooled: bool, lora: bool = False, compiled: bool = False
) -> Way:
    model = make_native_model(options, lora=lora)
    optimizer = make_optimizer(model)
    if compiled:
        for block in model.model.layers:
            block.compile()

    def pack(rows: list[LabeledConversation], budget: int) -> Any:
        packed = lay_out(rows, token_budget=budget, remove_cross_attention=True, pad_id=0)
        return collate(packed, keep_tail=options.device.type == "cuda")

    def chosen(rows: Iterator[LabeledConversation]) -> Iterator[tuple[list[LabeledConversation], int]]:
        """Yields the rows of each pack, and its budget."""
        while not pooled:
            chunk = list(itertools.islice(rows, options.per_step))
            yield chunk, sum(map(len, chunk))
        packing, pending = PoolPacking(POOL_SIZE), list[LabeledConversation]()
        while True:
            pending += itertools.islice(rows, POOL_SIZE - len(pending))
            indices = set(packing.choose([len(row) for row in pending], options.budget))
            yield [row for index, row in enumerate(pending) if index in indices], options.budget
            pending = [row for index, row in enumerate(pending) if index not in indices]

    def batches(rows: Iterator[LabeledConversation]) -> Iterator[StepBatch]:
        for chunk, budget in chosen(rows):
            batch = pack(chunk, budget)
            yield StepBatch(batch, chunk, len(batch.input_ids))

    def step(batch: StepBatch) -> None:
        train_step(model, optimizer, [batch.inputs], max_grad_norm=1.0)

    @torch.no_grad()
    def token_losses(rows: list[LabeledConversation]) -> Tensor:
        batch, device = pack(rows, sum(map(len, rows))), options.device
        ids, positions = batch.input_ids.to(device), batch.position_ids.to(device)
        hidden = model(ids, positions, batch.cu_seqlens, batch.max_seqlen)
        logits = model.head.logits(hidden[batch.label_positions.to(device)]).float()
        return F.cross_entropy(logits, batch.labels.to(device), reduction="none")

    return Way(name, batches, step, token_losses, trained_matrices(model, lora=lora))


def ways_of(options: argparse.Namespace) -> dict[str, Callable[[], Way]]:
    """Returns the functions that make the ways, by name; those of packages that are not installed are left out."""
    ways = {
        "transformers, padded": partial(transformers_way, flat=False),
        "transformers, flattened": partial(transformers_way, flat=True),
        FULL: partial(native_way, pooled=False),
        "sftron, pool": partial(native_way, pooled=True),
        PEFT: partial(transformers_way, flat=True, lora=True),
        "sftron, LoRA": partial(native_way, pooled=False, lora=True),
    }
    if options.gpu:
        ways["transformers, padded, compiled"] = partial(transformers_way, flat=False, compiled=True)
        ways["sftron, pool, compiled"] = partial(native_way, pooled=True, compiled=True)
        ways[LIGER] = partial(transformers_way, flat=False, compiled=True, liger=True)
        with_fa2 = partial(transformers_way, flat=True, attention="flash_attention_2")
        ways |= {FA2: with_fa2, FA2_LIGER: partial(with_fa2, liger=True), PEFT_FA2: partial(with_fa2, lora=True)}
    missing = {name for name, modules in NEEDS.items() if any(find_spec(module) is None for module in modules)}
    return {name: partial(make, name, options) for name, make in ways.items() if name not in missing}
