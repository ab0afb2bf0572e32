"""The memory of a step: what a dry run measures on the largest batches, and what a step that does not fit reports."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from sftron.config import Config
from sftron.data.loader import collate
from sftron.data.packing import lay_out
from sftron.data.types import (
    IGNORE_INDEX,
    WHOLE_ROW,
    Batch,
    ContextRank,
    ConversationKey,
    LabeledConversation,
    Role,
)
from sftron.kernels.device import device_name, gpu_functions, is_gpu
from sftron.models.loss import loss_function
from sftron.train.build_model import load_run_model, make_optimizer
from sftron.train.logs import console
from sftron.train.measured_memory import MeasuredPeak, peak_of_step, resident_memory, total_memory
from sftron.train.objective import loss_of
from sftron.train.optimizer import set_learning_rate
from sftron.train.run import Setup
from sftron.train.step import require_finite


def measure_step_memory(setup: Setup) -> MeasuredPeak:
    """Returns the peak memory of a training step on maximal batches. No weight changes.

    Raises ValueError if the weights give no finite loss.
    """
    ranks, baseline = setup.ranks, resident_memory()
    console.write("dry run    loading the weights")
    model = ranks.all_or_raise(lambda: load_run_model(setup))
    require_finite(model, ranks, f"model.path: {setup.model.folder}")
    optimizer, batch = make_optimizer(setup.config, model), maximal_batch(setup.config, ranks.context)
    set_learning_rate(optimizer, 0.0)
    tokens = f"{setup.data.dataset.token_budget:,} tokens"
    console.write(f"dry run    making a training step on two batches of {tokens}, to measure its memory")
    doing = out_of_memory_explained(setup, "a training step")
    with doing, peak_of_step(model, ranks.device, baseline) as peak:
        loss = loss_of(model, batch, loss_function(setup.model.loss))
        whole_loss = ranks.sum(loss.detach().clone())  # each rank may have a part of the batch
        if not torch.isfinite(whole_loss):
            problem = f"the loss of a batch of one token is {whole_loss.item()}"
            raise ValueError(f"{problem}: {setup.model.folder} holds broken weights")
        loss.backward()
        optimizer.step()
        if setup.config.tokens.batch_accumulation_per_replica == 1:
            model.zero_grad(set_to_none=True)
        # With the optimizer's state, which the first step has made.
        loss_of(model, batch, loss_function(setup.model.loss)).backward()
    return peak()


def maximal_batch(config: Config, context: ContextRank = WHOLE_ROW) -> Batch:
    """Returns the micro-batch that needs the most memory, or a rank's part of it: no padding, and a label wherever one
    can be."""
    length, size = config.tokens.sequence_length, config.tokens.micro_batch_size
    is_labeled = np.arange(length) < length - 1
    conversation = LabeledConversation(
        input_ids=np.zeros(length, dtype=np.int32),
        labels=np.where(is_labeled, 0, IGNORE_INDEX).astype(np.int32),
        loss_weights=is_labeled.astype(np.float32),
        role_ids=np.full(length, Role.ASSISTANT, dtype=np.uint8),
        key=ConversationKey(0, 0),
    )
    isolated = config.data.remove_cross_attention
    pack = lay_out([conversation] * size, token_budget=length * size, remove_cross_attention=isolated, pad_id=0)
    return collate(pack, keep_tail=True, context=context)


# --- Out of memory ---


class OutOfMemory(RuntimeError):  # noqa: N818  (Out of memory is the error)
    """The GPU has too little memory for a step. The message states the memory, and what to change first."""


@contextmanager
def out_of_memory_explained(setup: Setup, doing: str) -> Iterator[None]:
    """Raises OutOfMemory in place of torch.OutOfMemoryError.

    Args:
        doing: What the body of the context does, such as "step 3".
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        remedies = "; ".join(f"({number}) {each}" for number, each in enumerate(_remedies(setup.config), start=1))
        raise OutOfMemory(
            f"{doing} on packs of {setup.data.dataset.token_budget:,} tokens does not fit"
            f"{_state_of(setup.ranks.device)}. Change, in this order: {remedies}. "
            "`sftron train --config FILE --dry-run` predicts and measures the peak"
        ) from error


def _state_of(device: torch.device) -> str:
    if not is_gpu(device):
        return " in memory"
    functions = gpu_functions(device)
    allocated, reserved = functions.max_memory_allocated(device) / 1e9, functions.max_memory_reserved(device) / 1e9
    return (
        f" on {device_name(device)}: at most {allocated:.1f} GB were allocated and {reserved:.1f} GB reserved, of "
        f"{total_memory(device) / 1e9:.1f} GB"
    )


def _remedies(config: Config) -> list[str]:
    """Returns what takes less memory and is not in use yet, in the order of docs/troubleshooting.md."""
    mode, tokens = config.model.activation_checkpointing, config.tokens
    modes = {"none": "selective, then full", "selective": "full"}
    found = [f"model.activation_checkpointing: {modes[mode]} (now {mode})"] if mode in modes else []
    if tokens.micro_batch_size > 1:
        found.append(
            f"a lower tokens.micro_batch_size (now {tokens.micro_batch_size}) with more "
            f"tokens.batch_accumulation_per_replica (now {tokens.batch_accumulation_per_replica})"
        )
    return [
        *found,
        "more ranks (parallelism.dp_shard)",
        f"ranks that share packs (parallelism.context, now {config.parallelism.context})",
        f"a lower tokens.sequence_length (now {tokens.sequence_length})",
    ]
