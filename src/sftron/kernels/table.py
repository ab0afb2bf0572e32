"""The cos and sin tables of rotary position embedding (arXiv 2104.09864), and the scalings of its frequencies."""

import math
from collections.abc import Mapping, Sequence
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """One rotary embedding of a model. A model has several if its layers differ in them."""

    theta: float
    rotary_dim: int
    """The number of dimensions of each head that are rotated, which are its first; the others stay as they are."""
    interleaved: bool = False
    """Whether dimension 2i is rotated together with 2i + 1, rather than i with i + rotary_dim / 2."""
    scaling: RopeScaling | None = None


def build_rope_table(num_positions: int, spec: RopeSpec) -> Tensor:
    """Returns the table of cos and sin, fp32 [num_positions, rotary_dim] on the CPU: in each row all cos, then all sin.

    It uses the same fp32 operations in the same order as transformers (modeling_rope_utils.py), so that fp32 logits
    agree up to rounding at any position. With another order, an angle of 1e5 rad can differ by 1e-2.
    """
    with torch.device("cpu"):
        inv_freq = 1.0 / (spec.theta ** (torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32) / spec.rotary_dim))
        angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * _scale(inv_freq, spec.scaling)
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


Rotations = Mapping[int | None, tuple[Tensor, Tensor | None]]
"""The arguments of `rotate_heads` for each rope of a model by its index: the rows in the table for each token, and the
table. None is the index of layers without a rope, which have no table."""


class RopeTables:
    """The tables of a model's ropes, built on first use and cached for the most recent device.

    They are deliberately neither parameters nor buffers: they are not part of checkpoints, `model.to(bfloat16)` does
    not round them, and they exist even if the model was built on the meta device.
    """

    def __init__(self, num_positions: int, specs: Sequence[RopeSpec]) -> None:
        self.num_positions = num_positions
        self._specs = tuple(specs)
        self._tables: tuple[Tensor, ...] = ()

    @property
    def num_elements(self) -> int:
        return self.num_positions * sum(spec.rotary_dim for spec in self._specs)

    def on(self, device: torch.device) -> tuple[Tensor, ...]:
        """Returns the table of each rope, fp32 [num_positions, rotary_dim]."""
        if any(table.device != device for table in self._tables) or not self._tables:
            # Inference mode is disabled here, because a table built during generation could not be used for training
            # later.
            with torch.inference_mode(False):
                self._tables = tuple(build_rope_table(self.num_positions, spec).to(device) for spec in self._specs)
        return self._tables

    def at(self, position_ids: Tensor) -> Rotations:
        """Returns the rotations of the tokens at these positions."""
        tables = self.on(position_ids.device)
        return {None: (position_ids, None)} | {i: (position_ids, table_PD) for i, table_PD in enumerate(tables)}
