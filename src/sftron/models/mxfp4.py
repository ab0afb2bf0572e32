"""Weights in MXFP4 (OCP Microscaling Formats 1.0), the type of the experts in the published gpt-oss, read as bf16.

A weight is one of 16 values times a scale, a power of two that 32 consecutive weights of a row share; bf16 holds the
product exactly. Of the weights W [E, I, O], the files hold W_blocks [E, O, I / 32, 16] with two codes a byte, of which
the lower four bits come first, and W_scales [E, O, I / 32], the exponents plus 127.

    shape suffixes: E experts, I input size, O output size, G = I / 32 blocks of a row, B = 16 bytes of a block
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

MXFP4 = "mxfp4"
"""The value of quantization_config.quant_method in config.json."""
_BLOCKS, _SCALES = "_blocks", "_scales"
_BYTES, _BIAS = 16, 127
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values of the codes 0 to 7 (E2M1); those of 8 to 15 are their negatives."""


def quant_method(config: Mapping[str, Any]) -> Any:
    """Returns the quantization that a config.json states, if any."""
    stated = config.get("quantization_config")
    return stated.get("quant_method") if isinstance(stated, Mapping) else stated


def packed_weights(
    config: Mapping[str, Any], stored: Collection[str], slice_of: Callable[[str], Any]
) -> dict[str, PackedWeight]:
    """Returns the weights that are stored in MXFP4, by name, given a config.json and the names of all tensors.

    Raises:
        ValueError: A weight is not of the shapes and types above.
    """
    names = (name.removesuffix(_BLOCKS) for name in stored if name.endswith(_BLOCKS) and quant_method(config) == MXFP4)
    # If a name is stored in both ways, the two parts remain, and are reported as unexpected.
    whole = [name for name in names if name + _SCALES in stored and name not in stored]
    return {name: PackedWeight(name, *map(slice_of, names_of_parts(name))) for name in whole}


def names_of_parts(name: str) -> tuple[str, str]:
    """Returns the names of the two tensors of a weight in MXFP4."""
    return name + _BLOCKS, name + _SCALES


class PackedWeight:
    """A weight in MXFP4, with the methods of a slice of a safetensors file; its experts are read one at a time.

    Args:
        blocks, scales: The slices of its two tensors.

    Raises:
        ValueError: They are not of the shapes and types above.
    """

    def __init__(self, name: str, blocks: Any, scales: Any) -> None:
        found = [(each.get_dtype(), *each.get_shape()) for each in (blocks, scales)]
        shape = found[0][1:]
        if len(shape) != 4 or found != [("U8", *shape[:3], _BYTES), ("U8", *shape[:3])]:
            raise ValueError(
                f"{name}: stored in MXFP4 as {found[0]} and {found[1]}, expected U8 [E, O, I / 32, {_BYTES}] and U8 "
                "[E, O, I / 32]; download the model again"
            )
        self._blocks, self._scales, self._shape = blocks, scales, shape

    def get_shape(self) -> list[int]:
        num_experts, num_outputs, num_blocks, num_bytes = self._shape
        return [num_experts, num_blocks * num_bytes * 2, num_outputs]

    def get_dtype(self) -> str:
        return "BF16"

    def __getitem__(self, experts: slice) -> Tensor:
        """Returns the weights of a range of experts, bf16 [experts, I, O]."""
        pairs = zip(self._blocks[experts], self._scales[experts], strict=True)
        return torch.stack([dequantize(blocks_OGB, scales_OG) for blocks_OGB, scales_OG in pairs])


def dequantize(blocks_OGB: Tensor, scales_OG: Tensor) -> Tensor:
    """Returns the weights of blocks, bf16 [I, O], exactly; those of a block whose scale is stored as 255 are NaN."""
    values = torch.tensor([*_POSITIVE, *(-value for value in _POSITIVE)], dtype=torch.bfloat16)
    factors_OG = torch.ldexp(torch.ones_like(scales_OG, dtype=torch.float32), scales_OG.int() - _BIAS)
    factors_OG = factors_OG.masked_fill_(scales_OG == 255, torch.nan).bfloat16()
    num_outputs, *num_codes = blocks_OGB.shape
    # Bytes are transposed, not weights, which have four times their size: in all, a quarter of the time.
    bytes_GBO = blocks_OGB.flatten(1).T.contiguous().unflatten(0, num_codes)
    weights_GB2O = values.new_empty(*num_codes, 2, num_outputs)
    for index, codes_GBO in enumerate((bytes_GBO & 15, bytes_GBO >> 4)):
        found_GBO = values.index_select(0, codes_GBO.flatten().int()).view_as(codes_GBO)
        torch.mul(found_GBO, factors_OG.T[:, None], out=weights_GB2O[:, :, index])
    return weights_GB2O.flatten(0, 2)
