"""Exports of a run: a whole model, an adapter, and a merge of the two that is checked against the adapter."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sftron.checkpoint.adapter import vllm_limits, write_adapter
from sftron.checkpoint.atomic import remove
from sftron.checkpoint.checkpoint import read_state
from sftron.checkpoint.convert import checkpoint_to_hf
from sftron.checkpoint.hf_export import export_hf
from sftron.checkpoint.hf_weights import load_model
from sftron.checkpoint.merge import MergeReport, merged_weights
from sftron.config import Config
from sftron.models.adapters import AdapterStart, LoraSpec
from sftron.models.fusion import NamedTensors
from sftron.models.llama import LlamaForSFT
from sftron.train import console
from sftron.train.lora import MOST_KL, file_digest, largest_kl, logits_of
from sftron.train.model_card import AdapterFacts, model_card
from sftron.train.run_data import load_chat_tokenizer
from sftron.train.setup import ExportParts, local_folder, read_export_parts


@dataclass(frozen=True, slots=True)
class Merge:
    """A merge of an adapter into its base."""

    dtype: str
    lost: Mapping[str, float]
    """By the kind of projection, the share of the adapter that rounding to the type of the export lost."""
    largest_kl: float
    """In nats, over the tokens of a few texts, from the model that was trained."""

    @property
    def is_accepted(self) -> bool:
        return self.largest_kl <= MOST_KL  # False for NaN

    def __str__(self) -> str:
        lost = ", ".join(f"{kind} {share:.1%}" for kind, share in self.lost.items())
        return f"rounding to {self.dtype} lost of the adapters: {lost}; KL {self.largest_kl:.1e} at most"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"allowed_kl": MOST_KL, "is_accepted": self.is_accepted}


class Exporter:
    """Writes the exports of one state of a run, on the main rank.

    Args:
        parts: The files besides the weights.
        state: The state of a checkpoint; see `resume.run_facts`.
    """

    def __init__(self, config: Config, parts: ExportParts, state: Mapping[str, Any], run_folder: Path) -> None:
        self._config, self._parts, self._state, self._run_folder = config, parts, state, run_folder
        self._dtype = getattr(torch, config.model.compute_dtype)

    def write_model(self, weights: NamedTensors, folder: Path, vocab_size: int) -> None:
        """Writes a Hugging Face folder of native weights. Raises OSError."""
        export_hf(
            weights,
            folder,
            source_folder=self._parts.source,
            dtype=self._dtype,
            stop_token_ids=self._state["stop_token_ids"],
            vocab_size=vocab_size,
            chat_template=self._parts.chat_template,
            model_card=self._card(),
        )

    def write_adapter(self, tensors: Mapping[str, Tensor], spec: LoraSpec, folder: Path, vocab_size: int) -> None:
        """Writes an adapter folder of tensors by `peft_name`. Raises OSError."""
        for limit in (limits := vllm_limits(spec)):
            console.say(f"serving    {limit}")
        digest = self._state["fingerprint"]["the model's base weights"]
        ranks = dict.fromkeys(f"{rank} (alpha {spec.alphas[name]:g})" for name, rank in spec.ranks.items())
        layers = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in spec.ranks))
        rows = [["Rank", ", ".join(ranks)], ["Layers", f"{len(spec.ranks)}: {layers}"], ["Weights of the base", digest]]
        write_adapter(
            folder,
            tensors,
            spec,
            source=self._parts.source,
            base_model=self._parts.base.name,
            vocab_size=vocab_size,
            chat_template=self._parts.chat_template,
            model_card=self._card(AdapterFacts(rows, limits)),
        )

    def write_merged(
        self,
        tensors: Mapping[str, Tensor],
        spec: LoraSpec,
        folder: Path,
        *,
        trained: LlamaForSFT,
        texts: Sequence[Sequence[int]],
        logits: Sequence[Tensor],
    ) -> Merge:
        """Writes the merged model, but not if its next tokens differ from those of the trained model.

        Args:
            trained: The model that was trained; the merged one is computed in the same way.
            texts, logits: A few texts, and the logits of the trained model for each.

        Raises:
            OSError: The folder cannot be written, or the base model has changed since the run started.
        """
        source, report = self._parts.source, MergeReport()
        wanted, found = self._state["fingerprint"]["the model's base weights"], file_digest(source.folder)
        if wanted != found:
            raise OSError(
                f"{source.folder} has changed since the run started, so adapters cannot be merged into it; set "
                "lora.merge: false, or restore its weights"
            )
        unchecked = folder.with_name(f"{folder.name}.unchecked")
        weights = merged_weights(source.folder, source.architecture, tensors, spec, dtype=self._dtype, report=report)
        self.write_model(weights, unchecked, trained.config.vocab_size)
        merged = load_model(
            unchecked,
            trained.attention,
            trained.compute_dtype,
            trained.rope_table.num_positions,
            adapters=AdapterStart(spec=LoraSpec(ranks={}, alphas={})),
            frozen_dtype=self._dtype,
            device=trained.head_weight.device,
        )
        merge = Merge(
            str(self._dtype).removeprefix("torch."), report.lost, largest_kl(logits, logits_of(merged, texts))
        )
        if merge.is_accepted:
            remove(folder)
            unchecked.rename(folder)
            console.say(f"merged     {merge} of {MOST_KL:g} allowed")
        else:
            remove(unchecked)
            console.say(
                f"WARNING    not merged: {merge}, and {MOST_KL:g} is allowed. Serve the adapter, or merge it in "
                "float32 (tools/convert_checkpoint.py --dtype float32)"
            )
        return merge

    def _card(self, adapter: AdapterFacts | None = None) -> str:
        return model_card(
            self._config,
            self._state,
            run_folder=self._run_folder,
            base=self._parts.base,
            chat_tokenizer=self._parts.chat_tokenizer,
            adapter=adapter,
        )


def export_checkpoint(
    config: Config,
    checkpoint: Path,
    folder: Path,
    *,
    parts: ExportParts | None = None,
    dtype: torch.dtype | None = None,
    stop_token_ids: Collection[int] | None = None,
) -> None:
    """Exports a checkpoint of the run with this configuration to `folder`, exactly as the run would.

    Args:
        parts: The files besides the weights; by default, they are read from the folders that the configuration names.
        dtype: The dtype of the exported weights; by default, the run's compute dtype.
        stop_token_ids: The stop tokens; by default, those in the checkpoint.

    Raises:
        ValueError: If the checkpoint or a source folder cannot be used.
        OSError: If the export cannot be written.
    """
    if parts is None:
        model_folder = local_folder(config.model.path)
        local_folder(config.tokenizer_path, with_weights=False)
        parts = read_export_parts(config, model_folder, load_chat_tokenizer(config))
    checkpoint_to_hf(
        checkpoint,
        folder,
        source=parts.source,
        dtype=dtype or getattr(torch, config.model.compute_dtype),
        stop_token_ids=stop_token_ids,
        chat_template=parts.chat_template,
        model_card=model_card(
            config,
            read_state(checkpoint),
            run_folder=checkpoint.resolve().parents[1],
            base=parts.base,
            chat_tokenizer=parts.chat_tokenizer,
        ),
    )
