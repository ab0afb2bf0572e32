"""How far the gradients of a trainer's step are from a reference."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sftcheck.tolerances import SMALL_TENSOR
from sftron.checks.report import NotMeasuredError


@dataclass(frozen=True, slots=True)
class GradientDifference:
    """The gradients that a trainer's step leaves, against the reference's."""

    apart: float
    """The norm of the difference, divided by the norm of the reference."""
    factor: float
    """The factor by which the reference is nearest."""
    apart_from_factor: float
    """`apart`, against the reference times the factor."""
    worst: str
    worst_apart: float
    worst_factor: float

    def is_right(self, tolerance: float) -> bool:
        return self.worst_apart <= tolerance


def difference_of(
    gradients: Mapping[str, Tensor | None], expected: Mapping[str, Tensor], *, least: float = SMALL_TENSOR.in_float32
) -> GradientDifference:
    """Compares gradients, tensor by tensor.

    Args:
        least: A tensor whose share of the whole norm is smaller is compared with this share: it may be rounding.

    Raises NotMeasuredError if the reference has no gradient.
    """
    total = math.sqrt(sum(float(each.double().square().sum()) for each in expected.values()))
    if not total:
        raise NotMeasuredError("the reference has no gradient")
    products, squares, worst = 0.0, list[tuple[float, float, float]](), ("", 0.0, 1.0)
    for name, reference in expected.items():
        own = gradients.get(name)
        own = torch.zeros_like(reference) if own is None else own
        product, norm = float((own.double() * reference).sum()), float(reference.double().norm())
        products += product
        squares.append((float(own.double().square().sum()), product, norm**2))
        apart = float((own.double() - reference).norm()) / max(norm, least * total)
        if not apart <= worst[1]:
            worst = (name, apart, product / norm**2 if norm else math.inf)
    factor = products / total**2

    def apart_from(scale: float) -> float:
        square = sum(own - 2 * scale * product + scale**2 * norm for own, product, norm in squares)
        return math.sqrt(max(square, 0.0)) / total

    return GradientDifference(apart_from(1.0), factor, apart_from(factor) / max(abs(factor), 1e-12), *worst)
