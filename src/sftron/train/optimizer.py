"""AdamW and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn


def make_adamw(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> torch.optim.AdamW:
    """Returns a fused AdamW for the parameters that require a gradient.

    Weight decay applies to matrices, not to norms and biases. The optimizer state has the dtype of the parameters
    (fp32).
    """
    parameters = [parameter for _, parameter in named_parameters if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in parameters if parameter.ndim >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=learning_rate, betas=betas, eps=eps, fused=True
    )


def learning_rate_factor(
    schedule: str, *, step: int, warmup_steps: int, decay_progress: float, min_ratio: float, decay_share: float
) -> float:
    """Returns the factor that multiplies the peak learning rate at optimizer step `step` (the first is 0).

    The warm-up is linear: 1/(warmup_steps+1) at step 0, 1 at step warmup_steps. After it, decay_progress goes from 0
    (end of the warm-up) to 1 (end of training). `cosine` and `linear` fall to min_ratio, and `constant` stays at 1.
    `wsd` (warm-up, stable, decay) stays at 1 until the last decay_share of the way, then falls linearly to min_ratio.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    progress = min(1.0, max(0.0, decay_progress))
    if schedule == "constant":
        return 1.0
    if schedule == "cosine":
        remaining = 0.5 * (1 + math.cos(math.pi * progress))
    elif schedule == "linear":
        remaining = 1 - progress
    else:
        assert schedule == "wsd", schedule
        remaining = min(1.0, (1 - progress) / decay_share)
    return min_ratio + (1 - min_ratio) * remaining


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
