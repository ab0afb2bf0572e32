"""The cos and sin tables of rotary position embedding (arXiv 2104.09864), and the scalings of its frequencies."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicScaling:
    """The scaling `rope_type: dynamic`: a document longer than the original positions has a theta of its own, which
    grows with its length; all others have the frequencies without a scaling."""

    factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """The scaling `rope_type: yarn` (arXiv 2309.00071): frequencies that turn less than `beta_slow` times within the
    original positions are divided by `factor`, those that turn more than `beta_fast` times are kept, and others are
    interpolated; cos and sin are multiplied by `attention_factor`."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Whether the bounds of the interpolation are rounded to whole dimensions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRopeScaling:
    """The scaling `rope_type: longrope` (arXiv 2402.13753): each frequency has a divisor of its own, by `short_factor`
    in documents of up to the original number of tokens, and by `long_factor` in all tokens of longer ones."""

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    attention_factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProportionalScaling:
    """The scaling `rope_type: proportional` (Gemma 4): all but the first `num_rotated` pairs of a head stay as they
    are. Unlike a smaller `rotary_dim`, this keeps the pairs and frequencies of the whole head."""

    num_rotated: int
    factor: float = 1.0


RopeScaling = LinearScaling | Llama3Scaling | DynamicScaling | YarnScaling | LongRopeScaling | ProportionalScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryScaling:
    """The factor of queries in Llama 4 and Ministral 3, 1 + beta * log(1 + floor(position / original))."""

    beta: float
    original_max_position_embeddings: int

    def __call__(self, position_ids: Tensor) -> Tensor:
        """Returns the factor of each token, fp32 [T]."""
        return 1 + self.beta * torch.log(1 + torch.floor(position_ids / self.original_max_position_embeddings))


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """One rotary embedding of a model. A model has several if its layers differ in them."""

    theta: float
    rotary_dim: int
    """The number of rotated dimensions of each head, its first ones; the others stay unchanged."""
    interleaved: bool = False
    """Whether dimension 2i is rotated together with 2i + 1, rather than i with i + rotary_dim / 2."""
    scaling: RopeScaling | None = None
    query_scaling: QueryScaling | None = None


def build_rope_table(num_positions: int, spec: RopeSpec) -> Tensor:
    """Returns the table of cos and sin, fp32 [rows, rotary_dim] on the CPU: in each row all cos, then all sin.

    There is a row for each position. With `LongRopeScaling` and more positions than the original ones, there are as
    many more rows for the positions of long documents.

    It uses the same fp32 operations in the same order as transformers (modeling_rope_utils.py), so that fp32 logits
    agree up to rounding at any position. With another order, an angle of 1e5 rad can differ by 1e-2.
    """
    with torch.device("cpu"):
        wavelengths = spec.theta ** (torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32) / spec.rotary_dim)
        factor = getattr(spec.scaling, "attention_factor", 1.0)
        positions = torch.arange(num_positions, dtype=torch.float32)[:, None]
        angles = torch.cat([positions * inv_freq for inv_freq in _frequencies(wavelengths, spec, num_positions)])
        return torch.cat([angles.cos() * factor, angles.sin() * factor], dim=-1)


def _frequencies(wavelengths: Tensor, spec: RopeSpec, num_positions: int) -> list[Tensor]:
    """Returns the frequencies of the rows, given the unscaled wavelengths divided by 2 pi."""
    match spec.scaling:
        case LinearScaling(factor=factor):
            return [1.0 / wavelengths / factor]
        case Llama3Scaling():
            return [_by_llama3(1.0 / wavelengths, spec.scaling)]
        case YarnScaling():
            return [_by_yarn(wavelengths, spec, spec.scaling)]
        case LongRopeScaling():
            factors = [spec.scaling.short_factor, spec.scaling.long_factor]
            is_long = num_positions > spec.scaling.original_max_position_embeddings
            return [1.0 / (torch.tensor(each) * wavelengths) for each in factors[: 1 + is_long]]
        case ProportionalScaling(num_rotated=number, factor=factor):
            return [torch.cat([1.0 / wavelengths[:number], torch.zeros(len(wavelengths) - number)]) / factor]
    return [1.0 / wavelengths]


def _by_llama3(inv_freq: Tensor, scaling: Llama3Scaling) -> Tensor:
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    original = scaling.original_max_position_embeddings
    wavelength = 2 * math.pi / inv_freq
    divided = torch.where(wavelength > original / low, inv_freq / scaling.factor, inv_freq)
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * divided / scaling.factor + smooth * divided
    is_between = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(is_between, between, divided)


def _by_yarn(wavelengths: Tensor, spec: RopeSpec, scaling: YarnScaling) -> Tensor:
    def dimension(num_turns: float) -> float:
        """Returns the dimension that makes this many turns within the original positions."""
        turns = scaling.original_max_position_embeddings / (num_turns * 2 * math.pi)
        return spec.rotary_dim * math.log(turns) / (2 * math.log(spec.theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    if low == high:
        high += 0.001  # as in transformers
    # Not the ramp itself: fp32 results depend on the order of these operations.
    kept = 1 - ((torch.arange(len(wavelengths), dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return 1.0 / (scaling.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


def document_lengths(position_ids: Tensor) -> Tensor:
    """Returns for each token the length of its document: 1 + the last position of a run of positions that count up.

        position_ids   0  1  2  0  0  1      [T]
        lengths        3  3  3  1  2  2      [T]

    This is the length by which transformers selects frequencies if it computes a document alone, and the length so far
    in generation, where a run may start above 0. It does not wait for the device.
    """
    ends = F.pad(position_ids[1:] != position_ids[:-1] + 1, (0, 1), value=True)
    index = torch.arange(len(position_ids), device=position_ids.device)
    last = torch.where(ends, index, len(index)).flip(0).cummin(0).values.flip(0)
    return position_ids[last] + 1


Rotations = Mapping[int | None, tuple[Tensor, Tensor | None]]
"""The arguments of `rotate_heads` for each rope of a model by its index: the rows in the table for each token, and the
table. None is the index of layers without a rope, which have no table."""


def _dynamic_table(position_ids: Tensor, spec: RopeSpec, scaling: DynamicScaling) -> tuple[Tensor, Tensor]:
    """Returns a row for each token, and a table of these rows, because frequencies depend on the documents' lengths."""
    dim, original = spec.rotary_dim, scaling.original_max_position_embeddings
    lengths = document_lengths(position_ids).clamp(min=original)[:, None]
    growth = scaling.factor * lengths / original - (scaling.factor - 1)
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=position_ids.device) / dim
    angles = position_ids[:, None] * (1.0 / (spec.theta * growth ** (dim / (dim - 2))) ** exponents)
    return torch.arange(len(angles), device=angles.device), torch.cat([angles.cos(), angles.sin()], dim=-1)


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
    def most_cached(self) -> int | None:
        """The largest number of tokens up to which a new token leaves the frequencies unchanged, except for a single
        change (see `changes`); None if there is no limit."""
        dynamic = (spec.scaling for spec in self._specs if isinstance(spec.scaling, DynamicScaling))
        return min((scaling.original_max_position_embeddings for scaling in dynamic), default=None)

    def changes(self, num_tokens: int, num_more: int) -> bool:
        """Returns whether the first `num_tokens` of a document rotate differently if it has `num_more` more."""
        long = (spec.scaling for spec in self._specs if isinstance(spec.scaling, LongRopeScaling))
        bounds = [scaling.original_max_position_embeddings for scaling in long]
        return any(num_tokens <= bound < num_tokens + num_more for bound in bounds)

    def on(self, device: torch.device) -> tuple[Tensor, ...]:
        """Returns the table of each rope, from `build_rope_table`."""
        if any(table.device != device for table in self._tables) or not self._tables:
            # Inference mode is disabled here, because a table built during generation could not be used for training
            # later.
            with torch.inference_mode(False):
                self._tables = tuple(build_rope_table(self.num_positions, spec).to(device) for spec in self._specs)
        return self._tables

    def at(self, position_ids: Tensor) -> Rotations:
        """Returns the rotations of the tokens at these positions."""
        rotations: dict[int | None, tuple[Tensor, Tensor | None]] = {None: (position_ids, None)}
        for index, (spec, table_PD) in enumerate(zip(self._specs, self.on(position_ids.device), strict=True)):
            rows = position_ids
            if len(table_PD) > self.num_positions and isinstance(spec.scaling, LongRopeScaling):
                is_long = document_lengths(position_ids) > spec.scaling.original_max_position_embeddings
                rows = position_ids + self.num_positions * is_long
            if isinstance(spec.scaling, DynamicScaling):
                most = spec.scaling.original_max_position_embeddings
                if self.num_positions > most:
                    rows, table_PD = _dynamic_table(position_ids, spec, spec.scaling)
            rotations[index] = (rows, table_PD)
        return rotations
