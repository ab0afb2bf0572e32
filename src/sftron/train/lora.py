"""LoRA of a run: which adapters `lora` asks for, the fingerprint of the base model, and exports of what was trained."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sftron.config import Config
from sftron.config.schema import Lora
from sftron.models.adapters import AdapterStart, LoraSpec, add_adapters, match_targets, projections_of
from sftron.models.architecture import LlamaConfig
from sftron.models.llama import LlamaForSFT
from sftron.models.quantization import NF4
from sftron.train.flops import TrainedMatrices
from sftron.train.ranks import Ranks

_RANK, _ALPHA_OF_RANK = 16, 2
"""The defaults of lora.rank and of lora.alpha, the latter as a multiple of the rank."""
_MOST_SHOWN = 8


@dataclass(frozen=True, slots=True)
class RunAdapters:
    """The adapters of a run, before the weights are read."""

    start: AdapterStart
    trained: TrainedMatrices
    num_trained: int
    """The number of trained parameters."""

    @property
    def facts(self) -> dict[str, str]:
        """Returns the entries of a checkpoint's fingerprint; see `architecture_facts`."""
        spec = self.start.spec
        ranks = ", ".join(sorted({f"rank {rank} alpha {spec.alphas[name]:g}" for name, rank in spec.ranks.items()}))
        digest = hashlib.sha256(repr(spec.as_dict()).encode()).hexdigest()[:12]
        return {"the model's adapters": f"{digest}: {ranks} on {len(spec.ranks)} projections"}


def resolve_adapters(config: Config, architecture: LlamaConfig) -> RunAdapters | None:
    """Returns the adapters that `lora` of the configuration describes; None for full fine-tuning.

    Raises:
        ValueError: The model has no such layer, or the section contradicts the adapter that it continues.
    """
    if config.lora is None:
        return None
    with torch.device("meta"):
        model = LlamaForSFT(architecture)
    try:
        start = _start(config, model)
        add_adapters(model, architecture, start.spec)
    except ValueError as error:
        raise ValueError(f"lora.{error}") from error
    _require_trained_new_tokens(config, architecture, start.spec)
    trained = {name: parameter.numel() for name, parameter in model.named_parameters() if parameter.requires_grad}
    saved = start.spec.modules_to_save
    in_blocks = sum(size for name, size in trained.items() if ".layers." in name)
    head = "lm_head" in saved or ("embed_tokens" in saved and architecture.tie_word_embeddings)
    matrices = TrainedMatrices(blocks=False, head=head, adapter_parameters=in_blocks)
    return RunAdapters(start, matrices, sum(trained.values()))


def _start(config: Config, model: LlamaForSFT) -> AdapterStart:
    options = config.lora
    assert options is not None
    projections = list(projections_of(model, model.config))
    if options.adapter is not None:
        from sftron.checkpoint.adapter import read_adapter

        found = read_adapter(Path(options.adapter))
        _require_same(options, found.spec, projections)
        return AdapterStart(spec=found.spec, tensors=found.tensors, seed=config.general.seed)
    names = match_targets(options.targets, projections)
    rank = options.rank or _RANK
    spec = LoraSpec(
        ranks=dict.fromkeys(names, rank),
        alphas=dict.fromkeys(names, float(options.alpha or _ALPHA_OF_RANK * rank)),
        rslora=options.rslora,
        dora=options.dora,
        modules_to_save=options.modules_to_save,
    )
    return AdapterStart(spec=spec, seed=config.general.seed, init=options.init)


def _require_same(options: Lora, spec: LoraSpec, projections: Sequence[str]) -> None:
    """Raises ValueError if a key of `lora` is not at its default and differs from the adapter's value."""
    found = {
        "rank": set(spec.ranks.values()),
        "alpha": set(spec.alphas.values()),
        "targets": set(spec.ranks),
        "rslora": {spec.rslora},
        "dora": {spec.dora},
        "modules_to_save": set(spec.modules_to_save),
    }
    for key, values in found.items():
        value = getattr(options, key)
        if value == Lora.model_fields[key].default:
            continue
        wanted = {value}
        if key == "targets":
            wanted = set(match_targets(value, projections))
        elif key == "modules_to_save":
            wanted = set(value)
        if wanted != values:
            there = ", ".join(map(str, sorted(values)[:_MOST_SHOWN])) or "none"
            raise ValueError(f"{key}: {value}, but {options.adapter} has {there}; remove the key")


def _require_trained_new_tokens(config: Config, architecture: LlamaConfig, spec: LoraSpec) -> None:
    needed = ["embed_tokens"] if architecture.tie_word_embeddings else ["embed_tokens", "lm_head"]
    missing = [name for name in needed if name not in spec.modules_to_save]
    if config.tokenizer.add_tokens and missing:
        raise ValueError(
            f"tokenizer.add_tokens: {', '.join(config.tokenizer.add_tokens)}, but with lora their embeddings would not "
            f"be trained; add {' and '.join(missing)} to lora.modules_to_save"
        )


def frozen_dtype(config: Config) -> torch.dtype:
    """Returns the type of frozen matrices. In the compute type, a frozen matrix need not be cast at each step."""
    name = config.model.frozen_dtype
    return NF4 if name == "nf4" else getattr(torch, config.model.compute_dtype if name == "auto" else name)


def base_digest(folder: Path, ranks: Ranks) -> str:
    """Returns the SHA-256 over the weight files of the base model. Every rank calls this and reads a share of them."""
    paths = sorted(folder.glob("*.safetensors"))
    own = {}
    for path in paths[ranks.dp_rank :: ranks.dp_world_size]:
        with path.open("rb") as file:
            own[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    digests = {name: digest for each in ranks.gather(own) for name, digest in each.items()}
    return hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()
