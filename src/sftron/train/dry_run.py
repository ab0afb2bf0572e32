"""All of a run but its training."""

from __future__ import annotations

import torch

from sftron.models.loss import loss_function
from sftron.train import console, feed
from sftron.train.build import build_model
from sftron.train.description import describe_run
from sftron.train.health import require_finite
from sftron.train.plan import RunPlan
from sftron.train.ranks import peak_memory_bytes
from sftron.train.step import loss_of


def dry_run(plan: RunPlan) -> None:
    """Everything but the optimizer step and the run directory: also the memory of one maximal batch.

    Raises ValueError where the weights give no finite loss.
    """
    describe_run(plan, samples=None)
    model = plan.ranks.together(lambda: build_model(plan))
    require_finite(model, plan.ranks, f"model.path: {plan.model_folder}")
    loss = loss_of(model, feed.maximal_batch(plan.config), loss_function(plan.loss))
    if not torch.isfinite(loss):
        raise ValueError(f"the loss of a batch of one token is {loss.item()}: {plan.model_folder} holds broken weights")
    loss.backward()
    gigabytes = peak_memory_bytes(plan.ranks.device) / 1e9
    masters = 2 * 4 * sum(parameter.numel() for parameter in model.parameters()) / 1e9 / plan.ranks.dp_world_size
    console.say(
        f"memory     {gigabytes:.2f} GB at most for weights, gradients and one maximal batch of "
        f"{plan.dataset.token_budget} tokens; AdamW adds {masters:.2f} GB"
    )
    console.say("dry run    all checks passed; nothing was trained or written")
