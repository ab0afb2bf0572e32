"""Merging of an adapter into its base model, with a measure of what rounding loses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from sftron.checkpoint.hf_weights import SafetensorsFolder
from sftron.models.adapters import MAGNITUDE, A, B, LoraSpec, merge
from sftron.models.architecture import LlamaConfig
from sftron.models.fusion import NamedTensors, source_names
from sftron.models.llama import LlamaForSFT


@dataclass(slots=True)
class MergeReport:
    """The changes of the merged weights, and what rounding lost of them; filled by `merged_weights`."""

    squared_deltas: dict[str, float] = field(default_factory=dict)
    """By the kind of projection, such as q_proj: the sum of squares of the exact changes."""
    squared_losses: dict[str, float] = field(default_factory=dict)
    """By the kind of projection: the sum of squares of the rounding errors of the merged weights."""

    @property
    def lost(self) -> dict[str, float]:
        """The rounding errors relative to the changes, by the kind of projection; 0 where nothing changed."""
        deltas = self.squared_deltas.items()
        return {kind: (self.squared_losses[kind] / delta) ** 0.5 if delta else 0.0 for kind, delta in deltas}

    def add(self, kind: str, base_OI: Tensor, merged_OI: Tensor, dtype: torch.dtype) -> None:
        rounded_OI = merged_OI.to(dtype).float()
        for sums, change in ((self.squared_deltas, merged_OI - base_OI), (self.squared_losses, rounded_OI - merged_OI)):
            sums[kind] = sums.get(kind, 0.0) + change.double().square().sum().item()


def merged_weights(
    folder: Path,
    config: LlamaConfig,
    tensors: Mapping[str, Tensor],
    spec: LoraSpec,
    *,
    dtype: torch.dtype,
    report: MergeReport,
) -> NamedTensors:
    """Yields the native parameters of the base in `folder` with an adapter merged, in fp32 and one at a time.

    Args:
        config: The architecture of the base.
        tensors: All tensors of the adapter, by `peft_name`.
        dtype: The type that the weights will be exported in, for the report.
    """
    with torch.device("meta"):
        native_names = [name for name, _ in LlamaForSFT(config).named_parameters()]
    with SafetensorsFolder(folder) as source:

        def read(name: str) -> Tensor:
            if name in tensors:
                return tensors[name].float()
            base = source.read(name).float()
            projection = name.removesuffix(".weight")
            if projection not in spec.ranks:
                return base
            a_RI, b_OR = (tensors[f"{projection}.{factor}.weight"] for factor in (A, B))
            merged_OI = merge(base, a_RI, b_OR, spec.scale(projection), tensors.get(f"{projection}.{MAGNITUDE}"))
            report.add(projection.rpartition(".")[2], base, merged_OI, dtype)
            return merged_OI

        for name in native_names:
            parts = [read(each) for each in source_names(name)]
            yield name, parts[0] if len(parts) == 1 else torch.cat(parts)
