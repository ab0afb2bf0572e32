"""Adapter folders in peft's format, written by this project or another.

    adapter_config.json          ranks, scaling and targets
    adapter_model.safetensors    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight, ...
    README.md, tokenizer files

Tensors are named as in the file, without the prefix base_model.model. If the base is inside a wrapper
(Gemma 3 with images, Qwen 3.5), the file has model.language_model.layers in place of model.layers. The origin of a
folder is not trusted, as in model_folder.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from sftron.checkpoint.adapter_config import (
    CONFIG,
    AdapterConfig,
    adapter_config,
    read_adapter_config,
    renamed,
    spec_of,
)
from sftron.checkpoint.atomic import publish
from sftron.checkpoint.hf_weights import EMBEDDINGS, HEAD, SafetensorsFolder, listed, wrong_tensors
from sftron.checkpoint.model_folder import check_files, write_json
from sftron.checkpoint.shards import write_tensors
from sftron.checkpoint.source import ExportSource
from sftron.models.adapters import (
    ALL_LINEAR,
    MAGNITUDE,
    SAVED_MODULES,
    A,
    B,
    LoraSpec,
    Projection,
    projections_of,
    selected_names,
)
from sftron.models.architecture import LlamaConfig
from sftron.models.llama import LlamaForSFT
from sftron.models.wrappers import TEXT_MODEL, WRAPPED, in_wrapper

WEIGHTS, _PREFIX = "adapter_model.safetensors", "base_model.model."
_BASE_DTYPE, _IN_NF4 = "sftron.base_dtype", "nf4"
"""An entry of the file's metadata: peft has none for the type of the base, with which an adapter is trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFolder:
    """The content of an adapter folder."""

    spec: LoraSpec
    tensors: Mapping[str, Tensor]
    """fp32, by name without the prefix. With tied embeddings, the head is left out."""
    vocab_size: int
    base_model: str | None
    """The name or path of the base model in adapter_config.json."""
    in_nf4: bool = False
    """Whether the base was in NF4 while sftron trained the adapter, according to the file's metadata."""


# --- Reading ---


def read_adapter(folder: Path, config: LlamaConfig) -> AdapterFolder:
    """Reads an adapter for a model with this architecture; its embeddings may have more rows than the base's.

    Raises:
        ValueError: A file is missing or unsafe; adapter_config.json has a value that is not implemented; or the tensors
            do not match it for this model, or are not finite. The message lists all problems.
    """
    check_files(folder)
    if not (folder / WEIGHTS).is_file():
        raise ValueError(f"{folder}: holds no {WEIGHTS}. Save the adapter again with peft's save_pretrained.")
    stated = read_adapter_config(folder)
    with SafetensorsFolder(folder, WEIGHTS) as source:
        keys = {_short_name(key): key for key in source.names()}
        prefix = WRAPPED if _is_wrapped(keys) else TEXT_MODEL
        keys = {renamed(name, prefix, TEXT_MODEL): key for name, key in keys.items()}
        spec = spec_of(folder, stated, _adapted(folder, stated, keys, config, prefix), config, prefix)
        # Tokens may have been added to the base.
        rows = [source.shape(keys[name])[0] for name in (EMBEDDINGS, HEAD) if name in keys and source.shape(keys[name])]
        config = replace(config, vocab_size=max(config.vocab_size, *rows)) if rows else config
        expected = tensor_shapes(spec, config)
        if config.tie_word_embeddings and spec.modules_to_save:
            expected[HEAD] = expected[EMBEDDINGS]
        found = {name: (source.shape(key), source.dtype(key)) for name, key in keys.items()}
        _require_tensors(folder, found, expected)
        tensors = {name: source.read(keys[name]).float() for name in expected}
        in_nf4 = source.metadata().get(_BASE_DTYPE) == _IN_NF4
    _require_finite(folder, tensors)
    if HEAD in tensors and config.tie_word_embeddings and not tensors.pop(HEAD).equal(tensors[EMBEDDINGS]):
        raise ValueError(
            f"{folder}: {HEAD} and {EMBEDDINGS} differ, but the base ties them (tie_word_embeddings: true). Merge the "
            "adapter with peft into a model with tie_word_embeddings: false, and train that."
        )
    return AdapterFolder(
        spec=spec,
        tensors=tensors,
        vocab_size=config.vocab_size,
        base_model=stated.base_model_name_or_path,
        in_nf4=in_nf4,
    )


def _short_name(key: str) -> str:
    """Returns a tensor's name without the prefix, or the key in quotes if it has none."""
    return key.removeprefix(_PREFIX) if key.startswith(_PREFIX) else repr(key)


def _is_wrapped(names: Iterable[str]) -> bool:
    return any(name.startswith(WRAPPED) for name in names)


def is_of_wrapper(folder: Path) -> bool:
    """Returns whether an adapter's tensors are named after a wrapper class rather than after the text model alone."""
    with SafetensorsFolder(folder, WEIGHTS) as source:
        return _is_wrapped(map(_short_name, source.names()))


def _adapted(
    folder: Path, stated: AdapterConfig, names: Collection[str], config: LlamaConfig, prefix: str
) -> list[str]:
    """Returns the adapted projections: all that target_modules selects, or only those with tensors if
    layers_to_transform or exclude_modules narrow the selection."""
    targets, narrowing = stated.target_modules or ALL_LINEAR, stated.model_extra or {}
    there = {renamed(name, TEXT_MODEL, prefix): name for name in model_projections(config)}
    try:
        selected = [there[name] for name in selected_names(targets, there)]
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG}: target_modules: {error}") from error
    if all(narrowing.get(key) in (None, [], "") for key in ("layers_to_transform", "exclude_modules")):
        return selected
    return [name for name in selected if any(stored_name.startswith(f"{name}.") for stored_name in names)]


def model_projections(config: LlamaConfig) -> dict[str, Projection]:
    """Returns the projections of a model with this architecture."""
    with torch.device("meta"):
        return projections_of(LlamaForSFT(config), config)


def tensor_shapes(spec: LoraSpec, config: LlamaConfig) -> dict[str, torch.Size]:
    """Returns the shapes of all trained tensors, by name without the prefix."""
    shapes, projections = {}, model_projections(config)
    for name, rank in spec.ranks.items():
        at = projections[name]
        shapes[f"{name}.{A}.weight"] = torch.Size([rank, at.in_features])
        shapes[f"{name}.{B}.weight"] = torch.Size([at.num_rows, rank])
        if spec.dora:
            shapes[f"{name}.{MAGNITUDE}"] = torch.Size([at.num_rows])
    saved = {f"{SAVED_MODULES[name]}.weight" for name in spec.modules_to_save}
    return shapes | dict.fromkeys(sorted(saved), torch.Size([config.vocab_size, config.hidden_size]))


def _require_tensors(
    where: Path, found: Mapping[str, tuple[torch.Size, str]], expected: Mapping[str, torch.Size]
) -> None:
    problems = wrong_tensors(found, expected)
    if problems or not expected:
        raise ValueError(
            f"{where}: the tensors do not match {CONFIG} for this base model:"
            f"{listed(problems or ['the file has no tensors'])}\n"
            "Check that the adapter is complete and that this is the model it was trained on."
        )


def _require_finite(where: Path, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if not all(bound.isfinite() for bound in tensor.aminmax()):
            raise ValueError(f"{where}: {name} holds NaN or infinity; take another checkpoint of the adapter")


# --- Writing ---


def write_adapter(
    folder: Path,
    tensors: Mapping[str, Tensor],
    spec: LoraSpec,
    *,
    source: ExportSource,
    base_model: str,
    base_revision: str | None = None,
    in_nf4: bool = False,
    stop_token_ids: Collection[int] = (),
    dtype: torch.dtype = torch.float32,
    vocab_size: int | None = None,
    model_card: str | None = None,
) -> None:
    """Writes an adapter folder atomically. `export_hf` describes the other arguments.

    Trained tied embeddings are stored twice, as embeddings and as the head: peft copies each module in modules_to_save,
    and would otherwise compute logits with the base's head.

    Args:
        tensors: All trained tensors, by name without the prefix.
        source: The base model's folder, and the tokenizer's.
        base_model: The name or path by which others load the base model.
        in_nf4: Whether the base was in NF4 in training.

    Raises:
        ValueError: The tensors do not match the spec, or are not finite.
    """
    config = source.architecture
    config = config if vocab_size is None else replace(config, vocab_size=vocab_size)
    stored = {name: tensor.detach().to(device="cpu", dtype=dtype) for name, tensor in tensors.items()}
    found = {name: (tensor.shape, "F32") for name, tensor in stored.items()}
    _require_tensors(folder, found, tensor_shapes(spec, config))
    _require_finite(folder, stored)
    if config.tie_word_embeddings and EMBEDDINGS in stored:
        stored[HEAD] = stored[EMBEDDINGS]
    prefix = in_wrapper(source.config)
    in_file = {f"{_PREFIX}{renamed(name, TEXT_MODEL, prefix)}": tensor for name, tensor in stored.items()}

    def write(unfinished: Path) -> None:
        write_tensors(unfinished / WEIGHTS, in_file, {"format": "pt"} | ({_BASE_DTYPE: _IN_NF4} if in_nf4 else {}))
        base = {"base_model_name_or_path": base_model, "revision": base_revision}
        write_json(unfinished / CONFIG, adapter_config(spec, model_projections(config), config, prefix) | base)
        # peft ignores this file. A merge reads it (train/exports.py), and so can anyone who loads the adapter.
        write_json(unfinished / "generation_config.json", source.exported_generation_config(stop_token_ids))
        source.write_files(unfinished, model_card)

    publish(folder, write)


VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values of --max-lora-rank, whose default is 16 (vllm/config/lora.py)."""


def vllm_limits(spec: LoraSpec) -> list[str]:
    """Returns the reasons why vLLM does not serve an adapter as it was trained, and the options that it needs.

    vLLM reads `r`, `lora_alpha` and `use_rslora`, no pattern, and refuses DoRA and modules_to_save
    (vllm/lora/peft_helper.py). It needs the names of unfused projections, and every adapter here has them.
    """
    limits = []
    if spec.modules_to_save:
        limits.append(f"vLLM refuses modules_to_save ({', '.join(spec.modules_to_save)}); serve the merged model")
    if spec.dora:
        limits.append("vLLM refuses DoRA; serve the merged model")
    for words, values in (("rank", spec.ranks), ("alpha", spec.alphas)):
        if len(different := sorted(set(values.values()))) > 1:
            shown = ", ".join(f"{value:g}" for value in different)
            limits.append(
                f"vLLM reads one {words} for all layers, but this adapter has {shown}; serve the merged model"
            )
    largest = max(spec.ranks.values(), default=0)
    if largest > VLLM_RANKS[-1]:
        limits.append(
            f"vLLM serves ranks up to {VLLM_RANKS[-1]}, but this adapter has {largest}; serve the merged model"
        )
    elif largest > 16:
        limits.append(f"vLLM needs --max-lora-rank {next(rank for rank in VLLM_RANKS if rank >= largest)}")
    return limits
