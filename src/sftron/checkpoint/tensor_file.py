"""Writing a safetensors file tensor by tensor.

Not by the library: it does not hash on the way, does not sync, and its error for a full disk is no OSError. The format:
8 bytes of length, a JSON header with type, shape and place of each tensor, then their data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sftron.checkpoint.atomic import write_file

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write_tensors(path: Path, named: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, Any]:
    """Write a new file, synced to disk: its {"size", "sha256"}. Raises OSError, and ValueError for other types.

    The tensors may be on any device; one at a time is brought to the CPU.
    """
    # As the library orders them, so that every tensor is aligned: by the size of their numbers, then by name.
    ordered = sorted(named, key=lambda name: (-named[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in ordered:
        tensor = named[name]
        if tensor.dtype not in _NAMES:
            raise ValueError(f"{name} is {tensor.dtype}, but only {', '.join(map(str, _NAMES))} are written")
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def chunks() -> Iterator[bytes | memoryview]:
        yield len(text).to_bytes(8, "little") + text
        for name in ordered:
            yield _bytes_of(named[name])

    return write_file(path, chunks())


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
