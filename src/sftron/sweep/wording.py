"""Figures and effects in words."""

from __future__ import annotations

import math

from sftron.sweep.effects import Effect
from sftron.sweep.figures import Figure, Spread


def spread_words(found: Spread, figure: Figure) -> str:
    """`0.8123 ± 0.0045 (3)`: mean, standard deviation, number of runs. What is below 1 has two digits at least."""
    unit = f" {figure.unit}" if figure.unit else ""
    size = max(abs(found.mean), found.std or 0.0)
    digits = 1 - math.floor(math.log10(size)) if 0 < size < 1 else 0
    return f"{_mean_and_std(found, max(figure.decimals, digits))}{unit} ({found.n})"


def effect_words(effect: Effect) -> str:
    """`× 1.21 ± 0.03 (4 pairs)`, or `+0.0120 ± 0.0010 (4 pairs)`."""
    pairs = f"({effect.change.n} pair{'' if effect.change.n == 1 else 's'})"
    if effect.is_ratio:
        return f"× {_mean_and_std(effect.change, 3)} {pairs}"
    sign = "+" if effect.change.mean >= 0 else "−"
    size = Spread(abs(effect.change.mean), effect.change.std, effect.change.n)
    return f"{sign}{_mean_and_std(size, effect.figure.decimals)} {pairs}"


def _mean_and_std(found: Spread, decimals: int) -> str:
    mean = f"{found.mean:,.{decimals}f}"
    return mean if found.std is None else f"{mean} ± {found.std:,.{decimals}f}"
