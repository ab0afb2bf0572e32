"""LoRA of a run: the adapters that `lora` configures, the fingerprint of the base, and the trained tensors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from sftron.checkpoint.adapter import read_adapter
from sftron.checkpoint.checkpoint import trained_parameters
from sftron.checkpoint.hf_weights import digest_of, file_digests
from sftron.config import Config
from sftron.config.schema import Lora
from sftron.data.types import Dropped
from sftron.models.adapters import AdapterStart, LoraSpec, add_adapters, match_targets, peft_name, projections_of
from sftron.models.architecture import LlamaConfig
from sftron.models.llama import LlamaForSFT
from sftron.models.quantization import NF4, store_frozen_in
from sftron.models.sharding import whole
from sftron.train.flops import TrainedMatrices
from sftron.train.ranks import Ranks
from sftron.train.run import RunAdapters, RunData

_RANK, _ALPHA_OF_RANK = 16, 2
"""The defaults of lora.rank and of lora.alpha, the latter as a multiple of the rank."""
_MOST_SHOWN = 8


def resolve_adapters(config: Config, architecture: LlamaConfig) -> RunAdapters | None:
    """Returns the adapters that `lora` of the configuration describes; None for full fine-tuning.

    Raises:
        ValueError: The model has no such layer, its matrices cannot be stored in model.frozen_dtype, or the section
            contradicts the adapter that it continues.
    """
    if config.lora is None:
        return None
    with torch.device("meta"):
        model = LlamaForSFT(architecture)
    try:
        start, origin = _start(config, model)
        add_adapters(model, architecture, start.spec)
    except ValueError as error:
        raise ValueError(f"lora.{error}") from error
    store_frozen_in(model, frozen_dtype(config), model.compute_dtype)
    _require_trained_new_tokens(config, architecture, start.spec)
    trained = {name: parameter.numel() for name, parameter in model.named_parameters() if parameter.requires_grad}
    saved = start.spec.modules_to_save
    in_blocks = sum(size for name, size in trained.items() if ".layers." in name)
    head = "lm_head" in saved or ("embed_tokens" in saved and architecture.tie_word_embeddings)
    matrices = TrainedMatrices(blocks=False, head=head, adapter_parameters=in_blocks)
    return RunAdapters(start, matrices, sum(trained.values()), frozen_dtype(config) == NF4, origin)


def _start(config: Config, model: LlamaForSFT) -> tuple[AdapterStart, str]:
    options = config.lora
    assert options is not None
    projections, has_experts = list(projections_of(model, model.config)), model.config.mixture is not None
    if options.adapter is not None:
        if not Path(options.adapter).is_dir():
            raise ValueError(f"adapter: {options.adapter} is no folder")
        try:
            found = read_adapter(Path(options.adapter), model.config)
        except ValueError as error:
            raise ValueError(f"adapter: {error}") from error
        _require_same(options, found.spec, projections)
        start = AdapterStart(spec=found.spec, tensors=found.tensors, seed=config.general.seed)
        return start, f"{options.adapter}, which states the base {found.base_model or 'of no name'}"
    names = match_targets(options.targets, projections, has_experts=has_experts)
    rank = options.rank or _RANK
    spec = LoraSpec(
        ranks=dict.fromkeys(names, rank),
        alphas=dict.fromkeys(names, float(options.alpha or _ALPHA_OF_RANK * rank)),
        rslora=options.rslora,
        dora=options.dora,
        modules_to_save=options.modules_to_save,
    )
    return AdapterStart(spec=spec, seed=config.general.seed, init=options.init), ""


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


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns the trained parameters, whole and on the CPU, by `peft_name`. Every rank calls this."""
    return {peft_name(name): whole(each.detach()).cpu() for name, each in trained_parameters(model).items()}


# --- A merge against the adapter ---

_NUM_TEXTS, _MOST_TOKENS = 4, 128


def texts_of(data: RunData) -> list[list[int]]:
    """Returns the first tokens of a few evaluation prompts or, if there are none, of sampled conversations."""
    prompts = [data.chat_tokenizer.encode_prompt(question.messages) for question in data.questions]
    sampled = [row[0].input_ids.tolist() for row in data.sample.rows if not isinstance(row, Dropped)]
    return [ids[:_MOST_TOKENS] for ids in (prompts or sampled)[:_NUM_TEXTS]]


def base_digest(folder: Path, ranks: Ranks) -> str:
    """Returns the SHA-256 over the weight files of the base model. Every rank calls this and reads a share of them."""
    own = file_digests(folder, ranks.rank, ranks.world_size)
    return digest_of({name: digest for each in ranks.gather(own) for name, digest in each.items()})
