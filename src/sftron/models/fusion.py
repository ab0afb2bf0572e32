"""Mapping between the weights of Hugging Face and the native ones, which differ in two concatenations.

    Hugging Face                                      LlamaForSFT
    self_attn.{q,k,v}_proj.{weight,bias}              self_attn.qkv_proj.{weight,bias}      rows [N*D, K*D, K*D]
    mlp.{gate,up}_proj.{weight,bias}                  mlp.gate_up_proj.{weight,bias}        rows [F, F]
    all others                                        the same name

A family may have other names, or these tensors already concatenated; see `Family.names`.

No rows are permuted, and each direction is bitwise the inverse of the other (law 9).
"""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from sftron.models.architecture import LlamaConfig
from sftron.models.families import FAMILIES

NamedTensors = Iterable[tuple[str, Tensor]]

_NAMES: dict[str, tuple[str, ...]] = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


def source_names(native_name: str, config: LlamaConfig) -> tuple[str, ...]:
    """Returns the Hugging Face names that make up a native tensor, in the order of concatenation."""
    for native, parts in (_NAMES | dict(FAMILIES[config.model_type].names)).items():
        if f".{native}." in f".{native_name}":
            return tuple(native_name.replace(native, part) for part in parts)
    return (native_name,)


def _num_rows(native_name: str, whole: int, config: LlamaConfig) -> list[int]:
    """Returns the number of rows of each of the `source_names`; the native tensor has `whole` rows."""
    num_parts = len(source_names(native_name, config))
    if ".linear_attn.in_proj." in native_name and config.delta is not None:
        return config.delta.rows
    if ".qkv_proj." in native_name and num_parts == 3:
        # The rows of an output gate are in those of the queries.
        num_q, num_kv = config.num_attention_heads * (1 + config.output_gate), config.num_key_value_heads
        heads = (num_q, num_kv, num_kv)
        return [num * config.head_dim for num in heads]
    return [whole // num_parts] * num_parts


def source_rows(native_name: str, whole: int, config: LlamaConfig) -> list[tuple[str, int]]:
    """Returns the Hugging Face names that make up a native tensor of `whole` rows, each with its number of rows."""
    return list(zip(source_names(native_name, config), _num_rows(native_name, whole, config), strict=True))


def expected_shapes(native_shapes: Iterable[tuple[str, torch.Size]], config: LlamaConfig) -> dict[str, torch.Size]:
    """Returns the shapes under Hugging Face's names, given native names and shapes."""
    return {
        source: torch.Size([num_rows, *shape[1:]])
        for name, shape in native_shapes
        for source, num_rows in source_rows(name, shape[0], config)
    }


def fuse_state_dict(
    native_names: Iterable[str], config: LlamaConfig, read: Callable[[str], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yields native tensors, one at a time. `read` returns a tensor by its Hugging Face name."""
    for name in native_names:
        parts = [read(source) for source in source_names(name, config)]
        yield name, parts[0] if len(parts) == 1 else torch.cat(parts)


def read_fused(
    native_name: str, whole: int, config: LlamaConfig, read: Callable[[str, int, int], Tensor], start: int, end: int
) -> Tensor:
    """Returns rows [start, end) of a native tensor of `whole` rows; `read` returns rows by a Hugging Face name.

    Only these rows are read, so that each rank reads no more than its share.
    """
    parts, first = [], 0
    for source, size in source_rows(native_name, whole, config):
        if max(start, first) < min(end, first + size):
            parts.append(read(source, max(start - first, 0), min(end - first, size)))
        first += size
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def split_state_dict(native: NamedTensors, config: LlamaConfig) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors under Hugging Face's names, one at a time. Parts of a fused tensor are views of it."""
    for name, tensor in native:
        yield from zip(source_names(name, config), tensor.split(_num_rows(name, len(tensor), config)), strict=True)
