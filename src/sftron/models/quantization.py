"""Frozen matrices with 4 bits per weight: NF4 (QLoRA, arXiv 2305.14314), computed by bitsandbytes.

Of the libraries for it, bitsandbytes needs no compiler and runs on CPUs and GPUs. It is imported when it is used.

A weight is one of 16 values times the scale of its block, which is the largest absolute value of 64 consecutive weights
of a row. Each row of a matrix is stored as bytes, the codes and then the scales, so a matrix can be sharded by rows:

    I / 2 bytes with two codes each | I / 64 scales in fp32, which are I / 16 bytes       0.5625 bytes per weight

The scales are not quantized themselves (double quantization), which would save 0.05 bytes per weight.

    shape suffixes: I input size, O output size, B bytes of a stored row
"""

from types import ModuleType

import torch
from torch import Tensor, nn

NF4 = torch.uint8
"""The type of a matrix in NF4; no other parameter is of this type."""
_BLOCK = 64
_ROWS_BYTES = 4 * 2**20
"""Rows are quantized in parts of at most this size in fp32, because quantization needs several copies of them."""


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a type without `torch.`, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def import_bitsandbytes(setting: str) -> ModuleType:
    """Returns the package bitsandbytes, or raises ValueError with the setting that needs it and the pip command."""
    try:
        import bitsandbytes
    except ImportError as error:
        raise ValueError(
            f"{setting} needs the package bitsandbytes, which cannot be imported ({error}): pip install 'sftron[quant]'"
        ) from error
    return bitsandbytes


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Returns whether a parameter is a matrix, or one for each expert; the biases of all experts are none."""
    return parameter.ndim > 1 and not name.endswith("bias")


def store_frozen_in(model: nn.Module, dtype: torch.dtype, compute_dtype: torch.dtype) -> None:
    """Gives the frozen matrices of a model on the meta device the type `dtype`; norms and biases remain fp32.

    With NF4, only the matrices of the blocks are in NF4; embeddings and head have the type `compute_dtype`.

    Raises:
        ValueError: The rows of a matrix are not whole blocks of NF4.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or not is_matrix(name, parameter):
            continue
        if dtype != NF4:
            parameter.data = parameter.data.to(dtype)
        elif ".layers." not in name:
            parameter.data = parameter.data.to(compute_dtype)
        elif ".experts." in name:
            raise ValueError(f"model.frozen_dtype: nf4 is not implemented for experts ({name}); set it to bfloat16")
        elif parameter.ndim > 2:  # the taps of a convolution
            parameter.data = parameter.data.to(compute_dtype)
        elif parameter.shape[1] % _BLOCK:
            raise ValueError(
                f"model.frozen_dtype: nf4 rounds blocks of {_BLOCK} weights, but a row of {name} has "
                f"{parameter.shape[1]}; set it to bfloat16"
            )
        else:
            num_rows, width = parameter.shape
            parameter.data = torch.empty(num_rows, width // 2 + 4 * width // _BLOCK, dtype=NF4, device=parameter.device)


def to_stored(weight_OI: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns rows of a frozen matrix as they are stored in `dtype`, computed on the device of the weight.

    The codes are the same on any device. bitsandbytes' own operation rounds differently on GPUs and on CPUs.
    """
    if dtype != NF4:
        return weight_OI.to(dtype)
    table: Tensor = import_bitsandbytes("frozen_dtype: nf4").functional.get_4bit_type("nf4", device="cpu")
    bounds = ((table[:-1] + table[1:]) / 2).to(weight_OI.device)
    num_rows = max(1, _ROWS_BYTES // (4 * weight_OI.shape[1]))
    return torch.cat([_quantize(rows, bounds) for rows in weight_OI.split(num_rows)])


def from_stored(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a weight, however it is stored, in `dtype`."""
    if weight.dtype != NF4:
        return weight.to(dtype)
    num_rows, num_bytes = weight.shape
    width = num_bytes * 16 // 9
    if weight.is_meta:  # a prediction of memory, for which bitsandbytes need not be installed
        return weight.new_empty(num_rows, width, dtype=dtype)
    codes, scales = weight[:, : width // 2].contiguous(), weight[:, width // 2 :].contiguous().view(torch.float32)
    return torch.ops.bitsandbytes.dequantize_4bit(codes, scales.view(-1), _BLOCK, "nf4", [num_rows, width], dtype)


def as_computed(name: str, weight: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Returns a weight of the base, by Hugging Face's name, as a run with frozen matrices in `dtype` computes with
    it: matrices are rounded to that type, and from NF4 back."""
    if not is_matrix(name, weight):
        return weight
    if dtype != NF4:
        return weight.to(dtype)
    if ".layers." not in name:
        return weight
    return from_stored(to_stored(weight, NF4), torch.float32)


def _quantize(rows_OI: Tensor, bounds: Tensor) -> Tensor:
    blocks = rows_OI.float().unflatten(1, (-1, _BLOCK))
    scales = blocks.abs().amax(dim=-1)
    if not scales.isfinite().all():
        raise ValueError("frozen_dtype: nf4 cannot store weights that are not finite; use another copy of the model")
    # bitsandbytes' expression for CPUs, of operations that IEEE 754 rounds alike everywhere.
    shares = (blocks * (1.0 / scales.clamp(min=1e-38))[..., None]).clamp(-1, 1).flatten(1)
    codes = torch.bucketize(shares, bounds, out_int32=True).to(torch.uint8)
    return torch.cat([codes[:, ::2] << 4 | codes[:, 1::2], scales.view(torch.uint8)], dim=1)
