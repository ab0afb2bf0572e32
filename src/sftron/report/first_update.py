"""The size of the first update that an optimizer makes of its gradients, measured in the weights."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class FirstUpdate:
    """Copies of weights that have a gradient, before an optimizer updates them."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        used = [each for each in parameters if each.grad is not None]
        self._before = {each: each.detach().clone() for each in used}
        self._num_weights = sum(int(each.grad.count_nonzero()) for each in used if each.grad is not None)

    def restore(self) -> None:
        with torch.no_grad():
            for each, before in self._before.items():
                each.copy_(before)

    def measure(self, optimizer: Any) -> dict[str, Any]:
        """Returns the norm of the update, the same without weight decay, and how many weights have a gradient.

        Decay is left in both if it is part of the gradient that moments are made of, as in Adam.
        """
        norms, others = list[float](), list[float]()
        with torch.no_grad():
            for group in optimizer.param_groups:
                factor = group["lr"] * (group.get("weight_decay") or 0.0) if _decays_apart(optimizer, group) else 0.0
                for each in group["params"]:
                    if (before := self._before.get(each)) is not None:
                        change = each.detach() - before
                        norms.append(_norm(change))
                        others.append(_norm(change + factor * before) if factor else norms[-1])
        return {"norm": math.hypot(*norms), "without_decay": math.hypot(*others), "num_weights": self._num_weights}


def _decays_apart(optimizer: Any, group: dict[str, Any]) -> bool:
    """Returns whether weight decay is a term of its own in the update: in AdamW, and without moments."""
    is_adamw = any("AdamW" in kind.__name__ for kind in type(optimizer).__mro__)
    return group.get("decoupled_weight_decay", is_adamw) or "betas" not in group


def _norm(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values.float(), dtype=torch.float64))
