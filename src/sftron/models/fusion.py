"""Mapping between the weights of Hugging Face and the native ones, which differ in two concatenations.

    Hugging Face                                      LlamaForSFT
    self_attn.{q,k,v}_proj.{weight,bias}              self_attn.qkv_proj.{weight,bias}      rows [N*D, K*D, K*D]
    mlp.{gate,up}_proj.{weight,bias}                  mlp.gate_up_proj.{weight,bias}        rows [F, F]
    all others                                        the same name

Experts are stored in one of several spellings; see mixtures.py. All rows of all experts of a layer are one range of
rows here. A family may have other names, or these tensors already concatenated; see `Family.names`.

No rows are permuted, and each direction is bitwise the inverse of the other (law 9).
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache

import torch
from torch import Tensor

from sftron.models.architecture import LlamaConfig
from sftron.models.families.table import FAMILIES
from sftron.models.llama import blocks_without_weights
from sftron.models.mixtures import FUSED, is_split, mixture_names

NamedTensors = Iterable[tuple[str, Tensor]]


_BLOCK = re.compile(r"\blayers\.(\d+)\.")


def _parts_of(native_name: str, config: LlamaConfig) -> Mapping[str, Mapping[str, int]]:
    """Returns the parts of each fused layer in the block of a native tensor, with their numbers of rows, by the names
    in the block. The first block is that of a name without its number."""
    found = _BLOCK.search(native_name)
    return _parts_of_blocks(config)[int(found[1]) if found else 0]


@cache
def _parts_of_blocks(config: LlamaConfig) -> list[Mapping[str, Mapping[str, int]]]:
    return [block.source_rows() for block in blocks_without_weights(config)]


def source_names(native_name: str, config: LlamaConfig, spelling: str = FUSED) -> tuple[str, ...]:
    """Returns the Hugging Face names that make up a native tensor, in the order of concatenation."""
    if config.mixture and (names := mixture_names(native_name, config.mixture.num_experts, spelling)):
        return names
    fused = {native: tuple(parts) for native, parts in _parts_of(native_name, config).items()}
    for native, parts in (fused | dict(FAMILIES[config.model_type].names)).items():
        if f".{native}." in f".{native_name}.":
            num_heads = config.num_key_value_heads if "k_norm" in native else config.num_attention_heads
            parts = [part.format(head=head) for part in parts for head in range(num_heads if "{head}" in part else 1)]
            return tuple(native_name.replace(native, part) for part in parts)
    return (native_name,)


def _num_rows(native_name: str, whole: int, config: LlamaConfig, spelling: str) -> list[int]:
    """Returns the number of rows of each of the `source_names`; the native tensor has `whole` rows."""
    num_parts = len(source_names(native_name, config, spelling))
    for native, parts in _parts_of(native_name, config).items():
        if f".{native}." in native_name and num_parts == len(parts):
            return list(parts.values())
    return [whole // num_parts] * num_parts


def source_rows(native_name: str, whole: int, config: LlamaConfig, spelling: str = FUSED) -> list[tuple[str, int]]:
    """Returns the Hugging Face names that make up a native tensor of `whole` rows, each with its number of rows."""
    names = source_names(native_name, config, spelling)
    return list(zip(names, _num_rows(native_name, whole, config, spelling), strict=True))


def expected_shapes(
    native_shapes: Iterable[tuple[str, torch.Size]], config: LlamaConfig, spelling: str = FUSED
) -> dict[str, torch.Size]:
    """Returns the shapes under Hugging Face's names, given native names and shapes."""
    expected: dict[str, torch.Size] = {}
    for name, shape in native_shapes:
        rows, *rest = (shape[0] * shape[1], *shape[2:]) if is_split(name, spelling) else shape
        expected |= {source: torch.Size([num, *rest]) for source, num in source_rows(name, rows, config, spelling)}
    return expected


def fuse_state_dict(
    native_names: Iterable[str], config: LlamaConfig, read: Callable[[str], Tensor], spelling: str = FUSED
) -> Iterator[tuple[str, Tensor]]:
    """Yields native tensors, one at a time. `read` returns a tensor by its Hugging Face name."""
    for name in native_names:
        parts = [read(source) for source in source_names(name, config, spelling)]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        yield name, whole.unflatten(0, (_num_experts(config), -1)) if is_split(name, spelling) else whole


def read_fused(
    native_name: str,
    whole: int,
    config: LlamaConfig,
    read: Callable[[str, int, int], Tensor],
    start: int,
    end: int,
    spelling: str = FUSED,
) -> Tensor:
    """Returns rows [start, end) of a native tensor of `whole` rows; `read` returns rows by a Hugging Face name.

    Only these rows are read, so that each rank reads no more than its share. The rows of experts are the experts.
    """
    parts, first, splits_experts = [], 0, is_split(native_name, spelling)
    size_of_row = _rows_of_expert(native_name, config) if splits_experts else 1
    start, end, whole = (each * size_of_row for each in (start, end, whole))
    for source, size in source_rows(native_name, whole, config, spelling):
        if max(start, first) < min(end, first + size):
            parts.append(read(source, max(start - first, 0), min(end - first, size)))
        first += size
    rows = parts[0] if len(parts) == 1 else torch.cat(parts)
    return rows.unflatten(0, (-1, size_of_row)) if splits_experts else rows


def split_state_dict(native: NamedTensors, config: LlamaConfig, spelling: str = FUSED) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors under Hugging Face's names, one at a time. Parts of a fused tensor are views of it."""
    for name, tensor in native:
        rows = tensor.flatten(0, 1) if is_split(name, spelling) else tensor
        sizes = _num_rows(name, len(rows), config, spelling)
        yield from zip(source_names(name, config, spelling), rows.split(sizes), strict=True)


def _num_experts(config: LlamaConfig) -> int:
    assert config.mixture is not None
    return config.mixture.num_experts


def _rows_of_expert(native_name: str, config: LlamaConfig) -> int:
    assert config.mixture is not None
    return config.hidden_size if native_name.endswith(".down_proj") else 2 * config.mixture.intermediate_size
