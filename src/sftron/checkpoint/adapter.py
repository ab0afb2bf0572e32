"""Adapter folders in peft's format, written by this project or another.

    adapter_config.json          ranks, scaling and targets
    adapter_model.safetensors    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight, ...
    README.md, tokenizer files

Tensors are named as in the file, without the prefix base_model.model. If the base is inside a wrapper
(Gemma 3 with images, Qwen 3.5), the file has model.language_model.layers in place of model.layers. The origin of a
folder is not trusted, as in hf_weights.py.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sftron.checkpoint.atomic import publish
from sftron.checkpoint.hf_export import ExportSource, write_json
from sftron.checkpoint.hf_weights import EMBEDDINGS, HEAD, SafetensorsFolder, check_files, read_json
from sftron.checkpoint.shards import DTYPES, write_tensors
from sftron.models.adapters import (
    ALL_LINEAR,
    MAGNITUDE,
    SAVED_MODULES,
    A,
    B,
    LoraSpec,
    Projection,
    is_target,
    projections_of,
)
from sftron.models.architecture import LlamaConfig
from sftron.models.llama import LlamaForSFT
from sftron.models.wrappers import TEXT_MODEL, WRAPPED, in_wrapper

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."

_IMPLEMENTED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none",),
    # Every other initialization changes the base weights, or needs data.
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),
}
"""Keys with few implemented values; the first one is peft's default."""
_IRRELEVANT = frozenset(
    {
        # Which layers are adapted follows from the tensors.
        *("layers_to_transform", "layers_pattern", "exclude_modules"),
        *("inference_mode", "lora_dropout", "peft_version", "auto_mapping", "megatron_core", "qalora_group_size"),
    }
)


def _is_rank(value: Any) -> bool:
    return type(value) is int and 0 < value <= 2**16


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e12


def _is_expression(value: Any) -> bool:
    try:
        return isinstance(value, str) and re.compile(value) is not None
    except re.error:
        return False


def _is_pattern(value: Any, is_value: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(map(_is_expression, value)) and all(map(is_value, value.values()))


def _is_names(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(each, str) for each in value))


_BOOL = (False, lambda value: type(value) is bool, "true or false")
_NAME = (None, lambda value: value is None or isinstance(value, str), "a name")
_FORMS: dict[str, tuple[Any, Callable[[Any], bool], str]] = {
    "r": (8, _is_rank, "a whole number from 1 to 65536"),
    "lora_alpha": (8, _is_number, "a finite number"),
    "rank_pattern": ({}, partial(_is_pattern, is_value=_is_rank), "whole numbers above 0 by regular expressions"),
    "alpha_pattern": ({}, partial(_is_pattern, is_value=_is_number), "finite numbers by regular expressions"),
    "use_rslora": _BOOL,
    "use_dora": _BOOL,
    "ensure_weight_tying": _BOOL,
    "target_modules": (None, lambda value: _is_expression(value) or _is_names(value), "names or a regular expression"),
    "modules_to_save": (None, _is_names, "names"),
    "base_model_name_or_path": _NAME,
    "revision": _NAME,
}
"""The keys that are read: peft's default, a check, and the expected form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFolder:
    """The content of an adapter folder."""

    spec: LoraSpec
    tensors: Mapping[str, Tensor]
    """fp32, by name without the prefix. With tied embeddings, the head is not among them."""
    vocab_size: int
    base_model: str | None
    """The name or path of the base model in adapter_config.json."""
    base_revision: str | None


# --- Reading ---


def read_adapter(folder: Path, config: LlamaConfig) -> AdapterFolder:
    """Reads an adapter of a model with this architecture; its embeddings may have more rows than those of the base.

    Raises:
        ValueError: A file is missing or unsafe; adapter_config.json has a value that is not implemented; or the tensors
            are not exactly those that it describes for this model, or are not finite. The message lists all problems.
    """
    check_files(folder)
    if not (folder / WEIGHTS).is_file():
        is_pickled = (folder / "adapter_model.bin").exists()
        but = ", but adapter_model.bin, a pickle, which runs code when it is loaded" if is_pickled else ""
        raise ValueError(f"{folder}: holds no {WEIGHTS}{but}. Save the adapter again with peft's save_pretrained.")
    stated = read_json(folder / CONFIG)
    if problems := _unimplemented(stated):
        raise ValueError(f"{folder / CONFIG}: not implemented:\n  " + "\n  ".join(problems))
    given = {key: value for key, value in stated.items() if value is not None}
    values = {key: given.get(key, default) for key, (default, *_) in _FORMS.items()}
    with SafetensorsFolder(folder, WEIGHTS) as source:
        keys = {_short_name(key): key for key in source.names()}
        is_wrapped = _is_wrapped(keys)
        if is_wrapped:
            keys = {_moved(name, WRAPPED, TEXT_MODEL): key for name, key in keys.items()}
        spec = _spec_of(folder, values, _adapted(stated, keys, config, is_wrapped), config, is_wrapped)
        # Tokens may have been added to the base.
        rows = [source.shape(keys[name])[0] for name in (EMBEDDINGS, HEAD) if name in keys and source.shape(keys[name])]
        config = replace(config, vocab_size=max(config.vocab_size, *rows)) if rows else config
        expected = tensor_shapes(spec, config)
        if config.tie_word_embeddings and spec.modules_to_save:
            expected[HEAD] = expected[EMBEDDINGS]
        found = {name: (source.shape(key), source.dtype(key)) for name, key in keys.items()}
        _require_tensors(folder, found, expected)
        tensors = {name: source.read(keys[name]).float() for name in expected}
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
        base_model=values["base_model_name_or_path"],
        base_revision=values["revision"],
    )


def _unimplemented(stated: Mapping[str, Any]) -> list[str]:
    problems = [
        f"{key}: {stated.get(key, values[0])!r}, implemented is {' or '.join(map(repr, values))}"
        for key, values in _IMPLEMENTED.items()
        if stated.get(key, values[0]) not in values
    ]
    problems += [
        f"{key}: {stated[key]!r} is not {words}"
        for key, (_, is_right, words) in _FORMS.items()
        if stated.get(key) is not None and not is_right(stated[key])
    ]
    # Every other key that peft has is off by default: null, false or empty.
    others = stated.keys() - _IMPLEMENTED.keys() - _FORMS.keys() - _IRRELEVANT
    return problems + [f"{key}: {stated[key]!r}, implemented is null or false" for key in sorted(others) if stated[key]]


def _short_name(key: str) -> str:
    """Returns a tensor's name without the prefix, or the key in quotes if it has none."""
    return key.removeprefix(_PREFIX) if key.startswith(_PREFIX) else repr(key)


def _is_wrapped(names: Iterable[str]) -> bool:
    return any(name.startswith(WRAPPED) for name in names)


def is_of_wrapper(folder: Path) -> bool:
    """Returns whether an adapter is named for the class of a wrapper, and not for that of the text model alone."""
    with SafetensorsFolder(folder, WEIGHTS) as source:
        return _is_wrapped(map(_short_name, source.names()))


def _moved(name: str, old: str, new: str) -> str:
    """Returns the name with another prefix; the head has neither of them."""
    return new + name.removeprefix(old) if name.startswith(old) else name


def _adapted(stated: Mapping[str, Any], names: Collection[str], config: LlamaConfig, is_wrapped: bool) -> list[str]:
    """Returns the projections that target_modules selects; of those that other keys narrow, the ones with tensors."""
    targets = stated.get("target_modules") or ALL_LINEAR
    prefix = WRAPPED if is_wrapped else TEXT_MODEL
    selected = [name for name in model_projections(config) if is_target(_moved(name, TEXT_MODEL, prefix), targets)]
    if all(stated.get(key) in (None, [], "") for key in ("layers_to_transform", "exclude_modules")):
        return selected
    return [name for name in selected if any(each.startswith(f"{name}.") for each in names)]


def _spec_of(
    folder: Path, values: Mapping[str, Any], adapted: Sequence[str], config: LlamaConfig, is_wrapped: bool
) -> LoraSpec:
    saved = {name.rpartition(".")[2] for name in values["modules_to_save"] or ()}
    if unknown := sorted(saved - SAVED_MODULES.keys()):
        raise ValueError(
            f"{folder / CONFIG}: modules_to_save: {unknown[0]!r}, implemented are {', '.join(SAVED_MODULES)}"
        )
    if config.tie_word_embeddings and saved:
        if saved != SAVED_MODULES.keys() and not values["ensure_weight_tying"]:
            raise ValueError(
                f"{folder / CONFIG}: modules_to_save: {', '.join(sorted(saved))} alone, but the base ties the head to "
                "the embeddings (tie_word_embeddings: true), so peft trained two different matrices. Merge the adapter "
                "with peft into a model with tie_word_embeddings: false, and train that."
            )
        saved = {"embed_tokens"}
    named = {name: _moved(name, TEXT_MODEL, WRAPPED if is_wrapped else TEXT_MODEL) for name in adapted}
    ranks, alphas = values["rank_pattern"], values["alpha_pattern"]
    return LoraSpec(
        ranks={name: _by_pattern(ranks, there, values["r"]) for name, there in named.items()},
        alphas={name: float(_by_pattern(alphas, there, values["lora_alpha"])) for name, there in named.items()},
        rslora=values["use_rslora"],
        dora=values["use_dora"],
        modules_to_save=tuple(name for name in SAVED_MODULES if name in saved),
    )


def _by_pattern(patterns: Mapping[str, Any], name: str, default: Any) -> Any:
    """Returns the value of the first pattern that matches the end of the name, as peft's get_pattern_key."""
    matching = (value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", name))
    return next(matching, default)


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
    problems = [f"{name}: missing, expected {list(expected[name])}" for name in expected.keys() - found.keys()]
    problems += [f"{name}: unexpected, has {list(found[name][0])}" for name in found.keys() - expected.keys()]
    for name in found.keys() & expected.keys():
        shape, dtype = found[name]
        if shape != expected[name]:
            problems.append(f"{name}: has {list(shape)}, expected {list(expected[name])}")
        if dtype not in DTYPES:
            problems.append(f"{name}: stored as {dtype}, implemented are {', '.join(DTYPES)}")
    if problems or not expected:
        rest = f"\n  ... and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise ValueError(
            f"{where}: the tensors are not those that {CONFIG} describes for this base model:\n  "
            + "\n  ".join(sorted(problems)[:20] or ["there are none"])
            + f"{rest}\nIs this the whole adapter, and the model that it was trained on?"
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
    stop_token_ids: Collection[int] = (),
    dtype: torch.dtype = torch.float32,
    vocab_size: int | None = None,
    chat_template: str | None = None,
    model_card: str | None = None,
) -> None:
    """Writes an adapter folder atomically, as `export_hf` does, from whose arguments the ones not named here are.

    For tied embeddings that were trained, the file holds them twice, as embeddings and as the head: peft has a copy of
    each module in modules_to_save, and would compute logits with the base's head.

    Args:
        tensors: All trained tensors, by name without the prefix.
        source: The base model's folder, and the tokenizer's.
        base_model: The name or path by which others load the base model.

    Raises:
        ValueError: The tensors are not exactly those of the spec, or are not finite.
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
    in_file = {f"{_PREFIX}{_moved(name, TEXT_MODEL, prefix)}": each for name, each in stored.items()}

    def write(unfinished: Path) -> None:
        write_tensors(unfinished / WEIGHTS, in_file, {"format": "pt"})
        stated = adapter_config(spec, config, prefix) | {
            "base_model_name_or_path": base_model,
            "revision": base_revision,
        }
        write_json(unfinished / CONFIG, stated)
        # peft does not read it; a merge does (convert.py), and so can those who load the adapter.
        write_json(unfinished / "generation_config.json", source.exported_generation_config(stop_token_ids))
        source.write_files(unfinished, chat_template=chat_template, model_card=model_card)

    publish(folder, write)


def adapter_config(spec: LoraSpec, config: LlamaConfig, prefix: str = TEXT_MODEL) -> dict[str, Any]:
    """Returns adapter_config.json without the names of the base. Keys that are absent have peft's defaults.

    Inside a wrapper, all names are whole, because the last parts of some are those of layers for images as well.
    """
    rank, rank_pattern = _as_pattern({_moved(name, TEXT_MODEL, prefix): each for name, each in spec.ranks.items()})
    alpha, alpha_pattern = _as_pattern({_moved(name, TEXT_MODEL, prefix): each for name, each in spec.alphas.items()})
    complete = _last_parts(model_projections(config))
    targets = {_last(name) if complete[_last(name)] <= spec.ranks.keys() else name for name in spec.ranks}
    if prefix != TEXT_MODEL:
        targets = {_moved(name, TEXT_MODEL, prefix) for name in spec.ranks}
    is_tied = config.tie_word_embeddings and bool(spec.modules_to_save)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank or 1,
        "lora_alpha": alpha or 1,
        "rank_pattern": rank_pattern,
        "alpha_pattern": alpha_pattern,
        "target_modules": sorted(targets),
        "modules_to_save": sorted(SAVED_MODULES if is_tied else spec.modules_to_save) or None,
        "ensure_weight_tying": is_tied,
        "use_rslora": spec.rslora,
        "use_dora": spec.dora,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "lora_dropout": 0.0,
        "inference_mode": True,
    }


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _last_parts(names: Collection[str]) -> dict[str, set[str]]:
    """Returns the names by their last parts."""
    found: dict[str, set[str]] = {}
    for name in names:
        found.setdefault(_last(name), set()).add(name)
    return found


def _as_pattern(values: Mapping[str, float]) -> tuple[float | None, dict[str, float]]:
    """Returns the most frequent value, and the others by the last part of a name, or by the name if layers differ."""
    exact = {name: int(value) if value == int(value) else value for name, value in values.items()}
    default = max(Counter(exact.values()).items(), key=lambda each: (each[1], each[0]), default=(None, 0))[0]
    pattern: dict[str, float] = {}
    for last, names in _last_parts(exact).items():
        found = {exact[name] for name in names}
        keys = {last: found.pop()} if len(found) == 1 else {name: exact[name] for name in sorted(names)}
        pattern |= {key: value for key, value in keys.items() if value != default}
    return default, pattern


VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values of --max-lora-rank, whose default is 16 (vllm/config/lora.py)."""


def vllm_limits(spec: LoraSpec) -> list[str]:
    """Returns the reasons why vLLM does not serve an adapter as it was trained, and the options that it needs.

    vLLM reads `r`, `lora_alpha` and `use_rslora`, no pattern, and refuses DoRA and modules_to_save
    (vllm/lora/peft_helper.py). It needs the names of unfused projections, which are those of every adapter here.
    """
    limits = []
    if spec.modules_to_save:
        limits.append(f"vLLM refuses modules_to_save ({', '.join(spec.modules_to_save)}); serve the merged model")
    if spec.dora:
        limits.append("vLLM refuses DoRA; serve the merged model")
    for words, values in (("rank", spec.ranks), ("alpha", spec.alphas)):
        if len(different := sorted(set(values.values()))) > 1:
            shown = ", ".join(f"{value:g}" for value in different)
            limits.append(f"vLLM reads one {words} for all layers, this adapter has {shown}; serve the merged model")
    largest = max(spec.ranks.values(), default=0)
    if largest > VLLM_RANKS[-1]:
        limits.append(f"vLLM serves ranks up to {VLLM_RANKS[-1]}, this adapter has {largest}; serve the merged model")
    elif largest > 16:
        limits.append(f"vLLM needs --max-lora-rank {next(rank for rank in VLLM_RANKS if rank >= largest)}")
    return limits
