"""AdamW and its learning rate."""

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
    """Fused AdamW of the parameters that require a gradient; matrices decay, norms and biases do not.

    The state has the parameters' type (fp32 masters).
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
    """What the peak learning rate is multiplied with at optimizer step `step` (0 is the first).

    Linear warm-up: 1/(warmup_steps+1) at step 0, 1 at step warmup_steps. Then, over decay_progress from 0 (end of the
    warm-up) to 1 (end of training): `cosine` and `linear` fall to min_ratio, `constant` stays, `wsd` (warm-up, stable,
    decay) stays until the last decay_share and then falls linearly.
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
