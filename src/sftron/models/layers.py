"""The parts of blocks: linear layers and their adapters, and the norms and activations that are computed with them.

shape suffixes: T tokens of the packed row, H hidden_size, F intermediate_size, N heads, D head_dim, O output size
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sftron.kernels.rms_norm import rms_norm
from sftron.models.linear import LowRank, linear
from sftron.models.quantization import from_stored


class Adapter(nn.Module):
    """The trained parameters of one projection. `lora_B` starts at zero, so an untrained adapter changes nothing."""

    def __init__(self, first_row: int, num_rows: int, in_features: int, rank: int, scale: float, *, dora: bool) -> None:
        super().__init__()
        self.first_row, self.scale = first_row, scale
        self.lora_A = nn.Parameter(torch.empty(rank, in_features))
        self.lora_B = nn.Parameter(torch.empty(num_rows, rank))
        self.lora_magnitude_vector = nn.Parameter(torch.empty(num_rows)) if dora else None

    def low_rank(self) -> LowRank:
        return LowRank(self.first_row, self.scale, self.lora_A, self.lora_B)

    def magnitude_factor(self, weight_OI: Tensor) -> Tensor:
        """Returns magnitude / |W'| for the rows of this projection, [O] in fp32. Only the magnitude has a gradient."""
        assert self.lora_magnitude_vector is not None
        last_row = self.first_row + len(self.lora_B)
        with torch.no_grad():
            rows_OI = from_stored(weight_OI[self.first_row : last_row], torch.float32)
            norms_O = torch.addmm(rows_OI, self.lora_B.float(), self.lora_A.float(), alpha=self.scale).norm(dim=1)
        return self.lora_magnitude_vector.float() / norms_O


def magnitude_factors(weight_OI: Tensor, adapters: Sequence[Adapter]) -> Tensor:
    """Returns the factor of each column of a linear layer's output with DoRA, [O] in fp32; 1 for rows without one."""
    parts, row = [], 0
    for adapter in sorted(adapters, key=lambda each: each.first_row):
        parts += [weight_OI.new_ones(adapter.first_row - row, dtype=torch.float32), adapter.magnitude_factor(weight_OI)]
        row = adapter.first_row + len(adapter.lora_B)
    return torch.cat([*parts, weight_OI.new_ones(len(weight_OI) - row, dtype=torch.float32)])


class Linear(nn.Linear):
    """A linear layer that computes in the type of its input, whatever the type of its parameters.

    Args:
        recompute: Whether it saves less for the backward pass; see models/linear.py.
        parts: For a layer that is several layers of Hugging Face, their names and numbers of rows, in order.

    Its `adapters`, by the name of the projection, are empty unless models/adapters.py adds some.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        initializer_range: float,
        recompute: bool = False,
        parts: Mapping[str, int] | None = None,
    ) -> None:
        self.initializer_range, self.recompute, self.parts = initializer_range, recompute, parts or {}
        super().__init__(in_features, out_features, bias=bias)
        self.weights_per_token = in_features * out_features
        self.adapters = nn.ModuleDict()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.initializer_range)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        return self._apply_with_adapters(input)

    def _apply_with_adapters(self, input: Tensor, **made_by: Any) -> Tensor:
        """Returns `linear` with the adapters; `made_by` are its arguments for the norm or the activation."""
        adapters: Sequence[Adapter] = list(self.adapters.values())  # pyright: ignore[reportAssignmentType]
        has_magnitudes = any(each.lora_magnitude_vector is not None for each in adapters)
        bias = None if has_magnitudes else self.bias
        low_rank = [each.low_rank() for each in adapters]
        output = linear(input, self.weight, bias, recompute=self.recompute, adapters=low_rank, **made_by)
        if not has_magnitudes:
            return output
        output = output * magnitude_factors(self.weight, adapters).to(output.dtype)
        return output if self.bias is None else output + self.bias.to(output.dtype)


class RMSNorm(nn.Module):
    """Root mean square normalization, computed in fp32 and rounded once (arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    @property
    def factors(self) -> Tensor:
        """The factor of each element."""
        return self.weight

    def forward(self, x_TH: Tensor) -> Tensor:
        return rms_norm(x_TH, self.factors, self.eps)


class OffsetRMSNorm(RMSNorm):
    """Root mean square normalization whose factors are 1 + weight (Gemma, arXiv 2403.08295)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        nn.init.zeros_(self.weight)

    @property
    def factors(self) -> Tensor:
        # In fp32: the weights that FSDP gathers may be in bf16, where 1 + weight would lose what is small.
        return self.weight.float() + 1


class LayerNorm(nn.Module):
    """Layer normalization, computed in fp32 and rounded once (arXiv 1607.06450)."""

    def __init__(self, size: int, eps: float, *, weight: bool = True, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size)) if weight else None
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None
        self.eps = eps

    def forward(self, x_TH: Tensor) -> Tensor:
        weight, bias = (None if each is None else each.float() for each in (self.weight, self.bias))
        return F.layer_norm(x_TH.float(), x_TH.shape[-1:], weight, bias, self.eps).to(x_TH.dtype)


class LayerNormOfHeads(nn.Module):
    """Layer normalization of each head, with weights of its own and no bias.

    Args:
        is_flat: Whether the weight is stored as a vector, the concatenation of those of all heads.
    """

    def __init__(self, num_heads: int, head_dim: int, eps: float, *, is_flat: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((num_heads * head_dim,) if is_flat else (num_heads, head_dim)))
        self.eps = eps

    def forward(self, x_TND: Tensor) -> Tensor:
        normed_TND = F.layer_norm(x_TND.float(), x_TND.shape[-1:], eps=self.eps)
        return (normed_TND * self.weight.view(x_TND.shape[1:])).to(x_TND.dtype)


Norm = RMSNorm | LayerNorm
NORMS: dict[str, Callable[[int, float], Norm]] = {
    "rms": RMSNorm,
    "rms_offset": OffsetRMSNorm,
    "layer": LayerNorm,
    "layer_without_bias": partial(LayerNorm, bias=False),
    "layer_fixed": partial(LayerNorm, weight=False, bias=False),
}


_hooks: list[tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = []
"""Those of `saved_by`, of which torch calls only the innermost."""


@contextmanager
def saved_by(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Iterator[None]:
    """Within this context, functions save `pack(tensor)` for their backward pass, which calls `unpack` with it."""
    _hooks.append((pack, unpack))
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        _hooks.pop()


def recomputed(made: Tensor, make: Callable[[], Tensor]) -> AbstractContextManager[None]:
    """Within this context, no function saves `made` for its backward pass, which calls `make` in its place."""
    storage = made.untyped_storage()._cdata  # not the tensor, which would stay
    outer_pack, outer_unpack = _hooks[-1] if _hooks else (lambda saved: saved, lambda saved: saved)

    def pack(saved: Tensor) -> Any:
        return None if saved.untyped_storage()._cdata == storage else outer_pack(saved)

    def unpack(saved: Any) -> Tensor:
        with torch.no_grad():
            return make() if saved is None else outer_unpack(saved)

    return saved_by(pack, unpack)


class NormedLinear(Linear):
    """A norm, if any, followed by a linear layer. An RMSNorm and the layer are computed as one function.

    With `recompute`, the output of a norm is computed again, bit for bit, other than under torch.compile.
    """

    def forward(self, x_TH: Tensor, norm: Norm | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if isinstance(norm, RMSNorm):
            return self._apply_with_adapters(x_TH, norm_weight_H=norm.factors, eps=norm.eps)
        if norm is None or not self.recompute or torch.compiler.is_compiling():
            return super().forward(x_TH if norm is None else norm(x_TH))
        wide_TH = x_TH.float()  # what a LayerNorm keeps
        dtype, normed_TH = x_TH.dtype, norm(wide_TH).to(x_TH.dtype)
        with recomputed(normed_TH, lambda: norm(wide_TH).to(dtype)):
            return super().forward(normed_TH)


class GatedLinear(Linear):
    """An activation of the gate times up, such as SwiGLU, followed by a linear layer, computed as one function."""

    def __init__(self, *args: Any, activation: str, **options: Any) -> None:
        super().__init__(*args, **options)
        self.activation = activation

    def forward(self, gate_up_T2F: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._apply_with_adapters(gate_up_T2F, activation=self.activation, is_gated=True)


class ActiveLinear(GatedLinear):
    """An activation followed by a linear layer, computed as one function."""

    def forward(self, x_TF: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._apply_with_adapters(x_TF, activation=self.activation)
