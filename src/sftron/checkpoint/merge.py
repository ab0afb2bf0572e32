"""The merge of an adapter into its base, and what rounding loses of it (arXiv 2106.09685, section 4.1).

The sum of a weight W and its delta D is rounded to the type of the export. In bf16, which has 8 significant bits, a
delta of less than 1/512 of a weight is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from sftron.checkpoint.hf_weights import SafetensorsFolder, check_keys
from sftron.checkpoint.model_folder import read_config
from sftron.models.adapters import MAGNITUDE, SAVED_MODULES, A, B, LoraSpec, merge
from sftron.models.fusion import expected_shapes, fuse_state_dict
from sftron.models.llama import LlamaForSFT
from sftron.models.mixtures import spelling_of
from sftron.models.quantization import dtype_name
from sftron.models.sharding import whole_head


@dataclass(slots=True)
class MergeReport:
    """The share of an adapter that rounding lost, by kind of matrix; filled while the merged weights are consumed."""

    dtype: torch.dtype
    """The type of the export."""
    _squares: dict[str, tuple[float, float]] = field(default_factory=dict)
    _is_base: bool = True
    has_delta: bool = False
    """Whether any trained value changes the base before rounding."""

    def add(self, kind: str, base: Tensor, merged: Tensor, *, has_delta: bool = False) -> None:
        """Adds a matrix, given its values before and after the merge, fp32.

        Args:
            has_delta: Whether its adapter is not zero, even if the fp32 values before and after are equal.
        """
        rounded = merged.to(self.dtype)
        if rounded.shape != base.shape:  # tokens were added
            base = merged.new_zeros(merged.shape)
        squares = float((rounded.float() - merged).square().sum()), float((merged - base).square().sum())
        lost, delta = self._squares.get(kind, (0.0, 0.0))
        self._squares[kind] = lost + squares[0], delta + squares[1]
        self.has_delta |= has_delta or squares[1] > 0
        self._is_base &= rounded.equal(base.to(self.dtype))

    @property
    def lost(self) -> dict[str, float]:
        """|round(W + D) - (W + D)| / |D| by kind of matrix (q_proj, ...), as a ratio of norms; 0 without a delta.

        It is above 1 if the adapter is smaller than the spacing of the type, or if rounding changes the base as well.
        """
        return {kind: (lost / delta) ** 0.5 if delta else 0.0 for kind, (lost, delta) in self._squares.items()}

    def lines(self) -> list[str]:
        """Returns the report for the console and the model card."""
        if not self.has_delta:
            return ["the adapter is zero: the merged weights equal the base"]
        errors = ", ".join(f"{kind} {share:.1%}" for kind, share in self.lost.items() if share)
        return [f"rounding errors of {dtype_name(self.dtype)} relative to the adapter: {errors or 'none'}"]

    def require_delta(self) -> None:
        """Raises ValueError if the rounded weights equal the base although the adapter is not zero."""
        if self._is_base and self.has_delta:
            raise ValueError(
                f"rounding to {self.dtype} lost the whole adapter: the merged weights equal the base bit for bit. "
                "Merge in float32, or serve the adapter."
            )


def merged_weights(
    source_folder: Path,
    tensors: Mapping[str, Tensor],
    spec: LoraSpec,
    report: MergeReport,
    *,
    read_base: Callable[[str, Tensor], Tensor] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yields the parameters of LlamaForSFT with the adapter merged into the base, one at a time, for export_hf.

    Adapted weights are merged in fp32; all others have their stored values.

    Args:
        source_folder: The folder of the base.
        tensors: All trained tensors, by name without peft's prefix.
        report: Is filled for the type of the export.
        read_base: Maps Hugging Face's name and the stored value to the weight that training used, such as a matrix
            after quantization.

    Raises:
        ValueError: The base's weights cannot be read or do not match its config.json, or rounding undoes the whole
            merge.
    """
    saved = {f"{SAVED_MODULES[name]}.weight" for name in spec.modules_to_save}
    config = read_config(source_folder)
    with torch.device("meta"):
        shapes = {name: parameter.shape for name, parameter in LlamaForSFT(config).named_parameters()}
    with SafetensorsFolder(source_folder) as source:

        def read(name: str) -> Tensor:
            base, projection, has_delta = source.read(name), name.removesuffix(".weight"), False
            base = base if read_base is None else read_base(name, base)
            if name in saved:
                merged = tensors[name].float()
            elif projection in spec.ranks and name.endswith(".weight"):
                a, b = (tensors[f"{projection}.{each}.weight"] for each in (A, B))
                magnitude = tensors.get(f"{projection}.{MAGNITUDE}")
                merged = merge(base, a, b, spec.scale(projection), magnitude)
                has_delta = bool(b.any())
            else:
                return base
            report.add(projection.rpartition(".")[2], base.float(), merged, has_delta=has_delta)
            return merged

        spelling = spelling_of(source.names())
        check_keys(source, expected_shapes(shapes.items(), config, spelling), config)
        yield from fuse_state_dict(shapes, config, read, spelling)
    report.require_delta()


# --- A merge against the adapter ---

MOST_KL = 0.1
"""The largest KL divergence, in nats, of the next token's distribution that a merge may cause."""


@torch.no_grad()
def logits_of(model: LlamaForSFT, texts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Returns the logits of each text, fp32 [T, V] on the CPU. Every rank of a sharded model calls this."""
    logits = []
    with whole_head(model):
        device = model.head_weight.device
        for text in texts:
            ids = torch.tensor(text, device=device)
            bounds = torch.tensor([0, len(text)], dtype=torch.int32)
            hidden_TH = model(ids, torch.arange(len(text), device=device), bounds, len(text))
            logits.append(model.head.logits(hidden_TH).float().cpu())
    return logits


def kl_divergences(trained_TV: Tensor, other_TV: Tensor) -> Tensor:
    """Returns the KL divergence of the other model's next token from the trained model's, in nats, float64 [T].

    It is NaN where a logit is not finite.
    """
    log_trained, log_other = trained_TV.double().log_softmax(-1), other_TV.double().log_softmax(-1)
    return F.kl_div(log_other, log_trained, reduction="none", log_target=True).sum(-1)


def largest_kl(trained: Sequence[Tensor], merged: Sequence[Tensor]) -> float:
    """Returns the largest KL divergence of the merged model over all tokens of some texts; NaN if any is NaN."""
    return torch.cat([kl_divergences(*pair) for pair in zip(trained, merged, strict=True)]).max().item()
