"""The size of the first update that an optimizer makes of its gradients, measured in the weights."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from sftron.report.token_record import ADAM, SGD

_KINDS = {
    ADAM: re.compile(r"(Paged|Fused|DeepSpeedCPU)?AdamW?(4bit|8bit|32bit|Fp8)?|Adamax"),
    SGD: re.compile(r"SGD(8bit|32bit)?"),
}
"""By the names of classes of torch, bitsandbytes, torchao, apex and DeepSpeed, also as a base of another class."""


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
        """Returns the update's norm, the same without weight decay, its kind, and how many weights have a gradient.

        Decay is left in both where it is no term of its own in the update, as in Adam.
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
        return {
            "norm": math.hypot(*norms), "without_decay": math.hypot(*others), "num_weights": self._num_weights,
            "kind": _kind_of(optimizer),
        }  # fmt: skip


def _kind_of(optimizer: Any) -> str:
    """Returns what a first update is made of: ADAM, SGD, or "" for an optimizer that neither class nor base names."""
    names = [each.__name__ for each in type(optimizer).__mro__]
    return next((kind for kind, pattern in _KINDS.items() if any(map(pattern.fullmatch, names))), "")


def _decays_apart(optimizer: Any, group: dict[str, Any]) -> bool:
    """Returns whether weight decay is a term of its own in the update: in AdamW and in SGD."""
    is_adamw = any("AdamW" in kind.__name__ for kind in type(optimizer).__mro__)
    return group.get("decoupled_weight_decay", is_adamw) or _kind_of(optimizer) == SGD


def _norm(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values.float(), dtype=torch.float64))
