"""Comparison of the tensors in a folder with the native ones, bit for bit (law 9)."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from sftron.checkpoint.adapter import WEIGHTS, read_adapter, write_adapter
from sftron.checkpoint.export import same_bits
from sftron.checkpoint.hf_weights import HEAD, SafetensorsFolder
from sftron.checkpoint.source import ExportSource
from sftron.checks.report import Check
from sftron.models.adapters import is_adapter
from sftron.models.fusion import split_state_dict
from sftron.models.llama import LlamaForSFT
from sftron.models.mixtures import spelling_of
from sftron.models.quantization import to_stored
from sftron.train.build_model import adapter_tensors


def check_round_trip(native: LlamaForSFT, folder: Path, apart_from: Collection[str] = ()) -> Check:
    """Compares every tensor in `folder` with the native one, which is split and cast to the stored type.

    Args:
        apart_from: The tensors to skip because an adapter replaces them.
    """
    with SafetensorsFolder(folder) as source:
        names = set(source.names()) - set(apart_from)
        equal = {HEAD} & names if native.config.tie_word_embeddings else set()
        wrong = []
        base = ((name, parameter) for name, parameter in native.named_parameters() if not is_adapter(name))
        for name, tensor in split_state_dict(base, native.config, spelling_of(names)):
            if name in apart_from:
                continue
            stored = source.read(name) if name in names else None
            if stored is not None and same_bits(*_in_one_type(tensor.cpu(), stored)):
                equal.add(name)
            else:
                wrong.append(name)
    wrong += sorted(names - equal - set(wrong))
    measured, allowed = _equal_tensors(names, wrong), "every bit, the same keys"
    return Check("weights, Hugging Face -> native -> Hugging Face", not wrong, measured, allowed)


def _in_one_type(tensor: Tensor, stored: Tensor) -> tuple[Tensor, Tensor]:
    """Returns both in the stored type or, for a frozen matrix, in the type to which loading rounds it."""
    if tensor.dtype == torch.float32:
        return tensor.to(stored.dtype), stored
    return tensor, to_stored(stored, tensor.dtype)


def check_adapter_round_trip(native: LlamaForSFT, folder: Path, base: Path) -> Check:
    """Compares every tensor in the adapter's `folder`, and its scaling, with an export of the model's adapter."""
    spec = read_adapter(folder, native.config).spec
    with TemporaryDirectory() as scratch:
        again = Path(scratch, "adapter")
        write_adapter(again, adapter_tensors(native), spec, source=ExportSource.read(base), base_model=str(base))
        same_scaling = read_adapter(again, native.config).spec == spec
        with SafetensorsFolder(folder, WEIGHTS) as source, SafetensorsFolder(again, WEIGHTS) as written:
            names = source.names()
            wrong = sorted(set(names) ^ set(written.names()))
            for name in set(names) & set(written.names()):
                stored = source.read(name)
                if not same_bits(written.read(name), stored):
                    wrong.append(name)
    measured = _equal_tensors(names, wrong) + ("" if same_scaling else "; ranks or scaling differ")
    allowed = "every bit, the same keys"
    return Check("adapter, peft -> native -> peft", not wrong and same_scaling, measured, allowed)


def digest(tensor: Tensor) -> str:
    """Returns the SHA-256 of the bits of a tensor."""
    bits = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return hashlib.sha256(bits.tobytes()).hexdigest()


def _equal_tensors(names: Collection[str], wrong: Sequence[str]) -> str:
    shown = f"; not {', '.join(wrong[:3])}{' ...' if len(wrong) > 3 else ''}" if wrong else ""
    return f"{len(set(names) - set(wrong))} of {len(names)} tensors equal{shown}"
