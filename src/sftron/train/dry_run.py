"""The dry run: a training step on the largest batches, whose memory is measured before a run starts."""

from __future__ import annotations

import tempfile
from pathlib import Path

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
from sftron.models.loss import loss_function
from sftron.train.build_model import load_run_model, make_optimizer
from sftron.train.logs import console
from sftron.train.measured_memory import MeasuredPeak, peak_of_step, resident_memory
from sftron.train.objective import loss_of
from sftron.train.optimizer import set_learning_rate
from sftron.train.run import Setup
from sftron.train.step import out_of_memory_explained, require_finite


def measure_step_memory(setup: Setup) -> MeasuredPeak:
    """Returns the peak memory of a training step on maximal batches. No weight changes.

    Raises ValueError if the weights give no finite loss, and OutOfMemory if the step does not fit.
    """
    # A streamed base in NF4 is stored there, as a run stores it in its directory.
    with tempfile.TemporaryDirectory() as folder:
        own = setup.ranks.gather({"folder": folder})[0]["folder"]
        return _measured(setup, Path(own))


def _measured(setup: Setup, folder: Path) -> MeasuredPeak:
    ranks, baseline = setup.ranks, resident_memory()
    console.write("dry run    loading the weights")
    model = ranks.all_or_raise(lambda: load_run_model(setup, folder))
    require_finite(model, ranks, f"model.path: {setup.model.folder}")
    optimizer, batch = make_optimizer(setup.config, model), maximal_batch(setup.config, ranks.context)
    set_learning_rate(optimizer, 0.0)
    tokens = f"{setup.data.dataset.token_budget:,} tokens"
    console.write(f"dry run    making a training step on two batches of {tokens}, to measure its memory")
    explained = out_of_memory_explained(setup.config, ranks.device, setup.data.dataset.token_budget, "a training step")
    with explained, peak_of_step(model, ranks.device, baseline) as peak:
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
