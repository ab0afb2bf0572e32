"""The dry run: a training step on maximal batches, whose memory is measured."""

from __future__ import annotations

import torch

from sftron.models.loss import loss_function
from sftron.train.logs import console
from sftron.train.objective import loss_of
from sftron.train.optimizer import set_learning_rate
from sftron.train.run import Setup
from sftron.train.start.measured_memory import MeasuredPeak, peak_of_step, resident_memory
from sftron.train.start.preflight import require_finite
from sftron.train.start.run_data import maximal_batch
from sftron.train.start.setup import load_model, make_optimizer


def measure_step_memory(setup: Setup) -> MeasuredPeak:
    """Returns the peak memory of a training step on maximal batches. No weight changes.

    Raises ValueError if the weights give no finite loss.
    """
    ranks, baseline = setup.ranks, resident_memory()
    console.write("dry run    loading the weights")
    model = ranks.all_or_raise(lambda: load_model(setup))
    require_finite(model, ranks, f"model.path: {setup.model.folder}")
    optimizer, batch = make_optimizer(setup.config, model), maximal_batch(setup.config, ranks.context)
    set_learning_rate(optimizer, 0.0)
    tokens = f"{setup.data.dataset.token_budget:,} tokens"
    console.write(f"dry run    making a training step on two batches of {tokens}, to measure its memory")
    with peak_of_step(model, ranks.device, baseline) as peak:
        loss = loss_of(model, batch, loss_function(setup.model.loss))
        found = ranks.sum(loss.detach().clone())  # each rank may have a part of the batch
        if not torch.isfinite(found):
            problem = f"the loss of a batch of one token is {found.item()}"
            raise ValueError(f"{problem}: {setup.model.folder} holds broken weights")
        loss.backward()
        optimizer.step()
        if setup.config.tokens.batch_accumulation_per_replica == 1:
            model.zero_grad(set_to_none=True)
        # With the optimizer's state, which the first step has made.
        loss_of(model, batch, loss_function(setup.model.loss)).backward()
    return peak()
