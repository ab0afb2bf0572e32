"""The cos and sin table of rotary position embedding (arXiv 2104.09864), and the scalings of its frequencies."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """The scaling `rope_type: linear` (Position Interpolation, arXiv 2306.15595): divides frequencies by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """The scaling `rope_type: llama3`: low frequencies are divided by `factor`, high ones kept, others interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


RopeScaling = LinearScaling | Llama3Scaling


def build_rope_table(num_positions: int, head_dim: int, rope_theta: float, scaling: RopeScaling | None) -> Tensor:
    """Returns the table of cos and sin, fp32 [num_positions, head_dim] on the CPU; each row has all cos, then all sin.

    It uses the same fp32 operations in the same order as transformers (modeling_rope_utils.py), so that fp32 logits
    agree up to rounding at any position. With another order, an angle of 1e5 rad can differ by 1e-2.
    """
    with torch.device("cpu"):
        inv_freq = 1.0 / (rope_theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
        angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * _scale(inv_freq, scaling)
        return torch.cat([angles.cos(), angles.sin()], dim=-1)


def _scale(inv_freq: Tensor, scaling: RopeScaling | None) -> Tensor:
    if scaling is None:
        return inv_freq
    if isinstance(scaling, LinearScaling):
        return inv_freq / scaling.factor
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    original = scaling.original_max_position_embeddings
    wavelength = 2 * math.pi / inv_freq
    divided = torch.where(wavelength > original / low, inv_freq / scaling.factor, inv_freq)
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * divided / scaling.factor + smooth * divided
    is_between = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(is_between, between, divided)


class RopeTable:
    """The table of `build_rope_table`, built on first use and cached for the most recent device.

    It is deliberately neither a parameter nor a buffer: it is not part of checkpoints, `model.to(bfloat16)` does not
    round it, and it exists even if the model was built on the meta device.
    """

    def __init__(self, num_positions: int, head_dim: int, rope_theta: float, scaling: RopeScaling | None) -> None:
        self.num_positions = num_positions
        self._arguments = (num_positions, head_dim, rope_theta, scaling)
        self._table_PD: Tensor | None = None

    def on(self, device: torch.device) -> Tensor:
        if self._table_PD is None or self._table_PD.device != device:
            # Inference mode is disabled here, because a table built during generation could not be used for training
            # later.
            with torch.inference_mode(False):
                self._table_PD = build_rope_table(*self._arguments).to(device)
        return self._table_PD
